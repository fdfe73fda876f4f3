"""Broken quantised checkpoints: one CheckpointError that names tensor or field, never a crash."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decodegrid.graphs.checkpoint import (
    check_checkpoint,
    load_model,
    read_checkpoint_config,
    save_quantised,
)
from decodegrid.graphs.checkpoint_names import CheckpointError, tensor_slots
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config_checks import QUANTIZATION_CONFIG

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MakeModel = Callable[..., DraftModel]
MakeRaw = Callable[..., dict[str, Any]]
Change = Callable[[dict[str, Tensor]], Any]

# One window layer with a table, every stored kind in it, that loads fast.
ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "compress_ratios": [0],
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "candidate_source_layer_id": None,
    "engram_layer_ids": [0],
    "engram_num_embeddings": [184],
    "num_nextn_predict_layers": 0,
    "moe_intermediate_size": 32,
    "engram_head_dim": 32,
    "n_routed_experts": 3,
}


@pytest.fixture(scope="module")
def saved(
    make_model: MakeModel, make_raw: MakeRaw, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    save_quantised(make_model(dtype=torch.float32, **ONE_LAYER), directory, make_raw(**ONE_LAYER))
    return directory


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be broken."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


@pytest.fixture
def sharded(make_model: MakeModel, make_raw: MakeRaw, tmp_path: Path) -> Path:
    model = make_model(dtype=torch.float32, **ONE_LAYER)
    save_quantised(model, tmp_path / "s", make_raw(**ONE_LAYER), max_shard_bytes=20_000)
    return tmp_path / "s"


def fp8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def e8m0(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def put_byte(name: str, byte: int) -> Change:
    """Set the last byte of a tensor."""
    return lambda t: t[name].view(torch.uint8).view(-1)[-1:].fill_(byte)


WQ_A, EXPERT, TABLE = (
    "layers.0.attn.wq_a",
    "layers.0.ffn.experts.2.w2",
    "layers.0.engram.embed",
)
TENSOR_ERRORS: list[tuple[Change, str]] = [
    (lambda t: t.pop(f"{WQ_A}.scale"), rf"tensor {WQ_A}\.scale missing"),
    (lambda t: t.pop(f"{EXPERT}.scale"), rf"tensor {EXPERT}\.scale missing"),
    (lambda t: t.pop(f"{TABLE}.scale"), rf"tensor {TABLE}\.scale missing"),
    (lambda t: t.pop(f"{EXPERT}.weight"), rf"tensor {EXPERT}\.weight missing"),
    (
        lambda t: t.update({"norm.scale": e8m0(1)}),
        r"unexpected tensor norm\.scale; norm\.weight is not quantised in this format",
    ),
    (lambda t: t.update({"other.scale": e8m0(1)}), r"unexpected tensor other\.scale$"),
    (
        lambda t: t.update({f"{WQ_A}.weight": torch.zeros(16, 32)}),
        rf"{WQ_A}\.weight has dtype F32; must be F8_E4M3 \(config\.json has a quant",
    ),
    (
        lambda t: t.update({f"{WQ_A}.weight": torch.zeros(16, 32).to(torch.float8_e5m2)}),
        rf"{WQ_A}\.weight has dtype F8_E5M2; must be F8_E4M3",
    ),
    (
        lambda t: t.update({f"{WQ_A}.scale": torch.ones(1, 1)}),
        rf"{WQ_A}\.scale has dtype F32; must be F8_E8M0",
    ),
    (
        lambda t: t.update({f"{EXPERT}.weight": fp8(32, 32)}),
        rf"{EXPERT}\.weight has dtype F8_E4M3; must be I8 or U8",
    ),
    (
        lambda t: t.update({"norm.weight": fp8(32)}),
        r"norm\.weight has dtype F8_E4M3; must be BF16, F32 or F64$",
    ),
    (
        lambda t: t.update({f"{EXPERT}.weight": torch.zeros(32, 32, dtype=torch.int8)}),
        rf"{EXPERT}\.weight has shape \[32, 32\]; config\.json asks for \[32, 16\]",
    ),
    (
        lambda t: t.update({f"{TABLE}.scale": e8m0(6, 1)}),
        rf"{TABLE}\.scale has shape \[6, 1\]; config\.json asks for \[184, 1\]",
    ),
    (put_byte(f"{WQ_A}.weight", 0x7F), rf"tensor {WQ_A}\.weight has a NaN"),
    (put_byte(f"{TABLE}.weight", 0xFF), rf"tensor {TABLE}\.weight has a NaN"),
    (put_byte(f"{WQ_A}.scale", 255), rf"tensor {WQ_A}\.scale has a NaN"),
    (put_byte(f"{EXPERT}.scale", 255), rf"tensor {EXPERT}\.scale has a NaN"),
]


@pytest.mark.parametrize("weights", ["expanded", "packed"])
@pytest.mark.parametrize(("change", "message"), TENSOR_ERRORS)
def test_wrong_tensor(checkpoint: Path, change: Change, message: str, weights: Any) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    change(tensors)
    save_file(tensors, checkpoint / WEIGHTS)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(checkpoint, weights=weights)
    assert str(checkpoint) in str(caught.value)
    if "NaN" not in message:  # which needs the values
        with pytest.raises(CheckpointError, match=message):
            check_checkpoint(checkpoint)


def test_what_is_allowed(checkpoint: Path) -> None:
    """Experts as unsigned bytes, floats in other dtypes, every nibble, image tensors."""
    plain = load_model(checkpoint)
    tensors = load_file(checkpoint / WEIGHTS)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            tensors[name] = tensor.view(torch.uint8)
    tensors["norm.weight"] = tensors["norm.weight"].double()
    tensors["vision.norm.weight"] = torch.zeros(4, dtype=torch.bfloat16)
    save_file(tensors, checkpoint / WEIGHTS)
    loaded = load_model(checkpoint)
    for slot, other in zip(tensor_slots(loaded), tensor_slots(plain), strict=True):
        assert torch.equal(slot.target, other.target), slot.name
    put_byte(f"{EXPERT}.weight", 0xFF)(tensors)
    save_file(tensors, checkpoint / WEIGHTS)
    load_model(checkpoint)


def test_mapped_tables_are_not_read(checkpoint: Path) -> None:
    """What the promise of a mapped table costs: a NaN in it is not seen while loading."""
    tensors = load_file(checkpoint / WEIGHTS)
    put_byte(f"{TABLE}.weight", 0x7F)(tensors)
    save_file(tensors, checkpoint / WEIGHTS)
    table = load_model(checkpoint, engram_tables="mapped").blocks[0].engram.embed
    assert table.rows(torch.tensor([183]), torch.float32).isnan().any()
    assert not table.rows(torch.tensor([182]), torch.float32).isnan().any()


CONFIG_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "awq"}, r"quant_method is 'awq'; only 'fp8' is supported"),
    ({"activation_scheme": "static"}, "activation_scheme is 'static'; only 'dynamic'"),
    ({"weight_block_size": [128, 128]}, r"weight_block_size is \[128, 128\]; only \[32, 32\]"),
    ({"weight_block_size": [32.0, 32]}, r"weight_block_size is \[32\.0, 32\]; only \[32, 32\]"),
    ({"weight_block_size": 32}, "weight_block_size is 32; only"),
    ({"scale_fmt": None}, "scale_fmt is None; only 'ue8m0'"),
    ({"expert_dtype": "fp8"}, "expert_dtype is 'fp8'; only 'fp4'"),
    ({"modules_to_not_convert": []}, r"modules_to_not_convert is \[\]; the field is unknown; supp"),
]


@pytest.mark.parametrize(("change", "message"), CONFIG_ERRORS)
def test_unknown_quantisation(checkpoint: Path, change: dict[str, Any], message: str) -> None:
    path = checkpoint / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"] |= change
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=rf"quantization_config\.{message}") as caught:
        load_model(checkpoint)
    assert str(checkpoint) in str(caught.value)


@pytest.mark.parametrize("name", QUANTIZATION_CONFIG)
def test_incomplete_quantisation(checkpoint: Path, name: str) -> None:
    path = checkpoint / "config.json"
    raw = json.loads(path.read_text())
    del raw["quantization_config"][name]
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=rf"quantization_config\.{name} is missing"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("compress_ratios", [2], "kv_source_layer_ids.*no source at or before layer 0"),
        ("compress_ratios", [0, 0], "must have num_hidden_layers"),
        ("index_source_layer_ids", [0], "layer 0 is no target layer with ratio above 0"),
        ("engram_num_embeddings", [185], "the primes from engram_vocab_size 41 on sum to"),
        ("moe_intermediate_size", 48, "must be a multiple of 32 under a quantization_config"),
        ("hidden_size", 40, "must be a multiple of 32 under a quantization_config"),
        ("engram_head_dim", 16, "must be a multiple of 32 under a quantization_config"),
    ],
)
def test_a_config_that_breaks_the_rules(
    checkpoint: Path, name: str, value: Any, message: str
) -> None:
    path = checkpoint / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"][name] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=rf"text_config\..*{message}"):
        read_checkpoint_config(checkpoint)


def test_any_truncated_shard(sharded: Path) -> None:
    draw = random.Random(41)
    paths = sorted(sharded.glob("model-*.safetensors"))
    assert len(paths) > 3
    for path in paths:
        whole = path.read_bytes()
        for cut in [0, 7, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(8))]:
            path.write_bytes(whole[:cut])
            with pytest.raises(CheckpointError, match=re.escape(path.name)):
                load_model(sharded)
        path.write_bytes(whole)
    load_model(sharded)


def break_bytes(data: bytes, draw: random.Random, first: int, last: int) -> bytes:
    """A cut, or one to three flipped bits in [first, last)."""
    if draw.random() < 0.2:
        return data[: draw.randrange(len(data))]
    broken = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        broken[draw.randrange(first, last)] ^= 1 << draw.randrange(8)
    return bytes(broken)


def test_random_damage_is_an_error_or_harmless(sharded: Path) -> None:
    """Cuts and flipped bits in headers, data, index and config. Whatever still loads has exactly
    the tensors of the whole checkpoint, in name and shape."""
    wanted = {slot.name: slot.target.shape for slot in tensor_slots(load_model(sharded))}
    draw = random.Random(42)
    files = sorted(path for path in sharded.iterdir() if path.is_file())
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    loaded = refused = 0
    for _ in range(300):
        path = draw.choice(files)
        whole = path.read_bytes()
        first, last = 0, len(whole)
        if path.suffix == ".safetensors":
            header = 8 + int.from_bytes(whole[:8], "little")
            first, last = (header, last) if draw.random() < 0.2 else (0, header)
        path.write_bytes(break_bytes(whole, draw, first, last))
        try:
            model = load_model(sharded, weights=draw.choice(("expanded", "packed_experts")))
        except CheckpointError as error:
            assert str(sharded) in str(error)
            refused += 1
        else:
            loaded += 1
            for slot in tensor_slots(model):
                shape = wanted[slot.name]
                if slot.scales is not None:  # two weights in a byte
                    shape = torch.Size((shape[0], shape[1] // 2))
                assert slot.target.shape == shape, slot.name
            assert [slot.name for slot in tensor_slots(model)] == list(wanted)
        finally:
            path.write_bytes(whole)
    assert refused > 150 and loaded > 10
    load_model(sharded)
