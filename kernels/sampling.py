"""Choice of a token from logits: greedy, or Gumbel-max with noise that is a pure function.

Owns the noise. It depends on (seed, text position, token id) alone, so a token that target and
drafter choose with the same noise agrees as often as their distributions allow, and what is
emitted does not depend on the batch, the drafts or the number of verified rows ("coupled"
verification).

The hash runs on 32-bit values held in int64; every product has a factor below 2**31, so nothing
overflows and the result is the same in eager and generated code.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ID_STRIDE = 0x3C6EF35F
_POSITION_STRIDE = 0x1B873593


def _mix(x: Tensor) -> Tensor:
    """Avalanche a 32-bit value held in int64; a bijection on 0 .. 2**32 - 1."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x2C1B3C6D) & _MASK
    x = x ^ (x >> 12)
    x = (x * 0x297A2D39) & _MASK
    return x ^ (x >> 15)


def uniform_bits(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """32 random bits for every token id: seed, position (N,) int64 -> (N, vocab) int64."""
    low = seed & _MASK
    high = (seed >> 32) & _MASK
    key = _mix(_mix(low) ^ high)
    key = _mix(key ^ ((position * _POSITION_STRIDE) & _MASK))
    token = torch.arange(vocab_size, device=seed.device)
    return _mix(_mix(key.unsqueeze(-1) ^ ((token * _ID_STRIDE) & _MASK)) ^ token)


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, (N, vocab) float64: -log(E) with E = -log1p(-u)."""
    bits = uniform_bits(seed, position, vocab_size).to(torch.float64)
    uniform = (bits + 0.5) * 2.0**-32
    return -(-(-uniform).log1p()).log()


def choose_tokens(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Token id per row; ties go to the lower id.

    logits: (N, vocab) at least fp32; temperature: (N,), 0 for greedy; seed: (N,) int64;
    position: (N,) int64 text position of the token that is chosen. Returns (N,) int64.
    """
    noise = gumbel_noise(seed, position, logits.shape[-1]).to(logits.dtype)
    greedy = temperature <= 0
    divisor = torch.where(greedy, torch.ones_like(temperature), temperature).unsqueeze(-1)
    noisy = logits / divisor + noise
    return torch.where(greedy.unsqueeze(-1), logits, noisy).argmax(-1)
