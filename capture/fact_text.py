"""What differs between two values of one fact, for people.

Owns no fact. Some are long texts of the form Name(field=value, ...), of which one field may differ;
a message names that one.
"""

import ast

MAX_SHOWN = 60
"""Characters of a value in a message."""

ABSENT = "(absent)"


def differing_parts(name: str, theirs: str, ours: str) -> list[tuple[str, str, str]]:
    """(name of the part, their value, our value) of what differs between two different values.

    The parts of Name(field=value, ...) are its fields, called `name.field`; any other value is one
    part, called `name`, and is cut where it is long.
    """
    left, right = _fields(theirs), _fields(ours)
    parts = [
        (f"{name}.{field}", _short(left.get(field, ABSENT)), _short(right.get(field, ABSENT)))
        for field in dict.fromkeys((*left, *right))
        if left.get(field) != right.get(field)
    ]
    if left and right and parts:
        return parts
    return [(name, _short(theirs), _short(ours))]


def _fields(text: str) -> dict[str, str]:
    """The fields of Name(field=value, ...); none for any other text."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    if not isinstance(node, ast.Call) or node.args:
        return {}
    return {item.arg: ast.unparse(item.value) for item in node.keywords if item.arg is not None}


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
