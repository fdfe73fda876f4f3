"""Values and keys of a deployment as they stand in messages: on one line, and not too long.

Owns the escapes. Data flow: what a YAML file holds -> text that YAML reads as the same.
"""

import json
import re
from typing import Final

_MAX_CHARS: Final = 60
_WORD: Final = re.compile(r"[A-Za-z0-9_-]{1,60}")


def show_value(value: object) -> str:
    """A value as it would stand in the file, on one line, cut after 60 characters."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
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


def _escape(char: str) -> str:
    """A character in a YAML text with double quotes."""
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
