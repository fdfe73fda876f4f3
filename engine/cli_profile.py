"""`decodegrid profile`: measure the step times of all captured pairs and keep them.

Owns what is printed and written. The next start with the same deployment takes the kept surface for
its verify budget. Imports torch only when it runs.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from decodegrid.capture.surface_store import SurfaceStore
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli_options import add_config_options, load_from_options
from decodegrid.engine.llm import LLM


def add_profile_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "profile",
        help="measure the step times of the captured graphs",
        description="Measure every captured (requests, query tokens) pair, print the table, and "
        "keep it for the verify budget of later starts.",
        allow_abbrev=False,
    )
    add_config_options(parser)
    parser.add_argument(
        "--context-len",
        type=int,
        metavar="N",
        help="tokens in each row's context (default: the deployment's; only that one is kept)",
    )
    parser.add_argument(
        "--repeats", type=int, metavar="N", help="timed replays of a pair (default: as deployed)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the surface there too")
    parser.set_defaults(run=_profile)


def _profile(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    settings = loaded.config.surface
    repeats = settings.repeats or 1 if args.repeats is None else args.repeats
    if not 1 <= repeats <= 1000:
        raise ValueError(f"--repeats is {repeats}; allowed are 1..1000")
    # Imported here: the other commands check their arguments before torch is loaded.
    from decodegrid.engine.build import build_runner
    from decodegrid.engine.surface_run import context_for, measure

    context_len = args.context_len
    if context_len is not None and context_len < 1:
        raise ValueError(f"--context-len is {context_len}; at least 1 is needed")
    runner = build_runner(loaded)
    if context_len is None:
        context_len = context_for(runner, loaded)
    surface = measure(runner, context_len, repeats)
    print(surface.format())
    print(f"kept as {SurfaceStore(loaded.cache_dir).save(surface)}")
    if args.json is not None:
        args.json.write_text(json.dumps(surface.as_json(), indent=1) + "\n", encoding="utf-8")
    return 0
