"""Engram: n-gram hashing into prime-sized tables, and the gate that adds the looked-up value.

Owns the arithmetic from compressed token ids to the updated residual stream, and the table
layout (primes, multipliers), which follows from the config alone. The map from raw to compressed
ids is made elsewhere from the tokenizer.

Source: DeepSeek-V4.1-Flash `inference/engram.py` and `inference/model.py` (Engram).
"""

import numpy as np
import torch
from torch import Tensor

from decodegrid.kernels.norm_rope import island


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True


def table_primes(num_layers: int, columns_per_layer: int, lower_bound: int) -> list[list[int]]:
    """Rows of each table column: consecutive primes from `lower_bound`, never reused.

    Handed out layer by layer; within a layer n-gram size is major and head minor.
    """
    layers: list[list[int]] = []
    number = lower_bound
    for _ in range(num_layers):
        primes: list[int] = []
        while len(primes) < columns_per_layer:
            if _is_prime(number):
                primes.append(number)
            number += 1
        layers.append(primes)
    return layers


def hash_multipliers(layer_id: int, compressed_vocab_size: int, ngram_size: int) -> list[int]:
    """Odd int64 multipliers of one layer, seeded by the layer's index in the model."""
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    draws = np.random.default_rng(10007 * layer_id).integers(0, bound, ngram_size, dtype=np.int64)
    return [2 * int(draw) + 1 for draw in draws]


def hash_rows(
    lookback: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, num_heads: int
) -> Tensor:
    """Table row of every column.

    lookback: (..., N) int64 compressed ids at t, t-1, .., t-N+1, padding already applied;
    multipliers: (N,); primes, offsets: ((N - 1) * num_heads,) int64. Returns
    (..., (N - 1) * num_heads) int64. Products stay below 2**63 by choice of the multipliers.
    """
    products = lookback * multipliers
    mixed = products[..., 0]
    grams = []
    for size in range(1, lookback.shape[-1]):
        mixed = mixed ^ products[..., size]
        grams.append(mixed)
    columns = torch.stack(grams, -1).repeat_interleave(num_heads, -1)
    return columns % primes + offsets


def engram_gate(
    stream: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> Tensor:
    """Add the gated value to every copy of the stream.

    stream: (..., n, D); kv: (..., (n + 1) * D), keys of the n copies, then the value; q_weight,
    k_weight: (n, D). Returns the new stream in its dtype.
    """
    copies, dim = stream.shape[-2:]
    wide = island(stream)
    parts = island(kv).unflatten(-1, (copies + 1, dim))
    key, value = parts[..., :copies, :], parts[..., copies:, :]
    norm = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    gain = q_weight.to(wide.dtype) * k_weight.to(wide.dtype)
    delta = (wide * gain * key).sum(-1) * norm * dim**-0.5
    magnitude = delta.abs().clamp(min=1e-6).sqrt()
    gate = torch.sigmoid(torch.copysign(magnitude, delta))
    return (wide + gate.unsqueeze(-1) * value).to(stream.dtype)
