"""The fields of a request's body, whatever its protocol: which are known, and what they may hold.

Owns the checks that all protocols share and the errors that name a field. Knows no protocol; each
has a table of its fields of its own. Data flow: parts of a body -> the same parts, checked.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_checks import show

Json = Any
"""What json.loads makes."""


_FORMS: Final = ("ebnf", "json_schema", "regex")
"""Names that SGLang has for the form of a text; those of vLLM begin with `guided_`."""


class BodyError(RequestError):
    """A field that cannot be honoured."""

    def __init__(self, message: str, param: str | None) -> None:
        """param: the field."""
        super().__init__(message)
        self.param = param


def unknown_field(name: str, known: Collection[str], where: str = "") -> BodyError:
    """The refusal of a field that nobody knows, with the known one that is spelled most alike.

    where: the way to the object that has it.
    """
    place = f"{where}.{name}" if where else name
    if (name in _FORMS or name.startswith("guided_")) and "structured_outputs" in known:
        return BodyError(f"{place} is not supported; structured_outputs does that here", place)
    # A long name is like none, and takes long to compare.
    near = difflib.get_close_matches(name[:64], sorted(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return BodyError(f"{place} is not supported{hint}", place)


def check_names(fields: Mapping[str, Json], known: Collection[str]) -> None:
    """Raise BodyError for the first field of a body that is not known, null or not."""
    for name in fields:
        if name not in known:
            raise unknown_field(name, known)


def check_inert(fields: Mapping[str, Json], allowed: Mapping[str, Sequence[Json]]) -> None:
    """Raise BodyError for a field that asks for something else than what happens anyway.

    fields: of a body, without nulls. allowed: the values of each that ask for nothing more.
    """
    for name, values in allowed.items():
        if name in fields and not any(is_same(fields[name], value) for value in values):
            raise BodyError(
                f"{name} is not supported, got {shown(fields[name])}; it can only be "
                f"{_choices(values)}",
                name,
            )


def _choices(values: Sequence[Json]) -> str:
    """The values that a field may have, for a person; null is one that a body can leave out."""
    distinct: list[Json] = []
    for value in values:
        if value is not None and value not in distinct:
            distinct.append(value)
    return " or ".join(shown(value) for value in distinct) or "null"


def check_object(where: str, value: Json, names: Collection[str]) -> None:
    """Raise BodyError where a value is no object, or has a field beside these that is not null."""
    if not isinstance(value, dict):
        raise BodyError(f"{where} must be an object, got {kind_name(value)}", where)
    for name, item in value.items():
        if name not in names and item is not None:
            raise unknown_field(name, names, where)


def read_list(where: str, value: Json) -> list[Json]:
    """A value that must be a list."""
    if not isinstance(value, list):
        raise BodyError(f"{where} must be a list, got {kind_name(value)}", where)
    return value


def read_text(where: str, value: Json) -> str:
    """A value that must be a string of Unicode."""
    if not isinstance(value, str):
        raise BodyError(f"{where} must be a string, got {kind_name(value)}", where)
    check_unicode(where, value)
    return value


def read_bool(where: str, value: Json) -> bool:
    """A value that must be true or false."""
    if not isinstance(value, bool):
        raise BodyError(f"{where} must be true or false, got {shown(value)}", where)
    return value


def check_label(fields: Mapping[str, Json], name: str) -> None:
    """Raise BodyError where a field that changes nothing is there and is no string."""
    if name in fields:
        read_text(name, fields[name])


def check_unicode(where: str, text: str) -> None:
    """Raise BodyError for a string with half of a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"character {error.start} is {text[error.start]!r}"
        raise BodyError(f"{where} is not valid Unicode: {what}", where) from None


def kind_name(value: Json) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def is_same(value: Json, wanted: Json) -> bool:
    """Equal and of one type: false is not 0."""
    return type(value) is type(wanted) and bool(value == wanted)


def shown(value: Json) -> str:
    """A value in an error, cut where it is long."""
    text = show(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
