"""Per-token casts on the CPU route: every code and scale bit, every scale layout."""

import pytest
import torch

from decodegrid.kernels.quant import (
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    quantise_q4n,
    quantise_q4x,
    quantise_q8,
)

pytestmark = pytest.mark.kernels

ROWS = (0, 1, 5, 16, 37)
POISON = 0xA5


def hard_rows(rows, dim, seed, dtype=torch.bfloat16):
    """Values of all sizes, with zeros, ties, blocks of zeros and exact powers of two."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=make) * torch.exp2(
        torch.randint(-30, 20, (rows, dim // 16), generator=make).float()
    ).repeat_interleave(16, 1)
    x[torch.rand(rows, dim, generator=make) < 0.1] = 0.0
    x[torch.rand(rows, dim, generator=make) < 0.1] = -0.0
    if rows > 2:
        x[0] = 0.0
        x[1] = torch.arange(dim).remainder(29) / 4 - 3.5
        x[2] = torch.exp2(torch.arange(dim).remainder(9).float() - 4)
    return x.to(dtype)


def words(scales):
    """Four scale bytes as one int32, the first in the lowest bits."""
    wide = scales.to(torch.int64).unflatten(1, (-1, 4))
    total = (wide << (torch.arange(4) * 8)).sum(2)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (256, torch.bfloat16)])
@pytest.mark.parametrize("rows", ROWS)
def test_fp8_rows(tile, rows, dim, dtype):
    x = hard_rows(rows, dim, rows, dtype)
    codes = torch.full((rows, dim), POISON, dtype=torch.uint8)
    scales = torch.full((rows, dim // 32), POISON, dtype=torch.uint8)
    tile("casts.cast_fp8", dim=dim, dtype=str(dtype)[6:])(x, codes, scales)
    expected = quantise_q8(x)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(codes, expected.codes)


def test_every_bfloat16_rounds_to_its_fp8_code(tile):
    """All finite bfloat16 bit patterns, 32 of a kind at a time so that scales differ widely."""
    bits = torch.arange(2**16)
    values = bits.to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()][: 65280 // 256 * 256].view(-1, 256)
    codes = torch.empty(values.shape, dtype=torch.uint8)
    scales = torch.empty(len(values), 8, dtype=torch.uint8)
    tile("casts.cast_fp8", dim=256)(values, codes, scales)
    expected = quantise_q8(values)
    assert torch.equal(codes, expected.codes)
    assert torch.equal(scales, expected.scales)


@pytest.mark.parametrize("rows", ROWS)
def test_fp8_packed_columns(tile, rows):
    """int32 words, one column per 128 channels, padded to four rows; pads are left alone."""
    dim, stride = 384, -(-rows // 4) * 4
    x = hard_rows(rows, dim, rows)
    codes = torch.full((rows, dim), POISON, dtype=torch.uint8)
    scales = torch.full((dim // 128, stride), -7, dtype=torch.int32)
    tile("casts.cast_fp8_columns", dim=dim, block=32)(x, codes, scales)
    expected = quantise_q8(x)
    assert torch.equal(codes, expected.codes)
    assert torch.equal(scales[:, :rows].t(), words(expected.scales))
    assert bool((scales[:, rows:] == -7).all())


@pytest.mark.parametrize("rows", ROWS)
def test_fp8_float_columns(tile, rows):
    """float32 scales per 128 channels: the rule of Q8 with a wider block."""
    dim, stride = 384, -(-rows // 4) * 4
    x = hard_rows(rows, dim, rows)
    codes = torch.full((rows, dim), POISON, dtype=torch.uint8)
    scales = torch.full((dim // 128, stride), torch.nan)
    tile("casts.cast_fp8_columns", dim=dim, block=128)(x, codes, scales)
    blocks = x.float().unflatten(1, (-1, 128))
    # Q8 of a block's largest value alone gives the block's scale.
    largest = blocks.abs().amax(2).repeat_interleave(32, 1)
    expected = decode_e8m0(quantise_q8(largest).scales)
    assert torch.equal(scales[:, :rows].t(), expected)
    assert torch.equal(codes, encode_e4m3(blocks / expected.unsqueeze(2)).flatten(1))
    assert bool(scales[:, rows:].isnan().all())


@pytest.mark.parametrize(("block", "rule"), [(32, quantise_q4x), (16, quantise_q4n)])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [32, 256])
def test_fp4(tile, rows, dim, block, rule):
    x = hard_rows(rows, dim, rows + dim)
    codes = torch.full((rows, dim // 2), POISON, dtype=torch.uint8)
    scales = torch.full((rows, dim // block), POISON, dtype=torch.uint8)
    tile("casts.cast_fp4", dim=dim, block=block)(x, codes, scales)
    expected = rule(x)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(codes, expected.codes)


def test_a_scale_of_fp4_is_a_rounded_e4m3(tile):
    """Every E4M3 scale of Q4N comes out where a sixth of the largest value is that scale."""
    bytes_of = torch.arange(1, 127, dtype=torch.uint8)
    x = (decode_e4m3(bytes_of) * 6).unsqueeze(1).repeat(1, 16).repeat(1, 2)
    codes = torch.empty(len(x), 16, dtype=torch.uint8)
    scales = torch.empty(len(x), 2, dtype=torch.uint8)
    tile("casts.cast_fp4", dim=32, block=16, dtype="float32")(x, codes, scales)
    assert torch.equal(scales, bytes_of.unsqueeze(1).repeat(1, 2))
    assert bool((codes == 0x77).all())
