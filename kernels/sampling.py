"""Choice of a token from logits: greedy, or Gumbel-max with noise that is a pure function.

Owns the noise. It depends on (seed, counter, token id) alone. The counter is the text position for
"coupled" verification: a token that target and drafter choose with the same noise agrees as often
as their distributions allow, and what is emitted does not depend on the batch, the drafts or the
number of verified rows. Rejection sampling takes counters of its own (`stream_counter`).

The hash runs on 32-bit values held in int64; every product has a factor below 2**31, so nothing
overflows. `decodegrid::gumbel_noise` and `decodegrid::uniform_noise` are one op each, never traced
into: their bits are the same in eager and compiled code, and compilers unroll the chain of shifts
badly.
"""

from enum import IntEnum

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5
"""Temperatures above 0 act as at least this one; below it, logits divided by it overflow."""

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define(
    "gumbel_noise(Tensor seed, Tensor position, Tensor temperature, SymInt vocab_size) -> Tensor"
)
LIBRARY.define("uniform_noise(Tensor seed, Tensor position) -> Tensor")

_MASK = 0xFFFFFFFF
_ID_STRIDE = 0x3C6EF35F
_POSITION_STRIDE = 0x1B873593
_POSITION_BITS = 21
_INDEX_BITS = 5


class Purpose(IntEnum):
    """What noise is for; each purpose has counters of its own."""

    COUPLED = 0
    """A token of coupled verification, drafted or the target's."""
    FINAL = 1
    """The token after the accepted drafts of rejection sampling."""
    ACCEPTANCE = 2
    """The test whether a draft is accepted."""
    DRAFT = 3
    """A draft for rejection sampling."""


def stream_counter(position: Tensor, purpose: Purpose, index: Tensor | int = 0) -> Tensor:
    """Counter of one use of a seed: different for every (position, purpose, index), below 2**28.

    position: int64 text position, 0 to 2**21 - 1; index: 0 to 31, the place within a draft block.
    Coupled counters are the positions themselves.
    """
    offset = ((int(purpose) << _INDEX_BITS) + index) << _POSITION_BITS
    return position + offset


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


def uniform_noise(seed: Tensor, position: Tensor) -> Tensor:
    """A uniform number strictly between 0 and 1 for every row: (N,) int64 each -> (N,) float64.

    The native kernel gives the same bits.
    """
    bits = uniform_bits(seed, position, 1).squeeze(-1)
    return (bits.to(torch.float64) + 0.5) * 2.0**-32


def _fake_gumbel_noise(
    seed: Tensor, position: Tensor, temperature: Tensor, vocab_size: int
) -> Tensor:
    return seed.new_empty((seed.shape[0], vocab_size), dtype=torch.float32)


def _fake_uniform_noise(seed: Tensor, position: Tensor) -> Tensor:
    return seed.new_empty((seed.shape[0],), dtype=torch.float64)


# Not the CPU key: that one is for the native kernel, which then wins.
LIBRARY.impl("gumbel_noise", gumbel_noise, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::gumbel_noise", _fake_gumbel_noise, lib=LIBRARY)
LIBRARY.impl("uniform_noise", uniform_noise, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::uniform_noise", _fake_uniform_noise, lib=LIBRARY)

gumbel_noise_op = torch.ops.decodegrid.gumbel_noise.default
"""The op form, which every step uses."""
uniform_noise_op = torch.ops.decodegrid.uniform_noise.default
"""The op form, which every step uses."""


def scale_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits divided by the temperature, as they are where it is 0: (N, vocab), (N,)."""
    floored = temperature.clamp(min=MIN_TEMPERATURE)
    divisor = torch.where(temperature > 0, floored, torch.ones_like(temperature))
    return logits / divisor.unsqueeze(-1)


def choose_scaled(scaled: Tensor, temperature: Tensor, seed: Tensor, counter: Tensor) -> Tensor:
    """Token id per row from logits that are scaled (and filtered); ties go to the lower id.

    scaled: (N, vocab) at least fp32; temperature: (N,), 0 for greedy; seed, counter: (N,) int64,
    see `stream_counter`. Returns (N,) int64.
    """
    noise = gumbel_noise_op(seed, counter, temperature, scaled.shape[-1])
    return (scaled + noise.to(scaled.dtype)).argmax(-1)


def choose_tokens(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Token id per row from unfiltered logits; ties go to the lower id.

    logits: (N, vocab) at least fp32; temperature: (N,), 0 for greedy; seed: (N,) int64;
    position: (N,) int64 text position of the token that is chosen. Returns (N,) int64.
    """
    return choose_scaled(scale_logits(logits, temperature), temperature, seed, position)
