"""The deployments for cards: their comments' arithmetic is computed again, from config.json and the
deployment alone, and `config check` says the same."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodegrid.configs.load import CONFIGS_DIR, load_config
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.cli import main
from decodegrid.engine.doctor_kernels import kernel_table
from decodegrid.graphs.checkpoint import read_checkpoint_config
from decodegrid.kernels.providers.registry import Kind

CUT = {
    "n_routed_experts": 64,
    "engram_vocab_size": 2_000_000,
    "engram_num_embeddings": [48004402, 48011386],
}
"""What h200.yaml says that its checkpoint has instead of the released values."""
LINE = re.compile(r"^#   ( *)(\S.*?)\s{2,}([\d,]+)$", re.MULTILINE)
Text = dict[str, Any]


def fp8_tiles(rows: int, columns: int) -> int:
    """A byte a weight, one for each tile of 32 x 32."""
    return rows * columns + -(-rows // 32) * -(-columns // 32)


def expert_bytes(text: Text) -> int:
    """Three matrices of FP4 with a byte for 32 weights of a row."""
    weights = 3 * text["hidden_size"] * text["moe_intermediate_size"]
    return weights // 2 + weights // 32


def attention_bytes(text: Text, layer: int) -> int:
    """Of one layer: FP8 projections, bfloat16 norms and compressors, float32 sinks, frequencies."""
    hidden, dim, heads = text["hidden_size"], text["head_dim"], text["num_attention_heads"]
    low, out = text["q_lora_rank"], text["o_groups"] * text["o_lora_rank"]
    found = fp8_tiles(low + dim, hidden) + fp8_tiles(heads * dim, low)
    found += fp8_tiles(out, heads * dim // text["o_groups"]) + fp8_tiles(hidden, out)
    found += 2 * (low + dim) + 4 * heads + 4 * text["qk_rope_head_dim"] // 2
    index = text["index_head_dim"]
    if layer in text["kv_source_layer_ids"]:
        ratio = text["compress_ratios"][layer]
        found += 2 * ratio * dim * hidden + 2 * dim + 2 * index * dim + 2 * index
    if layer in text["index_source_layer_ids"]:
        found += fp8_tiles(text["index_n_heads"] * index, low) + 2 * text["index_n_heads"] * hidden
    return found


def mixer_bytes(text: Text) -> int:
    copies, hidden = text["hc_mult"], text["hidden_size"]
    mixes = copies * (copies + 2)
    return 2 * (4 * (mixes * copies * hidden + 3 + mixes) + 2 * hidden)


def shared_bytes(text: Text, num_experts: int) -> int:
    hidden, inner = text["hidden_size"], text["moe_intermediate_size"]
    router = 2 * num_experts * hidden + 4 * num_experts
    return router + fp8_tiles(2 * inner, hidden) + fp8_tiles(hidden, inner)


def weight_lines(text: Text, processes: int) -> dict[str, int]:
    """Bytes of one process, by the names of the comments."""
    hidden, vocab, layers = text["hidden_size"], text["vocab_size"], text["num_hidden_layers"]
    copies, drafters = text["hc_mult"], text["num_nextn_predict_layers"]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    width, rows = text["engram_head_dim"], sum(text["engram_num_embeddings"])
    memories, rank = len(text["engram_layer_ids"]), text["dspark_markov_rank"]
    share = f", 1/{processes}" if processes > 1 else ""
    routed = layers * text["n_routed_experts"] * expert_bytes(text)
    drafts = drafters * text["dspark_n_routed_experts"] * expert_bytes(text)
    constants = 8 * (text["engram_max_ngram_size"] + 2 * columns)
    taps = len(text["dspark_target_layer_ids"])
    return {
        f"routed experts{share}": -(-routed // processes),
        f"engram tables{share}": -(-rows * (width + width // 32) // processes),
        "embedding and head": 2 * 2 * vocab * hidden,
        "attention": sum(attention_bytes(text, layer) for layer in range(layers)),
        "shared experts and routers": layers * shared_bytes(text, text["n_routed_experts"]),
        "norms and mixers": layers * mixer_bytes(text) + 2 * hidden + 8 * vocab,
        "engram projections": memories
        * (fp8_tiles((copies + 1) * hidden, columns * width) + 4 * copies * hidden + constants),
        f"drafter's experts{share}": -(-drafts // processes),
        "drafter": drafters
        * (
            attention_bytes(text, layers)
            + mixer_bytes(text)
            + shared_bytes(text, text["dspark_n_routed_experts"])
        )
        + fp8_tiles(hidden, taps * hidden)
        + 2 * 2 * hidden
        + 2 * 2 * vocab * rank
        + 2 * (hidden + rank),
    }


def state_lines(text: Text, config: DeploymentConfig) -> dict[str, int]:
    """Pool, rings and snapshots, in the records of the released cache."""
    assert config.cache.kv_cache == "v41" and config.cache.prefix_cache == "on"
    dim, index, block = text["head_dim"], text["index_head_dim"], config.cache.block_size
    window_record = dim + dim // 32
    entry = dim // 2 + dim // 16 + index // 2 + index // 32
    assert (window_record, entry) == (528, 356)
    ratios = [text["compress_ratios"][layer] for layer in text["kv_source_layer_ids"]]
    slots = config.scheduler.max_num_reqs + 1
    drafts = config.speculation.num_draft_tokens
    per_request = -(-config.scheduler.max_model_len // block)
    blocks = config.scheduler.max_num_reqs * per_request + 1
    layers = text["num_hidden_layers"] + text["num_nextn_predict_layers"]
    window = text["sliding_window"]
    ring = window + drafts + 1 + block + 3 * (drafts + 1)
    pair = 2 * dim * 4
    return {
        "kv pool": sum(blocks * block // ratio * entry for ratio in ratios),
        "window rings": layers * slots * ring * window_record,
        "compressor rings": sum(
            (slots * (2 + drafts) if ratio == 2 else 2) * pair for ratio in ratios
        ),
        "window snapshots": layers * config.cache.prefix_snapshots * window * window_record,
    }


def commented(name: str) -> tuple[dict[str, int], dict[str, int]]:
    """The lines of a file's comment: pools, and parts of the weights."""
    pools, parts = {}, {}
    for indent, what, number in LINE.findall((CONFIGS_DIR / name).read_text()):
        (parts if indent else pools)[what] = int(number.replace(",", ""))
    return pools, parts


