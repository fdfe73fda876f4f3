"""Broken checkpoints: one CheckpointError for everything that can be wrong, never a crash."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from decodegrid.graphs.checkpoint import load_model, save_model
from decodegrid.graphs.checkpoint_names import CheckpointError
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config_checks import QUANTIZATION_CONFIG

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MakeModel = Callable[..., DraftModel]
MakeRaw = Callable[..., dict[str, Any]]
Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture(scope="session")
def saved(
    make_model: MakeModel, make_raw: MakeRaw, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A float32 checkpoint of the small model; copy it before changing it."""
    directory = tmp_path_factory.mktemp("saved")
    model = make_model(dtype=torch.float32)
    save_model(model, directory, torch.float32, make_raw())
    return directory


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of the float32 checkpoint, to be broken."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def rewrite(directory: Path, change: Change) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


TENSOR_ERRORS: list[tuple[str, Change, str]] = [
    ("missing", lambda t: t.pop("layers.2.attn.wkv.weight"), "layers.2.attn.wkv.weight missing"),
    (
        "missing expert",
        lambda t: t.pop("layers.2.ffn.experts.7.w2.weight"),
        "layers.2.ffn.experts.7.w2.weight missing",
    ),
    (
        "unexpected",
        lambda t: t.update({"layers.2.attn.wkv.bias": torch.zeros(1)}),
        "unexpected tensor layers.2.attn.wkv.bias",
    ),
    (
        "one expert too many",
        lambda t: t.update({"layers.2.ffn.experts.8.w2.weight": torch.zeros(32, 16)}),
        "unexpected tensor layers.2.ffn.experts.8.w2.weight",
    ),
    (
        "shape",
        lambda t: t.update({"norm.weight": torch.zeros(31)}),
        r"norm.weight has shape \[31\]; config.json asks for \[32\]",
    ),
    (
        "transposed",
        lambda t: t.update({"mtp.0.main_proj.weight": torch.zeros(96, 32)}),
        r"mtp.0.main_proj.weight has shape \[96, 32\]",
    ),
    (
        "dtype",
        lambda t: t.update({"norm.weight": torch.zeros(32, dtype=torch.float16)}),
        "norm.weight has dtype F16; must be BF16, F32 or F64",
    ),
    (
        "narrow wide tensor",
        lambda t: t.update({"layers.0.hc_attn_base": torch.zeros(24, dtype=torch.bfloat16)}),
        "layers.0.hc_attn_base has dtype BF16; must be F32 or F64",
    ),
    (
        "quantised",
        lambda t: t.update(
            {"layers.0.attn.wq_a.weight": torch.zeros(16, 32).to(torch.float8_e4m3fn)}
        ),
        r"wq_a.weight has dtype F8_E4M3; must be BF16, F32 or F64 \(config.json has no quant",
    ),
    (
        "scale",
        lambda t: t.update({"layers.0.attn.wq_a.scale": torch.zeros(1, 1)}),
        "unexpected tensor layers.0.attn.wq_a.scale; config.json has no quantization_config",
    ),
    (
        "twice",
        lambda t: t.update({"model.norm.weight": torch.zeros(32)}),
        "tensor norm.weight is stored twice",
    ),
]


@pytest.mark.parametrize(("change", "message"), [(c, m) for _, c, m in TENSOR_ERRORS])
def test_wrong_tensor(checkpoint: Path, change: Change, message: str) -> None:
    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(checkpoint)
    assert str(checkpoint) in str(caught.value)


def test_missing_files(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: no such checkpoint directory"):
        load_model(tmp_path / "absent")
    (checkpoint / WEIGHTS).rename(checkpoint / "other")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        load_model(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", None, r"text_config\.hidden_size is missing"),
        ("scoring_func", "softmax", r"text_config\.scoring_func is 'softmax'"),
        ("hidden_size", 64, r"has shape .*config\.json asks for"),
        ("engram_vocab_size", 100, r"text_config\.engram_num_embeddings"),
    ],
)
def test_wrong_config(checkpoint: Path, name: str, value: Any, message: str) -> None:
    path = checkpoint / "config.json"
    raw = json.loads(path.read_text())
    if value is None:
        del raw["text_config"][name]
    else:
        raw["text_config"][name] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(checkpoint)
    assert str(checkpoint) in str(caught.value)
    path.write_text('{"text_config": ')
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        load_model(checkpoint)


