"""`decodegrid plan`: which pairs to capture for the batches that a deployment sees.

Owns the arguments, where the trace and the step times come from, and the file that is written.
The plan is made and worded in decodegrid.capture. Imports torch only where it looks for kept step
times or measures.
"""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from uuid import uuid4

from decodegrid.capture.grid import Grid, build_grid
from decodegrid.capture.plan_costs import read_costs
from decodegrid.capture.plan_load import Load, simulate_load
from decodegrid.capture.plan_times import candidate_keys, estimate_times
from decodegrid.capture.plan_trace import GridTrace, read_trace
from decodegrid.capture.surface import Surface, SurfaceError
from decodegrid.capture.surface_search import read_surface
from decodegrid.configs.byte_size import parse_size
from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.cli_options import add_config_options, load_from_options
from decodegrid.engine.llm import LLM


def add_plan_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="propose which graphs to capture",
        description="Propose the (requests, query tokens) pairs with the least expected step time "
        "for the batches of a trace, within bounds; without one, as many pairs as the deployment "
        "captures. The step times are those that decodegrid profile kept.",
        allow_abbrev=False,
    )
    add_config_options(parser)
    batches = parser.add_mutually_exclusive_group(required=True)
    batches.add_argument(
        "--trace", type=Path, metavar="FILE", help="what generate or batch wrote with --trace"
    )
    batches.add_argument(
        "--arrivals",
        metavar="rate=R,...",
        help="simulate a load instead: rate (requests a second), requests, tokens (median of the "
        "outputs), sigma (of their logarithm), alpha and beta (of the confidences), prefill_ms, "
        "seed, max_tokens",
    )
    times = parser.add_mutually_exclusive_group()
    times.add_argument(
        "--surface", type=Path, metavar="FILE", help="step times that profile --json wrote"
    )
    times.add_argument("--measure", action="store_true", help="start, and measure them now")
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="memory and capture time of each pair, JSON"
    )
    parser.add_argument("--max-graphs", type=int, metavar="N", help="captured pairs at most")
    parser.add_argument(
        "--max-memory", type=_size, metavar="BYTES", help="of all graphs, such as 2GiB"
    )
    parser.add_argument("--max-capture-seconds", type=float, metavar="S", help="of all pairs")
    parser.add_argument(
        "--max-loss",
        type=float,
        metavar="PERCENT",
        help="look for the fewest pairs that lose at most that much step time",
    )
    parser.add_argument(
        "--unseen",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="of the steps that may be any batch, not one of the trace (default: 0)",
    )
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="S", help="of the solver (default: 60)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the grid there, as YAML")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    if args.max_loss is not None and not 0 <= args.max_loss < math.inf:
        raise ValueError(f"--max-loss is {args.max_loss:g} %; at least 0 is needed")
    if not 0 <= args.unseen < 100:
        raise ValueError(f"--unseen is {args.unseen:g} %; at least 0 and below 100 is needed")
    # Imported here: the solver takes a moment that other commands need not wait for.
    from decodegrid.capture.plan import PlanOptions, full_surface, plan_grid
    from decodegrid.capture.plan_report import format_plan, yaml_fragment
    from decodegrid.capture.plan_solve import PlanBounds

    bounds = PlanBounds(args.max_graphs, args.max_memory, args.max_capture_seconds)
    loss = None if args.max_loss is None else args.max_loss / 100
    options = PlanOptions(bounds, loss, args.unseen / 100, args.time_limit)
    grid = _grid_of(loaded.config)
    load = None if args.arrivals is None else _load_of(args.arrivals, loaded.config)
    trace = None if args.trace is None else read_trace(args.trace)
    if trace is not None:
        trace.check_fits(grid.max_num_reqs, grid.num_draft_tokens)
    costs = None if args.costs is None else read_costs(args.costs)
    if args.out is not None:
        _check_out(args.out, args.overwrite)
    surface, place = _surface(args, loaded, grid)
    limit = _token_limit(loaded.config)
    if trace is None:
        assert load is not None
        trace = _simulated(load, grid, surface, limit)
    plan = plan_grid(trace, grid, surface, options, costs)
    print(f"step times: {len(surface.points)} pairs of {place}")
    if load is not None:
        times = full_surface(plan.times, surface)
        before, after = (
            simulate_load(load, each, times, limit).tokens_per_s
            for each in (plan.deployed, plan.grid)
        )
        print(
            f"simulated with a total for each grid: {before:.4g} tokens/s on the deployment's, "
            f"{after:.4g} on the plan's"
        )
    print(format_plan(plan))
    if args.out is not None:
        _write(args.out, yaml_fragment(plan), plan.grid)
        print(f"written: {args.out}")
    return 0


