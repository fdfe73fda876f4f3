"""The plan advisor: which pairs to capture for the batches that a deployment really sees.

Owns what is compared with what, and when a plan is worth nothing. The solver is in
`decodegrid.capture.plan_solve`, the words in `decodegrid.capture.plan_report`. Data flow: a trace,
the deployment's grid, its step times, bounds -> `Plan`.

A plan minimises the expected step time of the trace: its batches, each on the cheapest captured
pair that covers it, pads paid for. It takes the trace's totals as they are, while the verify budget
may choose others on another grid: a trace that was recorded on a coarse grid asks for little that
this grid lacks. `decodegrid.capture.plan_load` simulates the budget too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.capture.plan_costs import PairCost, total_cost
from decodegrid.capture.plan_solve import (
    Batches,
    Candidate,
    PlanBounds,
    PlanError,
    Solution,
    expected_ms,
    solve_grid,
)
from decodegrid.capture.plan_times import Estimate, candidate_keys, estimate, estimate_times
from decodegrid.capture.plan_trace import GridTrace
from decodegrid.capture.surface import Surface, SurfacePoint

MIN_GAIN = 0.001
"""Share of the step time below which a plan with as many pairs is not worth a change."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan is asked for."""

    bounds: PlanBounds = field(default_factory=PlanBounds)
    """Where it has none at all, as many pairs as the deployment captures are allowed."""
    max_loss: float | None = None
    """Share by which the expected step time may grow over the deployment's: then the grid with the
    fewest pairs is looked for instead of the fastest."""
    unseen: float = 0.0
    """Share of the steps that may be any batch, below 1: they are spread evenly over the sizes of
    the candidates. The trace has the rest."""
    time_limit_s: float = 60.0
    """Of each call of the solver."""

    def __post_init__(self) -> None:
        for name, value in (("max_loss", self.max_loss), ("time_limit_s", self.time_limit_s)):
            if value is not None and not 0 <= value < math.inf:
                raise PlanError(f"{name} is {value}; a finite number of at least 0 is needed")
        if not 0 <= self.unseen < 1:
            raise PlanError(f"unseen is {self.unseen}; at least 0 and below 1 is needed")


@dataclass(frozen=True, slots=True)
class Plan:
    """A proposed grid beside the deployment's."""

    trace: GridTrace
    deployed: Grid
    grid: Grid
    """Both pick pairs by the same times."""
    times: Mapping[GraphKey, Estimate]
    """Of all candidates, ms."""
    costs: Mapping[GraphKey, PairCost] | None
    """Of all candidates; None where nothing is known."""
    deployed_ms: float
    """Expected step time of the trace, with the steps of any batch."""
    expected_ms: float
    gap: float
    """Share by which the best grid could be faster at most."""
    unseen: float
    """Share of the steps that may be any batch."""
    candidates: str
    """What was chosen from, for people."""
    is_forced: bool
    """The deployment's own grid is beyond a bound."""

    @property
    def dropped(self) -> tuple[GraphKey, ...]:
        """Pairs of the deployment that the plan leaves out."""
        return tuple(key for key in self.deployed.keys if key not in self.grid.keys)

    @property
    def added(self) -> tuple[GraphKey, ...]:
        """Pairs of the plan that the deployment does not capture."""
        return tuple(key for key in self.grid.keys if key not in self.deployed.keys)

    @property
    def loss(self) -> float:
        """Growth of the expected step time as a share; negative for a gain."""
        return self.expected_ms / self.deployed_ms - 1.0

    @property
    def has_gain(self) -> bool:
        """Fewer pairs, less time, or a bound that the deployment's grid breaks."""
        fewer = len(self.grid) < len(self.deployed)
        return self.is_forced or fewer or self.loss < -MIN_GAIN

    def cost_of(self, grid: Grid) -> PairCost | None:
        """What all pairs of a grid cost together."""
        return None if self.costs is None else total_cost(self.costs[key] for key in grid.keys)


def plan_grid(
    trace: GridTrace,
    deployed: Grid,
    surface: Surface,
    options: PlanOptions,
    costs: Mapping[GraphKey, PairCost] | None = None,
) -> Plan:
    """The best grid for a trace.

    Args:
        surface: measured times, those of the largest pair among them.
        costs: measured costs of pairs, those of the largest among them; needed for a bound on
            memory or capture time.

    Raises:
        TraceError: the trace has other limits than the grid.
        SurfaceError: no time covers a pair.
        PlanError: no grid is within the bounds, or one of them needs costs.
    """
    limits = (deployed.max_num_reqs, deployed.num_draft_tokens)
    trace.check_fits(*limits)
    keys, phrase = candidate_keys(deployed)
    times = estimate_times(keys, surface)
    all_costs = None if costs is None else estimate_costs(keys, costs)
    bounds = _bounds_of(options, len(deployed), has_costs=costs is not None)
    items = {key: _candidate(key, times, all_costs) for key in keys}
    ms = {key: item.ms for key, item in items.items()}
    deployed = deployed.with_cost(ms.__getitem__)
    batches = _with_unseen(trace, keys, options.unseen)
    deployed_ms = expected_ms(deployed, ms, batches)
    job = _Job(list(items.values()), batches, limits, options.time_limit_s)
    if options.max_loss is None:
        found = job.solve(bounds)
    else:
        found = job.fewest(bounds, deployed_ms * (1.0 + options.max_loss), len(deployed))
    is_forced = not bounds.admits([items[key] for key in deployed.keys])
    grid = Grid(found.keys, *limits, ms.__getitem__)
    grid.check_coverage()
    plan = Plan(
        trace,
        deployed,
        grid,
        times,
        all_costs,
        deployed_ms,
        found.expected_ms,
        found.gap,
        options.unseen,
        phrase,
        is_forced,
    )
    # A solver that ran out of time may have found a grid that is worse.
    is_worse = options.max_loss is None and plan.loss > 1e-9
    if not is_forced and (is_worse or not plan.has_gain):
        return replace(plan, grid=deployed, expected_ms=deployed_ms)
    return plan