def test_quantisation_config_over_float_tensors(one_layer: Path) -> None:
    path = one_layer / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match=r"quantization_config\.activation_scheme is missing"):
        load_model(one_layer)
    path.write_text(json.dumps(raw | {"quantization_config": QUANTIZATION_CONFIG}))
    with pytest.raises(CheckpointError, match=r"moe_intermediate_size is 16; must be a multiple"):
        load_model(one_layer)


@pytest.fixture
def sharded(make_model: MakeModel, make_raw: MakeRaw, tmp_path: Path) -> Path:
    model = make_model(dtype=torch.float32)
    save_model(model, tmp_path / "s", torch.float32, make_raw(), max_shard_bytes=200_000)
    return tmp_path / "s"


def test_index_errors(sharded: Path) -> None:
    path = sharded / INDEX
    good = json.loads(path.read_text())
    placed = good["weight_map"]
    shards = sorted(set(placed.values()))
    assert len(shards) > 2

    def fails(weight_map: Any, message: str) -> None:
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            load_model(sharded)

    fails(None, "weight_map must be a non-empty object")
    fails({}, "weight_map must be a non-empty object")
    fails(placed | {"norm.weight": "../x.safetensors"}, "norm.weight in '../x.safetensors'")
    fails(placed | {"norm.weight": 3}, "norm.weight in 3")
    fails(placed | {"norm.weight": "gone.safetensors"}, "gone.safetensors: no such file; .*lists")
    fails(placed | {"extra.weight": shards[0]}, f"{shards[0]}: tensor extra.weight is missing")
    other = next(name for name in shards if name != placed["norm.weight"])
    fails(placed | {"norm.weight": other}, "norm.weight is not placed here")
    fails({k: v for k, v in placed.items() if k != "norm.weight"}, "norm.weight is not placed here")
    path.write_text(json.dumps(good))
    (sharded / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1]}: no such file"):
        load_model(sharded)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match=re.escape(INDEX)):
        load_model(sharded)


def test_both_layouts(sharded: Path, checkpoint: Path) -> None:
    shutil.copy(checkpoint / WEIGHTS, sharded)
    with pytest.raises(CheckpointError, match="has both"):
        load_model(sharded)


@pytest.fixture
def one_layer(make_model: MakeModel, make_raw: MakeRaw, tmp_path: Path) -> Path:
    """A checkpoint that loads fast."""
    changes = {
        "num_hidden_layers": 1,
        "compress_ratios": [0],
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": None,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
    }
    model = make_model(dtype=torch.float32, **changes)
    save_model(model, tmp_path / "one", torch.float32, make_raw(**changes))
    return tmp_path / "one"


def test_any_truncation(one_layer: Path) -> None:
    path = one_layer / WEIGHTS
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = torch.Generator().manual_seed(11)
    cuts = [0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1]
    cuts += torch.randint(0, len(whole), (30,), generator=draw).tolist()
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=re.escape(WEIGHTS)):
            load_model(one_layer)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match=re.escape(WEIGHTS)):
        load_model(one_layer)


def test_any_flipped_header_bit(one_layer: Path) -> None:
    path = one_layer / WEIGHTS
    whole = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = torch.Generator().manual_seed(12)
    places = list(range(64))  # all of the length field
    places += torch.randint(64, header * 8, (300,), generator=draw).tolist()
    for place in places:
        whole[place // 8] ^= 1 << place % 8
        path.write_bytes(whole)
        with pytest.raises(CheckpointError, match=re.escape(str(one_layer))):
            load_model(one_layer)
        whole[place // 8] ^= 1 << place % 8
    path.write_bytes(whole)
    load_model(one_layer)


def write_tokenizer(directory: Path, words: list[str]) -> None:
    vocabulary = {word: number for number, word in enumerate(words)}
    Tokenizer(WordLevel(vocabulary, unk_token=words[0])).save(str(directory / "tokenizer.json"))


def test_tokenizer_errors(checkpoint: Path) -> None:
    write_tokenizer(checkpoint, [f"w{i}" for i in range(63)])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has 63 .*vocab_size is 64"):
        load_model(checkpoint)
    write_tokenizer(checkpoint, [f"w{i}" for i in range(97)])
    with pytest.raises(CheckpointError, match=r"has 97 tokens, above vocab_size 96"):
        load_model(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a readable tokenizer"):
        load_model(checkpoint)


@pytest.mark.parametrize("name", ["n_routed_experts", "dspark_n_routed_experts"])
def test_a_huge_count_is_an_error_at_once(checkpoint: Path, name: str) -> None:
    """Nothing of the size that the config claims is built before it is compared with the files."""
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["text_config"][name] = 10_000_000
    (checkpoint / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=rf"text_config\.{name} is 10000000, but"):
        load_model(checkpoint)
