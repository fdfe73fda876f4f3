"""RMS norm, rotary embedding and the dtype rule, as plain torch.

Owns the three numeric primitives that every block of the model uses. Owns no parameters. All
functions take any leading shape, so the same code serves whole sequences and flat token lists.

Source: DeepSeek-V4.1-Flash `inference/model.py` (RMSNorm, precompute_freqs_cis, apply_rotary_emb).
"""

import math

import torch
from torch import Tensor


def island(x: Tensor) -> Tensor:
    """`x` in at least float32: float64 stays float64, lower precisions become float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in an fp32 island.

    x: (..., dim) any float; weight: (dim,). Returns the shape and dtype of `x`.
    """
    wide = island(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def rope_frequencies(
    rope_dim: int,
    theta: float,
    *,
    yarn_factor: float = 1.0,
    original_max_positions: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """Angle per position of each rotated channel pair, (rope_dim / 2,) float64.

    `original_max_positions` 0 means plain RoPE; otherwise the YaRN ramp is applied, always,
    whatever the sequence length. There is no amplitude factor.
    """
    index = torch.arange(rope_dim // 2, dtype=torch.float64, device="cpu")
    plain = theta ** (-2.0 * index / rope_dim)
    if original_max_positions <= 0:
        return plain

    def correction(rotations: float) -> float:
        span = math.log(original_max_positions / (2 * math.pi * rotations))
        return rope_dim * span / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain / yarn_factor * ramp + plain * (1.0 - ramp)


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `positions` x `frequencies`, each (..., rope_dim / 2).

    positions: (...) int64; frequencies: (rope_dim / 2,) float32 or float64, which is also the
    result's dtype.
    """
    angles = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last `2 * cos.shape[-1]` channels of `x`, pairs (2i, 2i+1), in an fp32 island.

    x: (..., dim); cos, sin: (..., rope_dim / 2), broadcast against x without its last axis.
    `inverse` rotates back. Returns the dtype of `x`.
    """
    rope_dim = 2 * cos.shape[-1]
    head, tail = x.split([x.shape[-1] - rope_dim, rope_dim], -1)
    pairs = island(tail).unflatten(-1, (rope_dim // 2, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    if inverse:
        sin = -sin
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((head, rotated.to(x.dtype)), -1)
