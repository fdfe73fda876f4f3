"""Refuses regular expressions that the grammar library would read otherwise than they are meant.

Owns the list of what it silently ignores: anchors inside the expression and escapes that it does
not know; and, in the patterns of a JSON schema, of what it would put into a JSON string without
escaping it. What it refuses itself (look-around, references, word boundaries) is left to it.
"""

from typing import Final

from decodegrid.engine.request_error import RequestError

_LETTER_ESCAPES: Final = frozenset("dDwWsSnrtfvxucbBpPk")
"""Letters that mean something behind a backslash; the last of them are refused by name later."""


_CLASS_ESCAPES: Final = frozenset("dDwWsS")
"""Of those, the ones that stand for characters of which JSON's own are left out."""


def check_regex(name: str, pattern: str, *, in_json: bool = False) -> None:
    """Raise RequestError, naming the character's place, for what would be read otherwise.

    name: of the field. in_json: it is for the characters of a JSON string. The expression matches a
    whole text, so that `^` may stand where nothing can come before it, and `$` where nothing can
    follow.
    """
    if in_json:
        _check_json_characters(name, pattern)
    depth = 0
    is_class = False
    starts = [True]
    """For each open group whether nothing of the text comes before the next item."""
    place = 0
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            _check_escape(name, pattern, place)
            starts[-1] = False
            place += 2
            continue
        if is_class:
            is_class = char != "]"
        elif char == "[":
            is_class, starts[-1] = True, False
        elif char == "(":
            depth += 1
            starts.append(starts[-1])
            place = _group_start(pattern, place)
            continue
        elif char == ")" and depth:
            depth -= 1
            starts.pop()
            starts[-1] = False
        elif char == "|":
            starts[-1] = depth == 0 or (len(starts) > 1 and starts[-2])
        elif char == "^":
            if not starts[-1]:
                raise _misplaced(name, "^", place, "before")
        elif char == "$":
            if not _is_last(pattern, place + 1, depth):
                raise _misplaced(name, "$", place, "behind")
        else:
            starts[-1] = False
        place += 1


def _check_json_characters(name: str, pattern: str) -> None:
    """Outside of classes: no character that JSON escapes, written out or as an escape."""
    is_class = False
    place = 0
    while place < len(pattern):
        char = pattern[place]
        step = 2 if char == "\\" else 1
        escaped = pattern[place + 1 : place + 2] if step == 2 else ""
        is_special = escaped == "\\" or (escaped.isalnum() and escaped not in _CLASS_ESCAPES)
        if not is_class and (char < " " or char == '"' or escaped == '"' or is_special):
            raise RequestError(
                f"{name} has {pattern[place : place + step]!r} at character {place}: a quote, "
                "backslash or escaped character is only supported inside a class, such as [\\w]"
            )
        if step == 1:
            is_class = char != "]" if is_class else char == "["
        place += step


def _group_start(pattern: str, place: int) -> int:
    """The place behind `(`, `(?:` or `(?<name>`."""
    if pattern.startswith("(?<", place) and ">" in pattern[place:]:
        return pattern.index(">", place) + 1
    return place + (3 if pattern.startswith("(?:", place) else 1)


def _is_last(pattern: str, place: int, depth: int) -> bool:
    """Whether what follows closes groups only, up to the end or an alternative of all of it."""
    while place < len(pattern) and pattern[place] == ")" and depth:
        place += 1
        depth -= 1
    return place == len(pattern) or (depth == 0 and pattern[place] == "|")


def _check_escape(name: str, pattern: str, place: int) -> None:
    escaped = pattern[place + 1 : place + 2]
    if escaped.isascii() and escaped.isalpha() and escaped not in _LETTER_ESCAPES:
        raise RequestError(f"{name} has \\{escaped} at character {place}, which is not supported")


def _misplaced(name: str, anchor: str, place: int, side: str) -> RequestError:
    return RequestError(
        f"{name} has {anchor} at character {place}, with something {side} it; the expression "
        "matches the whole text, and an anchor inside it is not supported"
    )
