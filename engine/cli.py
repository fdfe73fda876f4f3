"""The `decodegrid` command: arguments, errors and exit statuses.

Owns the command line's grammar and what becomes of an error: one line on standard error and exit
status 2 for what a user can cause, 130 after Ctrl-C, 141 when the reader of the output has gone.
The subcommand NAME does its work in cli_NAME.py, whose add_NAME_parser adds its arguments.
"""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from decodegrid import __version__
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.collector_pause import collector_paused
from decodegrid.engine.llm import LLM
from decodegrid.engine.terminal_text import one_line

EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

VERBS = (
    "generate", "chat", "batch", "serve", "bench", "config", "capture", "profile", "plan",
    "inspect", "convert", "replay", "doctor",
)  # fmt: skip
"""Subcommands, in the order of the help text."""

_UNKNOWN = "unrecognized arguments: "
"""What argparse says of words that no option takes."""


class UsageError(ValueError):
    """Arguments that do not fit the grammar."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing a usage text and leaving."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix(_UNKNOWN).split()
        if message.startswith(_UNKNOWN) and words[-1].endswith((".yaml", ".yml")):
            message += "; a deployment is given with --config"
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The grammar of every subcommand, or of `verb` alone, if it is one: a start needs no other's
    modules."""
    parser: argparse.ArgumentParser = _Parser(
        prog="decodegrid",
        description="A graph-compiled decode engine for DeepSeek-V4.1 models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"decodegrid {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in (verb,) if verb in VERBS else VERBS:
        module = import_module(f"decodegrid.engine.cli_{name}")
        getattr(module, f"add_{name}_parser")(commands)
    return parser


def build_engine(loaded: LoadedConfig) -> LLM:
    """An engine of this process, whose modules stay to its end: Python's collector is told not to
    look for garbage among them."""
    with collector_paused():
        # Imported here: commands that only check something do without torch.
        import decodegrid.engine.build  # noqa: F401

        gc.freeze()
        return LLM(loaded)


def main(
    argv: Sequence[str] | None = None,
    build_llm: Callable[[LoadedConfig], LLM] = build_engine,
) -> int:
    """Run the command line and return its exit status.

    argv: arguments without the program's name; None for the process's own. build_llm: makes the
    engine from a checked deployment.
    """
    try:
        words = sys.argv[1:] if argv is None else argv
        args = build_parser(words[0] if words else None).parse_args(words)
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


def _discard_stdout() -> None:
    """Let the interpreter flush standard output at exit without a second broken pipe."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return  # standard output is no file, so nothing is flushed to a pipe
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)
