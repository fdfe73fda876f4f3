"""The choice of a grid as a facility location problem, by an exact solver.

Owns the reductions, the integer program and its answer. Knows no file and no words for people. Data
flow: candidates with their costs, batches with their weights, bounds -> the pairs with the least
weighted time, and how far from the optimum they can be.

Batch e is served by the cheapest chosen pair k that covers it. With w_e the batch's share of steps,
t_k the pair's time and L the largest pair, which is always chosen:

    maximise   sum w_e (t_L - t_k) x_ek
    subject to sum_k x_ek <= 1,  x_ek <= y_k,  y_L = 1,  sums of y_k within the bounds,  y in {0, 1}

Since L covers every admissible batch, every chosen grid does. Two reductions keep the optimum:
batches that the same pairs serve become one, and a pair is left out where another one covers as
much for no more of anything.

Source: the uncapacitated facility location and p-median problems; solved by HiGHS through SciPy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from decodegrid.capture.grid import GraphKey, Grid

TOLERANCE = 1e-6
"""Share of a bound that sums may be off by, as they may in the solver."""


class PlanError(ValueError):
    """Bounds that no grid can meet, or a plan that cannot be made."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that may be captured, and what it costs."""

    key: GraphKey
    ms: float
    """Time of a step in it."""
    memory_bytes: float = 0.0
    capture_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """What the pairs of a grid may cost together; None is no bound."""

    max_graphs: int | None = None
    """Captured pairs."""
    max_memory: float | None = None
    """Bytes."""
    max_capture_s: float | None = None
    """Seconds."""

    def __post_init__(self) -> None:
        for name in ("max_graphs", "max_memory", "max_capture_s"):
            value = getattr(self, name)
            least = 1 if name == "max_graphs" else 0
            if value is not None and not least <= value < math.inf:
                raise PlanError(f"{name} is {value}; a finite number of at least {least} is needed")

    def admits(self, candidates: Sequence[Candidate]) -> bool:
        """Whether pairs are together within all bounds."""
        return not self.exceeded(candidates)

    def exceeded(self, candidates: Sequence[Candidate]) -> str:
        """The first bound that pairs break, with both numbers; empty where they break none."""
        for name, limit, costs in self.rows(candidates):
            total = math.fsum(costs)
            if total > limit * (1.0 + TOLERANCE):
                return f"{name} is {limit:g}, and they take {total:g}"
        return ""

    def rows(self, candidates: Sequence[Candidate]) -> list[tuple[str, float, list[float]]]:
        """(name, limit, cost of each pair) of the bounds that are set."""
        columns = (
            ("max_graphs", self.max_graphs, [1.0] * len(candidates)),
            ("max_memory", self.max_memory, [item.memory_bytes for item in candidates]),
            ("max_capture_s", self.max_capture_s, [item.capture_s for item in candidates]),
        )
        return [(name, limit, costs) for name, limit, costs in columns if limit is not None]


@dataclass(frozen=True, slots=True)
class Solution:
    """A chosen grid."""

    keys: tuple[GraphKey, ...]
    """In order. Without the largest pair none of them could be left out for nothing."""
    expected_ms: float
    """Time of a step, averaged over the batches."""
    gap: float
    """Share by which the best grid can be better at most; 0 is a proof that none is."""


Batches = Mapping[tuple[int, int], float]


def expected_ms(grid: Grid, ms: Mapping[GraphKey, float], batches: Batches) -> float:
    """Time of a step of a trace on a grid that picks pairs as it does, averaged over the steps."""
    times = [steps * ms[grid.select(*batch)] for batch, steps in batches.items()]
    return math.fsum(times) / math.fsum(batches.values())


def solve_grid(
    candidates: Sequence[Candidate],
    batches: Batches,
    limits: tuple[int, int],
    bounds: PlanBounds,
    *,
    time_limit_s: float = 60.0,
) -> Solution:
    """The pairs within the bounds with the least expected step time.

    Args:
        candidates: each pair once, the largest admissible one among them.
        batches: steps, or any weights, by (requests, query tokens), all admissible.
        limits: max_num_reqs and K of the grid.
        time_limit_s: after which the best grid found so far is taken.

    Raises:
        PlanError: the largest pair alone is beyond a bound, or the time was too short for any grid.
    """
    max_num_reqs, num_draft_tokens = limits
    top = GraphKey(max_num_reqs, max_num_reqs * (num_draft_tokens + 1))
    largest = next((item for item in candidates if item.key == top), None)
    if largest is None:
        raise PlanError(f"the largest admissible pair {top} is not among the candidates")
    broken = bounds.exceeded([largest])
    if broken:
        raise PlanError(f"no grid is within the bounds: every grid has the pair {top}; {broken}")
    ms = {item.key: item.ms for item in candidates}
    kept = _undominated(candidates, largest, batches)
    weights, serves = _served(kept, largest, batches)
    chosen, gap = _choose(kept, weights, serves, largest, bounds, time_limit_s)
    # What serves no batch costs something and gains nothing.
    grid = Grid([*chosen, top], max_num_reqs, num_draft_tokens, ms.__getitem__)
    used = {grid.select(*batch) for batch in batches} | {top}
    grid = Grid(used, max_num_reqs, num_draft_tokens, ms.__getitem__)
    return Solution(grid.keys, expected_ms(grid, ms, batches), gap)


