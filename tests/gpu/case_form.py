"""What a case of values is, and how its outcome is compared: see cases.py.

Pure torch on the CPU; where the tensors go is the caller's choice. Needs neither pytest, TileLang
nor pydantic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Sizes = Mapping[str, Any]
POISON = 0xA5


@dataclass(frozen=True, slots=True)
class Case:
    """Tensors of one launch; `expected` by position among them."""

    tensors: list[Tensor]
    expected: dict[int, Tensor]
    rtol: float = 0.0
    atol: float = 0.0
    unread: int = 0
    """Bytes of the tensors that no launch needs to touch."""

    @property
    def moved(self) -> int:
        """Bytes that a launch reads or writes at least."""
        return sum(t.numel() * t.element_size() for t in self.tensors) - self.unread


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case: whether all outputs are as expected, and the largest difference."""

    is_right: bool
    worst: float


def compare(case: Case, found: list[Tensor]) -> Outcome:
    """found: the launch's tensors afterwards, on the CPU."""
    is_right, worst = True, 0.0
    for place, want in case.expected.items():
        got = found[place]
        if case.rtol == case.atol == 0.0:
            is_right &= bool(torch.equal(_bits(got), _bits(want)))
            continue
        is_right &= torch.allclose(
            got.double(), want.double(), rtol=case.rtol, atol=case.atol, equal_nan=True
        )
        gap = (got.double() - want.double()).abs()
        worst = max(worst, _most(gap))
    return Outcome(is_right, worst)


def _most(gap: Tensor) -> float:
    finite = gap[gap.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _bits(tensor: Tensor) -> Tensor:
    """A tensor as bytes, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


def draw(seed: int, *shape: int) -> Tensor:
    """Normal float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """int64 from low up to high - 1."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def spread(seed: int, rows: int, dim: int) -> Tensor:
    """bfloat16 rows of all magnitudes, with a row of zeros."""
    scale = torch.exp2(ints(seed + 1, -12, 8, rows, dim // 16).float())
    x = draw(seed, rows, dim) * scale.repeat_interleave(16, 1)
    x[rows // 2] = 0.0
    return x.to(torch.bfloat16)


def poison_bytes(*shape: int) -> Tensor:
    """uint8 that no kernel leaves by chance."""
    return torch.full(shape, POISON, dtype=torch.uint8)
