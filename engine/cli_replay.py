"""`decodegrid replay`: run the step that a dump is about again, captured, eagerly, or both.

Owns which deployment a dump is replayed with, what is printed, and the exit status: 0 for a step
that is in order (both runs equal), 1 for one that is not, 2 for bad input. Imports torch only when
it runs.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.cli_options import add_config_options
from decodegrid.engine.llm import LLM
from decodegrid.engine.replay_dump import DecodeFacts, Dump, load_dump
from decodegrid.engine.replay_file import DumpError
from decodegrid.engine.replay_record import config_values, step_values
from decodegrid.engine.terminal_text import printable

if TYPE_CHECKING:
    from decodegrid.engine.replay_run import StepReplay, StepView

EXIT_EQUAL = 0
EXIT_DIFFERENT = 1


def add_replay_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "replay",
        help="run a step again from the dump of a failure",
        description="Rebuild the state of a dumped step and run it through its captured graph, "
        "eagerly, or both, which is the default. Exit status: 0 in order, or both equal; 1 not in "
        "order, or different; 2 bad input.",
        allow_abbrev=False,
    )
    parser.add_argument("dump", type=Path, metavar="DUMP", help="the file that the error named")
    add_config_options(parser)
    forms = parser.add_mutually_exclusive_group()
    for form, words in (
        ("graph", "run it through the captured graph only"),
        ("eager", "run it eagerly only"),
        ("diff", "run both and print their largest difference (default)"),
    ):
        forms.add_argument(f"--{form}", action="store_const", dest="form", const=form, help=words)
    parser.add_argument(
        "--step", type=int, metavar="N", help="another step of the dump (default: the failed one)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference of logits that counts as equal (default: by model.dtype)",
    )
    parser.set_defaults(run=_replay, form="diff")


def _replay(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    tolerance: float | None = args.tolerance
    if tolerance is not None and not (tolerance >= 0 and math.isfinite(tolerance)):
        raise ValueError(f"--tolerance is {tolerance}; a number of at least 0 is needed")
    dump = load_dump(args.dump)
    step = dump.find_step(args.step)
    loaded = deployment_of(args, dump)
    for line in _facts(dump, step.index):
        _say(line)
    for line in differences(dump, loaded):
        print(printable(line), file=sys.stderr)
    # Imported here: a dump and a deployment are checked before torch is loaded.
    from decodegrid.engine.build import build_runner
    from decodegrid.engine.replay_run import StepReplay

    runner = build_runner(loaded)
    replay = StepReplay(runner, dump, step, runner.draft_temperatures)
    for line in model_differences(dump, runner.facts):
        print(printable(line), file=sys.stderr)
    for line in replay.notes:
        _say(line)
    if args.form == "diff":
        return report_both(replay, tolerance)
    return report_one(replay, args.form)


def report_both(replay: "StepReplay", tolerance: float | None) -> int:
    """Run both forms and print how far they are apart; the exit status."""
    from decodegrid.engine.replay_run import compare

    graph, eager = replay.run("graph"), replay.run("eager")
    _say(_outcome("graph", graph))
    _say(_outcome("eager", eager))
    result = compare(graph, eager, replay.tolerance if tolerance is None else tolerance)
    what = "logits" if isinstance(replay.step, DecodeFacts) else "hidden states"
    _say(
        f"largest difference of {what}: {result.max_difference:.3g} "
        f"(equal up to {result.tolerance:g})"
    )
    if isinstance(replay.step, DecodeFacts):
        _say(f"tokens: {'equal' if result.tokens_equal else 'different'}")
    _say("graph and eager are equal" if result.is_equal else "graph and eager differ")
    return EXIT_EQUAL if result.is_equal else EXIT_DIFFERENT


def report_one(replay: "StepReplay", form: str) -> int:
    """Run one form and print whether it is in order; the exit status."""
    view = replay.run("graph" if form == "graph" else "eager")
    _say(_outcome(form, view))
    return EXIT_EQUAL if view.problem is None else EXIT_DIFFERENT


def deployment_of(args: argparse.Namespace, dump: Dump) -> LoadedConfig:
    """The deployment to replay with: --config and --set, else the dump's own."""
    if args.config is not None:
        return load_config(args.config, args.overrides)
    if args.overrides:
        raise ValueError("--set needs --config: the dump's own deployment is taken as it is")
    if dump.config is None:
        raise DumpError(f"{args.dump} names no deployment; give one with --config")
    try:
        config = DeploymentConfig.model_validate(dump.config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "deployment"
        raise DumpError(
            f"the deployment in {args.dump} does not fit this version: {key}: {first['msg']}; "
            "give one with --config"
        ) from error
    origins = dict.fromkeys(_dotted(config.model_dump()), "dump")
    return LoadedConfig(config=config, origins=origins, path=args.dump.absolute())


def differences(dump: Dump, loaded: LoadedConfig) -> list[str]:
    """What decides a step and is not as it was, a line each."""
    if dump.config is None:
        return ["note: the dump names no deployment that this one could be compared with"]
    then, now = step_values(dump.config), step_values(config_values(loaded))
    return [
        f"note: {key} is {now.get(key)!r} here and {then.get(key)!r} in the dump"
        for key in dict.fromkeys((*then, *now))
        if then.get(key) != now.get(key)
    ]


def model_differences(dump: Dump, facts: dict[str, str]) -> list[str]:
    """Facts of the captured code that are not as they were, a line each."""
    return [
        f"note: {name} is {facts.get(name)!r} here and {value!r} in the dump"
        for name, value in dump.facts.items()
        if facts.get(name) != value
    ]


def _facts(dump: Dump, index: int) -> list[str]:
    versions, step = dump.versions, dump.find_step(index)
    if isinstance(step, DecodeFacts):
        rows = ", ".join(str(row.seq_len) for row in step.rows)
        pair = "" if step.key is None else f" in ({step.key.num_reqs}, {step.key.num_query_tokens})"
        what = f"decode with {step.num_query_tokens} query tokens{pair}, rows of {rows} tokens"
    else:
        end = step.start + step.num_tokens - 1
        what = f"prefill of positions {step.start}..{end}"
    return [
        f"dump: {dump.reason} at {dump.made_at}: {dump.message}",
        f"made by: decodegrid {versions.decodegrid}, torch {versions.torch}, Python "
        f"{versions.python}; deployment {dump.config_hash or 'unknown'}",
        f"step {step.index}: {what}",
    ]


def _outcome(form: str, view: "StepView") -> str:
    what = view.problem
    if what is None:
        count = sum(len(ids) for ids in view.emitted)
        what = f"in order, {count} tokens emitted" if view.emitted else "in order"
    return f"{form}: {what}"


def _say(line: str) -> None:
    # Messages of a dump may come from anywhere.
    print(printable(line))


def _dotted(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += _dotted(value, f"{prefix}{key}.")
        else:
            found.append(prefix + key)
    return found
