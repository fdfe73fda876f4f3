"""Every message that the troubleshooting page explains is one that the program can say.

Texts of the sources are read as patterns: what an f-string or a format fills in is anything. A
heading's `...` stands for what is filled in, so that it cannot hide words of the message.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decodegrid.engine.cli import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_USER_ERROR
from decodegrid.engine.server_process import EXIT_CUT_OFF, EXIT_ENGINE

FOLDERS = ("configs", "kernels", "graphs", "capture", "engine")
HOLE = "\0"
"""What is filled in."""
MIN_SHARE = 0.5
"""Of a heading's own characters those that the source's text must have itself."""


def template(node: ast.expr) -> str:
    """The text that an expression makes, with holes; a hole for one that is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%(s|d|\.\d+f)", HOLE, text)
        case ast.JoinedStr(values=values):
            return "".join(template(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return HOLE


def source_texts(root: Path) -> Iterator[str]:
    """All texts of the sources, and those that the Makefile prints."""
    for folder in FOLDERS:
        for path in (root / folder).glob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from (template(n) for n in ast.walk(tree) if isinstance(n, ast.expr))
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    for text in re.findall(r'(?:echo |print\(f)"(error: [^"]+)"', makefile):
        yield re.sub(r"\$\([^)]*\)|\{[^}]*\}", HOLE, text)


def says(text: str, message: str) -> bool:
    """Whether a source's text can be the message. text: with holes. message: with `...`."""
    if len(text.replace(HOLE, "")) < MIN_SHARE * len(message.replace("...", "")):
        return False
    text, message = _with_holes(text), _with_holes(message)
    # Quicker than the expression, which is for the order.
    if not all(part in message for part in text.split(HOLE)):
        return False
    pattern = re.escape(re.sub(f"{HOLE}+", HOLE, text)).replace(re.escape(HOLE), ".*")
    return re.fullmatch(pattern, message) is not None


def _with_holes(text: str) -> str:
    """Three dots become a hole; of more, the last three."""
    return re.sub(r"\.{3}(?!\.)", HOLE, text)


@pytest.fixture(scope="module")
def texts(root: Path) -> frozenset[str]:
    return frozenset(text for text in source_texts(root) if text.strip(HOLE + " "))


@pytest.fixture(scope="module")
def sections(pages: dict[str, Any]) -> dict[str, str]:
    """What the page says under each message."""
    _, *parts = re.split(r"^### ", pages["docs/troubleshooting.md"].prose, flags=re.MULTILINE)
    found = {}
    for part in parts:
        head, _, body = part.partition("\n")
        message = re.fullmatch(r"`([^`]+)`", head)
        assert message is not None, f"no message: {head}"
        assert message[1] not in found, f"twice: {head}"
        found[message[1]] = re.split(r"^#+ ", body, maxsplit=1, flags=re.MULTILINE)[0]
    return found


def test_every_message_is_one_of_the_program(
    sections: dict[str, str], texts: frozenset[str]
) -> None:
    assert len(sections) >= 25
    lost = [
        message
        for message in sections
        # A quotation mark stands for the backquotes that a heading cannot hold.
        if not any(says(text.replace("`", '"'), message) for text in texts)
    ]
    assert not lost


def test_every_message_has_a_cause_and_a_remedy(sections: dict[str, str]) -> None:
    for message, body in sections.items():
        cause, mark, remedy = body.partition("**Do:**")
        assert mark and cause.strip() and remedy.strip(), message


def test_exit_statuses(pages: dict[str, Any]) -> None:
    text = " ".join(pages["docs/troubleshooting.md"].prose.split())
    told = re.search(r"Exit statuses: (.*?)\. First things", text)
    assert told is not None
    numbers = [int(number) for number in re.findall(r"(?:^|; )(\d+) ", told[1])]
    others = [EXIT_USER_ERROR, EXIT_ENGINE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE]
    assert numbers == [0, EXIT_CUT_OFF, *others]


@pytest.mark.parametrize(
    ("source", "message", "is_said"),
    [
        ('f"{a} is {b}; allowed are 1..{c}"', "... is ...; allowed are 1.....", True),
        ('f"{a} is {b}; allowed are 1..{c}"', "... is 5; allowed are 1..9", True),
        ('f"{a} is {b}; allowed are 1..{c}"', "... was 5; allowed are 1..9", False),
        ('f"{a} is {b}; allowed are 1..{c}"', "... is ... 1..9", False),
        ('"no step for %.1f s"', "no step for ... s", True),
        ('"a " + f"b {x}"', "a b ...", True),
        ('f"{a}: {b}"', "...: no such checkpoint directory", False),
    ],
)
def test_a_message_is_compared_word_by_word(source: str, message: str, is_said: bool) -> None:
    text = template(ast.parse(source, mode="eval").body)
    assert says(text, message) is is_said
