"""Run-time corrections of the step-time surface, and the watch over how well it predicts.

Owns rolling medians of measured times. Does not measure, and does not choose a total. Data flow:
after each step the engine records what the step took; the verify budget gets the two corrections
with the next choice, and the status shows the drift.

A whole step, drafting included, is one graph here. So what is measured against the surface is the
whole replay, and the slope says how much longer it takes per captured query token than when the
surface was measured, mostly because contexts have grown. What is left is host time: from the end of
one replay to the start of the next, when the device waits. It is the same for every total, but the
larger it is, the more drafts pay. Where the host runs ahead of the device it is 0.

Source: DeepInfer's schedule, which calls the two the slope and the sampler time.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from decodegrid.capture.grid import GraphKey

SLOPE_WINDOW = 5000
"""Samples that a slope remembers, over all pairs."""
SLOPE_MIN_SAMPLES = 10
"""Samples that a pair needs before it counts."""
LOAD_WINDOW = 128
"""Steps that the load factor looks back on: few, because loads change."""
LOAD_MIN_SAMPLES = 8
LOAD_FIT_EVERY = 8
"""Steps between two fits."""
RATIO_NOISE = 0.1
SLOPE_SHARE = 0.25
SAMPLER_WINDOW = 9
SAMPLER_MIN_SAMPLES = 5


class _SortedSamples:
    """Samples in order of size: insertion and removal by bisection, quantiles by position."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list[float] = []

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        insort(self.values, value)

    def remove(self, value: float) -> None:
        """Remove one sample that was added."""
        del self.values[bisect_left(self.values, value)]

    def median(self) -> float:
        """The middle one, or the mean of the two middle ones; there must be a sample."""
        return _middle(self.values)

    def quantile(self, share: float) -> float:
        """The sample below which that share of the others lies, without interpolation."""
        return self.values[round(share * (len(self.values) - 1))]


class SlopeEstimator:
    """Correction in ms for each captured query token, from replays against the surface.

    The median over pairs of the median of each pair, so that a pair that runs often counts no more
    than one that runs now and then. Recording costs a few bisections; reading costs nothing.

    Args:
        window: samples remembered over all pairs; the oldest leaves first.
        min_samples: samples in the window from which on a pair counts.

    Raises:
        ValueError: window or min_samples below 1.
    """

    def __init__(self, window: int = SLOPE_WINDOW, min_samples: int = SLOPE_MIN_SAMPLES) -> None:
        if window < 1 or min_samples < 1:
            raise ValueError(f"window is {window} and min_samples {min_samples}; need 1 or more")
        self._window = window
        self._min_samples = min_samples
        self._samples: deque[tuple[GraphKey, float]] = deque()
        self._by_key: dict[GraphKey, _SortedSamples] = {}
        self._medians: dict[GraphKey, float] = {}
        self._sorted_medians = _SortedSamples()

    @property
    def ms_per_token(self) -> float:
        """The correction, 0 or more; 0 while no pair has enough samples."""
        return max(0.0, self._sorted_medians.median()) if self._sorted_medians.values else 0.0

    @property
    def num_samples(self) -> int:
        """Samples in the window."""
        return len(self._samples)

    def record(self, key: GraphKey, measured_ms: float, surface_ms: float) -> None:
        """Add one replay of a pair.

        Args:
            measured_ms: the whole replay, without host time around it.
            surface_ms: the surface's time of the pair, uncorrected.

        Raises:
            ValueError: a time that is not finite.
        """
        _check(measured_ms, "measured_ms")
        _check(surface_ms, "surface_ms")
        sample = (measured_ms - surface_ms) / key.num_query_tokens
        self._samples.append((key, sample))
        self._by_key.setdefault(key, _SortedSamples()).add(sample)
        self._settle(key)
        if len(self._samples) > self._window:
            oldest, gone = self._samples.popleft()
            self._by_key[oldest].remove(gone)
            self._settle(oldest)

    def clear(self) -> None:
        """Forget everything, as after a new surface."""
        self._samples.clear()
        self._by_key.clear()
        self._medians.clear()
        self._sorted_medians = _SortedSamples()

    def _settle(self, key: GraphKey) -> None:
        """Bring the pair's median among the medians up to date."""
        before = self._medians.pop(key, None)
        if before is not None:
            self._sorted_medians.remove(before)
        samples = self._by_key[key]
        if len(samples) >= self._min_samples:
            self._medians[key] = samples.median()
            self._sorted_medians.add(self._medians[key])


