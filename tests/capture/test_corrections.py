"""Run-time corrections: golden vectors, and rolling medians against medians from scratch."""

import math
from collections import defaultdict, deque
from statistics import median

import numpy as np
import pytest

from decodegrid.capture.corrections import (
    DriftMonitor,
    LoadEstimator,
    SamplerEstimator,
    SlopeEstimator,
)
from decodegrid.capture.grid import GraphKey

SMALL, LARGE = GraphKey(2, 8), GraphKey(16, 64)


def record_slopes(estimator: SlopeEstimator, key: GraphKey, slope: float, count: int) -> None:
    for _ in range(count):
        estimator.record(key, 5.0 + slope * key.num_query_tokens, 5.0)


def test_golden_slopes():
    estimator = SlopeEstimator()
    record_slopes(estimator, SMALL, 0.01, 9)
    assert estimator.ms_per_token == 0.0
    record_slopes(estimator, SMALL, 0.03, 1)
    assert estimator.ms_per_token == pytest.approx(0.01)
    record_slopes(estimator, LARGE, 0.02, 100)
    assert estimator.ms_per_token == pytest.approx(0.015)
    assert estimator.num_samples == 110


def test_negative_slope_is_none():
    estimator = SlopeEstimator()
    record_slopes(estimator, SMALL, -0.02, 20)
    assert estimator.ms_per_token == 0.0
    record_slopes(estimator, LARGE, 0.06, 20)
    assert estimator.ms_per_token == pytest.approx(0.02)


def test_slopes_equal_medians_from_scratch():
    rng = np.random.default_rng(5)
    keys = [GraphKey(b, b * n) for b in (1, 2, 4) for n in (1, 3, 6)]
    estimator, window = SlopeEstimator(window=120, min_samples=7), deque(maxlen=120)
    qualified = set()
    for step in range(1500):
        key = keys[int(rng.integers(len(keys))) if step % 300 < 200 else 0]
        measured = float(rng.choice([5.0, 5.5, rng.normal(6.0, 1.0)]))
        estimator.record(key, measured, 5.0)
        window.append((key, (measured - 5.0) / key.num_query_tokens))
        by_key = defaultdict(list)
        for owner, sample in window:
            by_key[owner].append(sample)
        medians = [median(samples) for samples in by_key.values() if len(samples) >= 7]
        assert estimator.ms_per_token == max(0.0, median(medians) if medians else 0.0)
        qualified.add(len(medians))
    assert 0 in qualified and 9 in qualified and 1 in qualified


def test_default_window_forgets_the_oldest():
    estimator = SlopeEstimator()
    record_slopes(estimator, SMALL, 1.0, 5000)
    assert estimator.ms_per_token == pytest.approx(1.0)
    record_slopes(estimator, LARGE, 3.0, 4990)
    assert estimator.ms_per_token == pytest.approx(2.0)
    record_slopes(estimator, LARGE, 3.0, 1)
    assert estimator.ms_per_token == pytest.approx(3.0)
    assert estimator.num_samples == 5000


def test_cleared_slope_starts_again():
    estimator = SlopeEstimator()
    record_slopes(estimator, SMALL, 0.5, 20)
    estimator.clear()
    assert estimator.ms_per_token == 0.0 and estimator.num_samples == 0
    record_slopes(estimator, SMALL, 0.25, 10)
    assert estimator.ms_per_token == pytest.approx(0.25)


def test_golden_sampler_times():
    estimator = SamplerEstimator()
    for value in (5, 1, 4, 2):
        estimator.record(8, value)
    assert estimator.ms(8) == 0.0
    estimator.record(8, 3)
    assert estimator.ms(8) == 3
    estimator.record(8, 9)
    assert estimator.ms(8) == 3.5
    for _ in range(4):
        estimator.record(8, 9)
    assert estimator.ms(8) == 9


def test_sampler_falls_back_to_all_row_counts():
    estimator = SamplerEstimator()
    for num_reqs, value in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)):
        estimator.record(num_reqs, value)
    assert estimator.ms(1) == estimator.ms(9) == 0.0
    estimator.record(5, 5.0)
    assert estimator.ms(1) == estimator.ms(9) == 3.0
    for _ in range(5):
        estimator.record(1, 10.0)
    assert estimator.ms(1) == 10.0
    # The last nine of any: 2, 3, 4, 5 and five times 10.
    assert estimator.ms(9) == 10.0
    for _ in range(4):
        estimator.record(2, 0.5)
    # The last nine of any are five times 10 and four times 0.5; there is none of exactly 3 rows.
    assert estimator.ms(3) == 10.0
    assert estimator.ms(2) == 0.5


def test_drift():
    monitor = DriftMonitor(window=20, threshold=0.25, min_samples=4)
    assert monitor.ratio is None and monitor.spread is None and not monitor.drifted
    for _ in range(3):
        monitor.record(2.0, 4.0)
    assert monitor.ratio == 2.0 and not monitor.drifted
    monitor.record(2.0, 4.0)
    assert monitor.drifted and monitor.spread == (2.0, 2.0)
    for _ in range(17):
        monitor.record(2.0, 2.4)
    assert len(monitor) == 20
    assert monitor.ratio == pytest.approx(1.2) and not monitor.drifted
    monitor.clear()
    assert len(monitor) == 0 and monitor.ratio is None and not monitor.drifted


