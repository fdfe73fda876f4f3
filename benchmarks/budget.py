"""The verify budget benchmark: `python -m benchmarks.budget [--json FILE] [--repeats N]`.

Measures what choosing a total costs on the host, for 8, 64 and 256 requests of 5 drafts, beside a
NumPy sort of the same rates, which no choice can do without, and beside a choice whose walk is in
NumPy instead of compiled, as where there are no native kernels; then serves mixed prompts under
each policy (`benchmarks.budget_serving`). Owns the order of the measurements and the printing.
Contenders take turns; every line gives min / median / max over the repeats. The numbers mean
something only on a machine that does nothing else meanwhile.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.budget_serving import LOADS, ServingPlan, measure_serving
from benchmarks.machine import describe_machine
from benchmarks.results import format_rows, save_json
from benchmarks.timing import interleave, paired_ratio, spread, time_call
from decodegrid.capture.budget import VerifyBudget
from decodegrid.capture.grid import build_grid
from decodegrid.capture.surface import Surface, SurfacePoint
from decodegrid.capture.total_scan import MakeScan
from decodegrid.configs.load import load_config
from decodegrid.engine.surface_run import fastest_scan
from decodegrid.kernels.native import install_native_kernels

BATCHES = (8, 64, 256)
NUM_DRAFT_TOKENS = 5
NUM_INPUTS = 64
"""Different rates that take turns, so that no branch is learned by heart."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    repeats: int
    serving: ServingPlan | None
    """None leaves the serving parts out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; 2 for arguments or a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--repeats", type=int, default=101, metavar="N")
    parser.add_argument("--config", type=Path, metavar="FILE", help="deployment; default tiny.yaml")
    parser.add_argument("--serving-repeats", type=int, default=5, metavar="N")
    parser.add_argument("--load", type=int, choices=LOADS, help="only that many requests at once")
    parser.add_argument("--choice-only", action="store_true", help="without the serving parts")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; a smoke test")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if args.serving_repeats < 1:
        parser.error(f"--serving-repeats must be at least 1, got {args.serving_repeats}")
    loads = LOADS if args.load is None else (args.load,)
    serving = ServingPlan(args.serving_repeats, 96, 8, loads)
    if args.quick:
        serving = ServingPlan(1, 16, 2, loads)
    plan = Plan(3 if args.quick else args.repeats, None if args.choice_only else serving)
    try:
        result = measure(args.config, plan)
        save_json(result, args.json)
    except (ValueError, OSError) as error:
        print(f"benchmarks.budget: error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(path: Path | None, plan: Plan) -> dict[str, Any]:
    """All parts in order, as one result."""
    machine = describe_machine()
    install_native_kernels(load_config(path).cache_dir)
    print(f"{machine['cpu_model']}, {machine['versions']}")
    return {
        **machine,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "repeats": plan.repeats,
        **report_choice(plan, fastest_scan()),
        **({} if plan.serving is None else measure_serving(path, plan.serving)),
    }


def report_choice(plan: Plan, make_scan: MakeScan) -> dict[str, Any]:
    """Time of one choice, with usable drafts that stay and that change with every call."""
    surface = _linear_surface(max(BATCHES))
    grid = build_grid(max(BATCHES), NUM_DRAFT_TOKENS).with_cost(surface.ms)
    budget = VerifyBudget(grid, surface, NUM_DRAFT_TOKENS, make_scan)
    plain = VerifyBudget(grid, surface, NUM_DRAFT_TOKENS)
    medians, details = {}, {}
    print(f"\nchoice of a total, {NUM_DRAFT_TOKENS} drafts a request: min / median / max")
    for num_reqs in BATCHES:
        samples = interleave(_contenders(budget, plain, num_reqs), plan.repeats)
        found = {name: spread(seconds).scaled(1e6) for name, seconds in samples.items()}
        ratio = paired_ratio(samples["choice"], samples["sort"])
        rows = [(f"{num_reqs} requests: {name}", value, "us") for name, value in found.items()]
        print(format_rows([*rows, (f"{num_reqs} requests: choice / sort", ratio, "x")]))
        medians[str(num_reqs)] = found["choice"].median
        details[str(num_reqs)] = {name: value.as_json() for name, value in found.items()} | {
            "choice_over_sort": ratio.as_json()
        }
    return {"choice_us": medians, "choice_details": details}


def _contenders(
    budget: VerifyBudget, plain: VerifyBudget, num_reqs: int
) -> dict[str, Callable[[], float]]:
    """Each returns the median seconds of one call over all inputs.

    A median of single calls, because one interruption would spoil a mean of calls this short.
    """
    inputs = _rates(num_reqs)
    full = np.full(num_reqs, NUM_DRAFT_TOKENS, dtype=np.int64)
    # One row less and then again all: as when a request comes to its end.
    ending = full.copy()
    ending[0] = 0
    flat = np.empty(full.size * NUM_DRAFT_TOKENS, dtype=np.float32)

    def sort(rates: NDArray[np.float32]) -> None:
        flat[:] = rates.ravel()
        flat.sort()

    def seconds(call: Callable[[NDArray[np.float32], NDArray[np.int64]], object]) -> float:
        usable = cycle((full, ending))
        return median(
            time_call(lambda r=rates, u=u: call(r, u))  # type: ignore[misc]
            for rates, u in zip(inputs, usable, strict=False)
        )

    return {
        "choice": lambda: seconds(lambda rates, _: budget.choose(rates, full)),
        "choice, limits changed": lambda: seconds(budget.choose),
        "choice, NumPy alone": lambda: seconds(lambda rates, _: plain.choose(rates, full)),
        "sort": lambda: seconds(lambda rates, _: sort(rates)),
    }


def _rates(num_reqs: int) -> list[NDArray[np.float32]]:
    """Running products of confidences of mean 0.75, as a drafter gives them."""
    rng = np.random.default_rng(num_reqs)
    shape = (num_reqs, NUM_DRAFT_TOKENS)
    confidences = (rng.beta(6, 2, shape).astype(np.float32) for _ in range(NUM_INPUTS))
    return [np.cumprod(c, axis=1, dtype=np.float32) for c in confidences]


def _linear_surface(max_num_reqs: int) -> Surface:
    """Times that rise with both sizes, so that no column is best for all rates."""
    points = {}
    for key in build_grid(max_num_reqs, NUM_DRAFT_TOKENS).keys:
        ms = 5.0 + 0.02 * key.num_reqs + 0.03 * key.num_query_tokens
        points[key] = SurfacePoint(ms, ms, ms, 1)
    return Surface(points, 0, 1.0, {})


if __name__ == "__main__":
    raise SystemExit(main())
