"""The input of an OpenAI response request.

Owns which kinds of items, and which of their fields, are understood; the rules between items (each
call has its output) are deepseek-recipe's. Data flow: `input` -> the recipe's items, with nothing
in them that it does not read.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from decodegrid.engine.body_fields import (
    BodyError,
    check_object,
    kind_name,
    read_list,
    read_text,
    shown,
)

Json = Any
"""What json.loads makes."""

_ROLES: Final = ("user", "system", "developer", "assistant")
_LABELS: Final = ("id", "status")
"""Of an item that an answer had: they say which one it was, and change nothing."""
_TEXTS: Final = ("input_text", "output_text")


def read_input(given: Json) -> list[Json]:
    """The items of `input`, which may be a text. Raises BodyError."""
    if isinstance(given, str):
        if not given:
            raise BodyError("input is empty; it needs at least 1 character", "input")
        return [{"role": "user", "content": read_text("input", given)}]
    if not isinstance(given, list) or not given:
        raise BodyError("input must be a text or a list of items, and not empty", "input")
    items = [_read_item(f"input[{index}]", item) for index, item in enumerate(given)]
    last = items[-1]
    if last.get("role") == "assistant" or last.get("type") in ("function_call", "reasoning"):
        raise BodyError("input must end with an item of the user or a call's output", "input")
    return items


def _read_item(where: str, item: Json) -> Json:
    if not isinstance(item, dict):
        raise BodyError(f"{where} must be an object, got {kind_name(item)}", where)
    kind = item.get("type", "message")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise BodyError(
            f"{where}.type must be one of {', '.join(_READERS)}, got {shown(kind)}",
            f"{where}.type",
        )
    for name in _LABELS:
        if item.get(name) is not None:
            read_text(f"{where}.{name}", item[name])
    return reader(where, item)


def _read_message(where: str, item: Mapping[str, Json]) -> Json:
    check_object(where, item, ("type", "role", "content", *_LABELS))
    role = item.get("role")
    if role not in _ROLES:
        raise BodyError(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}", f"{where}.role"
        )
    content = _read_content(f"{where}.content", item.get("content"))
    return {"role": "system" if role == "developer" else role, "content": content}


def _read_call(where: str, item: Mapping[str, Json]) -> Json:
    names = ("call_id", "name", "arguments")
    check_object(where, item, ("type", *names, *_LABELS))
    texts = {name: read_text(f"{where}.{name}", item.get(name)) for name in names}
    return {"type": "function_call", **texts}


def _read_call_output(where: str, item: Mapping[str, Json]) -> Json:
    check_object(where, item, ("type", "call_id", "output", *_LABELS))
    return {
        "type": "function_call_output",
        "call_id": read_text(f"{where}.call_id", item.get("call_id")),
        "output": _read_content(f"{where}.output", item.get("output")),
    }


def _read_reasoning(where: str, item: Mapping[str, Json]) -> Json:
    check_object(where, item, ("type", "summary", "content", *_LABELS))
    if item.get("summary") not in (None, []):
        raise BodyError(
            f"{where}.summary is not supported; content has the reasoning", f"{where}.summary"
        )
    place = f"{where}.content"
    parts = []
    for index, part in enumerate(read_list(place, item.get("content"))):
        inner = f"{place}[{index}]"
        check_object(inner, part, ("type", "text"))
        if part.get("type") != "reasoning_text":
            raise BodyError(f"{inner}.type must be reasoning_text", f"{inner}.type")
        text = read_text(f"{inner}.text", part.get("text"))
        parts.append({"type": "reasoning_text", "text": text})
    return {"type": "reasoning", "summary": [], "content": parts}


_READERS: Final[Mapping[str, Callable[[str, Mapping[str, Json]], Json]]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
    "reasoning": _read_reasoning,
}
"""By an item's type."""


def _read_content(where: str, content: Json) -> str:
    """A text, or a list of parts that are texts."""
    if isinstance(content, str):
        return read_text(where, content)
    if not isinstance(content, list):
        raise BodyError(f"{where} must be a text or a list of text parts", where)
    return "".join(_read_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _read_part(where: str, part: Json) -> str:
    if isinstance(part, dict) and part.get("type") not in _TEXTS:
        raise BodyError(
            f"{where}.type must be {' or '.join(_TEXTS)}, got {shown(part.get('type'))}",
            f"{where}.type",
        )
    check_object(where, part, ("type", "text", "annotations", "logprobs"))
    for name in ("annotations", "logprobs"):
        if part.get(name) not in (None, []):
            raise BodyError(f"{where}.{name} is not supported", f"{where}.{name}")
    return read_text(f"{where}.text", part.get("text"))