def estimate_costs(
    keys: Iterable[GraphKey], known: Mapping[GraphKey, PairCost]
) -> dict[GraphKey, PairCost]:
    """Costs of pairs, those of uncaptured ones interpolated as step times are.

    Raises:
        SurfaceError: a pair is larger than everything known.
    """
    wanted = list(keys)
    memory = estimate(wanted, {key: cost.memory_bytes for key, cost in known.items()})
    seconds = estimate(wanted, {key: cost.capture_s for key, cost in known.items()})
    return {key: PairCost(memory[key].value, seconds[key].value) for key in wanted}


def full_surface(times: Mapping[GraphKey, Estimate], like: Surface) -> Surface:
    """A surface of estimated times, for a simulation; the rest is `like`'s."""
    points = {key: SurfacePoint(*(item.value,) * 3, 1) for key, item in times.items()}
    return replace(like, points=points)


def worst_unseen(plan: Plan) -> tuple[tuple[int, int], float]:
    """The admissible batch that the plan slows down most, and by what factor.

    The trace may not hold it: what a plan leaves out is missed by batches that come later.
    """
    before, after = plan.deployed, plan.grid
    tops = sorted({key.num_reqs for key in (*before.keys, *after.keys)})
    # Grids choose alike for all batches between two captured numbers of requests.
    rows = sorted({*tops, *(top + 1 for top in tops[:-1]), 1})
    worst, factor = (1, 1), 0.0
    for num_reqs in rows:
        for total in range(num_reqs, num_reqs * (before.num_draft_tokens + 1) + 1):
            old = plan.times[before.select(num_reqs, total)].value
            new = plan.times[after.select(num_reqs, total)].value
            if new / old > factor:
                worst, factor = (num_reqs, total), new / old
    return worst, factor


def _with_unseen(trace: GridTrace, keys: Sequence[GraphKey], share: float) -> Batches:
    """The trace's steps, of which a share is spread evenly over the sizes of pairs."""
    if not share:
        return trace.batches
    batches = {batch: steps * (1.0 - share) for batch, steps in trace.batches.items()}
    each = trace.num_steps * share / len(keys)
    for key in keys:
        batch = (key.num_reqs, key.num_query_tokens)
        batches[batch] = batches.get(batch, 0.0) + each
    return batches


def _bounds_of(options: PlanOptions, num_deployed: int, *, has_costs: bool) -> PlanBounds:
    bounds = options.bounds
    if not has_costs and (bounds.max_memory is not None or bounds.max_capture_s is not None):
        raise PlanError(
            "a bound on memory or capture time needs what the pairs cost, which is not known"
        )
    return PlanBounds(max_graphs=num_deployed) if bounds == PlanBounds() else bounds


@dataclass(frozen=True, slots=True)
class _Job:
    """What stays the same between two calls of the solver."""

    items: Sequence[Candidate]
    batches: Batches
    limits: tuple[int, int]
    time_limit_s: float

    def solve(self, bounds: PlanBounds) -> Solution:
        return solve_grid(
            self.items, self.batches, self.limits, bounds, time_limit_s=self.time_limit_s
        )

    def fewest(self, bounds: PlanBounds, limit_ms: float, num_deployed: int) -> Solution:
        """The grid with the fewest pairs that is fast enough, of those within the bounds.

        Raises PlanError where none is.
        """
        high = min(bounds.max_graphs or num_deployed, num_deployed)
        best = self.solve(replace(bounds, max_graphs=high))
        if best.expected_ms > limit_ms * (1.0 + 1e-9):
            raise PlanError(
                f"no grid within the bounds has an expected step time of {limit_ms:.4g} ms, which "
                f"is the deployment's and the loss that is allowed; the best has "
                f"{best.expected_ms:.4g} ms"
            )
        low, high = 1, len(best.keys)
        while low < high:
            middle = (low + high) // 2
            found = self.solve(replace(bounds, max_graphs=middle))
            if found.expected_ms <= limit_ms * (1.0 + 1e-9):
                best, high = found, len(found.keys)
            else:
                low = middle + 1
        return best


def _candidate(
    key: GraphKey, times: Mapping[GraphKey, Estimate], costs: Mapping[GraphKey, PairCost] | None
) -> Candidate:
    if costs is None:
        return Candidate(key, times[key].value)
    return Candidate(key, times[key].value, costs[key].memory_bytes, costs[key].capture_s)
