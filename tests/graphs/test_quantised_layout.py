"""The stored kinds of the released format: names, shapes, and weights in pieces."""

import math

import pytest
import torch

from decodegrid.graphs import quant_layout
from decodegrid.graphs.quant_layout import (
    StoredKind,
    expand,
    has_nan_code,
    has_nan_scale,
    quantise,
    scale_name,
    stored_kind,
    stored_shapes,
)
from decodegrid.kernels.quant import (
    decode_e4m3,
    decode_e8m0,
    quantise_fp8_rows,
    quantise_fp8_weight,
    quantise_mxfp4,
)

TILES = """
layers.0.attn.wq_a layers.39.attn.wq_b layers.7.attn.wkv layers.12.attn.wo_a layers.1.attn.wo_b
layers.24.attn.indexer.wq_b layers.3.ffn.shared_experts.w1 layers.3.ffn.shared_experts.w2
layers.3.ffn.shared_experts.w3 layers.14.engram.wkv mtp.0.main_proj mtp.2.attn.wkv
mtp.1.ffn.shared_experts.w2
"""
EXPERTS = "layers.0.ffn.experts.383.w1 layers.39.ffn.experts.0.w2 mtp.2.ffn.experts.127.w3"
FLOATS = """
embed.weight head.weight norm.weight layers.0.attn_norm.weight layers.0.ffn.gate.weight
layers.2.attn.compressor.wkv.weight layers.2.attn.compressor.wgate.weight
layers.2.attn.indexer.wk.weight layers.2.attn.indexer.weights_proj.weight layers.0.attn.attn_sink
layers.2.attn.indexer.k_norm.weight layers.1.engram.q_weight layers.0.hc_attn_fn
layers.0.ffn.gate.bias mtp.2.markov_head.embed.weight mtp.2.markov_head.head.weight
mtp.2.confidence_head.proj.weight mtp.0.main_norm.weight vision.blocks.0.attn.wo.weight
aligner.w1.weight layers.0.attn.wq_a.scale xlayers.0.attn.wq_a.weight layers.0.attn.wq_a.weights
"""


def test_kinds_of_the_released_names() -> None:
    for name in TILES.split():
        assert stored_kind(f"{name}.weight") is StoredKind.FP8_TILES, name
    for name in EXPERTS.split():
        assert stored_kind(f"{name}.weight") is StoredKind.MXFP4, name
    for name in ("layers.1.engram.embed.weight", "layers.14.engram.embed.weight"):
        assert stored_kind(name) is StoredKind.FP8_ROWS, name
    for name in FLOATS.split():
        assert stored_kind(name) is StoredKind.FLOAT, name
    assert scale_name("layers.0.attn.wq_a.weight") == "layers.0.attn.wq_a.scale"


@pytest.mark.parametrize(
    ("kind", "shape", "codes", "scales"),
    [
        (StoredKind.FP8_TILES, (1280, 5120), (1280, 5120), (40, 160)),
        (StoredKind.FP8_TILES, (33, 31), (33, 31), (2, 1)),
        (StoredKind.FP8_ROWS, (384006168, 256), (384006168, 256), (384006168, 8)),
        (StoredKind.MXFP4, (2304, 5120), (2304, 2560), (2304, 160)),
        (StoredKind.MXFP4, (5120, 2304), (5120, 1152), (5120, 72)),
        (StoredKind.MXFP4, (4, 64, 96), (4, 64, 48), (4, 64, 3)),
    ],
)
def test_shapes_of_the_released_tensors(
    kind: StoredKind, shape: tuple[int, ...], codes: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    assert stored_shapes(kind, shape) == (codes, scales)


@pytest.mark.parametrize("kind", [StoredKind.FP8_ROWS, StoredKind.MXFP4])
def test_rows_must_be_whole_blocks(kind: StoredKind) -> None:
    with pytest.raises(ValueError, match=r"shape \[8, 48\] cannot .* multiple of 32"):
        stored_shapes(kind, (8, 48))
    with pytest.raises(ValueError, match="multiple of 32"):
        quantise(kind, torch.zeros(8, 48))


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        (StoredKind.FP8_TILES, quantise_fp8_weight),
        (StoredKind.FP8_ROWS, quantise_fp8_rows),
        (StoredKind.MXFP4, quantise_mxfp4),
    ],
)
def test_pieces_make_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, kind: StoredKind, whole: quant_layout.QuantiseForm
) -> None:
    weight = torch.randn(150, 64, generator=torch.Generator().manual_seed(5))
    wanted = whole(weight)
    monkeypatch.setattr(quant_layout, "_PIECE", 64 * 40)  # pieces of 32, 32, 32, 32 and 22 rows
    found = quantise(kind, weight)
    assert torch.equal(found.codes, wanted.codes) and torch.equal(found.scales, wanted.scales)
    values = expand(kind, found.codes, found.scales, torch.float64)
    monkeypatch.undo()
    assert torch.equal(values, expand(kind, wanted.codes, wanted.scales, torch.float64))
    # Half the largest step between codes, 16 of 448 or 1 of 6; the scale is up to twice too large.
    part = 3 if kind is StoredKind.MXFP4 else 14
    assert (values - weight).abs().amax() <= weight.abs().amax() / part


def test_values_that_are_not_finite_are_refused() -> None:
    for value in (math.inf, math.nan):
        weight = torch.zeros(64, 64)
        weight[40, 3] = value
        for kind in (StoredKind.FP8_TILES, StoredKind.FP8_ROWS, StoredKind.MXFP4):
            with pytest.raises(ValueError, match="not a finite float32"):
                quantise(kind, weight)
    with pytest.raises(ValueError, match="not a finite float32"):
        quantise(StoredKind.MXFP4, torch.full((32, 32), 1e300, dtype=torch.float64))


def test_exactly_the_nan_bytes_are_found() -> None:
    """Against the decoders, byte by byte; E2M1 has no NaN."""
    every = torch.arange(256, dtype=torch.uint8)
    is_nan = decode_e4m3(every).isnan().tolist()
    for byte in range(256):
        codes = torch.zeros(70, 64, dtype=torch.uint8)
        codes[69, 63] = byte
        assert has_nan_code(StoredKind.FP8_TILES, codes) == is_nan[byte], byte
        assert has_nan_code(StoredKind.FP8_ROWS, codes) == is_nan[byte], byte
        assert not has_nan_code(StoredKind.MXFP4, codes)
        assert has_nan_scale(codes) == bool(decode_e8m0(every[byte]).isnan()), byte
    assert not has_nan_code(StoredKind.FP8_ROWS, torch.empty(0, 32, dtype=torch.uint8))
