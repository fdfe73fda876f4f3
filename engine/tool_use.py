"""The tools of a request and how an answer may use them, whatever the protocol.

Owns the rules: which calls are held to a grammar, and to what of a tool's schema. Knows no body;
each protocol reads its own. Data flow: tools and a choice -> the recipe's choice and CallsParams.

An answer that must call is held to the tools' names, and each call's arguments to its schema unless
the tool says `strict: false`. One that may call is held to them only where a tool is strict, where
calls may not be parallel, or where not all tools may be called; there the arguments of tools that
are not strict are free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.grammar_calls import CallMode, CallSchema, CallsParams
from decodegrid.engine.grammar_schema import check_schema
from decodegrid.engine.request_error import RequestError

RecipeChoice = Literal["none", "auto", "required"]
_HINT: Final = "strict=false leaves a tool's arguments free"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call."""

    name: str
    parameters: Mapping[str, Any] | None
    """JSON schema of its arguments."""
    strict: bool | None
    """None where the request does not say."""
    where: str
    """The schema's place in the body."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request's choice of tools comes down to."""

    mode: CallMode = "may"
    names: tuple[str, ...] | None = None
    """Tools that may be called; None for all."""
    is_parallel: bool = True


def check_use(use: ToolUse, tools: Sequence[Tool], field: str = "tool_choice") -> None:
    """Raise BodyError where the choice names no tool of the request, or there is none to call."""
    known = [tool.name for tool in tools]
    for name in use.names or ():
        if name not in known:
            offered = ", ".join(known) or "none"
            raise BodyError(f"{field} names the tool {name!r}; the tools are: {offered}", field)
    if use.mode in ("must", "one") and not tools:
        raise BodyError(f"{field} asks for a tool call, and tools are not given", field)
    if use.names == ():
        raise BodyError(f"{field} allows no tool", field)


def recipe_choice(use: ToolUse, *, is_thinking: bool) -> RecipeChoice:
    """The recipe's word for the choice. For calls that must come it may end the prompt with their
    opening, which leaves no place for reasoning; behind reasoning the grammar alone asks for them.
    """
    if use.mode == "none":
        return "none"
    return "required" if use.mode in ("must", "one") and not is_thinking else "auto"


def calls_grammar(
    tools: Sequence[Tool],
    use: ToolUse,
    *,
    thinking_end_id: int | None,
    is_open: bool,
    max_thinking_tokens: int | None = None,
) -> CallsParams | None:
    """What the answer's text is held to; None where it is free.

    thinking_end_id: the token that ends the reasoning; None where the answer has none.
    is_open: whether the prompt ends with the opening of the calls. max_thinking_tokens: of the
    reasoning; None for no limit. Raises BodyError for a schema that no grammar can follow.
    """
    mode = use.mode if tools else "none"
    must_call = mode in ("must", "one")
    offered = [tool for tool in tools if use.names is None or tool.name in use.names]
    is_held = must_call or (
        mode == "may"
        and (
            not use.is_parallel
            or len(offered) < len(tools)
            or any(tool.strict is True for tool in offered)
        )
    )
    if not is_held and max_thinking_tokens is None:
        return None
    if not is_held and mode == "may":
        # A bound of the reasoning alone; what comes behind it is as free as a grammar leaves it.
        offered = [Tool(tool.name, None, False, tool.where) for tool in offered]
    schemas = [_schema(tool, must_call=must_call) for tool in offered] if mode != "none" else []
    try:
        return CallsParams(
            tools=tuple(schemas),
            mode=mode,
            is_parallel=use.is_parallel,
            thinking_end_id=thinking_end_id,
            max_thinking_tokens=max_thinking_tokens,
            is_open=is_open,
        )
    except RequestError as error:
        raise BodyError(str(error), "tools") from None


def _schema(tool: Tool, *, must_call: bool) -> CallSchema:
    is_followed = tool.strict is True or (must_call and tool.strict is None)
    if not is_followed or not tool.parameters:
        return CallSchema(tool.name, None)
    try:
        check_schema(tool.where, tool.parameters)
    except RequestError as error:
        raise BodyError(f"{error}; {_HINT}", tool.where) from None
    return CallSchema(tool.name, tool.parameters)
