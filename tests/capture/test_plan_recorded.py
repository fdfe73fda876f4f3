"""Plans for the batches of real runs against the grid that they were recorded on.

traces/recorded_*.json are what `python -m benchmarks.record_traces` wrote on the embedded model,
with the step times that its verify budget had.
"""

from pathlib import Path

import pytest

from decodegrid.capture.grid import Grid, build_grid
from decodegrid.capture.plan import PlanOptions, plan_grid
from decodegrid.capture.plan_solve import PlanBounds
from decodegrid.capture.plan_trace import read_trace
from decodegrid.capture.surface_search import read_surface

TRACES = Path(__file__).parent / "traces"
NAMES = ("one_user", "arrivals", "full_queue")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_plan_is_never_behind_a_grid_of_as_many_pairs(name: str, share: float) -> None:
    """Replayed expected time, every batch in the pair that the grid picks for it; with half the
    pairs, against the default's rule for them: fewer query tokens a request."""
    trace = read_trace(TRACES / f"recorded_{name}.json")
    surface = read_surface(TRACES / "recorded_surface.json")
    assert trace.source.startswith("recorded: ")
    default = build_grid(8, 5) if share == 1 else build_grid(8, 5, (), (1, 3, 6))
    plan = plan_grid(trace, default, surface, PlanOptions(PlanBounds(max_graphs=len(default))))
    assert len(plan.grid) <= len(default) and plan.gap < 1e-9

    def replay(grid: Grid) -> float:
        times = {key: plan.times[key].value for key in grid.keys}
        served = grid.with_cost(times.__getitem__)
        return sum(n * times[served.select(*batch)] for batch, n in trace.batches.items())

    ours, theirs = replay(plan.grid), replay(default)
    per_step = ours / trace.num_steps, theirs / trace.num_steps
    print(f"{name}, {len(default)} pairs: {per_step[0]:.3f} ms planned, {per_step[1]:.3f} default")
    assert ours <= theirs * (1 + 1e-12)
    if share < 1:
        assert ours < 0.99 * theirs
