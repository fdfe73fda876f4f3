"""`decodegrid profile`: what the captured graphs cost and how fast they are, as tables and files.

Owns the arguments and what is printed. The next start with the same deployment takes the kept step
times for its verify budget. Imports torch only when it runs.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from decodegrid.capture.profile_document import read_profile
from decodegrid.capture.profile_tables import format_difference, format_error, format_profile
from decodegrid.capture.surface import Surface, SurfaceError
from decodegrid.capture.surface_store import SurfaceStore
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli_options import (
    add_config_options,
    add_package_option,
    load_from_options,
)
from decodegrid.engine.llm import LLM
from decodegrid.engine.profile_targets import ProfileTargets

if TYPE_CHECKING:
    from decodegrid.engine.tokenizer import Tokenizer

MAX_CONTEXTS = 64
MAX_LIVE = 10_000
MAX_TRACE_STEPS = 1000


def add_profile_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "profile",
        help="measure the captured graphs and what they cost",
        description="Measure every captured (requests, query tokens) pair and prefill size, print "
        "the tables, and keep the step times for the verify budget of later starts.",
        allow_abbrev=False,
    )
    add_config_options(parser)
    add_package_option(parser)
    parser.add_argument(
        "--context-len",
        type=int,
        nargs="+",
        action="extend",
        metavar="N",
        help="tokens in each row's context, one or more (default: the deployment's, which is the "
        "one that later starts look for)",
    )
    parser.add_argument(
        "--repeats", type=int, metavar="N", help="timed replays of a graph (default: as deployed)"
    )
    parser.add_argument(
        "--ledger", action="store_true", help="print the line of each graph and each region too"
    )
    parser.add_argument(
        "--live",
        type=int,
        metavar="N",
        help="also decode N built-in prompts and count hits, padding and accepted drafts",
    )
    parser.add_argument(
        "--repeat-check",
        action="store_true",
        help="measure the step times again, once later and twice in turns, and print how much they "
        "differ",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a chrome trace there")
    parser.add_argument(
        "--trace-steps", type=int, metavar="N", help="steps of the live engine in the trace"
    )
    for name, metavar, what in (
        ("json", "FILE", "write the whole profile there"),
        ("costs", "FILE", "write memory and capture time of the pairs, for plan --costs"),
        ("csv", "DIR", "write the tables there, one file each"),
        ("html", "FILE", "write the report page there"),
        ("png", "DIR", "write the report's drawings there"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar=metavar, help=what)
    parser.add_argument(
        "--from",
        type=Path,
        metavar="FILE",
        dest="old",
        help="read what --json wrote instead of starting an engine",
    )
    parser.set_defaults(run=_profile)


def _profile(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    targets = ProfileTargets(args.json, args.csv, args.html, args.png, args.costs, args.trace)
    if args.old is not None:
        return _show_old(args, targets)
    loaded = load_from_options(args)
    repeats = loaded.config.surface.repeats or 1 if args.repeats is None else args.repeats
    _check_count("--repeats", repeats, 1000)
    context_lens = _context_lens(args.context_len, loaded)
    num_steps = _trace_steps(args)
    if args.live is not None:
        _check_count("--live", args.live, MAX_LIVE)
    targets.check()
    # Imported here: the other commands check their arguments before torch is loaded.
    from decodegrid.engine.build import build_runner
    from decodegrid.engine.ledger import make_profile
    from decodegrid.engine.profile_live import run_live
    from decodegrid.engine.profile_run import measure_runner
    from decodegrid.engine.profile_trace import MAX_REQUESTS, write_trace
    from decodegrid.engine.surface_run import measure, measure_in_turns

    tokenizer = None
    if args.live or num_steps:
        tokenizer = _tokenizer(loaded, max(args.live or 0, MAX_REQUESTS if num_steps else 0))
    _check_bindings(loaded)
    runner = build_runner(loaded)
    measured = measure_runner(runner, context_lens, repeats)
    lines = [_keep(surface, loaded) for surface in measured.surfaces]
    if args.repeat_check:
        first = measured.surfaces[0]
        again = measure(runner, first.context_len, repeats)
        lines.append(format_difference(first, again))
        lines.append(format_error(*measure_in_turns(runner, first.context_len, repeats)))
    if args.live and tokenizer is not None:
        measured = replace(measured, live=run_live(runner, loaded, tokenizer, args.live))
    profile = make_profile(runner, loaded, measured)
    print(format_profile(profile, ledger=args.ledger))
    for line in (*lines, *targets.write(profile)):
        print(line)
    if num_steps and tokenizer is not None:
        done = write_trace(runner, loaded, tokenizer, num_steps, args.trace)
        print(f"trace of {done} steps: {args.trace}")
    return 0


def _show_old(args: argparse.Namespace, targets: ProfileTargets) -> int:
    """Print and draw a profile from a file."""
    needs_engine = {
        "--config": args.config, "--set": args.overrides, "--context-len": args.context_len,
        "--repeats": args.repeats, "--live": args.live, "--repeat-check": args.repeat_check,
        "--trace": args.trace, "--trace-steps": args.trace_steps,
    }  # fmt: skip
    for name, value in needs_engine.items():
        if value not in (None, False, []):
            raise ValueError(f"{name} starts an engine, and --from reads {args.old} instead")
    profile = read_profile(args.old)
    targets.check()
    print(format_profile(profile, ledger=args.ledger))
    for line in targets.write(profile):
        print(line)
    return 0


def _keep(surface: Surface, loaded: LoadedConfig) -> str:
    """Save step times for later starts; says where, or why not."""
    try:
        return f"kept as {SurfaceStore(loaded.cache_dir).save(surface)}"
    except SurfaceError as error:
        return f"not kept: {error}"


def _tokenizer(loaded: LoadedConfig, num_requests: int) -> "Tokenizer":
    """The tokenizer of a live run, whose prompts the deployment must be able to serve."""
    from decodegrid.engine.deployment_check import check_before_start
    from decodegrid.engine.profile_live import check_live

    tokenizer = check_before_start(loaded)
    check_live(loaded, tokenizer, num_requests)
    return tokenizer


def _check_bindings(loaded: LoadedConfig) -> None:
    """Raise ValueError where the ledger could not look into the graphs."""
    if loaded.config.model.device == "cuda":
        from decodegrid.capture.cuda_nodes import CudaBindings
        from decodegrid.engine.deployment_check import check_settings

        check_settings(loaded)  # where there is no card, that is what is to be said
        CudaBindings.load()


def _trace_steps(args: argparse.Namespace) -> int:
    """Steps to trace, 0 for none. Raises ValueError for one of the two options alone."""
    if args.trace_steps is None and args.trace is None:
        return 0
    if args.trace_steps is None:
        raise ValueError(f"--trace is {args.trace}; --trace-steps N says how many steps to trace")
    _check_count("--trace-steps", args.trace_steps, MAX_TRACE_STEPS)
    if args.trace is None:
        raise ValueError(
            f"--trace-steps is {args.trace_steps}; --trace FILE says where the trace goes"
        )
    return int(args.trace_steps)


def _check_count(name: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise ValueError(f"{name} is {count}; allowed are 1..{most}")


def _context_lens(given: list[int] | None, loaded: LoadedConfig) -> list[int]:
    """The contexts to measure on, each with room for a step behind it, the deployment's first if
    it is among them; None is the deployment's alone.

    Raises ValueError: start-up compiles, which is too late to refuse.
    """
    length = loaded.config.scheduler.max_model_len
    drafts = loaded.config.speculation.num_draft_tokens
    room = length - drafts - 1
    if room < 1:
        raise ValueError(
            f"scheduler.max_model_len is {length}; measuring step times with "
            f"speculation.num_draft_tokens = {drafts} needs at least {drafts + 2}"
        )
    own = min(loaded.config.surface.context_len, room)
    if given is None:
        return [own]
    if len(given) > MAX_CONTEXTS:
        raise ValueError(f"--context-len has {len(given)} values; at most {MAX_CONTEXTS}")
    for value in given:
        if not 1 <= value <= room:
            raise ValueError(
                f"--context-len is {value}; allowed are 1..{room}, scheduler.max_model_len = "
                f"{length} less speculation.num_draft_tokens = {drafts} and one"
            )
    return sorted(dict.fromkeys(given), key=lambda value: value != own)
