"""The options of `decodegrid bench`, and what is refused of them before anything is loaded.

Owns their names, defaults and ranges. Data flow: arguments -> checked values; those that need the
deployment's numbers get them from the caller.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from decodegrid.configs.load import LoadedConfig
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.bench_policies import (
    SCHEDULES,
    TABLED,
    BenchPolicy,
    parse_policies,
    policy_names,
)
from decodegrid.engine.bench_prompts import PromptSource
from decodegrid.engine.cli_options import add_config_options, add_package_option

MAX_REPEATS = 1000
MAX_REQUESTS = 100_000
MAX_SEED = 2**32


def add_policy_options(parser: argparse.ArgumentParser, default: str) -> None:
    """default: what is compared without the option, in words."""
    parser.add_argument(
        "--policies",
        type=policy_list,
        metavar="NAME,...",
        help=f"none, k1, k2, ..., all, scheduled, oracle, random (default: {default})",
    )


def add_workload_options(parser: argparse.ArgumentParser, num_requests: int) -> None:
    """What requests look like; with the common options."""
    parser.add_argument(
        "--contexts",
        type=integers,
        metavar="N,...",
        help="tokens of every prompt, prose before the chat (default: the chats as they are)",
    )
    add_common_options(parser, num_requests)
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="tokens at most (default: 64)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (default: the deployment's)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")


def add_common_options(parser: argparse.ArgumentParser, num_requests: int) -> None:
    """Deployment, prompts, repeats, and where the result goes."""
    add_config_options(parser)
    add_package_option(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts",
        choices=("mixed", "structured", "stories"),
        default="mixed",
        help="built-in chats (default: mixed)",
    )
    source.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help="instead: one message of a user a line"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=num_requests,
        metavar="N",
        help=f"of each pass (default: {num_requests})",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="with other seeds (default: 5)"
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        default=1,
        metavar="N",
        help="passes of each setting before those that count (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument(
        "--no-progress", action="store_true", help="no line on standard error for each pass"
    )


def policies_from_options(
    args: argparse.Namespace,
    loaded: LoadedConfig,
    schedules: Sequence[str],
    *,
    all_fixed: bool = True,
) -> tuple[BenchPolicy, ...]:
    """Those that were asked for, or the default ones. Raises ValueError."""
    config = loaded.config
    num_drafts = config.speculation.num_draft_tokens
    is_known = config.speculation.verify == "coupled" or temperature_of(args, loaded) == 0
    names = args.policies
    if names is None:
        if not _schedules(config):
            schedules = ()
        able = [name for name in schedules if is_known or name not in TABLED]
        names = policy_names(num_drafts, schedules=able)
        if not all_fixed:
            names = [name for name in names if not name.startswith("k")]
    policies = parse_policies(names, num_drafts)
    for policy in policies:
        if policy.name in SCHEDULES and not _schedules(config):
            raise ValueError(
                f"--policies has {policy.name}, which needs speculation.verify_tokens = scheduled; "
                f"the deployment has {config.speculation.verify_tokens}"
            )
        if policy.name in TABLED and not is_known:
            raise ValueError(
                f"--policies has {policy.name}, which needs texts that do not depend on what is "
                "verified: speculation.verify = coupled, or --temperature 0"
            )
    return policies


def _schedules(config: DeploymentConfig) -> bool:
    return config.speculation.verify_tokens == "scheduled"


def check_common(args: argparse.Namespace, loaded: LoadedConfig) -> None:
    """What every kind of benchmark refuses. Raises ValueError."""
    kind = loaded.config.scheduler.engine_type
    if kind != "normal":
        raise ValueError(f"scheduler.engine_type is {kind}; a benchmark needs normal")
    for name, value, least, most in (
        ("requests", args.requests, 1, MAX_REQUESTS),
        ("repeats", args.repeats, 1, MAX_REPEATS),
        ("warm-up", args.warm_up, 0, MAX_REPEATS),
        ("seed", args.seed, 0, MAX_SEED),
    ):
        if not least <= value <= most:
            raise ValueError(f"--{name} is {value}; allowed are {least}..{most}")
    if args.json is not None:
        check_target("--json", args.json)


def check_target(option: str, path: Path) -> None:
    """Raise ValueError where a file cannot be written."""
    if path.is_dir():
        raise ValueError(f"{option} is {path}, which is a directory; a file is needed")
    if not path.parent.is_dir():
        raise ValueError(f"{option} is {path}; there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{option} is {path}; the directory {path.parent} cannot be written")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} is {path}, which cannot be written")


def prompt_source(args: argparse.Namespace) -> PromptSource:
    """Raises RequestError or OSError for the file."""
    if args.prompts_file is not None:
        return PromptSource.of_file(args.prompts_file)
    return PromptSource(args.prompts)


def teller(args: argparse.Namespace) -> Callable[[str], None]:
    """Prints a pass's line on standard error, or nothing with --no-progress."""
    if args.no_progress:
        return lambda line: None
    return lambda line: print(line, file=sys.stderr, flush=True)


def temperature_of(args: argparse.Namespace, loaded: LoadedConfig) -> float:
    """What was asked for, or the deployment's."""
    given: float | None = args.temperature
    return loaded.config.sampling.temperature if given is None else given


def check_contexts(contexts: Sequence[int], most: int, what: str) -> None:
    """Raise ValueError for a context outside 2..most, or one that is there twice. what: `most` in
    words."""
    check_distinct("--contexts", contexts)
    for context_len in contexts:
        if not 2 <= context_len <= most:
            raise ValueError(f"--contexts has {context_len}; allowed are 2..{most}, {what}")


def check_distinct(option: str, values: Sequence[float]) -> None:
    """Raise ValueError for a value that is there twice."""
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ValueError(f"{option} has {value:g} twice")


def integers(text: str) -> list[int]:
    """Whole numbers between commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None


def numbers(text: str) -> list[float]:
    """Numbers between commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None


def policy_list(text: str) -> list[str]:
    """Names between commas."""
    return [part.strip() for part in text.split(",")]
