"""Quantisation references: published vectors, every byte of every format, nearest-code rules."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from decodegrid.kernels.quant import (
    Blocks,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    dequantise_fp8_weight,
    dequantise_q4n,
    dequantise_q4x,
    dequantise_q8,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    quantise_fp8_rows,
    quantise_fp8_weight,
    quantise_mxfp4,
    quantise_q4n,
    quantise_q4x,
    quantise_q8,
    unpack_nibbles,
)

X16 = (
    "0.80078125 -0.69921875 -0.6015625 0.5 -0.400390625 -0.30078125 0.2001953125 -0.10009765625 "
    "0 -0.10009765625 0.2001953125 0.30078125 -0.400390625 0.5 0.6015625 -0.69921875"
)


def numbers(text: str) -> Tensor:
    return torch.tensor([float(word) for word in text.split()])


def hexes(text: str) -> Tensor:
    return torch.tensor([int(word, 16) for word in text.split()], dtype=torch.uint8)


def ints(text: str) -> Tensor:
    return torch.tensor([int(word) for word in text.split()], dtype=torch.uint8)


@pytest.fixture
def x16() -> Tensor:
    return numbers(X16).to(torch.bfloat16)


@pytest.fixture
def x32(x16: Tensor) -> Tensor:
    return torch.cat((x16, 2 * x16.flip(0)))


def test_q4n_vector(x16: Tensor) -> None:
    blocks = quantise_q4n(x16)
    assert blocks.scales.tolist() == [0x21]
    assert decode_e4m3(blocks.scales).tolist() == [0.140625]
    codes = ints("7 14 14 6 13 12 3 9 0 9 3 4 13 6 6 14")
    assert torch.equal(unpack_nibbles(blocks.codes), codes)
    assert torch.equal(blocks.codes, hexes("e7 6e cd 93 90 43 6d e6"))
    expected = numbers(
        "0.84375 -0.5625 -0.5625 0.5625 -0.421875 -0.28125 0.2109375 -0.0703125 0 -0.0703125 "
        "0.2109375 0.28125 -0.421875 0.5625 0.5625 -0.5625"
    )
    assert torch.equal(dequantise_q4n(blocks), expected)


def test_q4x_vector(x32: Tensor) -> None:
    blocks = quantise_q4x(x32)
    assert decode_e8m0(blocks.scales).tolist() == [0.5]
    codes = ints("3 11 10 2 10 9 1 8 0 8 1 1 10 2 2 11 13 4 4 11 2 2 9 0 9 2 10 11 4 12 13 5")
    assert torch.equal(unpack_nibbles(blocks.codes), codes)
    assert torch.equal(dequantise_q4x(blocks), decode_e2m1(codes) * 0.5)


def test_q8_vector(x32: Tensor) -> None:
    blocks = quantise_q8(x32)
    assert decode_e8m0(blocks.scales).tolist() == [2.0**-8]
    codes = hexes(
        "75 f3 f2 70 ed ea 65 dd 00 dd 65 6a ed 70 72 f3 fb 7a 78 f5 72 6d e5 00 e5 6d f2 f5 78 fa "
        "fb 7d"
    )
    assert torch.equal(blocks.codes, codes)


def test_fp8_weight_vector() -> None:
    codes = hexes("d8 71 f2 79 70 69 f0 e5")
    expected = numbers(
        "-0.00390625 0.03515625 -0.0390625 0.0703125 0.03125 0.017578125 -0.03125 -0.0126953125"
    )
    assert torch.equal(dequantise_fp8_weight(codes[None], hexes("73")[None])[0], expected)


def test_fp8_weight_tiles() -> None:
    """Each element takes the scale of its own 32 x 32 tile, ragged edges included."""
    scales = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8)
    one = encode_e4m3(torch.ones(40, 70))
    weight = dequantise_fp8_weight(one, scales)
    for row in (0, 31, 32, 39):
        for column in (0, 31, 32, 63, 64, 69):
            assert weight[row, column] == 2.0 ** (int(scales[row // 32, column // 32]) - 127)


def test_every_e8m0_byte() -> None:
    values = decode_e8m0(torch.arange(256, dtype=torch.uint8)).double().tolist()
    assert values[:255] == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    assert math.isnan(values[255])


def test_every_e4m3_byte() -> None:
    values = decode_e4m3(torch.arange(256, dtype=torch.uint8)).tolist()
    for byte, value in enumerate(values):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        if exponent == 15 and mantissa == 7:
            assert math.isnan(value)
        elif exponent == 0:
            assert value == sign * mantissa * 2.0**-9
        else:
            assert value == sign * (8 + mantissa) * 2.0 ** (exponent - 10)
    back = encode_e4m3(torch.tensor([v for v in values if not math.isnan(v)]))
    assert back.tolist() == [byte for byte in range(256) if byte & 0x7F != 0x7F]


def test_every_e2m1_code_and_packed_byte() -> None:
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()
    for code, value in enumerate(values):
        exponent, mantissa = (code >> 1) & 3, code & 1
        magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert value == (-magnitude if code & 8 else magnitude)
    every = torch.arange(256, dtype=torch.uint8)
    pairs = unpack_nibbles(every).reshape(256, 2)
    assert pairs.tolist() == [[byte % 16, byte // 16] for byte in range(256)]
    assert torch.equal(pack_nibbles(pairs.flatten()), every)


def test_e2m1_rounds_to_nearest_with_ties_to_even() -> None:
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    grid = torch.arange(-260, 261) / 32
    codes = encode_e2m1(grid).tolist()
    for value, code in zip(grid.tolist(), codes, strict=True):
        distance = [abs(min(abs(value), 6.0) - entry) for entry in table]
        best = [i for i, d in enumerate(distance) if d == min(distance)]
        wanted = best[0] if len(best) == 1 else next(i for i in best if i % 2 == 0)
        assert code & 7 == wanted, value
        assert (code >= 8) == (value < 0), value


@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 1e-4, 0.02, 1.0, 447.9, 449.0, 3e4])
def test_scales_are_the_smallest_that_hold_the_block(magnitude: float) -> None:
    noise = torch.rand(64, generator=torch.Generator().manual_seed(7)) * 2 - 1
    x = (noise * magnitude).to(torch.bfloat16)
    for start in (0, 32):
        amax = x[start : start + 32].abs().max().item()
        for quantise, floor, largest in ((quantise_q8, 1e-4, 448), (quantise_q4x, 6e-38, 6)):
            scale = decode_e8m0(quantise(x).scales)[start // 32].item()
            need = max(amax, floor) / largest
            assert scale >= need * (1 - 1e-6)
            assert scale / 2 < need * (1 + 1e-6)
    for start in range(0, 64, 16):
        amax = x[start : start + 16].abs().max().item()
        scale = decode_e4m3(quantise_q4n(x).scales)[start // 16].item()
        wanted = min(max(amax / 6, 2.0**-9), 448.0)
        assert abs(scale - wanted) <= max(wanted / 16, 2.0**-10)


def test_values_are_exact_in_bfloat16_and_q8_is_idempotent() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    for quantise, dequantise in (
        (quantise_q8, dequantise_q8),
        (quantise_q4x, dequantise_q4x),
        (quantise_q4n, dequantise_q4n),
    ):
        values = dequantise(quantise(x))
        assert torch.equal(values.to(torch.bfloat16).float(), values)
        assert (values - x.float()).abs().max() < 0.5 * x.abs().max()
    again = quantise_q8(dequantise_q8(quantise_q8(x)))
    assert torch.equal(dequantise_q8(again), dequantise_q8(quantise_q8(x)))


def test_scales_come_from_a_float32_product() -> None:
    """The reciprocal of the largest code is rounded first; around powers of two that decides."""
    quantises = ((quantise_q8, np.float32(1 / 448)), (quantise_q4x, np.float32(1 / 6)))
    for quantise, reciprocal in quantises:
        for exponent in range(-10, 60):
            centre = np.float32(2.0**exponent) / reciprocal
            below, above = np.nextafter(centre, np.float32([0, np.inf]))
            for amax in (below, centre, above):
                x = torch.zeros(32)
                x[7] = -float(amax)
                wanted = math.ceil(math.log2(float(np.float32(amax) * reciprocal)))
                assert quantise(x).scales.tolist() == [127 + wanted], (exponent, amax)


@pytest.mark.parametrize("quantise", [quantise_q8, quantise_q4x, quantise_q4n])
def test_quantising_makes_no_tensor_of_a_number(
    quantise: Callable[[Tensor], Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would be a copy from the host, which a captured CUDA graph cannot hold."""

    def never(*args: object, **options: object) -> Tensor:
        raise AssertionError("a tensor was made of Python numbers")

    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(8))
    for name in ("tensor", "as_tensor", "from_numpy"):
        monkeypatch.setattr(torch, name, never)
    quantise(x)


