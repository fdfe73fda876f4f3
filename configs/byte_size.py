"""Numbers of bytes as people write them: 1000, 512MiB, 1.5 GB.

Owns the one rule for them in deployment files and on the command line. A text counts whole or not
at all, so that 1,000 is refused and is not 1.
"""

import re
from typing import Annotated, Final

from pydantic import BeforeValidator

_UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}
_SIZE: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))? ?([A-Za-z]*)")

SIZE_PATTERN: Final = (
    r"^\s*([0-9]{1,18} ?[bB]?|[0-9]{1,18}(\.[0-9]{1,18})? ?[kKmMgGtTpP][iI]?[bB])\s*$"
)
"""What `parse_size` takes, for a JSON Schema."""


def parse_size(text: str) -> int:
    """Bytes of a size. A fraction needs a unit; what is left of a byte is dropped.

    Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[3].lower())
    if match is None or unit is None or (match[2] is not None and unit == 1):
        raise ValueError("must be a whole number of bytes, or a size such as 512MiB")
    whole, part = int(match[1]) * unit, match[2] or "0"
    return whole + int(part) * unit // int("1" + "0" * len(part))


def _as_bytes(value: object) -> object:
    """Bytes of a text or a number; one message for every other type."""
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number of bytes, or a size such as 512MiB")
    return value


NumBytes = Annotated[int, BeforeValidator(_as_bytes)]
"""A field that is a number of bytes; its bounds stand beside it."""
