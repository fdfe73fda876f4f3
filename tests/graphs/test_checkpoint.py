"""Checkpoints: bit-equal round trips, stored names and dtypes, token classes from a tokenizer."""

import json
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
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.engram_vocab import compressed_token_classes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MakeModel = Callable[..., DraftModel]
MakeRaw = Callable[..., dict[str, Any]]
Change = Callable[[dict[str, Tensor]], None]


def assert_equal_models(found: DraftModel, wanted: DraftModel) -> None:
    pairs = zip(found.named_parameters(), wanted.named_parameters(), strict=True)
    for (name, a), (other, b) in pairs:
        assert name == other
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name
    for (name, a), (_, b) in zip(found.named_buffers(), wanted.named_buffers(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [2**32, 60_000])
def test_round_trip(
    make_model: MakeModel,
    make_raw: MakeRaw,
    tmp_path: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    model = make_model(seed=4, dtype=dtype)
    save_model(model, tmp_path, dtype, make_raw(), max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in tmp_path.iterdir())
    if max_shard_bytes > 2**20:
        assert files == ["config.json", WEIGHTS]
    else:
        assert INDEX in files and WEIGHTS not in files and len(files) > 4
    assert not [name for name in files if "part" in name]
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, "readable by the same"
    loaded = load_model(tmp_path, dtype=dtype)
    assert_equal_models(loaded, model)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    ids = torch.arange(20) * 7 % 96
    assert torch.equal(loaded.logits(ids), model.logits(ids))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype)[6:]


def test_stored_names_dtypes_and_shapes(
    make_model: MakeModel, make_raw: MakeRaw, tmp_path: Path
) -> None:
    model = make_model(seed=4, dtype=torch.float32)
    save_model(model, tmp_path, torch.bfloat16, make_raw())
    stored = load_file(tmp_path / WEIGHTS)
    wanted = {
        "embed.weight": [96, 32],
        "head.weight": [96, 32],
        "norm.weight": [32],
        "layers.0.attn.wq_a.weight": [16, 32],
        "layers.0.attn.wo_a.weight": [32, 32],
        "layers.1.attn.compressor.wgate.weight": [16, 32],
        "layers.4.attn.compressor.wkv.weight": [16, 32],
        "layers.4.attn.indexer.wk.weight": [16, 16],
        "layers.6.attn.indexer.wq_b.weight": [256, 16],
        "layers.7.ffn.experts.7.w1.weight": [16, 32],
        "layers.7.ffn.experts.0.w2.weight": [32, 16],
        "layers.7.ffn.shared_experts.w3.weight": [16, 32],
        "layers.3.engram.embed.weight": [258, 16],
        "layers.3.engram.wkv.weight": [160, 64],
        "layers.3.engram.q_weight": [4, 32],
        "mtp.0.main_proj.weight": [32, 96],
        "mtp.0.main_norm.weight": [32],
        "mtp.1.norm.weight": [32],
        "mtp.1.markov_head.embed.weight": [96, 8],
        "mtp.1.markov_head.head.weight": [96, 8],
        "mtp.1.confidence_head.proj.weight": [1, 40],
        "mtp.1.ffn.experts.3.w3.weight": [16, 32],
        "layers.5.hc_attn_fn": [24, 128],
        "layers.5.hc_ffn_scale": [3],
        "layers.5.hc_ffn_base": [24],
        "mtp.0.ffn.gate.bias_vl": [4],
        "layers.5.attn.attn_sink": [4],
    }
    for name, shape in wanted.items():
        assert list(stored[name].shape) == shape, name
        wide = "hc_" in name or name.endswith(("sink", "bias", "bias_vl"))
        assert stored[name].dtype == (torch.float32 if wide else torch.bfloat16), name
    absent = [
        "layers.4.attn.compressor.wgate.weight",  # ratio 1 has no gate
        "layers.6.attn.indexer.wk.weight",  # reindex layers read the source's keys
        "layers.2.attn.compressor.wkv.weight",
        "layers.0.engram.embed.weight",
        "mtp.0.norm.weight",
        "mtp.1.main_proj.weight",
        "mtp.0.attn.compressor.wkv.weight",
    ]
    assert not set(absent) & set(stored)
    # A layer: 2 norms, 6 mHC, 8 attention, 3 router, 3 shared expert, and 3 for each expert.
    layers = 8 * (22 + 3 * 8) + 2 * (22 + 3 * 4)
    compressors, indexers, engrams, drafter = 3 + 3 + 2, 4 + 4 + 4 + 2, 2 * 4, 6
    assert len(stored) == layers + compressors + indexers + engrams + drafter + 3
    expert = stored["layers.7.ffn.experts.5.w1.weight"]
    assert torch.equal(expert, model.layers[7].ffn.experts.w1[5].to(torch.bfloat16))


@pytest.fixture
def checkpoint(make_model: MakeModel, make_raw: MakeRaw, tmp_path: Path) -> Path:
    """A float32 checkpoint of the small model."""
    save_model(make_model(dtype=torch.float32), tmp_path / "c", torch.float32, make_raw())
    return tmp_path / "c"


def test_prefix_vision_and_other_dtypes_are_read(checkpoint: Path) -> None:
    plain = load_model(checkpoint, dtype=torch.float64)
    tensors = load_file(checkpoint / WEIGHTS)
    tensors = {f"model.{name}": tensor.double() for name, tensor in tensors.items()}
    tensors["vision.patch_embed.proj.bias"] = torch.zeros(4)
    tensors["image_start"] = torch.zeros(32)
    save_file(tensors, checkpoint / WEIGHTS)
    assert_equal_models(load_model(checkpoint, dtype=torch.float64), plain)


def test_saving_again_replaces_the_other_layout(
    make_model: MakeModel, make_raw: MakeRaw, tmp_path: Path
) -> None:
    model = make_model(dtype=torch.float32)
    for limit in (60_000, 200_000, 2**32, 60_000):
        save_model(model, tmp_path, torch.float32, make_raw(), max_shard_bytes=limit)
        assert_equal_models(load_model(tmp_path), model)


def test_saving_refuses(make_model: MakeModel, make_raw: MakeRaw, tmp_path: Path) -> None:
    model = make_model(dtype=torch.float32)
    raw = make_raw()
    with pytest.raises(ValueError, match=r"dtype is torch\.float16"):
        save_model(model, tmp_path, torch.float16, raw)
    raw["text_config"]["index_topk"] = 5
    with pytest.raises(ValueError, match="does not describe the model"):
        save_model(model, tmp_path, torch.float32, raw)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"dtype is torch\.float16"):
        load_model(tmp_path, dtype=torch.float16)


def write_tokenizer(directory: Path, words: list[str]) -> None:
    vocabulary = {word: number for number, word in enumerate(words)}
    Tokenizer(WordLevel(vocabulary, unk_token=words[0])).save(str(directory / "tokenizer.json"))


def test_token_classes_come_from_the_tokenizer(checkpoint: Path) -> None:
    assert load_model(checkpoint).compressed_ids.tolist() == [i % 64 for i in range(96)]
    words = [f"w{i}" for i in range(64)] + [f"W{i}" for i in range(26)]
    write_tokenizer(checkpoint, words)
    classes = load_model(checkpoint).compressed_ids.tolist()
    assert classes[:90] == list(range(64)) + list(range(26))
    assert classes[90:] == [2] * 6, "ids without a token count as padding"
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert compressed_token_classes(tokenizer) == classes[:90]
