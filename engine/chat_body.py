"""The conversation in the body of an OpenAI chat request.

Owns which fields of messages and tools are understood, and how an answer to them is to be read.
The frame, and the rules between messages (each tool call has its answer), are deepseek-recipe's.
Every field is honoured or refused by name. Data flow: fields of a body -> token ids up to the
answer, and a ChatForm that says what stands in it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import deepseek_recipe as recipe

from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_checks import show
from decodegrid.engine.tokenizer import Tokenizer

Json = Any
"""What json.loads makes."""

CHAT_FIELDS: Final = ("messages", "tools", "tool_choice", "thinking", "reasoning_effort")
"""Fields that say what the conversation is."""
_MESSAGE_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "system": ("role", "content"),
    "developer": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "tool_calls", "reasoning_content"),
    "tool": ("role", "content", "tool_call_id"),
}
EFFORTS: Final = ("none", "low", "medium", "high", "xhigh", "max")
_MODEL: Final = "decodegrid"
"""A name for the recipe, which looks it up to choose the frame."""


class BodyError(RequestError):
    """A field that cannot be honoured."""

    def __init__(self, message: str, param: str | None) -> None:
        """param: the field."""
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What stands in the text of an answer."""

    request: recipe.ConversationRequest
    """The recipe's record of the conversation."""
    has_tools: bool
    is_thinking: bool

    @property
    def is_parsed(self) -> bool:
        """Whether the text holds more than the answer's words: reasoning or tool calls."""
        return self.has_tools or self.is_thinking


def read_chat(fields: Mapping[str, Json], tokenizer: Tokenizer) -> tuple[list[int], ChatForm]:
    """Check the CHAT_FIELDS of a body. fields: of the body, without nulls. Raises BodyError."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BodyError("messages must be a list of messages, and not empty", "messages")
    turns = [_read_message(index, message) for index, message in enumerate(messages)]
    if turns[-1]["role"] == "assistant":
        raise BodyError("a conversation must end with a message of the user", "messages")
    body: dict[str, Json] = {"model": _MODEL, "messages": turns}
    tools = _read_tools(fields.get("tools", []))
    if tools:
        body["tools"] = tools
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise BodyError(
            f"tool_choice={_shown(choice)} is not supported; it must be auto or none", "tool_choice"
        )
    body["tool_choice"] = choice
    is_thinking, effort = _read_thinking(fields)
    body["thinking"] = {"type": "enabled" if is_thinking else "disabled"}
    if effort is not None:
        body["reasoning_effort"] = effort
    request = _convert(body)
    ids = tokenizer.encode_conversation(request.conversation)
    has_tools = bool(tools) and choice == "auto"
    return ids, ChatForm(request, has_tools=has_tools, is_thinking=is_thinking)


def _convert(body: dict[str, Json]) -> recipe.ConversationRequest:
    options = recipe.ConversionOptions(default_thinking_mode=False).with_model_alias(
        _MODEL, recipe.ModelVersion.DeepseekV41Flash
    )
    try:
        return recipe.ChatCompletionRequest(body).convert(options)
    except recipe.ConversionError as error:
        message = str(json.loads(error.body)["error"]["message"])
    except ValueError as error:  # what the recipe cannot read at all
        message = str(error)
    param = "tools" if "tools[" in message or message.startswith("Tool ") else "messages"
    raise BodyError(message, param)


def _read_thinking(fields: Mapping[str, Json]) -> tuple[bool, str | None]:
    """Whether the answer begins with reasoning, and how much of it is asked for."""
    effort = fields.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise BodyError(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {_shown(effort)}",
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
            f"got {_shown(thinking)}",
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
            f"{where}.role must be one of {', '.join(_MESSAGE_FIELDS)}, got {_shown(role)}",
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
            found[name] = _read_text(f"{where}.{name}", message[name])
    if role == "tool" and "tool_call_id" not in found:
        raise BodyError(f"{where}.tool_call_id must name a tool call", f"{where}.tool_call_id")
    return found


def _read_content(where: str, content: Json) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [_text_of(part) for part in parts] if isinstance(parts, list) else [None]
    if any(text is None for text in texts):
        raise BodyError(f"{where} must be a string or a list of text parts", where)
    return _read_text(where, "".join(text for text in texts if text is not None))


def _read_calls(where: str, calls: Json) -> list[Json]:
    """Tool calls of an earlier answer; null for none."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BodyError(f"{where} must be a list, got {kind_name(calls)}", where)
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        _check_object(place, call, ("id", "type", "function"))
        _check_object(f"{place}.function", call.get("function"), ("name", "arguments"))
        if call.get("type", "function") != "function":
            raise BodyError(f"{place}.type must be function", f"{place}.type")
        _read_text(f"{place}.id", call.get("id"))
        for name in ("name", "arguments"):
            _read_text(f"{place}.function.{name}", call["function"].get(name))
    return calls


def _read_tools(tools: Json) -> list[Json]:
    if not isinstance(tools, list):
        raise BodyError(f"tools must be a list, got {kind_name(tools)}", "tools")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        _check_object(where, tool, ("type", "function"))
        if tool.get("type") != "function":
            raise BodyError(f"{where}.type must be function", f"{where}.type")
        function = tool.get("function")
        place = f"{where}.function"
        _check_object(place, function, ("name", "description", "parameters", "strict"))
        _read_text(f"{place}.name", function.get("name"))
        if function.get("description") is not None:
            _read_text(f"{place}.description", function["description"])
        if not isinstance(function.get("parameters"), dict | None):
            raise BodyError(f"{place}.parameters must be a JSON schema", f"{place}.parameters")
        strict = function.get("strict")
        if strict is not None and strict is not False:
            raise BodyError(
                f"{place}.strict={_shown(strict)} is not supported: arguments are not held to "
                "their schema",
                f"{place}.strict",
            )
    _check_unicode("tools", json.dumps(tools, ensure_ascii=False))
    return tools


def _check_object(where: str, value: Json, names: Sequence[str]) -> None:
    if not isinstance(value, dict):
        raise BodyError(f"{where} must be an object, got {kind_name(value)}", where)
    for name, item in value.items():
        if name not in names and item is not None:
            raise BodyError(f"{where}.{name} is not supported", f"{where}.{name}")


def _read_text(where: str, value: Json) -> str:
    if not isinstance(value, str):
        raise BodyError(f"{where} must be a string, got {kind_name(value)}", where)
    _check_unicode(where, value)
    return value


def _check_unicode(where: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"character {error.start} is {text[error.start]!r}"
        raise BodyError(f"{where} is not valid Unicode: {what}", where) from None


def _text_of(part: Json) -> str | None:
    """Text of a content part; None for any other kind of part."""
    if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
        return None
    return part["text"] if isinstance(part["text"], str) else None


def kind_name(value: Json) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def _shown(value: Json) -> str:
    """A value in an error, cut where it is long."""
    text = show(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
