"""The verify budget against a walk over all totals, and the golden vectors of the schedule."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from decodegrid.capture.budget import (
    VerifyBudget,
    choose_total,
    clean_rates,
    expected_tokens,
)
from decodegrid.capture.grid import CoverageError, GraphKey, Grid, build_grid
from decodegrid.capture.surface import Surface, SurfaceError, SurfacePoint
from decodegrid.capture.total_scan import NumpyScan, ScanMemory
from decodegrid.kernels.native import build_library
from decodegrid.kernels.total_scan import NativeScan, native_scan
from decodegrid.kernels.verify import split_verify_lengths

BUILD = Path(__file__).resolve().parents[2] / "build" / "native"

CURVE_A = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2, 16: 1.9, 24: 2.7}
CURVE_B = {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.6, 8: 3.0}


def compiled_scan(memory: ScanMemory) -> NativeScan:
    return native_scan(build_library(BUILD))(*memory)


def walk(sorted_rates, num_reqs, time_of) -> int:
    """The greedy as it is written down: one draft after the other, strictly better wins."""
    expected = np.float32(num_reqs)
    best, total = float(expected) / time_of(num_reqs), num_reqs
    for count, rate in enumerate(sorted_rates, 1):
        expected = np.float32(expected + np.float32(rate))
        ms = time_of(num_reqs + count)
        if ms is not None and float(expected) / ms > best:
            best, total = float(expected) / ms, num_reqs + count
    return total


def plain_clean(rates, num_usable) -> list[float]:
    """The rates that count, row by row in Python, largest first."""
    kept = []
    for row, usable in zip(rates.tolist(), num_usable.tolist(), strict=True):
        ceiling = 1.0
        for rate in row[:usable]:
            ceiling = min(ceiling, 0.0 if math.isnan(rate) else max(rate, 0.0))
            kept.append(ceiling)
    return sorted(kept, reverse=True)


def make_surface(grid: Grid, times) -> Surface:
    points = {key: SurfacePoint(ms, ms, ms, 1) for key, ms in zip(grid.keys, times, strict=True)}
    return Surface(points, 64, 1.0, {})


def random_grid(rng) -> Grid:
    """A covering grid: generated spacings, or any pairs, among them ones whose B pads."""
    reqs, drafts = int(rng.integers(1, 8)), int(rng.integers(0, 6))
    kind = rng.integers(3)
    if kind == 0:
        return build_grid(reqs, drafts)
    if kind == 1:
        return build_grid(reqs, drafts, [reqs], rng.integers(1, drafts + 2, 2).tolist())
    sizes = [(b, q) for b in range(1, reqs + 1) for q in range(b, b * (drafts + 1) + 1)]
    some = rng.permutation(len(sizes))[: int(rng.integers(1, 12))]
    keys = [GraphKey(*sizes[index]) for index in some]
    return Grid([*keys, GraphKey(reqs, reqs * (drafts + 1))], reqs, drafts)


def random_times(rng, grid: Grid) -> list[float]:
    """Linear, linear with noise, any at all, flat, or of a few equal values."""
    linear = np.array([1 + 0.1 * k.num_reqs + 0.2 * k.num_query_tokens for k in grid.keys])
    kind = rng.integers(5)
    if kind == 1:
        linear *= rng.uniform(0.5, 2.0, len(linear))
    elif kind == 2:
        linear = rng.uniform(0.1, 10.0, len(linear))
    elif kind == 3:
        linear[:] = 3.0
    elif kind == 4:
        linear = rng.choice([1.0, 1.5, 2.0], len(linear))
    return linear.tolist()


def random_rates(rng, rows: int, width: int):
    """Running products, values with many ties, extremes, vanishing ones, and broken ones."""
    kind = rng.integers(6)
    if kind == 0:
        rates = np.cumprod(rng.beta(6, 2, (rows, width)), axis=1)
    elif kind == 1:
        rates = np.cumprod(rng.choice([1.0, 0.5, 0.0], (rows, width)), axis=1)
    elif kind == 2:
        rates = np.full((rows, width), float(rng.integers(2)))
    elif kind == 3:
        rates = np.cumprod(rng.choice([1.0, 0.9, 1e-9, 1e-20], (rows, width)), axis=1)
    elif kind == 4:
        rates = rng.uniform(-0.5, 1.5, (rows, width))
    else:
        rates = rng.choice([np.nan, 0.0, 0.3, 1.0, np.inf, -np.inf], (rows, width))
    return rates.astype(np.float32)


@pytest.mark.parametrize("make_scan", [NumpyScan, compiled_scan])
def test_choice_equals_the_walk_over_all_totals(make_scan):
    """Random grids, surfaces and rates; each budget serves several calls, so that what it keeps
    between calls is tested with them."""
    rng = np.random.default_rng(20)
    cases = padded = changed = 0
    for _ in range(500):
        grid = random_grid(rng)
        surface = make_surface(grid, random_times(rng, grid))
        if rng.integers(2):
            grid = grid.with_cost(surface.ms)
        budget = VerifyBudget(grid, surface, grid.num_draft_tokens, make_scan)
        for _ in range(8):
            rows, width = int(rng.integers(1, grid.max_num_reqs + 1)), grid.num_draft_tokens
            rates = random_rates(rng, rows, width)
            usable = np.full(rows, width)
            if rng.integers(2):
                usable = rng.integers(0, width + 1, rows)
            slope, extra = ((0.0, 0.0), (0.05, 0.0), (0.01, 2.5))[rng.integers(3)]

            def time_of(total, grid=grid, surface=surface, rows=rows, slope=slope, extra=extra):
                key = grid.select(rows, total)
                return surface.ms(key) + slope * key.num_query_tokens + extra

            before = rates.copy()
            choice = budget.choose(rates, usable, slope_ms_per_token=slope, extra_ms=extra)
            kept = plain_clean(rates, usable)
            total = walk(kept, rows, time_of)
            assert choice.num_query_tokens == total, (grid.keys, rates, usable)
            assert choice.key == grid.select(rows, total)
            assert choice.step_ms == time_of(total)
            assert choice.all_ms == time_of(rows + len(kept))
            assert choice.none_ms == time_of(rows)
            assert not choice.verify_all
            expected = rows + math.fsum(kept[: total - rows])
            assert choice.expected_tokens == pytest.approx(expected, rel=1e-5)
            assert choice.all_tokens == pytest.approx(rows + math.fsum(kept), rel=1e-5)
            assert expected_tokens(rates, usable, total) == choice.expected_tokens
            assert np.array_equal(rates, before, equal_nan=True)
            cases += 1
            padded += choice.key.num_reqs > rows
            changed += rows < total < rows + len(kept)
    assert cases == 4000 and padded > 400 and changed > 400


def test_plain_choice_equals_the_walk_on_random_curves():
    rng = np.random.default_rng(21)
    for _ in range(3000):
        rows = int(rng.integers(1, 6))
        rates = rng.choice([0.0, 1e-9, 0.2, 0.5, 0.7, 1.0], int(rng.integers(0, 16)))
        rates = rates.astype(np.float32)
        sizes = sorted({rows, *rng.integers(1, 24, 5).tolist()})
        curve = {size: float(rng.choice([1.0, 1.2, 2.0, rng.uniform(0.5, 4)])) for size in sizes}

        def time_of(total, curve=curve):
            return next((ms for size, ms in sorted(curve.items()) if size >= total), None)

        total, column = choose_total(rates, rows, sizes, [curve[size] for size in sizes])
        assert total == walk(sorted(rates, reverse=True), rows, time_of)
        assert sizes[column] == next(size for size in sizes if size >= total)


@pytest.mark.parametrize(
    ("curve", "budget_rows", "split_rows", "corrections", "total", "lengths"),
    [
        (CURVE_A, [[0.9, 0.8, 0.1], [0.5, 0.2, 0.1]], None, (0, 0), 8, [4, 4]),
        (CURVE_A, [[0.0] * 3] * 3, None, (0, 0), 3, [1, 1, 1]),
        (CURVE_A, [[1.0] * 3] * 3, None, (0, 0), 8, [4, 3, 1]),
        (CURVE_A, [[1.0] * 3] * 7, None, (0, 0), 24, [4, 4, 4, 4, 4, 3, 1]),
        (CURVE_A, [[0.6, 0.36, 0.2]] * 4, None, (0.05, 0.3), 8, [2, 2, 2, 2]),
        (CURVE_A, [[0.6, 0.36, 0.2]] * 4, None, (0, 3), 16, [4, 4, 4, 4]),
        (
            CURVE_B,
            [[0.9, 0.2, 0.1], [0.8, 0.1, 0.0]],
            [[0.3, 0.2, 0.1], [0.7, 0.6, 0.5]],
            (0, 0),
            3,
            [1, 2],
        ),
        (
            CURVE_B,
            [[1.0, 1.0, 1.0], [0.5, 0.2, 0.1]],
            [[0.0, 0.0, 0.0], [0.5, 0.2, 0.1]],
            (0, 0),
            3,
            [1, 2],
        ),
        ({8: 5.0}, [[0.5, 0.25, 0.0], [0.1, 0.05, 0.01]], None, (0, 0), 7, [3, 4]),
        ({2: 2.0, 3: 3.0, 4: 4.0}, [[1.0, 1.0], [0.0, 0.0]], None, (0, 0), 2, [1, 1]),
    ],
)
def test_golden_totals_and_splits(curve, budget_rows, split_rows, corrections, total, lengths):
    rates = np.array(budget_rows, dtype=np.float32)
    slope, extra = corrections
    times = [ms + slope * size + extra for size, ms in curve.items()]
    assert choose_total(rates.ravel(), len(rates), list(curve), times)[0] == total
    split = torch.tensor(split_rows or budget_rows)
    limits, live = torch.full((len(rates),), rates.shape[1]), torch.ones(len(rates)).bool()
    assert split_verify_lengths(split, limits, live, torch.tensor(total)).tolist() == lengths


@pytest.mark.parametrize(
    ("rows", "corrections", "total"),
    [
        ([[0.6, 0.36, 0.2]] * 4, (0.05, 0.3), 8),
        ([[0.6, 0.36, 0.2]] * 4, (0.0, 3.0), 16),
        ([[1.0] * 3] * 4, (0.0, 0.0), 16),
        ([[0.0] * 3] * 4, (0.0, 0.0), 4),
    ],
)
def test_golden_totals_on_a_grid(rows, corrections, total):
    """Curve A as pairs of 4 requests; its columns below 4 tokens are out of reach for them."""
    grid = Grid([GraphKey(4, q) for q in (4, 8, 16)], max_num_reqs=4, num_draft_tokens=3)
    surface = make_surface(grid, [CURVE_A[q] for q in (4, 8, 16)])
    choice = VerifyBudget(grid, surface, 3).choose(
        np.array(rows, dtype=np.float32),
        np.full(4, 3),
        slope_ms_per_token=corrections[0],
        extra_ms=corrections[1],
    )
    assert choice.num_query_tokens == total and choice.key == grid.select(4, total)


def test_without_a_surface_everything_usable_is_verified():
    grid = build_grid(4, 5)
    budget = VerifyBudget(grid, None, 5)
    rates = np.full((3, 5), 0.5, dtype=np.float32)
    choice = budget.choose(rates, np.array([5, 0, 2]))
    assert choice.verify_all and choice.num_query_tokens == 3 + 7
    assert choice.key == grid.select(3, 10)
    assert choice.expected_tokens == choice.all_tokens == 3 + 3.5
    assert choice.step_ms is choice.all_ms is choice.none_ms is None


def test_rates_that_change_no_sum_are_not_chosen():
    """Inside one column every draft is free, yet only those that add something are taken."""
    grid = Grid([GraphKey(2, 12)], max_num_reqs=2, num_draft_tokens=5)
    budget = VerifyBudget(grid, make_surface(grid, [1.0]), 5)
    rates = np.array([[0.5, 1e-3, 1e-9, 0, 0], [0.25, 0, 0, 0, 0]], dtype=np.float32)
    choice = budget.choose(rates, np.array([5, 5]))
    assert choice.num_query_tokens == 2 + 3
    assert choice.expected_tokens == pytest.approx(2.751)


def test_a_stopped_row_costs_one_query_token():
    """A row with nothing usable adds 1 to the total whatever its rates say."""
    grid = Grid([GraphKey(2, 2), GraphKey(2, 12)], max_num_reqs=2, num_draft_tokens=5)
    budget = VerifyBudget(grid, make_surface(grid, [1.0, 1.1]), 5)
    ones = np.ones((2, 5), dtype=np.float32)
    assert budget.choose(ones, np.array([5, 0])).num_query_tokens == 7
    assert budget.choose(ones, np.array([0, 0])).num_query_tokens == 2
    assert budget.choose(ones, np.array([5, 5])).num_query_tokens == 12


def test_more_time_outside_the_graph_never_lowers_the_total():
    grid = build_grid(8, 5)
    surface = make_surface(grid, [1 + 0.3 * key.num_query_tokens for key in grid.keys])
    budget = VerifyBudget(grid, surface, 5)
    rates = np.cumprod(np.random.default_rng(3).beta(6, 2, (8, 5)), axis=1).astype(np.float32)
    totals = [
        budget.choose(rates, np.full(8, 5), extra_ms=extra).num_query_tokens
        for extra in (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)
    ]
    assert totals == sorted(totals) and totals[0] < totals[-1] == 48


def test_clean_rates():
    rates = np.array([[0.9, math.nan, 0.8], [1.5, -1.0, 0.5], [0.4, 0.6, 0.5]], dtype=np.float32)
    most = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0]], dtype=np.float32)
    want = np.array([[0.9, 0, 0], [1, 0, 0], [0.4, 0.4, 0]], dtype=np.float32)
    assert np.array_equal(clean_rates(rates, most), want)


def test_strided_rates_are_read_as_they_are():
    grid = build_grid(3, 2)
    budget = VerifyBudget(grid, make_surface(grid, range(1, len(grid) + 1)), 2)
    wide = np.zeros((2, 6), dtype=np.float32)
    wide[:, ::3] = [[0.9, 0.8], [0.7, 0.1]]
    usable = np.array([2, 2])
    assert budget.choose(wide[:, ::3], usable) == budget.choose(wide[:, ::3].copy(), usable)


def test_counts_of_another_integer_type_are_not_taken_for_the_last_ones():
    """Two 32-bit counts have the bytes of one 64-bit count."""
    budget = VerifyBudget(build_grid(2, 5), None, 5)
    one, two = np.array([5], dtype=np.int64), np.array([5, 0], dtype=np.int32)
    assert one.tobytes() == two.tobytes()
    assert budget.choose(np.ones((1, 5), dtype=np.float32), one).num_query_tokens == 6
    assert budget.choose(np.ones((2, 5), dtype=np.float32), two).num_query_tokens == 7


@pytest.mark.parametrize(
    ("shape", "usable", "message"),
    [
        ((2, 5), [5, 6], r"num_usable is \[5, 6\]; allowed are 0\.\.5"),
        ((2, 5), [-1, 5], r"num_usable is \[-1, 5\]"),
        ((2, 4), [5, 5], r"rates have shape \(2, 4\); need \(2, 5\)"),
        ((1, 5), [5, 5], r"rates have shape \(1, 5\); need \(2, 5\)"),
        ((5, 5), [5] * 5, r"num_usable has shape \(5,\); allowed are 1\.\.4 rows"),
        ((0, 5), [], r"num_usable has shape \(0,\)"),
    ],
)
def test_bad_inputs(shape, usable, message):
    grid = build_grid(4, 5)
    budget = VerifyBudget(grid, make_surface(grid, [1.0] * len(grid)), 5)
    with pytest.raises(ValueError, match=message):
        budget.choose(np.zeros(shape, dtype=np.float32), np.array(usable, dtype=np.int64))
    good = budget.choose(np.zeros((2, 5), dtype=np.float32), np.array([5, 5]))
    assert good.num_query_tokens == 2


@pytest.mark.parametrize("corrections", [(-0.1, 0.0), (0.0, -1.0), (math.nan, 0.0)])
def test_bad_corrections(corrections):
    grid = build_grid(2, 1)
    budget = VerifyBudget(grid, make_surface(grid, [1.0] * len(grid)), 1)
    with pytest.raises(ValueError, match="both must be 0 or more"):
        budget.choose(
            np.zeros((1, 1), dtype=np.float32),
            np.array([1]),
            slope_ms_per_token=corrections[0],
            extra_ms=corrections[1],
        )


def test_bad_budgets():
    grid = build_grid(2, 1)
    with pytest.raises(ValueError, match="num_draft_tokens is 2; the grid has 1"):
        VerifyBudget(grid, None, 2)
    part = Surface({GraphKey(1, 1): SurfacePoint(1, 1, 1, 1)}, 0, 1.0, {})
    with pytest.raises(SurfaceError, match=r"no step time for \(1, 2\)"):
        VerifyBudget(grid, part, 1)
    with pytest.raises(CoverageError, match="2 requests"):
        VerifyBudget(Grid([GraphKey(1, 2)], 2, 1), None, 1)


@pytest.mark.parametrize("total", [1, 5])
def test_expected_tokens_of_an_impossible_total(total):
    rates = np.full((2, 3), 0.5, dtype=np.float32)
    with pytest.raises(ValueError, match=rf"total is {total}; these rows have 2\.\.4"):
        expected_tokens(rates, np.array([2, 0]), total)


@pytest.mark.parametrize(
    ("tokens", "ms", "message"),
    [
        ([4, 2], [1.0, 2.0], "do not ascend"),
        ([2, 4], [1.0], "or fit"),
        ([1, 2], [1.0, 2.0], "3 rows do not fit"),
    ],
)
def test_bad_curves(tokens, ms, message):
    with pytest.raises(ValueError, match=message):
        choose_total(np.zeros(3, dtype=np.float32), 3, tokens, ms)


def test_choice_is_frozen():
    choice = VerifyBudget(build_grid(1, 0), None, 0).choose(
        np.zeros((1, 0), dtype=np.float32), np.array([0])
    )
    assert choice.num_query_tokens == 1 and choice.expected_tokens == 1.0
    with pytest.raises(AttributeError):
        choice.num_query_tokens = 2  # type: ignore[misc]


def test_compiled_scan_refuses_arrays_that_do_not_fit():
    memory = ScanMemory(
        np.zeros(5, np.float32), np.zeros(5, np.float32), np.array([0, 2]), np.array([1, 4]),
        np.ones(2), 4,
    )
    assert compiled_scan(memory).best(2) == (0, 0)
    broken = [
        (memory._replace(sums=np.zeros(4, np.float32)), "4 rates in rows of 4 do not fit 4 sums"),
        (memory._replace(last=np.array([1, 5])), "do not fit 4 drafts"),
        (memory._replace(first=np.array([-1, 2])), "do not fit 4 drafts"),
        (memory._replace(ms=np.ones(3)), "2 first, 2 last, 3 ms"),
        (memory._replace(width=3), "rows of 3"),
        (memory._replace(ms=np.ones(2, np.float32)), "contiguous float64"),
        (memory._replace(terms=np.zeros(10, np.float32)[::2]), "contiguous float32"),
    ]
    for arrays, message in broken:
        with pytest.raises(ValueError, match=message):
            compiled_scan(arrays)
