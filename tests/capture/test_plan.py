"""Plans against all grids that there are, bounds that none can meet, and the stored traces.

The traces under traces/ come from `decodegrid.capture.plan_load`; their sources say which load.
surface.json holds measured times of the embedded model's default grid.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decodegrid.capture.grid import GraphKey, Grid, build_grid
from decodegrid.capture.plan import PlanOptions, full_surface, plan_grid, worst_unseen
from decodegrid.capture.plan_costs import PairCost
from decodegrid.capture.plan_report import format_plan, sentence, yaml_fragment
from decodegrid.capture.plan_solve import Candidate, PlanBounds, PlanError, expected_ms, solve_grid
from decodegrid.capture.plan_times import Origin, candidate_keys, estimate, estimate_times
from decodegrid.capture.plan_trace import GridTrace, TraceError, read_trace
from decodegrid.capture.surface import Surface, SurfaceError, SurfacePoint
from decodegrid.capture.surface_search import read_surface

TRACES = Path(__file__).parent / "traces"
STORED = ("trickle", "mixed", "verify_all", "busy_fine")
LIMITS = [(2, 2), (3, 1), (2, 3), (4, 0), (1, 5)]


def all_keys(num_reqs: int, num_drafts: int) -> list[GraphKey]:
    return [
        GraphKey(b, q) for b in range(1, num_reqs + 1) for q in range(b, b * (num_drafts + 1) + 1)
    ]


def surface_of(times: dict[GraphKey, float]) -> Surface:
    points = {key: SurfacePoint(ms, ms, ms, 1) for key, ms in times.items()}
    return Surface(points, 64, 1.0, {})


def linear(keys, num_reqs=0.3, num_tokens=0.2) -> Surface:
    return surface_of(
        {k: 1 + num_reqs * k.num_reqs + num_tokens * k.num_query_tokens for k in keys}
    )


def best_of_all_grids(candidates, batches, bounds: PlanBounds) -> float | None:
    """Every subset with the largest pair, by the definitions alone."""
    largest = max(candidates, key=lambda item: item.key)
    best = None
    for size in range(len(candidates)):
        for others in itertools.combinations([c for c in candidates if c is not largest], size):
            grid = (*others, largest)
            if bounds.max_graphs is not None and len(grid) > bounds.max_graphs:
                continue
            if bounds.max_memory is not None and (
                sum(item.memory_bytes for item in grid) > bounds.max_memory
            ):
                continue
            if bounds.max_capture_s is not None and (
                sum(item.capture_s for item in grid) > bounds.max_capture_s
            ):
                continue
            total = 0.0
            for (rows, tokens), steps in batches.items():
                total += steps * min(
                    item.ms
                    for item in grid
                    if rows <= item.key.num_reqs and tokens <= item.key.num_query_tokens
                )
            best = total if best is None else min(best, total)
    return None if best is None else best / sum(batches.values())


@pytest.mark.parametrize("case", range(40))
def test_the_solver_finds_the_best_of_all_grids(case: int) -> None:
    rng = np.random.default_rng(case)
    limits = LIMITS[case % 5]
    keys = all_keys(*limits)
    noise = rng.uniform(0, 2, len(keys)) if case % 2 else np.zeros(len(keys))
    candidates = [
        Candidate(
            key,
            1 + 0.3 * key.num_reqs + 0.2 * key.num_query_tokens + float(extra),
            float(rng.integers(1, 9)),
            float(rng.integers(1, 5)),
        )
        for key, extra in zip(keys, noise, strict=True)
    ]
    batches = {
        (key.num_reqs, key.num_query_tokens): int(rng.integers(1, 50))
        for key in keys
        if rng.integers(2)
    } or {(1, 1): 1}
    largest = candidates[-1]
    bounds = (
        PlanBounds(max_graphs=int(rng.integers(1, len(keys) + 1))),
        PlanBounds(max_memory=largest.memory_bytes + float(rng.integers(0, 20))),
        PlanBounds(3, largest.memory_bytes + 6, largest.capture_s + 4),
        PlanBounds(max_capture_s=largest.capture_s + float(rng.integers(0, 9))),
        PlanBounds(),
    )[case % 4 if case < 36 else 4]
    found = solve_grid(candidates, batches, limits, bounds)
    assert found.expected_ms == pytest.approx(best_of_all_grids(candidates, batches, bounds))
    assert found.gap == pytest.approx(0.0, abs=1e-9)
    chosen = [item for item in candidates if item.key in found.keys]
    assert bounds.admits(chosen) and found.keys[-1] == keys[-1]
    # What was found, served as the engine would serve it.
    ms = {item.key: item.ms for item in candidates}
    grid = Grid(found.keys, *limits, ms.__getitem__)
    grid.check_coverage()
    assert expected_ms(grid, ms, batches) == found.expected_ms


def test_a_pair_that_serves_nothing_is_left_out() -> None:
    candidates = [Candidate(key, float(key.num_query_tokens)) for key in all_keys(3, 1)]
    found = solve_grid(candidates, {(1, 2): 5, (2, 3): 5}, (3, 1), PlanBounds())
    assert found.keys == (GraphKey(1, 2), GraphKey(2, 3), GraphKey(3, 6))
    assert found.expected_ms == 2.5


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            PlanBounds(max_memory=99.0),
            r"every grid has the pair \(2, 4\); max_memory is 99, .* 100",
        ),
        (PlanBounds(max_capture_s=0.5), r"max_capture_s is 0.5, and they take 2"),
    ],
)
def test_bounds_that_no_grid_can_meet(bounds: PlanBounds, message: str) -> None:
    grid = build_grid(2, 1)
    costs = {key: PairCost(100.0, 2.0) for key in grid.keys}
    trace = GridTrace(2, 1, "t", {(1, 1): 3})
    with pytest.raises(PlanError, match=message):
        plan_grid(trace, grid, linear(grid.keys), PlanOptions(bounds), costs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PlanBounds(max_graphs=0), "max_graphs is 0; a finite number of at least 1"),
        (lambda: PlanBounds(max_memory=-1), "max_memory is -1"),
        (lambda: PlanBounds(max_capture_s=math.nan), "max_capture_s is nan"),
        (lambda: PlanOptions(max_loss=-0.1), "max_loss is -0.1"),
        (lambda: PlanOptions(time_limit_s=math.inf), "time_limit_s is inf"),
        (lambda: PlanOptions(unseen=math.nan), "unseen is nan"),
    ],
)
def test_bad_options(make, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_a_bound_on_memory_needs_costs() -> None:
    grid = build_grid(2, 1)
    trace = GridTrace(2, 1, "t", {(1, 1): 3})
    options = PlanOptions(PlanBounds(max_memory=5))
    with pytest.raises(PlanError, match="needs what the pairs cost"):
        plan_grid(trace, grid, linear(grid.keys), options)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((4, 5), "scheduler.max_num_reqs = 4; the deployment has 8"),
        ((8, 3), "speculation.num_draft_tokens = 3; the deployment has 5"),
    ],
)
def test_a_trace_of_other_limits(limits: tuple[int, int], message: str) -> None:
    grid = build_grid(8, 5)
    with pytest.raises(TraceError, match=message):
        plan_grid(GridTrace(*limits, "t", {(1, 1): 1}), grid, linear(grid.keys), PlanOptions())


@pytest.mark.parametrize("name", STORED)
def test_the_plan_is_never_behind_the_default_grid(name: str) -> None:
    """Replayed expected time of the stored traces, with as many pairs, as the grids pick them."""
    trace, surface = read_trace(TRACES / f"{name}.json"), read_surface(TRACES / "surface.json")
    default = build_grid(8, 5)
    plan = plan_grid(trace, default, surface, PlanOptions())
    assert len(plan.grid) <= len(default) and plan.gap < 1e-9

    def replay(grid: Grid) -> float:
        times = {key: plan.times[key].value for key in grid.keys}
        served = grid.with_cost(times.__getitem__)
        return sum(n * times[served.select(*batch)] for batch, n in trace.batches.items())

    ours, theirs = replay(plan.grid), replay(default)
    print(
        f"{name}: {ours / trace.num_steps:.3f} ms planned, {theirs / trace.num_steps:.3f} default"
    )
    assert ours <= theirs * (1 + 1e-12)
    assert plan.expected_ms == pytest.approx(ours / trace.num_steps)
    assert plan.deployed_ms == pytest.approx(theirs / trace.num_steps)
    if name != "trickle":  # which the default grid fits
        assert ours < 0.99 * theirs
    for key in default.keys:
        assert plan.times[key].value == surface.selection_cost(key)
    admissible = [(k.num_reqs, k.num_query_tokens) for k in all_keys(8, 5)]
    slowest = max(
        plan.times[plan.grid.select(*b)].value / plan.times[plan.deployed.select(*b)].value
        for b in admissible
    )
    assert worst_unseen(plan)[1] == slowest


def test_more_pairs_are_never_slower_and_fewer_never_faster() -> None:
    trace, surface = read_trace(TRACES / "mixed.json"), read_surface(TRACES / "surface.json")
    default = build_grid(8, 5)
    times = [
        plan_grid(trace, default, surface, PlanOptions(PlanBounds(max_graphs=count))).expected_ms
        for count in (1, 2, 4, 8, 16)
    ]
    assert times == sorted(times, reverse=True) and times[0] == surface.ms(GraphKey(8, 48))


def test_the_fewest_pairs_within_a_loss() -> None:
    trace, surface = read_trace(TRACES / "mixed.json"), read_surface(TRACES / "surface.json")
    default = build_grid(8, 5)
    plan = plan_grid(trace, default, surface, PlanOptions(max_loss=0.003))
    assert plan.loss <= 0.003
    fewer = PlanOptions(PlanBounds(max_graphs=len(plan.grid) - 1))
    assert plan_grid(trace, default, surface, fewer).loss > 0.003
    with pytest.raises(PlanError, match="no grid within the bounds has an expected step time"):
        plan_grid(trace, default, surface, PlanOptions(PlanBounds(max_graphs=2), max_loss=0.003))


def test_a_share_of_unseen_steps_keeps_pairs_for_them() -> None:
    trace, surface = read_trace(TRACES / "trickle.json"), read_surface(TRACES / "surface.json")
    default, bounds = build_grid(8, 5), PlanBounds(max_graphs=8)
    plain = plan_grid(trace, default, surface, PlanOptions(bounds))
    careful = plan_grid(trace, default, surface, PlanOptions(bounds, unseen=0.1))
    assert worst_unseen(plain)[1] > 3 > 2 > worst_unseen(careful)[1]
    assert "steps of any batch" in format_plan(careful)
    # A tenth of the steps, each admissible pair's size as often as the others'.
    ms = {key: item.value for key, item in careful.times.items()}
    even = {(key.num_reqs, key.num_query_tokens): 1 for key in all_keys(8, 5)}
    parts = [expected_ms(careful.grid, ms, batches) for batches in (trace.batches, even)]
    assert careful.expected_ms == pytest.approx(0.9 * parts[0] + 0.1 * parts[1])


def test_words_of_a_plan_that_drops_pairs() -> None:
    """Two of four pairs serve everything: the sums are known."""
    grid = build_grid(2, 1)
    times = {(1, 1): 1.0, (1, 2): 2.0, (2, 2): 3.0, (2, 4): 4.0}
    surface = surface_of({GraphKey(*pair): ms for pair, ms in times.items()})
    costs = {key: PairCost(2.0**30, 4.5) for key in grid.keys}
    trace = GridTrace(2, 1, "a\nrun", {(1, 1): 999, (1, 2): 1})
    options = PlanOptions(PlanBounds(max_graphs=2))
    plan = plan_grid(trace, grid, surface, options, costs)
    assert plan.grid.keys == (GraphKey(1, 1), GraphKey(2, 4))
    assert sentence(plan) == "drop 2 pairs, save 2.0 GiB and 9 s, lose 0.2 %"
    report = format_plan(plan)
    assert report.splitlines()[-1] == sentence(plan)
    assert "(1, 2)          2        0.1%        -  dropped" in report
    assert "slowed down most, in the trace or not: (1, 2), x2.000" in report
    assert "trace: 1000 decode steps, a run" in report
    assert "    [1, 1],\n    [2, 4],\n" in yaml_fragment(plan)


def test_no_gain() -> None:
    grid = Grid([GraphKey(1, 1), GraphKey(2, 4)], 2, 1)
    plan = plan_grid(
        GridTrace(2, 1, "t", {(1, 1): 9, (2, 4): 1}), grid, linear(all_keys(2, 1)), PlanOptions()
    )
    assert plan.grid.keys == grid.keys and not plan.has_gain
    assert sentence(plan).startswith("no gain: keep the deployment's 2 pairs")


def test_a_gain_from_other_pairs() -> None:
    """Three rows always: a pair of 3 is worth one of 4, and the rest serves nothing."""
    grid = build_grid(4, 1)
    trace = GridTrace(4, 1, "t", {(3, 6): 10})
    plan = plan_grid(trace, grid, linear(grid.keys), PlanOptions())
    assert plan.grid.keys == (GraphKey(3, 6), GraphKey(4, 8))
    assert plan.added == (GraphKey(3, 6),) and len(plan.dropped) == 5
    # 1 + 0.3 B + 0.2 Q, which interpolation meets: 3.1 against 3.8.
    assert (plan.expected_ms, plan.deployed_ms) == (pytest.approx(3.1), pytest.approx(3.8))
    assert sentence(plan) == "drop 5 pairs, add 1, gain 18.4 %"
    assert "~3.1" in format_plan(plan) and "~ interpolated" in format_plan(plan)


def test_interpolation_is_exact_where_costs_are_linear() -> None:
    known = {k: 2 + 0.7 * k.num_reqs + 0.3 * k.num_query_tokens for k in build_grid(8, 5).keys}
    found = estimate(all_keys(8, 5), known)
    for key, item in found.items():
        assert item.value == pytest.approx(2 + 0.7 * key.num_reqs + 0.3 * key.num_query_tokens)
        assert item.origin is (Origin.MEASURED if key in known else Origin.INTERPOLATED)


def test_what_lies_outside_the_measured_pairs_is_bounded_by_one_that_covers_it() -> None:
    known = {GraphKey(2, 4): 3.0, GraphKey(4, 8): 5.0, GraphKey(4, 24): 9.0}
    found = estimate([GraphKey(1, 1), GraphKey(2, 12), GraphKey(3, 6), GraphKey(2, 2)], known)
    assert found[GraphKey(1, 1)].value == 3.0 and found[GraphKey(1, 1)].origin is Origin.BOUND
    assert found[GraphKey(2, 12)].value == 9.0
    assert found[GraphKey(3, 6)].value == 4.0
    assert found[GraphKey(2, 2)].value == 3.0
    with pytest.raises(SurfaceError, match=r"nothing is known of \(5, 5\)"):
        estimate([GraphKey(5, 5)], known)
    # A measured pair that covers it and is faster: nobody would take longer.
    dip = {GraphKey(1, 1): 1.0, GraphKey(1, 3): 9.0, GraphKey(2, 6): 4.0}
    assert estimate([GraphKey(1, 2)], dip)[GraphKey(1, 2)].value == 4.0


def test_candidates() -> None:
    keys, phrase = candidate_keys(build_grid(8, 5))
    assert list(keys) == all_keys(8, 5) and phrase == "every admissible pair (188)"
    grid = build_grid(256, 5, [100], [2])
    keys, phrase = candidate_keys(grid)
    assert set(grid.keys) <= set(keys) and keys[-1] == GraphKey(256, 1536)
    assert len(keys) <= 400 and phrase.startswith(f"{len(keys)} of 164736 admissible pairs")
    Grid(keys, 256, 5).check_coverage()


def test_a_lattice_is_planned_too() -> None:
    """Hundreds of batches, merged by the pairs that serve them; no exchange of a pair is better."""
    default, rng = build_grid(16, 5), np.random.default_rng(1)
    batches = {}
    for _ in range(300):
        rows = int(rng.integers(1, 17))
        batches[rows, int(rng.integers(rows, rows * 6 + 1))] = int(rng.integers(1, 9))
    trace = GridTrace(16, 5, "t", batches)
    plan = plan_grid(trace, default, linear(default.keys), PlanOptions(PlanBounds(max_graphs=12)))
    assert "of 696 admissible pairs" in plan.candidates
    assert len(plan.grid) == 12 and plan.gap < 1e-9
    keys = list(plan.times)
    sizes = np.array([(key.num_reqs, key.num_query_tokens) for key in keys])
    covers = (sizes[:, None] >= np.array(list(batches))[None]).all(axis=2)
    times = np.where(covers, np.array([plan.times[key].value for key in keys])[:, None], np.inf)
    steps = np.array(list(batches.values()))

    def total(chosen: list[int]) -> float:
        return float(times[chosen].min(axis=0) @ steps) / steps.sum()

    own = [keys.index(key) for key in plan.grid.keys]
    assert total(own) == pytest.approx(plan.expected_ms)
    for leaving in own[:-1]:
        rest = [index for index in own if index != leaving]
        assert all(total([*rest, k]) >= total(own) - 1e-9 for k in range(len(keys)))


def test_full_surface_keeps_what_it_is_like() -> None:
    surface = read_surface(TRACES / "surface.json")
    keys, _ = candidate_keys(build_grid(8, 5))
    full = full_surface(estimate_times(keys, surface), surface)
    assert (full.context_len, len(full.points)) == (surface.context_len, 188)
    assert replace(full, points=surface.points) == surface
