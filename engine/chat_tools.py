"""The tools in the body of an OpenAI request, and the choice among them.

Owns both spellings: that of chats, with a function inside of a tool, and that of responses, where
they are one object. Data flow: `tools`, `tool_choice` and `parallel_tool_calls` -> the recipe's
tools, Tool and ToolUse.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from decodegrid.engine.body_fields import (
    BodyError,
    check_object,
    check_unicode,
    kind_name,
    read_bool,
    read_list,
    read_text,
    shown,
)
from decodegrid.engine.tool_use import Tool, ToolUse, check_use

Json = Any
"""What json.loads makes."""

TOOL_FIELDS: Final = ("tools", "tool_choice", "parallel_tool_calls")
_FUNCTION: Final = ("name", "description", "parameters", "strict")
_PARALLEL: Final = "parallel_tool_calls"


def read_tools(tools: Json, *, is_flat: bool) -> tuple[list[Json], list[Tool]]:
    """The tools for the recipe, and for the rules of their use. is_flat: as responses have them."""
    shapes: list[Json] = []
    found = []
    for index, tool in enumerate(read_list("tools", tools)):
        where = f"tools[{index}]"
        names = ("type", *_FUNCTION) if is_flat else ("type", "function")
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise BodyError(f"{where}.type must be function", f"{where}.type")
        check_object(where, tool, names)
        function, place = (tool, where) if is_flat else (tool.get("function"), f"{where}.function")
        if not is_flat:
            check_object(place, function, _FUNCTION)
        found.append(_read_function(place, function))
        shape = {
            name: function[name]
            for name in ("name", "description", "parameters")
            if function.get(name) is not None
        }
        # Its strictness is not the recipe's: it knows a part of JSON schemas only.
        made = {"type": "function", **(shape if is_flat else {"function": shape})}
        shapes.append(made)
    check_unicode("tools", json.dumps(shapes, ensure_ascii=False))
    return shapes, found


def read_use(fields: Mapping[str, Json], tools: Sequence[Tool], *, is_flat: bool) -> ToolUse:
    """The choice among the tools. fields: of the body, without nulls."""
    is_parallel = read_bool(_PARALLEL, fields.get(_PARALLEL, True))
    choice = fields.get("tool_choice", "auto")
    if isinstance(choice, str):
        use = _read_word(choice, is_parallel=is_parallel)
    elif isinstance(choice, dict):
        use = _read_object(choice, is_flat=is_flat, is_parallel=is_parallel)
    else:
        raise _wrong(choice)
    if not is_parallel and not tools:
        raise BodyError(f"{_PARALLEL}=False is of tools, which are not given", _PARALLEL)
    check_use(use, tools)
    return use


def _read_function(place: str, function: Mapping[str, Json]) -> Tool:
    name = read_text(f"{place}.name", function.get("name"))
    if function.get("description") is not None:
        read_text(f"{place}.description", function["description"])
    parameters = function.get("parameters")
    where = f"{place}.parameters"
    if not isinstance(parameters, dict | None):
        raise BodyError(f"{where} must be a JSON schema", where)
    strict = function.get("strict")
    if strict is not None:
        read_bool(f"{place}.strict", strict)
    return Tool(name, parameters, strict, where)


def _read_word(choice: str, *, is_parallel: bool) -> ToolUse:
    if choice == "none":
        return ToolUse("none")
    if choice == "auto":
        return ToolUse("may", is_parallel=is_parallel)
    if choice == "required":
        return ToolUse("must", is_parallel=is_parallel)
    raise _wrong(choice)


def _read_object(choice: Mapping[str, Json], *, is_flat: bool, is_parallel: bool) -> ToolUse:
    kind = choice.get("type")
    if kind == "function":
        return ToolUse("one", (_named("tool_choice", choice, is_flat=is_flat),))
    if kind != "allowed_tools":
        raise _wrong(dict(choice))
    where = "tool_choice"
    allowed: Json = choice
    if not is_flat:
        check_object(where, choice, ("type", "allowed_tools"))
        where, allowed = "tool_choice.allowed_tools", choice.get("allowed_tools")
    names = ("type", "mode", "tools") if is_flat else ("mode", "tools")
    check_object(where, allowed, names)
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise BodyError(f"{where}.mode must be auto or required", f"{where}.mode")
    offered = [
        _named(f"{where}.tools[{index}]", tool, is_flat=is_flat)
        for index, tool in enumerate(read_list(f"{where}.tools", allowed.get("tools")))
    ]
    return ToolUse("may" if mode == "auto" else "must", tuple(offered), is_parallel)


def _named(where: str, value: Json, *, is_flat: bool) -> str:
    """The name in `{"type": "function", ...}`."""
    check_object(where, value, ("type", "name") if is_flat else ("type", "function"))
    if value.get("type") != "function":
        raise BodyError(f"{where}.type must be function", f"{where}.type")
    if is_flat:
        return read_text(f"{where}.name", value.get("name"))
    check_object(f"{where}.function", value.get("function"), ("name",))
    return read_text(f"{where}.function.name", value["function"].get("name"))


def _wrong(choice: Json) -> BodyError:
    what = shown(choice) if isinstance(choice, str | dict) else kind_name(choice)
    return BodyError(
        f"tool_choice={what} is not supported; it must be auto, none, required, a function of the "
        "tools, or allowed_tools",
        "tool_choice",
    )
