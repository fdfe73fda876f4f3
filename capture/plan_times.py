"""What a pair that was never captured would cost: read off the measured ones.

Owns the candidates of a plan and the interpolation. Measures nothing. Data flow: a surface (or any
measured number of each pair) and a list of pairs -> an `Estimate` for each, which says whether it
was measured, interpolated, or is only a bound.

Between measured pairs numbers are linear in B at equal Q / B, and linear in Q at equal B: exact for
whatever is linear in rows and query tokens. Real step times are stairs in places (tiles of a GPU,
vectors of a CPU), which an interpolation does not see; a plan that hangs on it should be measured.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.capture.surface import Surface, SurfaceError

MAX_CANDIDATES = 400
"""Up to so many admissible pairs, every one is a candidate; above, a lattice is."""
_LATTICE_ROWS = 16


class Origin(Enum):
    """How a number of a pair came about."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    BOUND = "bound"
    """The least of the measured pairs that cover it: it costs no more than that."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number of one pair."""

    value: float
    origin: Origin


def candidate_keys(grid: Grid) -> tuple[tuple[GraphKey, ...], str]:
    """The pairs that a plan chooses from, those of the grid among them, and what they are.

    Returns:
        The pairs in order, the largest admissible one last; and a phrase for people.
    """
    most, per_req = grid.max_num_reqs, grid.num_draft_tokens + 1
    num_admissible = sum(b * grid.num_draft_tokens + 1 for b in range(1, most + 1))
    if num_admissible <= MAX_CANDIDATES:
        keys = {GraphKey(b, q) for b in range(1, most + 1) for q in range(b, b * per_req + 1)}
        return tuple(sorted(keys)), f"every admissible pair ({len(keys)})"
    step = -(-most // _LATTICE_ROWS)
    rows = {1 << i for i in range(most.bit_length())} | {*range(step, most, step), most}
    rows |= {key.num_reqs for key in grid.keys}
    keys = {GraphKey(b, b * n) for b in rows for n in range(1, per_req + 1)} | set(grid.keys)
    return (
        tuple(sorted(keys)),
        f"{len(keys)} of {num_admissible} admissible pairs: 1 to {per_req} query tokens for each "
        f"of the powers of two, the multiples of {step} and the captured numbers of requests",
    )


def estimate_times(keys: Iterable[GraphKey], surface: Surface) -> dict[GraphKey, Estimate]:
    """Step times of pairs, ms; differences below the noise are ignored as when a grid picks one.

    Raises:
        SurfaceError: a pair is larger than everything measured.
    """
    known = {key: surface.selection_cost(key) for key in surface.points}
    return estimate(keys, known)


def estimate(keys: Iterable[GraphKey], known: Mapping[GraphKey, float]) -> dict[GraphKey, Estimate]:
    """A number of each pair from the known ones, never above that of a known pair that covers it.

    Raises:
        SurfaceError: a pair is larger than everything known.
    """
    levels = _Levels(known)
    found = {}
    for key in keys:
        if key in known:
            found[key] = Estimate(known[key], Origin.MEASURED)
            continue
        covering = [
            value
            for other, value in known.items()
            if other.covers(key.num_reqs, key.num_query_tokens)
        ]
        if not covering:
            raise SurfaceError(f"nothing is known of {key} or of a pair that covers it")
        value, bound = levels.between(key), min(covering)
        if value is None or value > bound:
            found[key] = Estimate(bound, Origin.BOUND)
        else:
            found[key] = Estimate(value, Origin.INTERPOLATED)
    return found


class _Levels:
    """Known numbers by B, and there by Q / B."""

    def __init__(self, known: Mapping[GraphKey, float]) -> None:
        points: dict[int, list[tuple[float, float]]] = {}
        for key, value in sorted(known.items()):
            point = (key.num_query_tokens / key.num_reqs, value)
            points.setdefault(key.num_reqs, []).append(point)
        self.rows = sorted(points)
        self.points = {
            num_reqs: tuple(np.array(column) for column in zip(*points[num_reqs], strict=True))
            for num_reqs in self.rows
        }

    def between(self, key: GraphKey) -> float | None:
        """The number between the two levels around a pair; None where one does not reach it."""
        per_req = key.num_query_tokens / key.num_reqs
        above = next(
            (b for b in self.rows[bisect_left(self.rows, key.num_reqs) :] if self._has(b, per_req)),
            None,
        )
        below = next(
            (
                b
                for b in reversed(self.rows[: bisect_right(self.rows, key.num_reqs)])
                if self._has(b, per_req)
            ),
            None,
        )
        if above is None or below is None:
            return None
        low, high = self._at(below, per_req), self._at(above, per_req)
        if above == below:
            return low
        share = (key.num_reqs - below) / (above - below)
        return low + share * (high - low)

    def _has(self, num_reqs: int, per_req: float) -> bool:
        return per_req <= float(self.points[num_reqs][0][-1])

    def _at(self, num_reqs: int, per_req: float) -> float:
        """On one level; below its first column what that column costs, which pads pay."""
        columns, values = self.points[num_reqs]
        return float(np.interp(per_req, columns, values))
