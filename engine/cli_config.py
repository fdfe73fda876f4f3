"""`decodegrid config show` and `decodegrid config check`.

Owns how a deployment is printed. Loads no model and imports no torch.
"""

import argparse
from collections.abc import Callable

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli_options import add_config_options, load_from_options
from decodegrid.engine.llm import LLM


def add_config_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("config", help="show or check a deployment", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show", help="every effective value and where it comes from", allow_abbrev=False
    )
    add_config_options(show)
    show.set_defaults(run=_show)
    check = actions.add_parser("check", help="say whether it is valid", allow_abbrev=False)
    add_config_options(check)
    check.set_defaults(run=_check)


def _show(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    rows = list(load_from_options(args).rows())
    key_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{key_width}}  {value:<{value_width}}  {origin}")
    return 0


def _check(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    print(f"{load_from_options(args).path}: ok")
    return 0
