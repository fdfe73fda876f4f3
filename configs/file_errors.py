"""What pydantic finds wrong with a JSON file, on one line.

Owns the words for place and value. Knows no file's name; who reads the file adds it.
"""

import json

from pydantic import ValidationError

_SHOWN_CHARS = 60


def first_problem(
    error: ValidationError, root: str = "the file", written_by: str | None = None
) -> str:
    """The first thing that is wrong, such as "pairs.0.steps: Input should be ..., got -1".

    root: what to call the place of the outermost value. written_by: the command that writes such
    files, named where fields are missing or unknown, as in a file of another kind.
    """
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or root
    # Behind it stands the name of a Python class.
    words = first["msg"].partition(" or instance of ")[0]
    if written_by is not None and first["type"] in ("missing", "extra_forbidden"):
        words += f" in what {written_by} writes"
    if first["type"] == "missing":  # there is no value; the input is what lacks it
        return f"{place}: {words}"
    shown = json.dumps(first["input"], default=str)
    if len(shown) > _SHOWN_CHARS:
        shown = shown[: _SHOWN_CHARS - 3] + "..."
    return f"{place}: {words}, got {shown}"
