"""The messages of an Anthropic message request.

Owns which blocks, and which of their fields, are understood; the rules between messages (each call
has its result) are deepseek-recipe's. Data flow: `system` and `messages` -> the recipe's, with
nothing in them that it does not read.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from decodegrid.engine.body_fields import (
    BodyError,
    check_object,
    kind_name,
    read_bool,
    read_text,
    shown,
)

Json = Any
"""What json.loads makes."""

_Reader = Callable[[str, Mapping[str, Json]], Json]
_CACHE: Final = "cache_control"
_ERROR: Final = "Error:"
"""Stands before the text of a tool's result that is one."""


def read_system(system: Json) -> Json:
    """The system prompt: a text, or a list of blocks of text."""
    if isinstance(system, str):
        return read_text("system", system)
    return _read_blocks("system", system, {"text": _read_text_block})


def read_messages(messages: Json) -> list[Json]:
    """The turns of a conversation. Raises BodyError."""
    if not isinstance(messages, list) or not messages:
        raise BodyError("messages must be a list of messages, and not empty", "messages")
    turns = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        check_object(where, message, ("role", "content"))
        role = message.get("role")
        if not isinstance(role, str) or role not in _BLOCKS:
            raise BodyError(
                f"{where}.role must be one of {', '.join(_BLOCKS)}, got {shown(role)}",
                f"{where}.role",
            )
        content = message.get("content")
        if isinstance(content, str):
            read_text(f"{where}.content", content)
        else:
            content = _read_blocks(f"{where}.content", content, _BLOCKS[role])
        turns.append({"role": role, "content": content})
    if turns[-1]["role"] == "assistant":
        raise BodyError(
            "messages must end with a message of the user: an answer cannot be begun for the model",
            "messages",
        )
    return turns


def check_cache(where: str, block: Mapping[str, Json]) -> None:
    """Raise BodyError for what the prefix cache does not do anyway. where: empty for a body."""
    control = block.get(_CACHE)
    if control is None:
        return
    place = f"{where}.{_CACHE}" if where else _CACHE
    check_object(place, control, ("type",))
    if control.get("type") != "ephemeral":
        raise BodyError(f"{place}.type must be ephemeral", f"{place}.type")


def _read_blocks(where: str, blocks: Json, readers: Mapping[str, _Reader]) -> list[Json]:
    if not isinstance(blocks, list):
        what = kind_name(blocks)
        raise BodyError(f"{where} must be a string or a list of blocks, got {what}", where)
    return [_read_block(f"{where}[{index}]", block, readers) for index, block in enumerate(blocks)]


def _read_block(where: str, block: Json, readers: Mapping[str, _Reader]) -> Json:
    if not isinstance(block, dict):
        raise BodyError(f"{where} must be an object, got {kind_name(block)}", where)
    kind = block.get("type")
    reader = readers.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise BodyError(
            f"{where}.type must be one of {', '.join(readers)}, got {shown(kind)}", f"{where}.type"
        )
    return reader(where, block)


def _read_text_block(where: str, block: Mapping[str, Json]) -> Json:
    check_object(where, block, ("type", "text", "citations", _CACHE))
    check_cache(where, block)
    if block.get("citations") not in (None, []):
        raise BodyError(f"{where}.citations is not supported", f"{where}.citations")
    return {"type": "text", "text": read_text(f"{where}.text", block.get("text"))}


def _read_thinking(where: str, block: Mapping[str, Json]) -> Json:
    check_object(where, block, ("type", "thinking", "signature"))
    found = {
        name: read_text(f"{where}.{name}", block.get(name)) for name in ("thinking", "signature")
    }
    return {"type": "thinking", **found}


def _read_call(where: str, block: Mapping[str, Json]) -> Json:
    check_object(where, block, ("type", "id", "name", "input", _CACHE))
    check_cache(where, block)
    given = block.get("input")
    if not isinstance(given, dict):
        message = f"{where}.input must be an object, got {kind_name(given)}"
        raise BodyError(message, f"{where}.input")
    texts = {name: read_text(f"{where}.{name}", block.get(name)) for name in ("id", "name")}
    return {"type": "tool_use", **texts, "input": given}


def _read_result(where: str, block: Mapping[str, Json]) -> Json:
    check_object(where, block, ("type", "tool_use_id", "content", "is_error", _CACHE))
    check_cache(where, block)
    content = "" if block.get("content") is None else block["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": read_text(f"{where}.content", content)}]
    else:
        content = _read_blocks(f"{where}.content", content, {"text": _read_text_block})
    is_error = block.get("is_error")
    if is_error is not None and read_bool(f"{where}.is_error", is_error):
        # The frame has no mark for it.
        content = [{"type": "text", "text": _ERROR}, *content]
    name = read_text(f"{where}.tool_use_id", block.get("tool_use_id"))
    return {"type": "tool_result", "tool_use_id": name, "content": content}


_BLOCKS: Final[Mapping[str, Mapping[str, _Reader]]] = {
    "user": {"text": _read_text_block, "tool_result": _read_result},
    "system": {"text": _read_text_block},
    "assistant": {
        "text": _read_text_block,
        "thinking": _read_thinking,
        "tool_use": _read_call,
    },
}
"""By the role of a message and the type of a block."""
