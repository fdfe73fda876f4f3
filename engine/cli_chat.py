"""`decodegrid chat`: a conversation on the terminal or through a pipe.

Owns the history and the commands /clear and /exit. The V4.1 chat frame is the tokenizer's.
"""

import argparse
import re
import sys
from collections.abc import Callable

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli_input import STANDARD_INPUT, decode_utf8
from decodegrid.engine.cli_options import (
    add_config_options,
    add_package_option,
    add_sampling_options,
    load_from_options,
    sampling_from_options,
)
from decodegrid.engine.llm import LLM
from decodegrid.engine.prompt_check import check_conversation
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import ChatMessage

_HELP = "/clear forgets the conversation, /exit (or end of input) leaves"
_COMMAND = re.compile(r"/[a-z]+")
"""What looks like one on a terminal; text from a pipe is for the model, whatever it looks like."""


def add_chat_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with the model",
        description=f"One line a turn; {_HELP}.",
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_config_options(parser)
    add_package_option(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    params = sampling_from_options(args, loaded)
    opening = [] if args.system is None else [ChatMessage("system", args.system)]
    lines = _Lines()
    # A person types after the start-up, but from a pipe the first message is there before it.
    line = "" if lines.interactive else lines.read_first_message()
    if line is None:
        return 0
    # Without a message yet, an empty one stands for it: it is shorter than any other.
    check_conversation(loaded, [*opening, ChatMessage("user", line)], params)
    llm = build_llm(loaded)
    if lines.interactive:
        print(_HELP, file=sys.stderr)
        line = lines.read()
    messages = list(opening)
    try:
        while line is not None and line != "/exit":
            if line == "/clear":
                messages = list(opening)
            elif lines.interactive and _COMMAND.fullmatch(line):
                print(f"decodegrid: error: {line} is no command; {_HELP}", file=sys.stderr)
            elif line:
                _take_turn(llm, messages, line, params, lines.interactive)
            line = lines.read()
    finally:
        if not args.no_report and llm.stats.num_decode_steps:
            print(llm.report(), file=sys.stderr)
    return 0


class _Lines:
    """The lines of standard input: typed on a terminal, or UTF-8 through a pipe."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._offset = 0

    def read(self) -> str | None:
        """The next line without its end, or None at the end of input.

        Raises RequestError for bytes from a pipe that are not UTF-8.
        """
        if self.interactive:
            sys.stdout.write("> ")
            sys.stdout.flush()
            line = sys.stdin.readline()
            return line.strip() if line else None
        data = sys.stdin.buffer.readline()
        if not data:
            return None
        line = decode_utf8(STANDARD_INPUT, data, self._offset)
        self._offset += len(data)
        return line.strip()

    def read_first_message(self) -> str | None:
        """The first line that is for the model, or None where the talk ends without one."""
        while (line := self.read()) in ("", "/clear"):
            pass
        return None if line == "/exit" else line


def _take_turn(
    llm: LLM, messages: list[ChatMessage], line: str, params: SamplingParams, interactive: bool
) -> None:
    """Answer one line and write both turns to messages.

    A turn that cannot be served leaves messages as they were: on a terminal the error is printed
    and the talk goes on, through a pipe it is raised.
    """
    question = ChatMessage("user", line)
    answer: list[str] = []
    try:
        pieces = llm.stream([llm.tokenizer.encode_chat([*messages, question])], params)
    except RequestError as error:
        if not interactive:
            raise
        print(f"decodegrid: error: {error}; /clear starts over", file=sys.stderr)
        return
    for piece in pieces:
        answer.append(piece.text)
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    messages += [question, ChatMessage("assistant", "".join(answer))]
