"""JSON as the standard has it, from users: what Python's reader lets through or words badly.

Owns how much of a file is read, and the refusal of NaN and infinity, of keys that stand twice in an
object, of numbers of thousands of digits and of deep nesting.
"""

import json
from pathlib import Path
from typing import Any, Final, NoReturn

MAX_DEPTH: Final = 256
"""Lists and objects inside each other. Far below Python's limit, which depends on who calls: a
value that could be read must be possible to look through, to print and to write."""
_TOO_DEEP: Final = "not readable as JSON: it is nested too deeply"


def load_json(text: str, first_line: int = 1) -> Any:
    """The value of a JSON text. Raises ValueError with one line of what is wrong.

    first_line: number of the text's first line in its file.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        place = f"line {first_line - 1 + error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON at {place}: {error.msg}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except _JsonError:
        raise
    except ValueError:  # Python converts no longer ones
        raise ValueError("not readable as JSON: a number has thousands of digits") from None
    # Few texts have so many brackets that it needs a look.
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


class _JsonError(ValueError):
    """What this module itself refuses."""


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [outer for outer in level if isinstance(outer, dict | list)]
        if not level:
            return False
        children = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [item for inner in children for item in inner]
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise _JsonError(f"not JSON: {name} is no JSON number")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for json: ValueError for a key that an object has twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _JsonError(f"the key {key!r} is there twice")
        found[key] = value
    return found


def read_json(path: Path, max_bytes: int) -> Any:
    """The value of a JSON file. Raises ValueError, without the file's name, for what is no such
    file: a device or a directory, a longer one, other bytes than UTF-8; OSError."""
    if path.exists() and not path.is_file():
        raise ValueError("is not a file")
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{size} bytes; at most {max_bytes} are read")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text") from None
    return load_json(text)
