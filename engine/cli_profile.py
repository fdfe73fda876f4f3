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
    context_len = _context_len(args.context_len, loaded)
    if args.json is not None:
        _check_target(args.json)
    # Imported here: the other commands check their arguments before torch is loaded.
    from decodegrid.engine.build import build_runner
    from decodegrid.engine.surface_run import measure

    runner = build_runner(loaded)
    surface = measure(runner, context_len, repeats)
    print(surface.format())
    print(f"kept as {SurfaceStore(loaded.cache_dir).save(surface)}")
    if args.json is not None:
        args.json.write_text(json.dumps(surface.as_json(), indent=1) + "\n", encoding="utf-8")
    return 0


def _context_len(given: int | None, loaded: LoadedConfig) -> int:
    """The context to measure on, with room for a step behind it; None is the deployment's.

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
    if given is None:
        return min(loaded.config.surface.context_len, room)
    if not 1 <= given <= room:
        raise ValueError(
            f"--context-len is {given}; allowed are 1..{room}, scheduler.max_model_len = {length} "
            f"less speculation.num_draft_tokens = {drafts} and one"
        )
    return given


def _check_target(path: Path) -> None:
    """Raise ValueError where no file of that name can be made."""
    if path.is_dir():
        raise ValueError(f"--json is {path}, which is a directory; a file is needed")
    if not path.parent.is_dir():
        raise ValueError(f"--json is {path}; there is no directory {path.parent}")
