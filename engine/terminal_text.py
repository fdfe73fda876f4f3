"""Text from files as it may stand on a terminal.

Owns the escaping of what a checkpoint names: a tensor's or a field's name can hold line ends, a
terminal's commands, or halves of characters that no stream can encode. Data flow: text -> the same
text with those written as escapes.
"""


def printable(text: str) -> str:
    """`text` with every character that does not print written as \\x1b, \\n or \\ud800."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
