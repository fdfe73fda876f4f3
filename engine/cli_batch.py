"""`decodegrid batch`: a file of requests in OpenAI's batch form, answered in its order.

Owns the verb's arguments and its closing line. The lines and the file are batch_file.py's.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.batch_file import check_output, partial_path, read_batch, run_batch
from decodegrid.engine.cli_options import (
    add_config_options,
    add_package_option,
    add_trace_option,
    load_from_options,
)
from decodegrid.engine.grid_trace import check_trace_target, save_trace
from decodegrid.engine.llm import LLM


def add_batch_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests in OpenAI's batch form",
        description="Answer the requests of INPUT, a JSON object a line with custom_id, method, "
        "url (/v1/completions or /v1/chat/completions) and body, with a line each in OUTPUT, in "
        "the same order. A line that cannot be served gets its error there. Sampling that a body "
        "leaves open is the deployment's.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="INPUT", type=Path, help="requests, a JSON object a line")
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        type=Path,
        help="answers; stand in OUTPUT.partial until all are there",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it exists")
    add_config_options(parser)
    add_package_option(parser)
    add_trace_option(parser)
    parser.add_argument(
        "--no-report", action="store_true", help="no closing report on standard error"
    )
    parser.set_defaults(run=_batch)


def _batch(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    # Before the start-up, which takes a while.
    check_output(args.source, args.output, overwrite=args.overwrite)
    _check_apart(args.trace, args.source, args.output)
    check_trace_target(args.trace)
    lines = read_batch(args.source)
    llm = build_llm(loaded)
    try:
        counts = run_batch(
            llm, lines, args.output, loaded.config.sampling, overwrite=args.overwrite
        )
        print(f"{args.output}: {counts.num_done} answered, {counts.num_refused} refused")
    finally:
        if not args.no_report and llm.stats.num_decode_steps:
            print(llm.report(), file=sys.stderr)
        note = save_trace(llm.stats.grid, args.trace, f"decodegrid batch {args.source.name}")
        if note and not args.no_report:
            print(note, file=sys.stderr)
    return 0


def _check_apart(trace: Path | None, source: Path, output: Path) -> None:
    """Raise ValueError where the trace would be written over the requests or the answers."""
    files = (("INPUT", source), ("OUTPUT", output), ("OUTPUT.partial", partial_path(output)))
    for name, path in files:
        if trace is not None and trace.resolve() == path.resolve():
            raise ValueError(f"--trace and {name} are both {trace}; each needs its own file")
