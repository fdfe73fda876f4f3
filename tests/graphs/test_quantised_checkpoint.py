"""The released quantised format: names and bytes in the files, values and logits after loading."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from decodegrid.graphs.checkpoint import check_checkpoint, load_model, save_model, save_quantised
from decodegrid.graphs.checkpoint_names import tensor_slots
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.packed_modules import (
    PackedExperts,
    PackedLinear,
    PackedTable,
    use_packed_modules,
)

MakeModel = Callable[..., DraftModel]
MakeRaw = Callable[..., dict[str, Any]]
# Inputs of experts and table rows in whole blocks; ranks of 16 leave ragged tiles.
WHOLE_BLOCKS = {"moe_intermediate_size": 32, "engram_head_dim": 32}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
FORMS = ["expanded", "packed_experts", "packed"]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def slow_e4m3(byte: int) -> float:
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if byte & 0x80 else value


E4M3 = [slow_e4m3(byte) for byte in range(256)]


class RawFile:
    """A safetensors file read by hand: an 8-byte length, a JSON header, bytes."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        self.header = json.loads(data[8 : 8 + length])
        self.header.pop("__metadata__", None)
        self.data = data[8 + length :]

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """One-byte items as (..., last axis)."""
        entry = self.header[name]
        first, last = entry["data_offsets"]
        return np.frombuffer(self.data[first:last], np.uint8).reshape(entry["shape"])

    def weight(self, name: str) -> NDArray[np.float64]:
        """Values of a quantised weight, element by element."""
        codes, scales = self.bytes_of(name), self.bytes_of(name.removesuffix("weight") + "scale")
        is_expert, is_table = ".experts." in name, name.endswith("engram.embed.weight")
        rows, columns = codes.shape[0], codes.shape[1] * (2 if is_expert else 1)
        values = np.empty((rows, columns))
        for o in range(rows):
            for k in range(columns):
                if is_expert:
                    code = int(codes[o, k // 2]) >> (4 * (k % 2)) & 15
                    value = -E2M1[code & 7] if code & 8 else E2M1[code]
                else:
                    value = E4M3[codes[o, k]]
                line = o if is_expert or is_table else o // 32
                values[o, k] = value * 2.0 ** (int(scales[line, k // 32]) - 127)
        return values


def fill_with_random_bytes(path: Path, seed: int) -> None:
    """Every quantised tensor of a file gets random codes and scales, all of them numbers."""
    draw = torch.Generator().manual_seed(seed)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if name.endswith(".scale"):
            scales = torch.randint(110, 125, shape, generator=draw, dtype=torch.uint8)
            tensors[name] = scales.view(torch.float8_e8m0fnu)
        elif tensor.dtype in (torch.int8, torch.float8_e4m3fn):
            codes = torch.randint(0, 256, shape, generator=draw).to(torch.uint8)
            if tensor.dtype != torch.int8:
                codes[(codes & 0x7F) == 0x7F] = 0x12
            tensors[name] = codes.view(tensor.dtype)
    save_file(tensors, path)


@pytest.fixture(scope="module")
def raw(make_raw: MakeRaw) -> dict[str, Any]:
    return make_raw(**WHOLE_BLOCKS)


@pytest.fixture(scope="module")
def quantised(
    make_model: MakeModel, raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A quantised checkpoint of the small model."""
    directory = tmp_path_factory.mktemp("quantised")
    save_quantised(make_model(dtype=torch.float32, **WHOLE_BLOCKS), directory, raw)
    return directory


def test_names_dtypes_and_shapes(quantised: Path) -> None:
    header = RawFile(quantised / "model.safetensors").header
    wanted = {
        "embed.weight": ("BF16", [96, 32]),
        "norm.weight": ("BF16", [32]),
        "layers.0.hc_attn_fn": ("F32", [24, 128]),
        "layers.0.attn.wq_a.weight": ("F8_E4M3", [16, 32]),
        "layers.0.attn.wq_a.scale": ("F8_E8M0", [1, 1]),
        "layers.0.attn.wq_b.weight": ("F8_E4M3", [64, 16]),
        "layers.0.attn.wq_b.scale": ("F8_E8M0", [2, 1]),
        "layers.0.attn.attn_sink": ("F32", [4]),
        "layers.1.attn.compressor.wkv.weight": ("BF16", [16, 32]),
        "layers.1.attn.compressor.wgate.weight": ("BF16", [16, 32]),
        "layers.6.attn.indexer.wq_b.weight": ("F8_E4M3", [256, 16]),
        "layers.6.attn.indexer.wq_b.scale": ("F8_E8M0", [8, 1]),
        "layers.1.attn.indexer.wk.weight": ("BF16", [16, 16]),
        "layers.1.attn.indexer.weights_proj.weight": ("BF16", [16, 32]),
        "layers.7.ffn.gate.weight": ("BF16", [8, 32]),
        "layers.7.ffn.gate.bias": ("F32", [8]),
        "layers.7.ffn.gate.bias_vl": ("F32", [8]),
        "layers.7.ffn.experts.7.w1.weight": ("I8", [32, 16]),
        "layers.7.ffn.experts.7.w1.scale": ("F8_E8M0", [32, 1]),
        "layers.7.ffn.experts.7.w2.weight": ("I8", [32, 16]),
        "layers.7.ffn.experts.7.w2.scale": ("F8_E8M0", [32, 1]),
        "layers.7.ffn.shared_experts.w3.weight": ("F8_E4M3", [32, 32]),
        "layers.7.ffn.shared_experts.w3.scale": ("F8_E8M0", [1, 1]),
        "layers.3.engram.embed.weight": ("F8_E4M3", [258, 32]),
        "layers.3.engram.embed.scale": ("F8_E8M0", [258, 1]),
        "layers.3.engram.wkv.weight": ("F8_E4M3", [160, 128]),
        "layers.3.engram.wkv.scale": ("F8_E8M0", [5, 4]),
        "layers.3.engram.q_weight": ("BF16", [4, 32]),
        "mtp.0.main_proj.weight": ("F8_E4M3", [32, 96]),
        "mtp.0.main_proj.scale": ("F8_E8M0", [1, 3]),
        "mtp.0.main_norm.weight": ("BF16", [32]),
        "mtp.1.ffn.experts.3.w3.weight": ("I8", [32, 16]),
        "mtp.1.markov_head.embed.weight": ("BF16", [96, 8]),
        "mtp.1.confidence_head.proj.weight": ("BF16", [1, 40]),
    }
    for name, (dtype, shape) in wanted.items():
        assert (header[name]["dtype"], header[name]["shape"]) == (dtype, shape), name
    # A layer: 2 norms, 6 mHC, 3 of attention in floats and 5 with scales, 3 of the router, 3 shared
    # with scales, and 3 with scales for each expert.
    layers = 8 * (14 + 2 * 8 + 6 * 8) + 2 * (14 + 2 * 8 + 6 * 4)
    compressors, indexers, engrams, drafter = 3 + 3 + 2, 5 + 5 + 5 + 3, 2 * (2 * 2 + 2), 2 + 5
    assert len(header) == layers + compressors + indexers + engrams + drafter + 3
    config = json.loads((quantised / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    }
    assert check_checkpoint(quantised).quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_bytes_against_a_slow_decoder(
    make_model: MakeModel, raw: dict[str, Any], tmp_path: Path, dtype: torch.dtype
) -> None:
    """Every quantised element of a loaded model; bfloat16 has bits enough for all of them."""
    save_quantised(make_model(dtype=torch.float32, **WHOLE_BLOCKS), tmp_path, raw)
    fill_with_random_bytes(tmp_path / "model.safetensors", seed=31)
    stored = RawFile(tmp_path / "model.safetensors")
    seen = 0
    for slot in tensor_slots(load_model(tmp_path, dtype=dtype)):
        if stored.header[slot.name]["dtype"] in ("F8_E4M3", "I8"):
            assert slot.target.dtype == dtype
            assert np.array_equal(slot.target.double().numpy(), stored.weight(slot.name)), slot.name
            seen += 1
    assert seen == 8 * (5 + 3 + 24) + 2 * (5 + 3 + 12) + 4 + 2 * 2 + 1


def logits_of(model: DraftModel) -> Tensor:
    return model.logits(torch.arange(20) * 7 % 96)


def drafted(model: DraftModel) -> Tensor:
    """Draft logits of one round behind four tokens, through every module of the drafter."""
    ids = torch.arange(8) * 5 % 96
    with torch.inference_mode():
        context = model.draft_context(model(ids[None]).taps)
        keys = model.context_keys(context, torch.arange(8))
        live = torch.ones(1, 8, dtype=torch.bool)
        hidden = model.draft_hidden(torch.tensor([3]), torch.tensor([8]), keys, live)
        return model.draft_base_logits(hidden)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_compute_the_same_bits(quantised: Path, dtype: torch.dtype) -> None:
    plain = load_model(quantised, dtype=dtype)
    wanted, wanted_drafts = logits_of(plain), drafted(plain)
    assert wanted.isfinite().all() and wanted.std() > 0.1
    for weights in ("packed_experts", "packed"):
        model = load_model(quantised, dtype=dtype, weights=weights)
        assert torch.equal(logits_of(model), wanted), weights
        assert torch.equal(drafted(model), wanted_drafts), weights
        modules = {type(module) for module in model.modules()}
        assert PackedExperts in modules
        assert (PackedLinear in modules) == (PackedTable in modules) == (weights == "packed")


def test_what_stays_packed(quantised: Path) -> None:
    """A packed model has the file's bytes, and no float of a quantised weight."""
    stored = RawFile(quantised / "model.safetensors")
    model = load_model(quantised, weights="packed")
    for slot in tensor_slots(model):
        dtype = stored.header[slot.name]["dtype"]
        assert (slot.scales is not None) == (dtype in ("F8_E4M3", "I8")), slot.name
        if slot.scales is not None:
            assert np.array_equal(slot.target.numpy(), stored.bytes_of(slot.name))
            scale = slot.name.removesuffix("weight") + "scale"
            assert np.array_equal(slot.scales.numpy(), stored.bytes_of(scale))
    floats = {name for name, _ in model.named_parameters()}
    assert not [name for name in floats if "experts" in name or "wq_a" in name]
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_shards_and_scales_in_other_files(quantised: Path, tmp_path: Path) -> None:
    """Also where a weight and its scales lie in different files, and under the model. prefix."""
    wanted = logits_of(load_model(quantised))
    tensors = load_file(quantised / "model.safetensors")
    parts: list[dict[str, Tensor]] = [{}, {}, {}]
    for number, name in enumerate(sorted(tensors)):
        parts[number % 3][f"model.{name}"] = tensors[name]
    files = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    placed = {}
    for file, part in zip(files, parts, strict=True):
        save_file(part, tmp_path / file)
        placed |= dict.fromkeys(part, file)
    apart = [n for n in placed if n.endswith(".scale") and placed[n] != placed[n[:-5] + "weight"]]
    assert len(apart) > 100
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (tmp_path / "config.json").write_text((quantised / "config.json").read_text())
    for weights in FORMS:
        assert torch.equal(logits_of(load_model(tmp_path, weights=weights)), wanted)


def test_saving_what_was_loaded_keeps_every_byte(
    quantised: Path, raw: dict[str, Any], tmp_path: Path
) -> None:
    """Packed: the same bytes. Expanded and quantised again: bytes of the same values."""
    config = json.loads((quantised / "config.json").read_text())
    original = RawFile(quantised / "model.safetensors")
    save_quantised(load_model(quantised, weights="packed"), tmp_path / "p", config)
    packed = RawFile(tmp_path / "p" / "model.safetensors")
    assert packed.header.keys() == original.header.keys()
    for name, entry in original.header.items():
        if entry["dtype"] not in ("BF16", "F32"):
            assert np.array_equal(packed.bytes_of(name), original.bytes_of(name)), name
    save_quantised(load_model(quantised), tmp_path / "e", config, max_shard_bytes=60_000)
    assert len(list((tmp_path / "e").glob("model-*.safetensors"))) > 4
    again, first = load_model(tmp_path / "e"), load_model(quantised)
    for slot, other in zip(tensor_slots(again), tensor_slots(first), strict=True):
        assert torch.equal(slot.target, other.target), slot.name


def test_a_float_model_can_be_packed_in_place(
    make_model: MakeModel, raw: dict[str, Any], quantised: Path
) -> None:
    """The same rounding as in the file; floats keep what the file's BF16 would lose."""
    model = make_model(dtype=torch.float32, **WHOLE_BLOCKS)
    use_packed_modules(model, "packed")
    loaded = load_model(quantised, weights="packed")
    for slot, other in zip(tensor_slots(model), tensor_slots(loaded), strict=True):
        if slot.scales is not None and other.scales is not None:
            assert torch.equal(slot.target, other.target), slot.name
            assert torch.equal(slot.scales, other.scales), slot.name
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.wq_a\.weight is packed"):
        save_model(model, quantised / "x", torch.float32, raw)


def test_arguments_that_do_not_fit(quantised: Path) -> None:
    with pytest.raises(ValueError, match="weights is 'fp8'; must be one of expanded, packed_exp"):
        load_model(quantised, weights="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="engram_tables is 'disk'; must be one of memory, mapped"):
        load_model(quantised, engram_tables="disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'mapped', which needs device cpu; device is meta"):
        load_model(quantised, "meta", engram_tables="mapped")


def test_published_bytes(quantised: Path, tmp_path: Path) -> None:
    """The first eight bytes and the first scale of the released layers.0.attn.wkv."""
    tensors = load_file(quantised / "model.safetensors")
    row = torch.tensor([0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5], dtype=torch.uint8)
    tensors["layers.0.attn.wkv.weight"].view(torch.uint8)[0, :8] = row
    tensors["layers.0.attn.wkv.scale"].view(torch.uint8)[0, 0] = 0x73
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((quantised / "config.json").read_text())
    wanted = (
        "-0.00390625 0.03515625 -0.0390625 0.0703125 0.03125 0.017578125 -0.03125 -0.0126953125"
    )
    found = load_model(tmp_path).blocks[0].attn.wkv.weight[0, :8].tolist()
    assert found == [float(word) for word in wanted.split()]


def test_a_progress_bar_counts_bytes(quantised: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(quantised)
    assert capsys.readouterr().err == ""
    load_model(quantised, progress=True)
    bar = capsys.readouterr().err
    size = sum(
        math.prod(entry["shape"]) * {"BF16": 2, "F32": 4}.get(entry["dtype"], 1)
        for entry in RawFile(quantised / "model.safetensors").header.values()
    )
    assert "loading: 100%" in bar and f"{size / 1000:.0f}k/{size / 1000:.0f}k" in bar
