"""The `decodegrid` command: arguments, errors and exit statuses.

Owns the command line's grammar and what becomes of an error: one line on standard error and exit
status 2 for what a user can cause, 130 after Ctrl-C, 141 when the reader of the output has gone.
The subcommands do the work in cli_generate.py, cli_chat.py, cli_batch.py, cli_config.py,
cli_profile.py, cli_plan.py, cli_inspect.py, cli_convert.py and cli_replay.py.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from decodegrid import __version__
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli_batch import add_batch_parser
from decodegrid.engine.cli_chat import add_chat_parser
from decodegrid.engine.cli_config import add_config_parser
from decodegrid.engine.cli_convert import add_convert_parser
from decodegrid.engine.cli_generate import add_generate_parser
from decodegrid.engine.cli_inspect import add_inspect_parser
from decodegrid.engine.cli_plan import add_plan_parser
from decodegrid.engine.cli_profile import add_profile_parser
from decodegrid.engine.cli_replay import add_replay_parser
from decodegrid.engine.llm import LLM
from decodegrid.engine.terminal_text import printable

EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class UsageError(ValueError):
    """Arguments that do not fit the grammar."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing a usage text and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="decodegrid",
        description="A graph-compiled decode engine for DeepSeek-V4.1 models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"decodegrid {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_generate_parser(commands)
    add_chat_parser(commands)
    add_batch_parser(commands)
    add_config_parser(commands)
    add_profile_parser(commands)
    add_plan_parser(commands)
    add_inspect_parser(commands)
    add_convert_parser(commands)
    add_replay_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None, build_llm: Callable[[LoadedConfig], LLM] = LLM) -> int:
    """Run the command line and return its exit status.

    argv: arguments without the program's name; None for the process's own. build_llm: makes the
    engine from a checked deployment.
    """
    try:
        args = build_parser().parse_args(argv)
        status: int = args.run(args, build_llm)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("decodegrid: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError) as error:
        print(f"decodegrid: error: {one_line(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except SystemExit as stop:  # argparse leaves this way after --help and --version
        return stop.code if isinstance(stop.code, int) else EXIT_OK


def one_line(error: Exception) -> str:
    """An error's message on one line, in characters that print; a file error as `name: what`."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return printable(f"{os.fspath(error.filename)!s}: {error.strerror}")
    lines = (line.strip() for line in str(error).splitlines())
    return printable("; ".join(line for line in lines if line))


def _discard_stdout() -> None:
    """Let the interpreter flush standard output at exit without a second broken pipe."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return  # standard output is no file, so nothing is flushed to a pipe
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)
