"""The tools in the body of an Anthropic message request, and the choice among them.

Data flow: `tools` and `tool_choice` -> the recipe's tools, Tool and ToolUse.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from decodegrid.engine.body_fields import (
    BodyError,
    check_inert,
    check_object,
    check_unicode,
    read_bool,
    read_list,
    read_text,
    shown,
)
from decodegrid.engine.messages_content import check_cache
from decodegrid.engine.tool_use import Tool, ToolUse, check_use

Json = Any
"""What json.loads makes."""

INERT: Final = {
    "type": ("custom",),
    "defer_loading": (False,),
    "eager_input_streaming": (False,),
    "allowed_callers": (["direct"],),
}
"""Of a tool: fields that must ask for what happens anyway."""
_FIELDS: Final = ("name", "description", "input_schema", "strict", "cache_control", *INERT)
_CHOICES: Final = ("auto", "any", "tool", "none")
_NOT_PARALLEL: Final = "disable_parallel_tool_use"


def read_tools(tools: Json) -> tuple[list[Json], list[Tool]]:
    """The tools for the recipe, and for the rules of their use. Raises BodyError."""
    shapes: list[Json] = []
    found = []
    for index, tool in enumerate(read_list("tools", tools)):
        where = f"tools[{index}]"
        check_object(where, tool, _FIELDS)
        _check_inert(where, tool)
        check_cache(where, tool)
        shape: dict[str, Json] = {"name": read_text(f"{where}.name", tool.get("name"))}
        if tool.get("description") is not None:
            shape["description"] = read_text(f"{where}.description", tool["description"])
        schema = tool.get("input_schema")
        place = f"{where}.input_schema"
        if not isinstance(schema, dict):
            raise BodyError(f"{place} must be a JSON schema", place)
        shape["input_schema"] = schema
        strict = tool.get("strict")
        if strict is not None:
            read_bool(f"{where}.strict", strict)
        shapes.append(shape)
        found.append(Tool(shape["name"], schema, strict, place))
    check_unicode("tools", json.dumps(shapes, ensure_ascii=False))
    return shapes, found


def read_use(choice: Json, tools: Sequence[Tool]) -> ToolUse:
    """The choice among the tools. Raises BodyError."""
    where = "tool_choice"
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in _CHOICES:
        message = f"{where} must have one of the types {', '.join(_CHOICES)}, got {shown(choice)}"
        raise BodyError(message, where)
    names = ["type"]
    names += [_NOT_PARALLEL] if kind != "none" else []
    names += ["name"] if kind == "tool" else []
    check_object(where, choice, names)
    given = choice.get(_NOT_PARALLEL)
    is_single = given is not None and read_bool(f"{where}.{_NOT_PARALLEL}", given)
    if is_single and not tools:
        name = f"{where}.{_NOT_PARALLEL}"
        raise BodyError(f"{name} is of tools, which are not given", name)
    if kind == "none":
        use = ToolUse("none")
    elif kind == "tool":
        name = read_text(f"{where}.name", choice.get("name"))
        # Anthropic's may be called several times, unless it is said otherwise.
        use = ToolUse("one" if is_single else "must", (name,), is_parallel=not is_single)
    else:
        use = ToolUse("must" if kind == "any" else "may", is_parallel=not is_single)
    check_use(use, tools)
    return use


def _check_inert(where: str, tool: dict[str, Json]) -> None:
    given = {f"{where}.{name}": tool[name] for name in INERT if tool.get(name) is not None}
    check_inert(given, {f"{where}.{name}": values for name, values in INERT.items()})
