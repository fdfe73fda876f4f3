"""The arithmetic between what a benchmark measured and what it says.

Owns percentiles, spreads over repeats, ratios inside a repeat, the Pareto front and the curve that
an assumed acceptance would draw. Measures nothing and drops no sample. Data flow: samples in one
unit -> numbers in the same unit -> tables, JSON and plot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Tail = Literal["high", "low"]
"""Which end of the samples is the bad one: high for times, low for speeds."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of some samples, in the samples' unit.

    Interpolated linearly between neighbouring samples. Of a tail that is low, pN is what N percent
    of the samples reach or exceed.
    """

    count: int
    p50: float
    p90: float
    p99: float
    mean: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        """Keys count, p50, p90, p99, mean, min, max."""
        return {
            "count": self.count, "p50": self.p50, "p90": self.p90, "p99": self.p99,
            "mean": self.mean, "min": self.low, "max": self.high,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.p50:.4g} / {self.p90:.4g} / {self.p99:.4g}"


def percentiles(samples: Sequence[float], tail: Tail = "high") -> Percentiles | None:
    """Percentiles of all samples; None where there is none."""
    if not samples:
        return None
    values = np.array(samples, dtype=np.float64)
    wanted = [50.0, 90.0, 99.0] if tail == "high" else [50.0, 10.0, 1.0]
    p50, p90, p99 = np.percentile(values, wanted).tolist()
    return Percentiles(
        len(samples), p50, p90, p99, values.mean().item(), values.min().item(), values.max().item()
    )


@dataclass(frozen=True, slots=True)
class RepeatSpread:
    """Least, median and greatest of a figure over the repeats."""

    low: float
    median: float
    high: float
    count: int

    def as_json(self) -> dict[str, float]:
        """Keys min, median, max, repeats."""
        return {"min": self.low, "median": self.median, "max": self.high, "repeats": self.count}

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g}..{self.high:.4g})"


def repeat_spread(figures: Iterable[float | None]) -> RepeatSpread | None:
    """Spread of one figure a repeat; None stands for a repeat that has no such figure, and `count`
    does not count it. None where no repeat has one."""
    values = [figure for figure in figures if figure is not None]
    if not values:
        return None
    return RepeatSpread(min(values), float(np.median(values)), max(values), len(values))


def paired_spread(
    numerators: Sequence[float], denominators: Sequence[float]
) -> RepeatSpread | None:
    """Spread of numerators[i] / denominators[i], both of repeat i.

    Raises ValueError where the lengths differ or a denominator is not above 0.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators for {len(denominators)} denominators")
    if any(value <= 0 for value in denominators):
        raise ValueError(f"a denominator is {min(denominators)}; it must be above 0")
    return repeat_spread(a / b for a, b in zip(numerators, denominators, strict=True))


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One measured setting: what a user gets against what a device gives."""

    label: str
    """The policy."""
    batch: int
    """Requests at once."""
    context_len: int | None
    """Tokens of each prompt; None for prompts as they are."""
    user_tokens_per_s: float
    """Median speed of a request behind its first token."""
    device_tokens_per_s: float
    """Emitted tokens of all requests over the whole time, prefill charged."""

    def as_json(self) -> dict[str, str | float | None]:
        """The fields by their names."""
        return {
            "policy": self.label,
            "batch": self.batch,
            "context_len": self.context_len,
            "user_tokens_per_s": self.user_tokens_per_s,
            "device_tokens_per_s": self.device_tokens_per_s,
        }


def pareto_front(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """The points that no other one beats on an axis without losing on the other, the largest speed
    of a user first. Of equal points the first is kept."""
    ordered = sorted(points, key=lambda p: (-p.user_tokens_per_s, -p.device_tokens_per_s))
    front: list[ParetoPoint] = []
    for point in ordered:
        if not front or point.device_tokens_per_s > front[-1].device_tokens_per_s:
            front.append(point)
    return front


@dataclass(frozen=True, slots=True)
class AssumedPoint:
    """What a number of steps a second would give if every step emitted an assumed number of tokens
    for each request. Nobody measured it."""

    batch: int
    context_len: int | None
    steps_per_s: float
    """Measured, all drafts being verified."""
    factor: float
    """1 + K * a."""

    @property
    def user_tokens_per_s(self) -> float:
        return self.steps_per_s * self.factor

    @property
    def device_tokens_per_s(self) -> float:
        return self.steps_per_s * self.factor * self.batch

    def as_json(self) -> dict[str, float | None]:
        """The fields and both products by their names."""
        return {
            "batch": self.batch,
            "context_len": self.context_len,
            "steps_per_s": self.steps_per_s,
            "factor": self.factor,
            "user_tokens_per_s": self.user_tokens_per_s,
            "device_tokens_per_s": self.device_tokens_per_s,
        }


def assumed_factor(num_draft_tokens: int, acceptance: float) -> float:
    """1 + K * a, which counts every draft as accepted with the same chance whatever became of the
    drafts before it; a chain of that chance gives 1 + a + a**2 + ... + a**K, which is less."""
    return 1.0 + num_draft_tokens * acceptance