@pytest.fixture
def description(released_raw: dict[str, Any], tmp_path: Path) -> Callable[[str], Path]:
    """description(name): the config.json that a shipped deployment is about."""

    def write(name: str) -> Path:
        raw = copy.deepcopy(released_raw)
        if name == "h200.yaml":
            raw["text_config"].update(CUT)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(raw))
        return path

    return write


@pytest.mark.parametrize("name", ["h200.yaml", "v41-flash-8gpu.yaml"])
def test_arithmetic_of_the_comments(
    name: str,
    description: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = load_config(CONFIGS_DIR / name).config
    path = description(name)
    text = json.loads(path.read_text())["text_config"]
    weights = weight_lines(text, config.parallel.expert)
    state = state_lines(text, config)
    pools, parts = commented(name)
    assert parts == weights
    assert pools == {"weights": sum(weights.values()), **state}
    sizes = list(parts.values())
    assert sizes == sorted(sizes, reverse=True)

    argv = ["config", "check", f"--config={CONFIGS_DIR / name}", f"--model-config={path}", "--json"]
    status = main([*argv, "--device-memory=141GB"])
    report = json.loads(capsys.readouterr().out)
    memory = report["memory"]
    refusals = ["parallel.expert is 8: needs 8 processes, each with a GPU; this version runs one"]
    assert (status, report["problems"]) == ((2, refusals) if "8gpu" in name else (0, []))
    assert {pool: memory["pools"][pool] for pool in pools} == pools
    shown = {
        part["what"] + (f", 1/{part['shared_by']}" if part["shared_by"] > 1 else ""): part["bytes"]
        for part in memory["parts"]
        if part["pool"] == "weights"
    }
    assert shown == weights
    # "some 90 GB" and "some 96 GB" of the files' words.
    (said,) = re.findall(r"it is some (\d+) GB", (CONFIGS_DIR / name).read_text())
    assert round(memory["total_bytes"] / 1e9) == int(said)
    assert memory["total_bytes"] < 141e9 * 0.7


def test_the_node_holds_the_whole_checkpoint(released_raw: dict[str, Any]) -> None:
    """Eight shares and what each process has again: the published 510,286,023,000 bytes, less the
    image path, the routers' biases for images and hash constants that are made at start."""
    text = released_raw["text_config"]
    whole = sum(weight_lines(text, 1).values())
    eighth = weight_lines(text, 8)
    divided = sum(size for what, size in eighth.items() if what.endswith("1/8"))
    rest = sum(size for what, size in eighth.items() if not what.endswith("1/8"))
    assert 8 * divided + rest == pytest.approx(whole, abs=100)
    assert 509.0e9 < whole < 510_286_023_000
    assert round(rest / 1e9, 1) == 10.6
    four = sum(weight_lines(text, 4).values())
    assert round(four / 1e9) == 135


@pytest.mark.parametrize("name", ["h200.yaml", "v41-flash-8gpu.yaml"])
def test_without_a_checkpoint_the_rest_is_said(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status = main(["config", "check", f"--config={CONFIGS_DIR / name}"])
    out, err = capsys.readouterr()
    assert status == (2 if "8gpu" in name else 0)
    assert err.count("\n") == (1 if "8gpu" in name else 0)
    assert "no checkpoint here: what depends on the model, sizes among it" in out
    assert "has a pair that covers it" in out and "memory on" not in out


@pytest.mark.parametrize("name", ["h200.yaml", "v41-flash-8gpu.yaml"])
def test_they_say_where_cuda_stands_and_why_each_value(name: str) -> None:
    text = (CONFIGS_DIR / name).read_text()
    assert "traced, built, run: none of the three" in text
    config = load_config(CONFIGS_DIR / name)
    assert config.config.model.device == "cuda"
    bare = [
        line.strip()
        for line in text.splitlines()
        if line.startswith("  ") and "#" not in line and line.strip()
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("h200.yaml", "sm90"), ("v41-flash-8gpu.yaml", "sm90"), ("v41-flash-8gpu.yaml", "sm100"),
        ("tiny.yaml", "sm90"), ("tiny.yaml", "sm100"), ("tiny-v41.yaml", "sm90"),
        ("tiny-v41.yaml", "sm100"),
    ],
)  # fmt: skip
def test_no_kernel_of_their_sizes_is_missing(
    name: str, target: str, description: Callable[[str], Path]
) -> None:
    """On the cards that each is for: an op runs plain torch only where the device has nothing else
    for it, or for a reason other than the sizes."""
    loaded = load_config(CONFIGS_DIR / name, ["model.device=cuda", "model.dtype=bfloat16"])
    folder = loaded.checkpoint_dir if "tiny" in name else description(name).parent
    table = kernel_table(loaded, read_checkpoint_config(folder), target)
    plain = [choice for choice in table.choices.values() if choice.chosen.kind is Kind.REFERENCE]
    missing = {
        choice.op: item.reason
        for choice in plain
        for item in choice.rejected
        if table.device.target in item.implementation.targets and "no kernel" in item.reason
    }
    assert missing == {}
    if name != "tiny.yaml":
        # Keys that are no records have no kernels; these have them all.
        assert not {choice.op for choice in plain} & {
            "linear", "packed_linear", "packed_grouped_linear", "packed_experts", "attention",
            "select_entries", "encode_records", "take_records", "sinkhorn", "gumbel_noise",
            "filter_logits",
        }  # fmt: skip
