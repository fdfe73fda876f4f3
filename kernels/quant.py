"""Block quantisation formats of DeepSeek-V4.1: Q8, Q4x and Q4n, and the stored weight forms.

Owns codes, scales and values, bit for bit, in plain torch; no kernel speed. They state what a
quantised cache or checkpoint must reproduce. Each format quantises along the last axis in blocks
that share a scale (FP8 weights in 32 x 32 tiles); values are exact in bfloat16.

Data flow: float tensor -> `Blocks` (uint8 codes and scales) -> float32 values.

Source: DeepSeek-V4.1-Flash `inference/kernel.py`; OCP Microscaling Formats v1.0 for E2M1 and E8M0.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Q8_BLOCK = 32
Q4X_BLOCK = 32
Q4N_BLOCK = 16
WEIGHT_TILE = 32
E4M3_MAX = 448.0
E2M1_MAX = 6.0

# Rounded to float32 before they multiply, as in the released kernels. Numbers: a tensor made of one
# would be a copy from the host, which a captured step must not do.
_E4M3_RECIPROCAL = float(np.float32(1.0 / E4M3_MAX))
_E2M1_RECIPROCAL = float(np.float32(1.0 / E2M1_MAX))

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_Q8_FLOOR = 1e-4
_Q4X_FLOOR = 6.0 * 2.0**-126
_Q4N_FLOOR = 6.0 * 2.0**-9


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised tensor."""

    codes: Tensor
    """uint8: (..., D) E4M3 bytes, or (..., D / 2) pairs of E2M1 codes, even channel low."""
    scales: Tensor
    """uint8 (..., D / block): E8M0 bytes, or E4M3 bytes for Q4n. They multiply."""


def decode_e8m0(codes: Tensor) -> Tensor:
    """2 ** (byte - 127) as float32; 255 is NaN. codes: uint8, any shape."""
    bits = codes.to(torch.int32) << 23
    # 2 ** -127 is subnormal in float32, and exponent field 255 with a zero mantissa is infinity.
    bits = torch.where(codes == 0, 0x00400000, bits)
    bits = torch.where(codes == 255, 0x7FC00000, bits)
    return bits.to(torch.int32).view(torch.float32)


def decode_e4m3(codes: Tensor) -> Tensor:
    """float32 values of E4M3 bytes (finite form: 0x7f and 0xff are NaN). codes: uint8."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values of E2M1 codes 0..15, one per byte; bit 3 is the sign. codes: uint8."""
    # Without a table, which a captured step could not bring to the device. A code without a leading
    # one is read with one, which is then subtracted.
    magnitude = (codes & 7).to(torch.int32)
    is_small = magnitude < 2
    bits = (magnitude << 22) + ((is_small.to(torch.int32) + 126) << 23)
    values = bits.view(torch.float32) - is_small.to(torch.float32)
    return torch.where(codes > 7, -values, values)


def encode_e4m3(values: Tensor) -> Tensor:
    """E4M3 bytes, round to nearest even after a clamp to +-448. values: finite float32."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def encode_e2m1(values: Tensor) -> Tensor:
    """E2M1 codes 0..15, one per byte, clamp to +-6; ties go to the even code. values: float32.

    What rounds to zero keeps its sign bit.
    """
    magnitude = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for code in range(1, len(_E2M1_VALUES)):
        middle = (_E2M1_VALUES[code - 1] + _E2M1_VALUES[code]) / 2
        codes += (magnitude >= middle) if code % 2 == 0 else (magnitude > middle)
    return codes | (values.signbit().to(torch.uint8) << 3)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes 0..15 per byte, the even channel in the low nibble: (..., D) -> (..., D / 2)."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`: (..., D / 2) uint8 -> (..., D) uint8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def quantise_q8(x: Tensor) -> Blocks:
    """E4M3 codes with one E8M0 scale per 32 channels: fp8 activations and window keys.

    x: (..., D) finite float, D a multiple of 32. Raises ValueError otherwise.
    """
    blocks = _blocks(x, Q8_BLOCK)
    scales = _power_of_two_scale(blocks, _Q8_FLOOR, _E4M3_RECIPROCAL)
    codes = encode_e4m3(blocks / decode_e8m0(scales).unsqueeze(-1))
    return Blocks(codes.flatten(-2), scales)


def dequantise_q8(blocks: Blocks) -> Tensor:
    """float32 values (..., D), exact."""
    values = decode_e4m3(blocks.codes).unflatten(-1, (-1, Q8_BLOCK))
    return (values * decode_e8m0(blocks.scales).unsqueeze(-1)).flatten(-2)


def quantise_q4x(x: Tensor) -> Blocks:
    """E2M1 codes with one E8M0 scale per 32 channels: index queries and keys, MXFP4 weights.

    x: (..., D) finite float, D a multiple of 32. Raises ValueError otherwise.
    """
    blocks = _blocks(x, Q4X_BLOCK)
    scales = _power_of_two_scale(blocks, _Q4X_FLOOR, _E2M1_RECIPROCAL)
    codes = encode_e2m1(blocks / decode_e8m0(scales).unsqueeze(-1))
    return Blocks(pack_nibbles(codes.flatten(-2)), scales)


def dequantise_q4x(blocks: Blocks) -> Tensor:
    """float32 values (..., D), exact."""
    values = decode_e2m1(unpack_nibbles(blocks.codes)).unflatten(-1, (-1, Q4X_BLOCK))
    return (values * decode_e8m0(blocks.scales).unsqueeze(-1)).flatten(-2)


def quantise_q4n(x: Tensor) -> Blocks:
    """E2M1 codes with one E4M3 scale per 16 channels: compressed keys.

    x: (..., D) finite float, D a multiple of 16. Raises ValueError otherwise.
    """
    blocks = _blocks(x, Q4N_BLOCK)
    scales = encode_e4m3(blocks.abs().amax(-1).clamp(min=_Q4N_FLOOR) / E2M1_MAX)
    codes = encode_e2m1(blocks / decode_e4m3(scales).unsqueeze(-1))
    return Blocks(pack_nibbles(codes.flatten(-2)), scales)


def dequantise_q4n(blocks: Blocks) -> Tensor:
    """float32 values (..., D), exact."""
    values = decode_e2m1(unpack_nibbles(blocks.codes)).unflatten(-1, (-1, Q4N_BLOCK))
    return (values * decode_e4m3(blocks.scales).unsqueeze(-1)).flatten(-2)


def dequantise_fp8_weight(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 weight of a stored fp8 one, one scale per 32 x 32 tile.

    codes: (out, in) uint8 E4M3; scales: (ceil(out / 32), ceil(in / 32)) uint8 E8M0.
    """
    tiles = decode_e8m0(scales).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return decode_e4m3(codes) * tiles[: codes.shape[0], : codes.shape[1]]