def _covers(candidates: Sequence[Candidate], batches: Batches) -> NDArray[np.bool_]:
    """(candidates, batches) whether a pair covers a batch."""
    sizes = np.array([(item.key.num_reqs, item.key.num_query_tokens) for item in candidates])
    live = np.array(list(batches))
    return np.asarray((sizes[:, None, :] >= live[None, :, :]).all(axis=2))


def _undominated(
    candidates: Sequence[Candidate], largest: Candidate, batches: Batches
) -> list[Candidate]:
    """The pairs but the largest that can be worth choosing: faster than the largest, and no other
    pair covers as much of the trace and costs as little; of equals the first stays."""
    faster = [item for item in candidates if item.ms < largest.ms]
    if not faster:
        return []
    covers = _covers(faster, batches)
    costs = np.array([(item.ms, item.memory_bytes, item.capture_s) for item in faster])
    kept: list[Candidate] = []
    for index, item in enumerate(faster):
        others = ~(covers[index] & ~covers).any(axis=1) & (costs <= costs[index]).all(axis=1)
        backwards = ~(covers & ~covers[index]).any(axis=1) & (costs >= costs[index]).all(axis=1)
        equal = others & backwards
        beaten = (others & ~equal).any() or equal[:index].any()
        if covers[index].any() and not beaten:
            kept.append(item)
    return kept


def _served(
    kept: Sequence[Candidate], largest: Candidate, batches: Batches
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Shares of the steps, and (candidates, classes) what serves them; a class is all batches that
    the same pairs cover."""
    if not kept:
        return np.zeros(0), np.zeros((0, 0), dtype=np.bool_)
    steps = np.array(list(batches.values()), dtype=np.float64)
    serves, place = np.unique(_covers(kept, batches), axis=1, return_inverse=True)
    shares = np.zeros(serves.shape[1])
    np.add.at(shares, place.ravel(), steps / steps.sum())
    return shares, serves


def _choose(
    kept: Sequence[Candidate],
    weights: NDArray[np.float64],
    serves: NDArray[np.bool_],
    largest: Candidate,
    bounds: PlanBounds,
    time_limit_s: float,
) -> tuple[list[GraphKey], float]:
    """Solve the integer program; the chosen pairs without the largest, and the gap."""
    if not kept:
        return [], 0.0
    pairs, classes = np.nonzero(serves)
    num_links, num_pairs, num_classes = len(pairs), len(kept), serves.shape[1]
    saved = np.array([largest.ms - item.ms for item in kept])
    gains = weights[classes] * saved[pairs] / largest.ms
    links, ones = np.arange(num_links), np.ones(num_links)
    width = num_pairs + num_links
    once = csr_array((ones, (classes, num_pairs + links)), shape=(num_classes, width))
    opened = csr_array(
        (
            np.concatenate([ones, -ones]),
            (np.concatenate([links, links]), np.concatenate([num_pairs + links, pairs])),
        ),
        shape=(num_links, width),
    )
    constraints = [LinearConstraint(once, ub=1.0), LinearConstraint(opened, ub=0.0)]
    for (_, limit, costs), (_, _, taken) in zip(
        bounds.rows(kept), bounds.rows([largest]), strict=True
    ):
        row = np.concatenate([costs, np.zeros(num_links)])
        scale = max(limit, 1e-300)
        constraints.append(LinearConstraint(row[None] / scale, ub=(limit - taken[0]) / scale))
    result = milp(
        np.concatenate([np.zeros(num_pairs), -gains]),
        integrality=np.concatenate([np.ones(num_pairs), np.zeros(num_links)]),
        bounds=Bounds(0.0, 1.0),
        constraints=constraints,
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise PlanError(
            f"the solver found no grid in {time_limit_s:g} s ({result.message}); allow more time"
        )
    chosen = [item for item, value in zip(kept, result.x, strict=False) if value > 0.5]
    if not bounds.admits([*chosen, largest]):
        raise PlanError(f"the solver's grid is beyond a bound: {bounds.exceeded(chosen)}")
    # The times that are left, not those that are saved, are what the gap is a share of.
    best = 1.0 + float(result.mip_dual_bound)
    reached = 1.0 + float(result.fun)
    return [item.key for item in chosen], max(0.0, (reached - best) / reached)
