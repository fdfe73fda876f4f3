"""The simulated load: what its rules say, on loads whose outcome is known."""

import math

import numpy as np
import pytest

from decodegrid.capture.budget import VerifyBudget
from decodegrid.capture.grid import GraphKey, Grid, build_grid
from decodegrid.capture.plan_load import Load, simulate_load
from decodegrid.capture.surface import Surface, SurfacePoint

SURE, HOPELESS = {"alpha": 1e6, "beta": 1e-9}, {"alpha": 1e-9, "beta": 1e6}


def surface_of(grid: Grid) -> Surface:
    times = {k: 1 + 0.3 * k.num_reqs + 0.2 * k.num_query_tokens for k in grid.keys}
    points = {key: SurfacePoint(ms, ms, ms, 1) for key, ms in times.items()}
    return Surface(points, 64, 1.0, {})


def run(load: Load, grid: Grid, limit: int | None = None):
    return simulate_load(load, grid, surface_of(grid), limit)


def test_drafts_that_are_all_right() -> None:
    """13 tokens: one without drafts, then six, then six; 1.5 and 2.5 ms a step."""
    grid = build_grid(1, 5)
    result = run(Load(1.0, 1, 13, 0.0, **SURE), grid, limit=6)
    assert result.trace.batches == {(1, 1): 1, (1, 6): 2}
    assert result.num_emitted == 13
    assert result.decode_ms == pytest.approx(1.5 + 2 * 2.5)
    assert result.tokens_per_s == pytest.approx(13 / 6.5 * 1e3)


def test_a_row_never_verifies_more_than_it_can_emit() -> None:
    """9 tokens: 1, 6, and of the last two one is a draft."""
    result = run(Load(1.0, 1, 9, 0.0, **SURE), build_grid(1, 5), limit=6)
    assert result.trace.batches == {(1, 1): 1, (1, 2): 1, (1, 6): 1}


def test_drafts_that_are_all_wrong() -> None:
    """The first two steps with drafts take the rates for 1, the later ones know better."""
    result = run(Load(1.0, 1, 12, 0.0, **HOPELESS), build_grid(1, 5))
    assert result.trace.batches == {(1, 1): 11, (1, 6): 1}
    assert result.num_emitted == 12


def test_without_drafts_a_step_is_a_token() -> None:
    """Six requests of 10 tokens; the others come while the first one's first step runs."""
    result = run(Load(1e6, 6, 10, 0.0), build_grid(3, 0))
    assert result.trace.batches == {(1, 1): 1, (2, 2): 1, (3, 3): 19}
    assert result.trace.pairs[GraphKey(3, 3)].pad_rows == 0


def test_tokens_are_conserved_and_pads_counted() -> None:
    grid, load = build_grid(8, 5, [8], [2, 4]), Load(50.0, 60, 40, 0.7, seed=5)
    result = run(load, grid)
    generator = np.random.default_rng(5)
    generator.exponential(20.0, 60)
    lengths = np.rint(40 * np.exp(0.7 * generator.standard_normal(60))).clip(1)
    assert result.num_emitted == lengths.sum()
    rows = sum(n * b for (b, _), n in result.trace.batches.items())
    tokens = sum(n * q for (_, q), n in result.trace.batches.items())
    uses = result.trace.pairs.items()
    assert sum(use.steps * key.num_reqs - use.pad_rows for key, use in uses) == rows
    surplus = sum(use.steps * key.num_query_tokens - use.surplus_tokens for key, use in uses)
    assert surplus == tokens
    assert any(use.pad_rows for _, use in uses) and any(use.surplus_tokens for _, use in uses)
    assert run(load, grid) == result
    assert run(Load(50.0, 60, 40, 0.7, seed=6), grid) != result


def test_more_arrivals_fill_more_rows() -> None:
    means = []
    for rate in (1.0, 20.0, 200.0):
        trace = run(Load(rate, 60, 40), build_grid(8, 5)).trace
        means.append(sum(n * b for (b, _), n in trace.batches.items()) / trace.num_steps)
    assert means == sorted(means) and means[0] < 1.2 and means[-1] > 6


def test_prefill_takes_time_in_which_others_arrive() -> None:
    quick, slow = (run(Load(5.0, 60, 40, prefill_ms=ms), build_grid(8, 5)) for ms in (0.0, 150.0))
    assert max(b for b, _ in slow.trace.batches) > max(b for b, _ in quick.trace.batches)


def test_totals_come_from_the_rates_of_the_step_before_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []
    choose = VerifyBudget.choose

    def watch(self, rates, usable, **corrections):
        given.append(rates[0].tolist())
        return choose(self, rates, usable, **corrections)

    monkeypatch.setattr(VerifyBudget, "choose", watch)
    run(Load(1.0, 1, 30, 0.0, seed=9), build_grid(1, 3))
    drawn = np.random.default_rng((9, 0)).beta(6, 2, (30, 3)).astype(np.float32)
    made = np.multiply.accumulate(drawn, axis=1)
    assert given[:2] == [[1.0] * 3] * 2
    assert len(given) > 6
    assert given[2:] == made[: len(given) - 2].tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 0.0}, "rate is 0.0; a finite number above 0"),
        ({"rate": math.inf}, "rate is inf"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"sigma": -1.0}, "sigma is -1.0; a finite number of at least 0"),
        ({"requests": 0}, "requests is 0; at least 1"),
        ({"seed": -1}, "seed is -1; at least 0"),
        ({"sigma": 10.5}, "sigma is 10.5; at most 10 is allowed"),
        ({"requests": 10**400}, "more than the 2000000 tokens"),
        ({"requests": 10**6, "tokens": 1e3}, "more than the 2000000 tokens"),
    ],
)
def test_bad_loads(values, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Load(**({"rate": 1.0} | values))


def test_lengths_that_are_drawn_have_a_bound_too() -> None:
    """The median is small; what sigma makes of it is not."""
    load = Load(1.0, 50, 10.0, 9.0, max_tokens=10**400)
    with pytest.raises(ValueError, match=r"sigma = 9 .* at most 2000000 are simulated"):
        run(load, build_grid(1, 2))
