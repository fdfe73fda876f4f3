"""JSON as the standard has it, from users: what Python's reader lets through or words badly.

Owns the refusal of NaN and infinity, of keys that stand twice in an object, of numbers of thousands
of digits and of nesting beyond the reader's stack.
"""

import json
from typing import Any, NoReturn


def load_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError with one line of what is wrong."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise ValueError(f"not JSON at {place}: {error.msg}") from None
    except RecursionError:
        raise ValueError("not readable as JSON: it is nested too deeply") from None
    except _JsonError:
        raise
    except ValueError:  # Python converts no longer ones
        raise ValueError("not readable as JSON: a number has thousands of digits") from None


class _JsonError(ValueError):
    """What this module itself refuses."""


def _refuse_constant(name: str) -> NoReturn:
    raise _JsonError(f"not JSON: {name} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            shown = repr(key[:80])
            raise _JsonError(f"not readable as JSON: the key {shown} stands twice in an object")
        found[key] = value
    return found