def test_q4n_scale_saturates() -> None:
    blocks = quantise_q4n(torch.full((16,), 1e5))
    assert decode_e4m3(blocks.scales).tolist() == [448.0]
    assert dequantise_q4n(blocks).tolist() == [6 * 448.0] * 16


def test_shapes_and_refusal() -> None:
    blocks = quantise_q4n(torch.zeros(2, 3, 32))
    assert isinstance(blocks, Blocks)
    assert blocks.codes.shape == (2, 3, 16) and blocks.scales.shape == (2, 3, 2)
    assert quantise_q8(torch.zeros(0, 32)).codes.shape == (0, 32)
    with pytest.raises(ValueError, match="48 channels; must be a multiple of 32"):
        quantise_q8(torch.zeros(48))


def slow_nearest(value: float, table: list[float]) -> float:
    """The entry of a code table nearest to a magnitude; the even code where two are as near."""
    distances = [abs(value - entry) for entry in table]
    least = min(distances)
    best = [code for code, distance in enumerate(distances) if distance == least]
    return table[best[0] if len(best) == 1 else next(code for code in best if code % 2 == 0)]


E2M1_TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3_TABLE = [
    m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)
][:127]


def slow_block(values: list[float], table: list[float]) -> list[float]:
    """A block's quantised values: the smallest power of two whose largest code reaches them all."""
    amax = max(abs(value) for value in values)
    exponent = -127
    while amax > table[-1] * 2.0**exponent:
        exponent += 1
    scale = 2.0**exponent
    return [math.copysign(slow_nearest(abs(v) / scale, table) * scale, v) for v in values]


