"""The benchmark's arithmetic: counting of work, ratios, the JSON schema, prompts. No times."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.deployments import WITHOUT_DRAFTER, load_deployment
from benchmarks.generation import (
    Run,
    Workload,
    acceptance,
    compare_llms,
    join_runs,
    same_output_share,
    split_workload,
)
from benchmarks.machine import parse_memory
from benchmarks.prompts import STORIES, STRUCTURED, ChatPrompt, encode_prompts
from benchmarks.results import SCHEMA, check_result, write_result
from benchmarks.timing import interleave, paired_ratio, spread
from decodegrid.configs.load import load_config
from decodegrid.engine.ledger_work import (
    StepShape,
    StepWork,
    experts_touched,
    layer_tensors,
    step_work,
)
from decodegrid.engine.tokenizer import ChatMessage, Tokenizer
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.weight_packing import pack_weights

TOKENIZER = Path(__file__).parents[2] / "configs" / "tiny" / "tokenizer.json"


def good_result() -> dict[str, Any]:
    return {key: dict.fromkeys(names, 1.5) if names else 2.0 for key, names in SCHEMA.items()}


def test_spread_and_ratio_are_medians_of_pairs() -> None:
    found = spread([5.0, 1.0, 3.0])
    assert (found.low, found.median, found.high, found.count) == (1.0, 3.0, 5.0, 3)
    assert found.scaled(10).as_json() == {"min": 10, "median": 30, "max": 50, "count": 3}
    # Ratios 2, 4, 3 in their repeats; the ratio of the medians would be 4 / 2 = 2.
    assert paired_ratio([2.0, 4.0, 30.0], [1.0, 1.0, 10.0]).median == 3.0


@pytest.mark.parametrize(
    ("numerators", "denominators", "words"),
    [([1.0], [1.0, 2.0], "1 numerators for 2"), ([1.0], [0.0], "not positive"), ([], [], "no sa")],
)
def test_ratio_refuses(numerators: list[float], denominators: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        paired_ratio(numerators, denominators)


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def make(name: str) -> Callable[[], float]:
        return lambda: float(order.append(name) or len(order))

    samples = interleave({"a": make("a"), "b": make("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert samples == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}
    with pytest.raises(ValueError, match="repeats is 0"):
        interleave({}, 0)


def test_result_schema() -> None:
    assert set(SCHEMA) == {
        "eager_over_grid",
        "draft_gain",
        "scheduler_us_per_step",
        "capture_s",
        "peak_rss_mib",
        "compilations_after_ready",
    }
    check_result({**good_result(), "extra": "allowed"})
    for key in SCHEMA:
        with pytest.raises(ValueError, match=f"no {key}"):
            check_result({name: value for name, value in good_result().items() if name != key})
    with pytest.raises(ValueError, match="1x1, 1x6, 8x8, 8x48"):
        check_result({**good_result(), "eager_over_grid": {"1x1": 2.0}})
    with pytest.raises(ValueError, match="capture_s must hold numbers"):
        check_result({**good_result(), "capture_s": "3"})


def test_result_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(good_result(), path)
    assert json.loads(path.read_text()) == good_result()
    with pytest.raises(ValueError, match="Out of range float"):
        write_result({**good_result(), "capture_s": float("nan")}, path)


def test_memory_lines() -> None:
    memory = parse_memory("Name:\tx\nVmHWM:\t  204800 kB\nVmRSS:\t  102400 kB\n")
    assert (memory.peak_rss_mib, memory.rss_mib) == (200.0, 100.0)
    with pytest.raises(ValueError, match="VmHWM"):
        parse_memory("VmRSS:\t1 kB\n")


def test_expected_experts() -> None:
    assert experts_touched(8, 2, 1) == pytest.approx(2.0)
    # Each expert is missed twice with probability (6/8)^2.
    assert experts_touched(8, 2, 2) == pytest.approx(8 * (1 - 36 / 64))
    assert experts_touched(4, 4, 3) == pytest.approx(4.0)


def test_floor_is_the_longer_of_both() -> None:
    work = StepWork(60.0, 40.0, 500.0)
    assert work.floor_seconds(bytes_per_s=10.0, flops_per_s=100.0) == 10.0
    assert work.floor_seconds(bytes_per_s=100.0, flops_per_s=100.0) == 5.0


@pytest.fixture
def one_layer(make_model: Callable[..., DraftModel]) -> DraftModel:
    """One window layer of 32 channels without drafter, Engram and compression."""
    return make_model(
        dtype=torch.float32,
        num_hidden_layers=1,
        compress_ratios=[0],
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=None,
        engram_layer_ids=[],
        engram_num_embeddings=[],
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=[],
    )


def test_one_layer_by_hand(one_layer: DraftModel) -> None:
    """32 channels, 4 copies, 4 heads of 16, ranks 16, 2 groups, 8 experts of 16, 3 a token."""
    weights = pack_weights(one_layer, with_drafter=False)
    work = step_work(weights, one_layer.config, StepShape(2, 2, 20, 0))
    mixers = 2 * 24 * 128
    w_in, wq_b = (16 + 16) * 32, 64 * 16
    wo_a, wo_b = 2 * 32 * 16, 32 * 32
    gate, expert = 8 * 32, 3 * 16 * 32
    per_token = mixers + w_in + wq_b + wo_a + wo_b + gate + (3 + 1) * expert + 96 * 32
    window = 8
    assert work.flops == 2 * (2 * per_token + 4 * 4 * 16 * window)
    # Per request: 8 window keys read, one key written and read.
    assert work.state_bytes == 4 * 2 * (window + 2) * 16


def test_every_weight_is_counted_once(make_model: Callable[..., DraftModel]) -> None:
    """With one token of context, one request and all experts drawn, bytes are the parameters'."""
    model = make_model(dtype=torch.float32, num_experts_per_tok=8, dspark_num_experts_per_tok=4)
    config, weights = model.config, pack_weights(model, with_drafter=True)
    work = step_work(weights, config, StepShape(1, 1, 1, 5))
    # Token, Engram and Markov tables are read by row; text never reads the image bias.
    left_out = ("embed.weight", "bias_vl")
    size = sum(
        p.numel() * p.element_size()
        for name, p in model.named_parameters()
        if not name.endswith(left_out)
    )
    size += sum(
        layer.attention.frequencies.nbytes for layer in (*weights.layers, *weights.draft_layers)
    )
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    rows = len(config.engram_layer_ids) * columns * config.engram_head_dim
    rows += 5 * config.dspark_markov_rank + 3 * config.hidden_size
    assert work.weight_bytes == pytest.approx(size + 4 * rows)