class LoadEstimator:
    """How much slower all replays are than when the surface was measured: another load, a clock.

    Measured over surface, r, is fitted by load + slope * x over the pairs of the last steps, where
    x is the tokens of a pair for each ms of its surface: a load multiplies all times, a cost of
    each token shows where x is large. One pair alone is all load. Pairs that ran at different times
    may have met different loads, so the slope is held towards 0: it takes several that agree.

    Args:
        window: steps remembered.
        min_samples: steps of a pair in the window from which on it counts.

    Raises:
        ValueError: window or min_samples below 1.
    """

    def __init__(self, window: int = LOAD_WINDOW, min_samples: int = LOAD_MIN_SAMPLES) -> None:
        if window < 1 or min_samples < 1:
            raise ValueError(f"window is {window} and min_samples {min_samples}; need 1 or more")
        self._window = window
        self._min_samples = min_samples
        self._samples: deque[tuple[GraphKey, float]] = deque()
        self._ratios: dict[GraphKey, _SortedSamples] = {}
        self._density: dict[GraphKey, float] = {}
        self._until_fit = 0
        self.factor = 1.0
        """Above 0; 1 while no pair has enough samples. Brought up to date now and then."""

    def record(self, key: GraphKey, measured_ms: float, surface_ms: float) -> None:
        """Add one replay of a pair; times as in `SlopeEstimator.record`.

        Raises:
            ValueError: a time that is not finite, or not above 0.
        """
        for name, value in (("measured_ms", measured_ms), ("surface_ms", surface_ms)):
            _check(value, name)
            if value <= 0.0:
                raise ValueError(f"{name} is {value}; need more than 0")
        ratio = measured_ms / surface_ms
        self._samples.append((key, ratio))
        self._ratios.setdefault(key, _SortedSamples()).add(ratio)
        self._density[key] = key.num_query_tokens / surface_ms
        if len(self._samples) > self._window:
            oldest, gone = self._samples.popleft()
            self._ratios[oldest].remove(gone)
        self._until_fit -= 1
        if self._until_fit <= 0:
            self._until_fit = LOAD_FIT_EVERY
            self._fit()

    def _fit(self) -> None:
        points = [
            (self._density[key], ratios.median())
            for key, ratios in self._ratios.items()
            if len(ratios) >= self._min_samples
        ]
        if not points:
            return
        mean_x = sum(x for x, _ in points) / len(points)
        mean_ratio = sum(ratio for _, ratio in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        shared = sum((x - mean_x) * (ratio - mean_ratio) for x, ratio in points)
        # A ridge: ratios are off by RATIO_NOISE, a slope adds some SLOPE_SHARE to the densest pair.
        ridge = (RATIO_NOISE * max(x for x, _ in points) / SLOPE_SHARE) ** 2
        slope = max(0.0, shared / (spread + ridge))
        self.factor = max(mean_ratio - slope * mean_x, 0.5 * min(ratio for _, ratio in points))


class SamplerEstimator:
    """Time of a step outside its graph, ms, for each number of live rows.

    The median of the last 9 samples of exactly that many rows, from 5 on; otherwise of the last 9
    samples of any number of rows, from 5 on; otherwise 0.
    """

    def __init__(self) -> None:
        self._rings: dict[int, deque[float]] = {}
        self._any: deque[float] = deque(maxlen=SAMPLER_WINDOW)
        self._medians: dict[int, float] = {}

    def record(self, num_reqs: int, extra_ms: float) -> None:
        """Add one step's time outside its graph.

        Raises:
            ValueError: a time that is negative or not finite.
        """
        _check(extra_ms, "extra_ms")
        if extra_ms < 0.0:
            raise ValueError(f"extra_ms is {extra_ms}; need 0 or more")
        self._any.append(extra_ms)
        if num_reqs not in self._rings:
            self._rings[num_reqs] = deque(maxlen=SAMPLER_WINDOW)
        ring = self._rings[num_reqs]
        ring.append(extra_ms)
        if len(ring) >= SAMPLER_MIN_SAMPLES:
            self._medians[num_reqs] = _middle(sorted(ring))

    def ms(self, num_reqs: int) -> float:
        """Expected time outside the graph of a step with that many live rows, 0 or more."""
        exact = self._medians.get(num_reqs)
        if exact is not None:
            return exact
        return _middle(sorted(self._any)) if len(self._any) >= SAMPLER_MIN_SAMPLES else 0.0


class DriftMonitor:
    """How far measured steps are from their predictions, over the last steps.

    Args:
        window: steps remembered.
        threshold: share by which the median may be off; 0.2 allows ratios of 1 / 1.2 to 1.2.
        min_samples: steps before `drifted` can be set; by default a quarter of the window.

    Raises:
        ValueError: a window below 1, a threshold not above 0, or min_samples outside 1..window.
    """

    def __init__(self, window: int, threshold: float, min_samples: int | None = None) -> None:
        self.min_samples = max(1, window // 4) if min_samples is None else min_samples
        if not 1 <= self.min_samples <= window:
            raise ValueError(
                f"window is {window} and min_samples {self.min_samples}; "
                "need 1 <= min_samples <= window"
            )
        if not 0.0 < threshold < math.inf:
            raise ValueError(f"threshold is {threshold}; need a finite number above 0")
        self.window = window
        self.threshold = threshold
        self._samples: deque[float] = deque()
        self._sorted = _SortedSamples()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def ratio(self) -> float | None:
        """Median of measured / predicted; None before the first step."""
        return self._sorted.median() if self._samples else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The 10th and 90th percentile of measured / predicted; None before the first step."""
        if not self._samples:
            return None
        return self._sorted.quantile(0.1), self._sorted.quantile(0.9)

    @property
    def drifted(self) -> bool:
        """Whether the median is off by more than the threshold, once there are enough steps."""
        if len(self._samples) < self.min_samples:
            return False
        limit = 1.0 + self.threshold
        return not 1.0 / limit <= self._sorted.median() <= limit

    def record(self, predicted_ms: float, measured_ms: float) -> None:
        """Add one step; the oldest leaves once the window is full.

        Raises:
            ValueError: a time that is not finite or not above 0.
        """
        for name, value in (("predicted_ms", predicted_ms), ("measured_ms", measured_ms)):
            _check(value, name)
            if value <= 0.0:
                raise ValueError(f"{name} is {value}; need more than 0")
        ratio = measured_ms / predicted_ms
        self._samples.append(ratio)
        self._sorted.add(ratio)
        if len(self._samples) > self.window:
            self._sorted.remove(self._samples.popleft())

    def clear(self) -> None:
        """Forget everything, as after a new surface."""
        self._samples.clear()
        self._sorted = _SortedSamples()


def _middle(ordered: Sequence[float]) -> float:
    """Median of sorted samples, of which there must be one."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _check(value: float, name: str) -> None:
    """A NaN would make every later bisection go wrong."""
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; need a finite number")
