"""Repeats that alternate, and what is said about them: medians, spreads, ratios.

Owns the arithmetic between measured seconds and a printed number. Measures nothing itself except
the call it is given. Machine noise that lasts longer than one repeat hits every contender alike,
because contenders take turns; ratios are therefore taken inside a repeat, and the median of those
is reported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, median and greatest of some samples, in the samples' unit."""

    low: float
    median: float
    high: float
    count: int

    def scaled(self, factor: float) -> "Spread":
        """The same in another unit."""
        return Spread(self.low * factor, self.median * factor, self.high * factor, self.count)

    def as_json(self) -> dict[str, float]:
        """Keys min, median, max, count."""
        return {"min": self.low, "median": self.median, "max": self.high, "count": self.count}

    def __str__(self) -> str:
        return f"{self.low:.4g} / {self.median:.4g} / {self.high:.4g}"


def spread(samples: Sequence[float]) -> Spread:
    """Raises ValueError without a sample."""
    if not samples:
        raise ValueError("no samples: at least 1 repeat is needed")
    return Spread(min(samples), median(samples), max(samples), len(samples))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Spread of numerators[i] / denominators[i], the two taken in the same repeat.

    Raises ValueError when the lengths differ, are 0, or a denominator is not positive.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators for {len(denominators)} denominators")
    if any(value <= 0 for value in denominators):
        raise ValueError(f"a denominator is not positive: {min(denominators)}")
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def time_call(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = perf_counter()
    call()
    return perf_counter() - began


def interleave(
    contenders: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Let contenders take turns; each returns its own sample.

    Every second repeat goes through them backwards, so that none always comes after the same one.
    Raises ValueError for fewer than 1 repeat.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; at least 1 is needed")
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        names = list(contenders)
        for name in names if repeat % 2 == 0 else reversed(names):
            samples[name].append(contenders[name]())
    return samples