def _simulated(load: Load, grid: Grid, surface: Surface, limit: int | None) -> GridTrace:
    """What the load asks for where every candidate is captured: a coarse grid would hide it."""
    from decodegrid.capture.plan import full_surface

    keys, _ = candidate_keys(grid)
    times = full_surface(estimate_times(keys, surface), surface)
    full = Grid(keys, grid.max_num_reqs, grid.num_draft_tokens, times.ms)
    return simulate_load(load, full, times, limit).trace


def _surface(args: argparse.Namespace, loaded: LoadedConfig, grid: Grid) -> tuple[Surface, str]:
    if args.surface is not None:
        return _surface_of_file(args.surface, grid), str(args.surface)
    # Imported here: everything else is checked before torch is loaded.
    from decodegrid.engine.plan_surface import kept_surface, measured_surface

    return measured_surface(loaded) if args.measure else kept_surface(loaded, grid)


def _surface_of_file(path: Path, grid: Grid) -> Surface:
    """Nothing of it is compared with the deployment but that it has a time for its largest pair."""
    surface = read_surface(path)
    if grid.largest_key not in surface.points:
        raise SurfaceError(
            f"{path}: no step time for {grid.largest_key}, the largest pair of the deployment; "
            "it is of other limits"
        )
    return surface


def _grid_of(config: DeploymentConfig) -> Grid:
    return build_grid(
        config.scheduler.max_num_reqs,
        config.speculation.num_draft_tokens,
        config.grid.num_reqs,
        config.grid.num_query_tokens_per_req,
        config.grid.pairs,
    )


def _token_limit(config: DeploymentConfig) -> int | None:
    """Most query tokens of a step where the deployment sets them; None for the schedule."""
    verify = config.speculation.verify_tokens
    if verify == "scheduled":
        return None
    return config.max_num_query_tokens if verify == "all" else verify


def _load_of(text: str, config: DeploymentConfig) -> Load:
    """The load of --arrivals. Raises ValueError."""
    kinds: dict[str, type] = {
        item.name: int if item.name in ("requests", "seed", "max_tokens") else float
        for item in fields(Load)
    }
    values: dict[str, float] = {"max_tokens": config.scheduler.max_model_len - 1}
    seen = set()
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in kinds or not equals:
            known = ", ".join(kinds)
            raise ValueError(f"--arrivals has {part!r}; allowed is NAME=VALUE with {known}")
        if name in seen:
            raise ValueError(f"--arrivals has {name} twice")
        seen.add(name)
        try:
            values[name] = kinds[name](value)
        except ValueError:
            word = "whole number" if kinds[name] is int else "number"
            raise ValueError(f"--arrivals: {name} is {value!r}; a {word} is needed") from None
    if "rate" not in values:
        raise ValueError("--arrivals needs rate=R, the requests a second")
    try:
        return Load(**values)  # type: ignore[arg-type]  # the kinds are those of the fields
    except ValueError as error:
        raise ValueError(f"--arrivals: {error}") from None


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        message = f"{text!r} is no number of bytes and no size such as 2GiB"
        raise argparse.ArgumentTypeError(message) from None


def _check_out(path: Path, overwrite: bool) -> None:
    """Raise ValueError where the file cannot or must not be made."""
    if path.is_dir():
        raise ValueError(f"--out is {path}, which is a directory; a file is needed")
    if not path.parent.is_dir():
        raise ValueError(f"--out is {path}; there is no directory {path.parent}")
    if path.exists() and not overwrite:
        raise ValueError(f"--out is {path}, which exists; --overwrite replaces it")


def _write(path: Path, text: str, grid: Grid) -> None:
    """Write the fragment once it has been read back; an older file is whole until then."""
    part = path.parent / f".{path.name}.{uuid4().hex}.tmp"
    try:
        part.write_text(text, encoding="utf-8")
        if _grid_of(load_config(part).config).keys != grid.keys:
            raise AssertionError(f"{part} does not say what was planned")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
