"""`decodegrid serve`: the engine behind OpenAI's API.

Owns the verb's arguments and the end of the process. The server itself is server_process.py's,
which is imported where it runs: the other verbs do without its packages.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli_options import (
    add_config_options,
    add_package_option,
    load_from_options,
)
from decodegrid.engine.llm import LLM

MAX_PORT = 65535


def add_serve_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve OpenAI's API over HTTP",
        description="Serve /v1/chat/completions, /v1/completions, /v1/models, /tokenize and "
        "/detokenize, with /live, /ready, /version and /metrics, as the deployment's section "
        "`server` says. SIGTERM drains. Exit status 0 after a clean end, 1 when requests were cut "
        "off, 2 for a deployment that cannot start, 3 when the engine failed or hung.",
        allow_abbrev=False,
    )
    add_config_options(parser)
    add_package_option(parser)
    parser.add_argument("--host", metavar="ADDRESS", help="default: the deployment's server.host")
    parser.add_argument(
        "--port", type=int, metavar="N", help="0: a free one (default: the deployment's)"
    )
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    if args.host is not None:
        args.overrides = [*args.overrides, f"server.host={args.host!r}"]
    if args.port is not None:
        if not 0 <= args.port <= MAX_PORT:
            raise ValueError(f"--port is {args.port}; allowed are 0..{MAX_PORT}")
        args.overrides = [*args.overrides, f"server.port={args.port}"]
    loaded = load_from_options(args)
    engine_type = loaded.config.scheduler.engine_type
    if engine_type != "normal":
        raise ValueError(f"serve needs scheduler.engine_type normal, got {engine_type}")

    from decodegrid.engine.server_log import configure_logging
    from decodegrid.engine.server_process import Server

    server = Server(loaded, build_llm)
    configure_logging(loaded.config.server.log_level)
    end = asyncio.run(server.run())
    if end.is_stuck:
        # A thread that hangs, or compiles, would keep the interpreter from ending.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(end.status)
    return end.status