@pytest.mark.parametrize("spread", [0.0, 1.0, 40.0])
def test_weights_against_slow_rounding(spread: float) -> None:
    """Random tensors with magnitudes over up to 80 powers of two, ragged tiles included."""
    generator = torch.Generator().manual_seed(21)
    weight = torch.randn(37, 64, generator=generator)
    weight *= torch.exp2(spread * (2 * torch.rand(37, 1, generator=generator) - 1))
    weight[5] = 0.0
    weight[6, :32] = torch.linspace(-6.0, 6.0, 32)
    exact = [[float(v) for v in row] for row in weight]
    rows = dequantise_q8(quantise_fp8_rows(weight))
    experts = dequantise_q4x(quantise_mxfp4(weight))
    tiles = quantise_fp8_weight(weight)
    assert tiles.scales.shape == (2, 2)
    tile_values = dequantise_fp8_weight(tiles.codes, tiles.scales)
    for column in (0, 32):
        for row in range(37):
            block = exact[row][column : column + 32]
            assert rows[row, column : column + 32].tolist() == slow_block(block, E4M3_TABLE)
            assert experts[row, column : column + 32].tolist() == slow_block(block, E2M1_TABLE)
        for first, last in ((0, 32), (32, 37)):
            flat = [v for row in exact[first:last] for v in row[column : column + 32]]
            found = tile_values[first:last, column : column + 32].flatten().tolist()
            assert found == slow_block(flat, E4M3_TABLE)


def test_quantising_what_was_quantised_changes_nothing() -> None:
    """Every code under every scale byte, in blocks of one scale: the values come back."""
    codes = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    codes = torch.cat((codes, codes[:2])).view(8, 32)
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(2)
    for byte in range(247):  # above that the largest code is no float32
        scale = torch.tensor([[byte]], dtype=torch.uint8)
        values = dequantise_fp8_weight(codes, scale)
        again = quantise_fp8_weight(values)
        assert torch.equal(dequantise_fp8_weight(again.codes, again.scales), values), byte
        values = dequantise_q8(Blocks(codes, scale.expand(8, 1)))
        assert torch.equal(dequantise_q8(quantise_fp8_rows(values)), values), byte
        values = dequantise_q4x(Blocks(pack_nibbles(nibbles), scale[0]))
        assert torch.equal(dequantise_q4x(quantise_mxfp4(values)), values), byte
        # Small codes alone: the scale moves down, and the values stay.
        values = dequantise_fp8_weight(codes[:1] & 0x87, scale)
        again = quantise_fp8_weight(values)
        assert torch.equal(dequantise_fp8_weight(again.codes, again.scales), values), byte
    assert quantise_mxfp4(torch.zeros(1, 32)).scales.tolist() == [[127]]


def test_weight_shapes_and_refusal() -> None:
    tiles = quantise_fp8_weight(torch.ones(40, 70))
    assert tiles.codes.shape == (40, 70) and tiles.scales.shape == (2, 3)
    assert tiles.codes.is_contiguous()
    for quantise in (quantise_fp8_rows, quantise_mxfp4):
        with pytest.raises(ValueError, match="48 channels; must be a multiple of 32"):
            quantise(torch.zeros(2, 48))
