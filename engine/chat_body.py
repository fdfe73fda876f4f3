"""The conversation in the body of an OpenAI chat request.

Owns which fields of messages and tools are understood, and how an answer to them is to be read.
The frame, and the rules between messages (each tool call has its answer), are deepseek-recipe's.
Every field is honoured or refused by name. Data flow: fields of a body -> token ids up to the
answer, and a ChatForm that says what stands in it.
"""

from collections.abc import Mapping
from typing import Any, Final

import deepseek_recipe as recipe

from decodegrid.engine.body_fields import BodyError, check_object, kind_name, read_text, shown
from decodegrid.engine.chat_tools import TOOL_FIELDS, read_tools, read_use
from decodegrid.engine.conversations import ChatForm, convert, thinking_end
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.tool_use import calls_grammar, recipe_choice

Json = Any
"""What json.loads makes."""

CHAT_FIELDS: Final = ("messages", *TOOL_FIELDS, "thinking", "reasoning_effort")
"""Fields that say what the conversation is."""
_MESSAGE_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "system": ("role", "content"),
    "developer": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "tool_calls", "reasoning_content"),
    "tool": ("role", "content", "tool_call_id"),
}
EFFORTS: Final = ("none", "low", "medium", "high", "xhigh", "max")


def read_chat(fields: Mapping[str, Json], tokenizer: Tokenizer) -> tuple[list[int], ChatForm]:
    """Check the CHAT_FIELDS of a body. fields: of the body, without nulls. Raises BodyError."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BodyError("messages must be a list of messages, and not empty", "messages")
    turns = [_read_message(index, message) for index, message in enumerate(messages)]
    if turns[-1]["role"] == "assistant":
        raise BodyError("a conversation must end with a message of the user", "messages")
    body: dict[str, Json] = {"messages": turns}
    shapes, tools = read_tools(fields.get("tools", []), is_flat=False)
    if shapes:
        body["tools"] = shapes
    use = read_use(fields, tools, is_flat=False)
    is_thinking, effort = _read_thinking(fields)
    body["tool_choice"] = recipe_choice(use, is_thinking=is_thinking)
    body["thinking"] = {"type": "enabled" if is_thinking else "disabled"}
    if effort is not None:
        body["reasoning_effort"] = effort
    request = convert(recipe.ChatCompletionRequest, body, "messages")
    grammar = calls_grammar(
        tools,
        use,
        thinking_end_id=thinking_end(tokenizer) if is_thinking else None,
        is_open=request.parsing_options.starts_in_tool_calls,
    )
    ids = tokenizer.encode_conversation(request.conversation)
    has_tools = bool(tools) and use.mode != "none"
    return ids, ChatForm(request, has_tools=has_tools, is_thinking=is_thinking, grammar=grammar)


def _read_thinking(fields: Mapping[str, Json]) -> tuple[bool, str | None]:
    """Whether the answer begins with reasoning, and how much of it is asked for."""
    effort = fields.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise BodyError(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {shown(effort)}",
            "reasoning_effort",
        )
    thinking = fields.get("thinking")
    asked = effort not in (None, "none")
    if thinking is None:
        return asked, effort if asked else None
    kind = thinking.get("type") if isinstance(thinking, dict) and len(thinking) == 1 else None
    if kind not in ("enabled", "disabled"):
        raise BodyError(
            'thinking must be {"type": "enabled"} or {"type": "disabled"}, '
            f"got {shown(thinking)}",
            "thinking",
        )
    is_thinking = kind == "enabled"
    if effort is not None and asked != is_thinking:
        raise BodyError(f"thinking is {kind}, but reasoning_effort is {effort}", "reasoning_effort")
    return is_thinking, effort if asked else None


def _read_message(index: int, message: Json) -> dict[str, Json]:
    """A message with its content as one text."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise BodyError(f"{where} must be an object, got {kind_name(message)}", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _MESSAGE_FIELDS:
        raise BodyError(
            f"{where}.role must be one of {', '.join(_MESSAGE_FIELDS)}, got {shown(role)}",
            f"{where}.role",
        )
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS[role] and value is not None:
            raise BodyError(
                f"{where}.{name} is not supported in a message of the role {role}",
                f"{where}.{name}",
            )
    found: dict[str, Json] = {"role": "system" if role == "developer" else role}
    calls = _read_calls(f"{where}.tool_calls", message.get("tool_calls"))
    if message.get("content") is not None or not calls:
        found["content"] = _read_content(f"{where}.content", message.get("content"))
    if calls:
        found["tool_calls"] = calls
    for name in ("tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            found[name] = read_text(f"{where}.{name}", message[name])
    if role == "tool" and "tool_call_id" not in found:
        raise BodyError(f"{where}.tool_call_id must name a tool call", f"{where}.tool_call_id")
    return found


def _read_content(where: str, content: Json) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [_text_of(part) for part in parts] if isinstance(parts, list) else [None]
    if any(text is None for text in texts):
        raise BodyError(f"{where} must be a string or a list of text parts", where)
    return read_text(where, "".join(text for text in texts if text is not None))


def _read_calls(where: str, calls: Json) -> list[Json]:
    """Tool calls of an earlier answer; null for none."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BodyError(f"{where} must be a list, got {kind_name(calls)}", where)
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        check_object(place, call, ("id", "type", "function"))
        check_object(f"{place}.function", call.get("function"), ("name", "arguments"))
        if call.get("type", "function") != "function":
            raise BodyError(f"{place}.type must be function", f"{place}.type")
        read_text(f"{place}.id", call.get("id"))
        for name in ("name", "arguments"):
            read_text(f"{place}.function.{name}", call["function"].get(name))
    return calls


def _text_of(part: Json) -> str | None:
    """Text of a content part; None for any other kind of part."""
    if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
        return None
    return part["text"] if isinstance(part["text"], str) else None
