"""Straight-through rounding against the reference formats, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from decodegrid.graphs.drafter import DraftModel
from decodegrid.kernels import quant
from training.quantised import (
    WeightFormat,
    round_e2m1,
    round_e4m3,
    round_in_place,
    round_q4n,
    round_q4x,
    round_q8,
    round_record,
    round_tiles,
    rounded_weights,
    stored_values,
    weight_format,
)

MakeModel = Callable[..., DraftModel]
SIZES = {"moe_intermediate_size": 32, "head_dim": 32, "index_head_dim": 32, "engram_head_dim": 32}


def wide_values(shape: tuple[int, ...]) -> Tensor:
    """Values over many powers of two, zeros and exact ties among them."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(shape, generator=generator)
    values = values * 2.0 ** torch.randint(-14, 9, shape, generator=generator)
    ties = torch.tensor([0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 0.0, 448.0, 6.0])
    flat = values.flatten()
    flat[: len(ties)] = ties
    return flat.view(shape)


def test_elements_equal_the_codes() -> None:
    x = wide_values((64, 96))
    assert torch.equal(round_e4m3(x), quant.decode_e4m3(quant.encode_e4m3(x)))
    assert torch.equal(round_e2m1(x), quant.decode_e2m1(quant.encode_e2m1(x)))


@pytest.mark.parametrize(
    ("rounding", "encode", "decode"),
    [
        (round_q8, quant.quantise_q8, quant.dequantise_q8),
        (round_q4x, quant.quantise_q4x, quant.dequantise_q4x),
        (round_q4n, quant.quantise_q4n, quant.dequantise_q4n),
    ],
)
def test_blocks_equal_the_reference(
    rounding: Callable[[Tensor], Tensor],
    encode: Callable[[Tensor], quant.Blocks],
    decode: Callable[[quant.Blocks], Tensor],
) -> None:
    x = wide_values((3, 7, 96))
    x[1, 2] = 0.0
    x[2, 3] *= 1e-9
    assert torch.equal(rounding(x), decode(encode(x)))
    assert torch.equal(rounding(rounding(x)), rounding(x))
    with pytest.raises(ValueError, match="97"):
        rounding(torch.zeros(2, 97))


def test_tiles_by_hand() -> None:
    weight = wide_values((70, 40))
    rounded = round_tiles(weight)
    assert rounded.shape == weight.shape
    for top in range(0, 70, 32):
        for left in range(0, 40, 32):
            tile = weight[top : top + 32, left : left + 32]
            exponent = -20
            while 448.0 * 2.0**exponent < float(tile.abs().max()):
                exponent += 1
            codes = quant.encode_e4m3(tile / 2.0**exponent)
            expected = quant.decode_e4m3(codes) * 2.0**exponent
            assert torch.equal(rounded[top : top + 32, left : left + 32], expected)
    assert torch.equal(round_tiles(rounded), rounded)


def test_a_quantised_checkpoint_holds_the_same_values() -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(1))
    weight *= 2.0 ** torch.arange(70).remainder(9).sub(8)[:, None]
    stored = stored_values("layers.0.attn.wkv.weight", weight)
    tiles = quant.quantise_fp8_weight(stored)
    assert torch.equal(quant.dequantise_fp8_weight(tiles.codes, tiles.scales), stored)
    stored = stored_values("layers.0.ffn.experts.w1", weight)
    assert torch.equal(quant.dequantise_q4x(quant.quantise_mxfp4(stored)), stored)
    stored = stored_values("layers.1.engram.embed.weight", weight)
    assert torch.equal(quant.dequantise_q8(quant.quantise_fp8_rows(stored)), stored)
    assert torch.equal(stored.to(torch.bfloat16).float(), stored)


def test_formats_by_name(make_model: MakeModel) -> None:
    formats = {n: weight_format(n) for n, _ in make_model(0).named_parameters()}
    assert formats["layers.0.ffn.experts.w2"] is WeightFormat.MXFP4
    assert formats["mtp.1.ffn.experts.w1"] is WeightFormat.MXFP4
    assert formats["layers.1.engram.embed.weight"] is WeightFormat.FP8_ROWS
    tiles = {n.split(".", 2)[2] for n, kind in formats.items() if kind is WeightFormat.FP8_TILES}
    assert tiles == {
        *(f"attn.{part}.weight" for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")),
        *(f"ffn.shared_experts.w{i}.weight" for i in (1, 2, 3)),
        "attn.indexer.wq_b.weight",
        "engram.wkv.weight",
        "main_proj.weight",
    }
    plain = ("embed.weight", "head.weight", "layers.1.attn.compressor.wkv.weight")
    assert all(formats[name] is None for name in plain)


def test_weights_are_rounded_within_and_gradients_pass(make_model: MakeModel) -> None:
    model = make_model(2, dtype=torch.float32, **SIZES).requires_grad_(True)
    named = list(model.named_parameters())
    own = {name: parameter.detach().clone() for name, parameter in named}
    ids = torch.randint(0, 96, (1, 16))
    with rounded_weights(named):
        inside = {name: parameter.detach().clone() for name, parameter in named}
        model(ids).hidden.square().sum().backward()
    for name, parameter in named:
        assert torch.equal(parameter, own[name])
        assert torch.equal(inside[name], stored_values(name, own[name]))
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    round_in_place(model)
    model.zero_grad()
    model(ids).hidden.square().sum().backward()
    for name, parameter in named:
        assert torch.equal(parameter, inside[name])
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, gradients[name])
    changed = [name for name in own if not torch.equal(inside[name], own[name])]
    assert set(changed) == {name for name in own if weight_format(name) is not None}


def test_own_weights_come_back_after_an_error() -> None:
    linear = nn.Linear(32, 32, bias=False)
    before = linear.weight.detach().clone()
    with pytest.raises(RuntimeError), rounded_weights([("attn.wkv.weight", linear.weight)]):
        raise RuntimeError
    assert torch.equal(linear.weight, before)


def test_records_pass_gradients() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    (round_record(x, round_q8) * torch.arange(32)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.arange(32.0).expand(4, 32))
