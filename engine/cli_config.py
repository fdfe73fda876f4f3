"""`decodegrid config show` and `decodegrid config check`.

Owns how a deployment is printed. `show` needs neither checkpoint nor torch; `check` refuses what
start-up would refuse before it compiles, and loads no weights.
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
    check = actions.add_parser(
        "check", help="say whether it fits its checkpoint and this machine", allow_abbrev=False
    )
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
    loaded = load_from_options(args)
    # Imported here: the other commands check their arguments before torch is loaded.
    from decodegrid.engine.deployment_check import check_deployment

    check_deployment(loaded)
    print(f"{loaded.path}: ok")
    if loaded.config.cache.memory_fraction:
        fraction = f"cache.memory_fraction = {loaded.config.cache.memory_fraction:g}"
        print(f"{fraction}: the pool is sized at start, by the memory that is free then")
    return 0