@pytest.mark.parametrize(
    ("ratio", "drifted"), [(1.24, False), (1.26, True), (0.81, False), (0.79, True)]
)
def test_drift_both_ways(ratio, drifted):
    monitor = DriftMonitor(window=8, threshold=0.25)
    monitor.record(1.0, ratio)
    assert not monitor.drifted
    monitor.record(1.0, ratio)
    assert monitor.drifted is drifted


def test_drift_equals_quantiles_from_scratch():
    rng = np.random.default_rng(6)
    monitor, window = DriftMonitor(window=50, threshold=0.1), deque(maxlen=50)
    for _ in range(300):
        predicted, measured = rng.uniform(1.0, 2.0), float(rng.choice([1.0, 1.5, 2.0, 3.0]))
        monitor.record(predicted, measured)
        window.append(measured / predicted)
        assert monitor.ratio == median(window)
        low, high = np.quantile(window, [0.1, 0.9], method="nearest")
        assert monitor.spread is not None
        below = sorted(window)
        assert below.index(monitor.spread[0]) == pytest.approx(below.index(low), abs=1)
        assert below.index(monitor.spread[1]) == pytest.approx(below.index(high), abs=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_samples_are_refused_and_leave_nothing(bad):
    slope, sampler, drift = SlopeEstimator(), SamplerEstimator(), DriftMonitor(4, 0.1)
    with pytest.raises(ValueError, match="measured_ms"):
        slope.record(SMALL, bad, 1.0)
    with pytest.raises(ValueError, match="surface_ms"):
        slope.record(SMALL, 1.0, bad)
    with pytest.raises(ValueError, match="extra_ms"):
        sampler.record(1, bad)
    with pytest.raises(ValueError, match="predicted_ms"):
        drift.record(bad, 1.0)
    with pytest.raises(ValueError, match="measured_ms"):
        drift.record(1.0, bad)
    assert slope.num_samples == 0 and len(drift) == 0 and sampler.ms(1) == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlopeEstimator(window=0), "window is 0"),
        (lambda: SlopeEstimator(min_samples=0), "min_samples 0"),
        (lambda: DriftMonitor(0, 0.1), "window is 0"),
        (lambda: DriftMonitor(4, 0.1, 5), "min_samples 5"),
        (lambda: DriftMonitor(4, 0.0), "threshold is 0"),
        (lambda: DriftMonitor(4, math.nan), "threshold is nan"),
        (lambda: SamplerEstimator().record(1, -0.1), "need 0 or more"),
        (lambda: DriftMonitor(4, 0.1).record(0.0, 1.0), "predicted_ms is 0"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


KEYS = (GraphKey(1, 1), GraphKey(1, 6), GraphKey(8, 48))
SURFACE_MS = {KEYS[0]: 16.0, KEYS[1]: 24.0, KEYS[2]: 66.0}


def test_a_load_on_all_pairs_is_a_factor_and_no_slope() -> None:
    """Twice as slow everywhere: without the factor the slope would charge large pairs too much."""
    load, slope = LoadEstimator(), SlopeEstimator()
    for _ in range(20):
        for key in KEYS:
            load.record(key, 2 * SURFACE_MS[key], SURFACE_MS[key])
    for _ in range(20):
        for key in KEYS:
            slope.record(key, 2 * SURFACE_MS[key], SURFACE_MS[key] * load.factor)
    assert load.factor == 2.0
    assert slope.ms_per_token == 0.0


def test_a_cost_of_each_token_is_mostly_slope() -> None:
    """Held towards 0 by the ridge, and never negative."""
    load, slope = LoadEstimator(), SlopeEstimator()
    for _ in range(40):
        for key in KEYS:
            measured = SURFACE_MS[key] + 0.4 * key.num_query_tokens
            load.record(key, measured, SURFACE_MS[key])
    for _ in range(40):
        for key in KEYS:
            measured = SURFACE_MS[key] + 0.4 * key.num_query_tokens
            slope.record(key, measured, SURFACE_MS[key] * load.factor)
    # All load would be the mean of the ratios, 1.14; all slope would be 1.
    assert 1.0 < load.factor < 1.06
    assert 0.1 < slope.ms_per_token <= 0.4


def test_a_change_of_load_passes_through() -> None:
    """One pair before, another after: while both are in the window some of it looks like slope;
    later nothing does."""
    load = LoadEstimator(window=64)
    for _ in range(40):
        load.record(KEYS[0], 16.0, 16.0)
    assert load.factor == 1.0
    for _ in range(40):
        load.record(KEYS[2], 132.0, 66.0)
    assert 1.0 < load.factor <= 2.0
    for _ in range(64):
        load.record(KEYS[2], 132.0, 66.0)
    assert load.factor == 2.0


def test_the_load_forgets() -> None:
    load = LoadEstimator(window=10)
    for factor in [3.0] * 10 + [1.0] * 14:
        load.record(KEYS[0], 16.0 * factor, 16.0)
    assert load.factor == 1.0
    assert LoadEstimator().factor == 1.0
    with pytest.raises(ValueError, match="surface_ms is 0"):
        load.record(KEYS[0], 1.0, 0.0)
