"""References inside a JSON schema: which of them the grammar library follows, and where they go.

Owns the reading of `$ref`. Data flow: a reference and the whole schema -> the schema it names.
"""

from collections.abc import Mapping
from typing import Any

from decodegrid.engine.request_error import RequestError


def check_reference(place: str, reference: object, root: Mapping[str, Any]) -> None:
    """Raise RequestError unless `$ref` is `#` or a path to a part of the same schema.

    place: of the schema that holds it, for the message.
    """
    if not isinstance(reference, str):
        raise RequestError(f"{place}.$ref must be a string, got {reference!r}")
    if reference != "#" and not reference.startswith("#/"):
        raise RequestError(
            f"{place}.$ref is {reference!r}; only references into the same schema are supported, "
            'which begin with "#/"'
        )
    if "%" in reference:
        raise RequestError(f"{place}.$ref is {reference!r}; percent signs are not supported")
    if resolve(reference, root) is None:
        raise RequestError(f"{place}.$ref is {reference!r}, which the schema does not have")


def resolve(reference: object, root: Mapping[str, Any]) -> object:
    """What a reference names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for step in reference.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
