"""DeepSeek's counter-based random numbers for sampling, in plain Python integers.

Owns the published formula alone, as a reference to compare a vectorised form with. Draws nothing
from a distribution. Data flow: (seed, position, case) -> one float in [0, 1).

Source: DeepInfer `layers/tilelang_ops/random_sampling.py`; the mixer is SplitMix64 (Steele, Lea,
Flood 2014).
"""

from enum import IntEnum

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class DrawCase(IntEnum):
    """What a uniform number is for; each has a stream of its own."""

    ORDINARY = 0
    """A token from the target's distribution."""
    RESIDUAL = 1
    """A token from what is left after a rejected draft."""
    ACCEPTANCE = 2
    """The test whether a draft is accepted."""


def splitmix_hash(state: int) -> float:
    """Output function of SplitMix64 at `state` + golden ratio, top 53 bits, in [0, 1)."""
    mixed = (state + _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53


def splitmix_uniform(seed: int, position: int, case: DrawCase | int) -> float:
    """The uniform number of a sample position; `case` is a DrawCase or its number.

    Raises ValueError for a case outside 0..2. Everything is modulo 2 ** 64.
    """
    case = DrawCase(case)
    counter = ((3 * position + case) * _GOLDEN) & _MASK
    if case is DrawCase.ACCEPTANCE:
        return splitmix_hash((seed & _MASK) ^ counter)
    return splitmix_hash(seed + (counter ^ ((counter << 13) & _MASK)))
