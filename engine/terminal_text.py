"""Text from files as it may stand on a terminal.

Owns the escaping of what a checkpoint names: a tensor's or a field's name can hold line ends, a
terminal's commands, or halves of characters that no stream can encode; and an error as one line.
Data flow: text -> the same text with those written as escapes.
"""

import os


def printable(text: str) -> str:
    """`text` with every character that does not print written as \\x1b, \\n or \\ud800."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: Exception) -> str:
    """An error's message on one line, in characters that print; a file error as `name: what`."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return printable(f"{os.fspath(error.filename)!s}: {error.strerror}")
    lines = (line.strip() for line in str(error).splitlines())
    return printable("; ".join(line for line in lines if line))