def quantise_fp8_weight(weight: Tensor) -> Blocks:
    """E4M3 codes of a weight with one E8M0 scale per 32 x 32 tile; edge tiles may be smaller.

    weight: (out, in) finite float. Scales: (ceil(out / 32), ceil(in / 32)).
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(
        weight.to(torch.float32), (0, -columns % WEIGHT_TILE, 0, -rows % WEIGHT_TILE)
    )
    tiles = padded.unflatten(1, (-1, WEIGHT_TILE)).unflatten(0, (-1, WEIGHT_TILE))
    scales = _weight_scale(tiles.abs().amax((1, 3)), E4M3_MAX)
    codes = encode_e4m3(tiles / decode_e8m0(scales)[:, None, :, None])
    return Blocks(codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales)


def quantise_fp8_rows(weight: Tensor) -> Blocks:
    """E4M3 codes of a table with one E8M0 scale per 32 channels of a row.

    weight: (..., D) finite float, D a multiple of 32. Raises ValueError otherwise. Unlike
    `quantise_q8` it has no floor under the scale, and so keeps small values.
    """
    blocks = _blocks(weight, Q8_BLOCK)
    scales = _weight_scale(blocks.abs().amax(-1), E4M3_MAX)
    return Blocks(encode_e4m3(blocks / decode_e8m0(scales).unsqueeze(-1)).flatten(-2), scales)


def quantise_mxfp4(weight: Tensor) -> Blocks:
    """E2M1 codes of a weight with one E8M0 scale per 32 inputs.

    weight: (..., D) finite float, D a multiple of 32. Raises ValueError otherwise.
    """
    blocks = _blocks(weight, Q4X_BLOCK)
    scales = _weight_scale(blocks.abs().amax(-1), E2M1_MAX)
    codes = encode_e2m1(blocks / decode_e8m0(scales).unsqueeze(-1))
    return Blocks(pack_nibbles(codes.flatten(-2)), scales)


def _weight_scale(amax: Tensor, largest: float) -> Tensor:
    """E8M0 bytes of 2 ** ceil(log2(amax / largest)), without rounding on the way; 1.0 for zeros.

    Weights that were quantised once then find a scale that holds all their values again, which the
    rounded reciprocal of the activations' rule does not promise.
    """
    mantissa, exponent = torch.frexp(amax)
    top_mantissa, top_exponent = math.frexp(largest)
    exponent = exponent - top_exponent + (mantissa > top_mantissa).to(torch.int32)
    return torch.where(amax == 0, 127, (exponent + 127).clamp(0, 254)).to(torch.uint8)


def _blocks(x: Tensor, size: int) -> Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"last axis has {x.shape[-1]} channels; must be a multiple of {size}")
    return x.to(torch.float32).unflatten(-1, (-1, size))


def _power_of_two_scale(blocks: Tensor, floor: float, reciprocal: float) -> Tensor:
    """E8M0 bytes of 2 ** ceil(log2(amax * reciprocal)), by exponent field and mantissa."""
    bits = (blocks.abs().amax(-1).clamp(min=floor) * reciprocal).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return exponent.to(torch.uint8)
