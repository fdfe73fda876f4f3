"""Percentiles, spreads, the Pareto front, tables and the plot, against brute force."""

import importlib.util
import random
from pathlib import Path

import pytest

from decodegrid.capture import bench_plot
from decodegrid.capture.bench_numbers import (
    AssumedPoint,
    ParetoPoint,
    assumed_factor,
    paired_spread,
    pareto_front,
    percentiles,
    repeat_spread,
)
from decodegrid.capture.bench_plot import plot_pareto, require_matplotlib
from decodegrid.capture.bench_table import format_table


def interpolated(samples: list[float], share: float) -> float:
    """Linear between the two samples around share * (n - 1), counted from the smallest."""
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@pytest.mark.parametrize("count", [1, 2, 3, 50, 101])
def test_percentiles_of_both_tails(count: int) -> None:
    rng = random.Random(count)
    samples = [rng.expovariate(0.1) for _ in range(count)]
    times, speeds = percentiles(samples), percentiles(samples, "low")
    assert times is not None and speeds is not None
    for found, shares in ((times, (0.5, 0.9, 0.99)), (speeds, (0.5, 0.1, 0.01))):
        wanted = [interpolated(samples, share) for share in shares]
        assert [found.p50, found.p90, found.p99] == pytest.approx(wanted)
        assert found.count == count and found.mean == pytest.approx(sum(samples) / count)
        assert (found.low, found.high) == (min(samples), max(samples))
    if count == 101:
        # What 90 of 100 users reach or exceed is exceeded by 90 of the others.
        assert sum(speed >= speeds.p90 for speed in samples) == 91
        assert sum(time <= times.p90 for time in samples) == 91
    assert times.as_json()["p90"] == times.p90 and str(times).count("/") == 2


def test_no_sample_is_no_percentile() -> None:
    assert percentiles([]) is None and repeat_spread([]) is None and repeat_spread([None]) is None


def test_spread_over_repeats() -> None:
    found = repeat_spread([4.0, None, 1.0, 3.0, 2.0])
    assert found is not None
    assert (found.low, found.median, found.high, found.count) == (1.0, 2.5, 4.0, 4)
    assert str(found) == "2.5 (1..4)"
    assert found.as_json() == {"min": 1.0, "median": 2.5, "max": 4.0, "repeats": 4}


def test_ratios_are_taken_inside_a_repeat() -> None:
    """The second repeat was on a machine half as fast; the ratio does not see it."""
    found = paired_spread([30.0, 15.0], [20.0, 10.0])
    assert found is not None and (found.low, found.high) == (1.5, 1.5)
    with pytest.raises(ValueError, match="1 numerators for 2"):
        paired_spread([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"a denominator is 0\.0"):
        paired_spread([1.0, 1.0], [0.0, 2.0])


def point(user: float, device: float, label: str = "p", context: int | None = None) -> ParetoPoint:
    return ParetoPoint(label, 1, context, user, device)


@pytest.mark.parametrize("seed", range(20))
def test_front_against_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    points = [
        point(rng.randint(1, 9), rng.randint(1, 9), str(index))
        for index in range(rng.randint(0, 25))
    ]

    def beats(other: ParetoPoint, one: ParetoPoint) -> bool:
        left = (other.user_tokens_per_s, other.device_tokens_per_s)
        right = (one.user_tokens_per_s, one.device_tokens_per_s)
        return left != right and left[0] >= right[0] and left[1] >= right[1]

    front = pareto_front(points)
    best = {
        (one.user_tokens_per_s, one.device_tokens_per_s)
        for one in points
        if not any(beats(other, one) for other in points)
    }
    found = [(one.user_tokens_per_s, one.device_tokens_per_s) for one in front]
    assert set(found) == best and len(found) == len(best)
    assert found == sorted(found, reverse=True)


def test_the_assumed_factor_is_more_than_its_own_chain() -> None:
    """1 + K * a of the published plots against 1 + a + a**2 + a**3 for K = 3, a = 0.75."""
    assert assumed_factor(3, 0.75) == 3.25
    assert assumed_factor(3, 0.75) > sum(0.75**j for j in range(4)) == pytest.approx(2.734375)
    assumed = AssumedPoint(4, None, 100.0, 3.25)
    assert (assumed.user_tokens_per_s, assumed.device_tokens_per_s) == (325.0, 1300.0)


def test_tables() -> None:
    table = format_table(["name", "ms"], [["a", "10.5"], ["longer", "2"]])
    assert table.splitlines() == ["name      ms", "a       10.5", "longer     2"]
    assert format_table(["a", "b"], [["x", ""]], num_names=2).splitlines()[1] == "x"
    with pytest.raises(ValueError, match="a row has 1 cells, the head has 2"):
        format_table(["a", "b"], [["x"]])


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    points = [
        point(10, 20, label, context) for label in ("all", "oracle") for context in (None, 64)
    ]
    assumed = [AssumedPoint(batch, 64, 10.0, 4.75) for batch in (1, 4)]
    plot_pareto(tmp_path / "plot.png", points, assumed, "one core, 1 device")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(FileNotFoundError):
        plot_pareto(tmp_path / "none" / "plot.png", points, [], "")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_matplotlib("--png")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        bench_plot, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    with pytest.raises(ValueError, match=r"--png needs matplotlib.*'decodegrid\[report\]'"):
        require_matplotlib("--png")
