"""Choice of a token from logits: greedy, or Gumbel-max with noise that is a pure function.

Owns the noise. It depends on (seed, text position, token id) alone, so a token that target and
drafter choose with the same noise agrees as often as their distributions allow, and what is
emitted does not depend on the batch, the drafts or the number of verified rows ("coupled"
verification).

The hash runs on 32-bit values held in int64; every product has a factor below 2**31, so nothing
overflows. `decodegrid::gumbel_noise` is one op, never traced into: its bits are the same in eager
and compiled code, and compilers unroll the chain of shifts badly.
"""

import torch
from torch import Tensor

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define(
    "gumbel_noise(Tensor seed, Tensor position, Tensor temperature, SymInt vocab_size) -> Tensor"
)

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
    key = _mix(key ^ (((position & _MASK) * _POSITION_STRIDE) & _MASK))
    token = torch.arange(vocab_size, device=seed.device)
    return _mix(_mix(key.unsqueeze(-1) ^ ((token * _ID_STRIDE) & _MASK)) ^ token)


def gumbel_noise(seed: Tensor, position: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise -log(E), E = -log1p(-u), zero where the temperature is 0.

    seed, position: (N,) int64; temperature: (N,). Returns (N, vocab) float32. The native kernel
    differs from this reference by rounding only.
    """
    bits = uniform_bits(seed, position, vocab_size).to(torch.float64)
    uniform = (bits + 0.5) * 2.0**-32
    noise = -(-(-uniform).log1p()).log()
    return noise.where(temperature.unsqueeze(-1) > 0, torch.zeros_like(noise)).to(torch.float32)


def _fake_gumbel_noise(
    seed: Tensor, position: Tensor, temperature: Tensor, vocab_size: int
) -> Tensor:
    return seed.new_empty((seed.shape[0], vocab_size), dtype=torch.float32)


# Not the CPU key: that one is for the native kernel, which then wins.
LIBRARY.impl("gumbel_noise", gumbel_noise, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::gumbel_noise", _fake_gumbel_noise, lib=LIBRARY)

gumbel_noise_op = torch.ops.decodegrid.gumbel_noise.default
"""The op form, which every step uses."""


def choose_tokens(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Token id per row; ties go to the lower id.

    logits: (N, vocab) at least fp32; temperature: (N,), 0 for greedy; seed: (N,) int64;
    position: (N,) int64 text position of the token that is chosen. Returns (N,) int64.
    """
    noise = gumbel_noise_op(seed, position, temperature, logits.shape[-1]).to(logits.dtype)
    divisor = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    return (logits / divisor.unsqueeze(-1) + noise).argmax(-1)
