"""`decodegrid capture`: compile and capture a deployment, and keep it as a package.

Owns the verb's arguments and what it prints. The package is written by package_write.py. Imports
torch only when it runs.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli_options import add_config_options, load_from_options
from decodegrid.engine.llm import LLM

if TYPE_CHECKING:
    from decodegrid.capture.package_swap import Staging
    from decodegrid.capture.surface import Surface
    from decodegrid.engine.runner import Runner

EXIT_NOT_PROVEN = 1


def add_capture_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "capture",
        help="compile a deployment and keep it as a package",
        description="Compile and capture a deployment, measure its step times, and write all that "
        "a later start needs as one directory. It can be moved; --package starts from it.",
        allow_abbrev=False,
    )
    add_config_options(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the package, which takes the place of an earlier one (default: compile.package, or "
        "else the cache directory)",
    )
    parser.add_argument(
        "--prove",
        action="store_true",
        help="prove the captured graphs first (see doctor --self-test); where a proof fails, "
        "nothing is written and the exit status is 1",
    )
    parser.add_argument(
        "--no-report", action="store_true", help="no start-up report on standard error"
    )
    parser.set_defaults(run=_capture)


def _capture(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    out = loaded.package_dir if args.out is None else Path.cwd() / args.out
    # Imported here: the other commands check their arguments before torch is loaded.
    from decodegrid.capture.package_swap import Staging
    from decodegrid.engine.deployment_check import check_before_start

    # What is written does not come from the package whose place it takes.
    compile_section = loaded.config.compile.model_copy(update={"package": ""})
    config = loaded.config.model_copy(update={"compile": compile_section})
    loaded = replace(loaded, config=config)
    check_before_start(loaded)
    with nullcontext() if out is None else Staging(out) as staging:
        return _run(args, loaded, staging)


def _run(args: argparse.Namespace, loaded: LoadedConfig, staging: "Staging | None") -> int:
    """Start the deployment, prove it where asked to, and write it down."""
    from decodegrid.engine.build import build_runner
    from decodegrid.engine.package_write import keep_in_cache, package_bytes, write_package
    from decodegrid.engine.surface_run import obtain_surface

    runner = build_runner(loaded)
    if not args.no_report:
        print(runner.start_up_report, file=sys.stderr)
    surface, note = obtain_surface(runner, loaded)
    if surface is None:
        print(f"no step times in the package: {note}", file=sys.stderr)
    if args.prove:
        from decodegrid.engine.proofs import run_proofs

        report = run_proofs(runner, runner.draft_temperatures)
        print(report.format())
        if not report.ok:
            return EXIT_NOT_PROVEN
    documents = {} if surface is None else {"ledger.json": _ledger(runner, loaded, surface)}
    if staging is None:
        manifest = keep_in_cache(runner, documents)
        assert runner.source is not None
        place = runner.source.path
    else:
        manifest = write_package(runner, staging, [surface] if surface else [], documents)
        place = staging.target
    megabytes = package_bytes(manifest) / 2**20
    print(f"{place}: {len(manifest.files)} files, {megabytes:.1f} MiB")
    return 0


def _ledger(runner: "Runner", loaded: LoadedConfig, surface: "Surface") -> str:
    """What was compiled and captured, and what it costs; it names no file of this machine."""
    from decodegrid.engine.ledger import Measured, ledger_text

    return ledger_text(runner, loaded, Measured((surface,)), ("decodegrid", "capture"))
