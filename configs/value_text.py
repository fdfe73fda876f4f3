"""Values and keys of a deployment as they stand in messages: on one line, and not too long.

Owns the escapes. Data flow: what a YAML file holds -> text that YAML reads as the same.
"""

import json
import re
from typing import Final

_MAX_CHARS: Final = 60
_MAX_SET_CHARS: Final = 120
_WORD: Final = re.compile(r"[A-Za-z0-9_-]{1,60}")
_URL_USER: Final = re.compile(r"://[^/?#@\s\"']*(?:@[^/?#@\s\"']*)*@")


def show_value(value: object) -> str:
    """A value as it would stand in the file, on one line, cut after 60 characters. A URL's user and
    password are left out: messages go to logs."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    text = _hide_user(text)
    if not text.isprintable():  # JSON leaves more as it is than YAML and terminals take
        text = "".join(char if char.isprintable() else _escape(char) for char in text)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def show_key(path: tuple[str | int, ...]) -> str:
    """("grid", "num_reqs", 1) as grid.num_reqs[1]; a name that is no word as a value."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if _WORD.fullmatch(part) else show_value(part)
            text += f".{name}" if text else name
    return text


def show_set(text: str) -> str:
    """The text of a `--set`, cut after 120 characters, as `show_value` without passwords."""
    text = _hide_user(text)
    return text if len(text) <= _MAX_SET_CHARS else text[: _MAX_SET_CHARS - 3] + "..."


def _hide_user(text: str) -> str:
    return _URL_USER.sub("://***@", text)


def _escape(char: str) -> str:
    """A character in a YAML text with double quotes."""
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
