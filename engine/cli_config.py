"""`decodegrid config show`, `config check` and `config schema`.

Owns their arguments, how values and their origins are printed, and the exit statuses. `show` and
`schema` need neither checkpoint nor torch; what `check` looks at stands in engine/config_check.py.

Exit status of `check`: 0 where nothing is refused; 2 where something is, a line each on standard
error; with --strict also for warnings and for what could not be checked.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decodegrid.configs.byte_size import parse_size
from decodegrid.configs.load import ConfigError, LoadedConfig
from decodegrid.engine.cli_options import add_config_options, load_from_options
from decodegrid.engine.config_format import empty_report, format_report
from decodegrid.engine.llm import LLM
from decodegrid.engine.terminal_text import printable

EXIT_FINE = 0
EXIT_REFUSED = 2


def add_config_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "config", help="show or check a deployment, print its schema", allow_abbrev=False
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show", help="every effective value and where it comes from", allow_abbrev=False
    )
    add_config_options(show)
    show.add_argument("--json", action="store_true", help="print one JSON object instead")
    show.set_defaults(run=_show)
    _add_check_parser(actions)
    schema = actions.add_parser(
        "schema",
        help="the JSON Schema of a deployment file, for editors and CI",
        description="Print the JSON Schema (draft 2020-12) of a deployment file. An editor takes "
        "it from a first line such as: # yaml-language-server: $schema=decodegrid.schema.json",
        allow_abbrev=False,
    )
    schema.set_defaults(run=_schema)


def _add_check_parser(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    check = actions.add_parser(
        "check",
        help="say what it would capture and need, and whether it can start",
        description="Print what a start would capture and compile, the memory that it needs, and "
        "what is wrong. Loads no weights and needs no GPU. A deployment for CUDA is taken to be "
        "for another machine where this one has no GPU. Exit status 0 where nothing is refused, 2 "
        "where something is; with --strict also for warnings and what could not be checked.",
        allow_abbrev=False,
    )
    add_config_options(check)
    check.add_argument("--json", action="store_true", help="print one JSON object instead")
    check.add_argument(
        "--strict", action="store_true", help="refuse what is doubtful or could not be checked"
    )
    check.add_argument(
        "--elsewhere",
        action="store_true",
        help="the deployment is for another machine: do not refuse what this one lacks",
    )
    check.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="a config.json to take for the checkpoint's; implies --elsewhere",
    )
    check.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="refuse what does not fit into a device of that many bytes, such as 141GB",
    )
    check.set_defaults(run=_check)


def _show(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    if args.json:
        values = [
            {"key": key, "value": value, "origin": loaded.origins[key]}
            for key, value in loaded.values()
        ]
        print(json.dumps({"deployment": str(loaded.path), "values": values}, indent=1))
        return EXIT_FINE
    rows = list(loaded.rows())
    key_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{key_width}}  {value:<{value_width}}  {origin}")
    return EXIT_FINE


def _schema(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    from decodegrid.configs.json_schema import deployment_schema

    print(json.dumps(deployment_schema(), indent=1))
    return EXIT_FINE


def _check(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    device_memory = None if args.device_memory is None else _size(args.device_memory)
    try:
        loaded = load_from_options(args)
    except ConfigError as error:
        named = None if args.config is None else str(args.config)
        return _end(args, empty_report(named) | {"problems": list(error.errors)})
    # Imported here: the other commands check their arguments before torch is loaded.
    from decodegrid.engine.config_check import CheckOptions, check_deployment

    options = CheckOptions(args.model_config, args.elsewhere, device_memory)
    return _end(args, check_deployment(loaded, options))


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"--device-memory {error}, got {text!r}") from None


def _end(args: argparse.Namespace, report: dict[str, Any]) -> int:
    """Print a report and return the exit status."""
    doubts = [*report["warnings"], *report["not_checked"]]
    refused = [*report["problems"], *(doubts if args.strict else [])]
    status = EXIT_REFUSED if refused else EXIT_FINE
    if args.json:
        print(json.dumps({"status": "refused" if refused else "ok", **report}, indent=1))
        return status
    if report["plan"] is not None:
        print("\n".join(format_report(report)))
    for line in report["problems"]:
        print(f"decodegrid: error: {printable(line)}", file=sys.stderr)
    if refused and not report["problems"]:
        print(
            f"decodegrid: error: --strict: {len(doubts)} "
            f"{'thing is' if len(doubts) == 1 else 'things are'} doubtful or not checked",
            file=sys.stderr,
        )
    if not refused:
        print(printable(f"{report['deployment']}: ok"))
    return status
