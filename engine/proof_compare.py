"""How far two runs of one step are apart, request by request, and what still counts as equal.

Owns the measure, the tolerances, and the treatment of near ties. Two right implementations differ
by rounding, and where a router, a top-k, a quantiser or a draw is nearly tied, rounding decides. So
a difference beyond the tolerance counts as rounding only where the plain step itself moves as much
when its own intermediate values are disturbed by a few units in the last place.

Data flow: views of two runs -> distances by name and request -> `excess`, with the spread of the
disturbed runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.25,
}  # fmt: skip
"""Largest difference that counts as equal, as a share of max(1, largest value of the tensor), by
the model's dtype. Whole numbers must be equal."""

NOISE: Mapping[torch.dtype, float] = {
    torch.float64: 2e-14, torch.float32: 1e-5, torch.bfloat16: 8e-3,
}  # fmt: skip
"""Relative size of the disturbance: above what two orders of summation differ by."""

SPREAD_FACTOR = 4.0
"""A near tie is off by at most so many times what the disturbed runs are."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that a run made, by request."""

    values: Tensor
    """(n, ...)."""
    owner: Tensor
    """(n,) int64 on the CPU: the request that each entry belongs to."""


View = Mapping[str, Part]
"""What a run made, by name."""

Distances = Mapping[str, Tensor]
"""By name: (requests,) float64 on the CPU; of whole numbers 1 where any of a request differs."""


def distances(got: View, want: View, num_requests: int) -> dict[str, Tensor]:
    """How far each request of `got` is from that of `want`; inf where one has other entries."""
    found = {}
    for name, part in want.items():
        other = got[name]
        if other.values.shape != part.values.shape or not torch.equal(other.owner, part.owner):
            found[name] = torch.full((num_requests,), torch.inf, dtype=torch.float64)
            continue
        found[name] = torch.zeros(num_requests, dtype=torch.float64)
        if part.values.numel():
            apart = _entry_distances(other.values, part.values).cpu()
            found[name].scatter_reduce_(0, part.owner, apart, "amax")
    return found


def _entry_distances(got: Tensor, want: Tensor) -> Tensor:
    """(n,) float64: the largest difference within each entry, of which there is one at least."""
    count = want.shape[0]
    if not want.is_floating_point():
        return (got != want).reshape(count, -1).any(1).to(torch.float64)
    left, right = got.to(torch.float64), want.to(torch.float64)
    same = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs()
    apart = apart.where(apart.isfinite(), torch.full_like(apart, torch.inf))
    apart = apart.where(~same, torch.zeros_like(apart)).reshape(count, -1)
    sizes = right.abs()
    sizes = sizes.where(sizes.isfinite(), torch.zeros_like(sizes))
    return apart.amax(1) / max(1.0, float(sizes.max()))


def same_bits(got: View, want: View) -> list[str]:
    """Names whose values are not the same bit for bit."""
    return [name for name, part in want.items() if not _same_bits(got[name].values, part.values)]


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    if left.is_floating_point():  # NaN is no equal of itself, and -0.0 is one of 0.0
        left, right = (item.contiguous().view(torch.uint8) for item in (left, right))
    return torch.equal(left, right)


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest distance of a comparison."""

    distance: float
    name: str
    request: int

    def __str__(self) -> str:
        return f"{self.name} of row {self.request} is off by {self.distance:.3g}"


def largest(found: Distances) -> Gap:
    """The largest distance of numbers and whole numbers alike."""
    gap = Gap(0.0, "", 0)
    for name, values in found.items():
        request = int(values.argmax()) if values.numel() else 0
        if values.numel() and float(values[request]) > gap.distance:
            gap = Gap(float(values[request]), name, request)
    return gap


def beyond(found: Distances, want: View, tolerance: float) -> dict[str, Tensor]:
    """The distances that are over the tolerance, 0 elsewhere; any of whole numbers is over."""
    return {
        name: values.where(
            values > (tolerance if want[name].values.is_floating_point() else 0.0),
            torch.zeros_like(values),
        )
        for name, values in found.items()
    }


def widest(first: Distances, second: Distances) -> dict[str, Tensor]:
    """The larger of two distances, by name and request."""
    return {name: torch.maximum(values, second[name]) for name, values in first.items()}


def unexplained(over: Distances, spread: Distances) -> dict[str, Tensor]:
    """Of distances over the tolerance those that the spread of the disturbed runs does not reach.

    Whole numbers are explained where a disturbed run changed them too; their distance is 1.
    """
    return {
        name: values.where(values > SPREAD_FACTOR * spread[name], torch.zeros_like(values))
        for name, values in over.items()
    }


def count_requests(over: Distances) -> int:
    """Requests with a distance over the tolerance."""
    flags = [values > 0 for values in over.values()]
    return int(torch.stack(flags).any(0).sum()) if flags else 0
