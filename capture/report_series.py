"""What the report's drawings show, worked out from a profile: no drawing library is involved.

Owns the derived numbers, which the page, its tables and the image files share. Data flow: `Profile`
-> matrices, staircases, shares -> decodegrid.capture.report_figures, report_tables, report_png.
"""

from dataclasses import dataclass

from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.capture.profile_document import ContextSurface, GraphEntry, PositionCounts, Profile
from decodegrid.capture.surface import SurfacePoint

MIB = 1 << 20
_NAME_LENGTH = 40


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Step times with a row for each captured number of requests."""

    num_reqs: list[int]
    columns: list[str]
    by_request: bool
    """Columns are query tokens for each request, else query tokens."""
    points: list[list[SurfacePoint | None]]
    """By row and column; None where no pair is captured."""
    keys: list[list[GraphKey | None]]


@dataclass(frozen=True, slots=True)
class Stair:
    """A run of query tokens that one captured pair serves."""

    first_tokens: int
    last_tokens: int
    key: GraphKey
    point: SurfacePoint


@dataclass(frozen=True, slots=True)
class PositionShare:
    """Drafts of one position; shares are None where nothing was counted."""

    position: int
    """From 1."""
    drafted: int
    offered: int
    verified: int
    reached: int
    accepted: int
    of_reached: float | None
    """Accepted of those whose predecessors were all accepted."""
    of_verified: float | None
    """Accepted of all that were verified: the survival to this position."""


def heat_map(part: ContextSurface) -> HeatMap:
    """The pairs as a matrix, by query tokens a request where that makes fewer columns."""
    points = part.surface().points
    totals = {key: float(key.num_query_tokens) for key in points}
    per_req = {key: key.num_query_tokens / key.num_reqs for key in points}
    by_request = len(set(per_req.values())) <= len(set(totals.values()))
    place = per_req if by_request else totals
    columns = sorted(set(place.values()))
    rows = sorted({key.num_reqs for key in points})
    keys: list[list[GraphKey | None]] = [[None] * len(columns) for _ in rows]
    for key, column in place.items():
        keys[rows.index(key.num_reqs)][columns.index(column)] = key
    found = [[None if key is None else points[key] for key in row] for row in keys]
    return HeatMap(rows, [f"{column:.4g}" for column in columns], by_request, found, keys)


def grid_of(profile: Profile, part: ContextSurface) -> Grid:
    """The grid as a run picks from it: pairs by their times at this context.

    Raises:
        ValueError: the pairs do not fit the profile's limits, or do not cover every batch.
    """
    surface = part.surface()
    grid = Grid(
        surface.points, profile.max_num_reqs, profile.num_draft_tokens, surface.selection_cost
    )
    grid.check_coverage()
    return grid


def staircase(grid: Grid, part: ContextSurface, num_reqs: int) -> list[Stair]:
    """What that many requests cost by query tokens, from one each to all their drafts.

    `grid` covers every batch; neighbours that one pair serves are one stair.
    """
    points = part.surface().points
    stairs: list[Stair] = []
    for total in range(num_reqs, num_reqs * (grid.num_draft_tokens + 1) + 1):
        key = grid.select(num_reqs, total)
        if stairs and stairs[-1].key == key:
            stairs[-1] = Stair(stairs[-1].first_tokens, total, key, points[key])
        else:
            stairs.append(Stair(total, total, key, points[key]))
    return stairs


def staircases(profile: Profile, part: ContextSurface) -> dict[int, list[Stair]]:
    """The staircase of each captured number of requests. Raises ValueError as `grid_of`."""
    grid = grid_of(profile, part)
    rows = sorted({key.num_reqs for key in grid.keys})
    return {num_reqs: staircase(grid, part, num_reqs) for num_reqs in rows}


def position_shares(counts: PositionCounts) -> list[PositionShare]:
    """One line for each draft position, as far as all five lists go."""
    rows = zip(
        counts.drafted,
        counts.offered,
        counts.verified,
        counts.reached,
        counts.accepted,
        strict=False,
    )
    return [
        PositionShare(
            position,
            *row,
            of_reached=_share(row[4], row[3]),
            of_verified=_share(row[4], row[2]),
        )
        for position, row in enumerate(rows, start=1)
    ]


def mean_acceptance(profile: Profile) -> float | None:
    """Accepted drafts of those whose predecessors were accepted, over all positions, 0..1; None
    without a live run that reached one."""
    if profile.live is None:
        return None
    counts = profile.live.positions
    share = _share(sum(counts.accepted), sum(counts.reached))
    return None if share is None else min(share, 1.0)


def roofline_ratio(entry: GraphEntry) -> float | None:
    """Roofline time over replay time: 1 is as fast as the machine allows; None if not known."""
    if entry.replay_ms is None or entry.roofline_ms is None:
        return None
    return _share(entry.roofline_ms, entry.replay_ms)


def short_name(name: str) -> str:
    """A name for a drawing: one line of at most 40 characters."""
    line = " ".join(name.split())
    return line if len(line) <= _NAME_LENGTH else line[: _NAME_LENGTH - 3] + "..."


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