def test_long_context_adds_index_work_only_where_it_is_scored(
    make_model: Callable[..., DraftModel],
) -> None:
    model = make_model(dtype=torch.float32)
    weights = pack_weights(model, with_drafter=False)
    short, long = (
        step_work(weights, model.config, StepShape(1, 1, context, 0)) for context in (100, 200)
    )
    # Ratio 2 in indexer layers 1 and 3 adds 50 entries each, ratio 1 in layers 4 and 6 adds 100;
    # windows and selections are full at both lengths. Heads 16, index dimension 16.
    entries = 50 + 50 + 100 + 100
    assert long.flops - short.flops == 2 * entries * 16 * (16 + 1)
    assert long.state_bytes - short.state_bytes == 4 * entries * 16
    assert long.weight_bytes == short.weight_bytes


def test_layer_tensors_have_no_experts(make_model: Callable[..., DraftModel]) -> None:
    layer = pack_weights(make_model(), with_drafter=False).layers[0]
    matrices, rest = layer_tensors(layer)
    owned = {id(tensor) for tensor in (*matrices, *rest)}
    assert id(layer.moe.w13) not in owned and id(layer.moe.shared_w13) in owned


def test_run_rates_and_acceptance() -> None:
    run = Run(60, 5.0, 2.0, (10, 0), (7, 0), 20, ((1, 2), (3,)))
    assert run.rate == 20.0 and run.rate_with_prefill == 12.0
    assert acceptance(run) == [0.7, 0.0]
    other = Run(60, 5.0, 2.0, (), (), 60, ((1, 2), (4,)))
    assert same_output_share(run, other) == 0.5


def test_prompts_are_the_engine_s_chat_format() -> None:
    ids = encode_prompts((*STRUCTURED, *STORIES), TOKENIZER)
    assert len(STRUCTURED) == len(STORIES) == 8
    tokenizer = Tokenizer(TOKENIZER)
    assert all(prompt[0] == tokenizer.bos_token_id and max(prompt) < 2048 for prompt in ids)
    with_tool = tokenizer.decode(ids[0])
    assert '"create_event"' in with_tool and "Tuesday" in with_tool
    text = STORIES[0].user_turns[0]
    assert list(ids[8]) == tokenizer.encode_chat([ChatMessage("user", text)])
    with pytest.raises(ValueError, match="one answer fewer"):
        encode_prompts((ChatPrompt(("a", "b")),), TOKENIZER)


def test_deployments_that_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"lacks \(1, 6\), \(8, 48\)"):
        load_deployment(None, ("speculation.num_draft_tokens=3",))
    with pytest.raises(ValueError, match=r"model\.device is cuda"):
        load_deployment(None, ("model.device=cuda",))
    assert load_deployment(None, ()).config.max_num_query_tokens == 48
    assert load_config(None, WITHOUT_DRAFTER).config.max_num_query_tokens == 8


def test_engines_take_turns_after_every_batch_with_the_seeds_of_the_whole_pass(monkeypatch):
    workload = Workload("five", ((1,), (2,), (3,), (4,), (5,)), 2, 7, first_seed=30)
    assert [(part.prompts, part.first_seed) for part in split_workload(workload)] == [
        (((1,), (2,)), 30), (((3,), (4,)), 32), (((5,),), 34),
    ]  # fmt: skip
    calls = []

    def run(llm, part):
        calls.append((llm, part.prompts[0][0]))
        count = len(part.prompts)
        return Run(count, 2.0 * count, 0.5, (count, 0), (0, count), count, part.prompts)

    monkeypatch.setattr("benchmarks.generation.run_workload", run)
    runs = compare_llms({"a": "A", "b": "B"}, workload, 2)
    one_pass = [("A", 1), ("B", 1), ("B", 3), ("A", 3), ("A", 5), ("B", 5)]
    assert calls == one_pass * 3
    whole = Run(5, 10.0, 1.5, (5, 0), (0, 5), 5, workload.prompts)
    assert runs == {"a": [whole] * 2, "b": [whole] * 2}
    assert join_runs([whole]) == whole
