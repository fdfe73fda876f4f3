"""JSON schemas of the bodies that the server reads.

Owns which fields each endpoint's body has; single fields stand in server_schema_fields.py. Data
flow: properties -> components of the OpenAPI document.
"""

from typing import Final

from decodegrid.engine.chat_body import EFFORTS
from decodegrid.engine.runner_protocol import MAX_TOP_LOGPROBS
from decodegrid.engine.server_schema_fields import (
    BOOLEAN,
    NULL,
    STRING,
    Schema,
    array,
    common_properties,
    integer,
    one_of_values,
    or_null,
    record,
    text,
)

CHAT_REQUEST: Final = "ChatCompletionRequest"
COMPLETION_REQUEST: Final = "CompletionRequest"
TOKENIZE_REQUEST: Final = "TokenizeRequest"
DETOKENIZE_REQUEST: Final = "DetokenizeRequest"


def body_schemas() -> dict[str, Schema]:
    """The bodies of OpenAI's and vLLM's endpoints, by their names among the components."""
    return {
        CHAT_REQUEST: _chat(),
        COMPLETION_REQUEST: _completion(),
        TOKENIZE_REQUEST: _tokenize(),
        DETOKENIZE_REQUEST: record(
            {"model": or_null(STRING), "tokens": array(integer(0))}, ["tokens"]
        ),
    }


def _completion() -> Schema:
    ids = array(integer(0), 1)
    properties = {
        **common_properties(),
        "prompt": {"description": "Text, or token ids.", "anyOf": [text(1), ids]},
        "logprobs": or_null({"const": False}, integer(0, MAX_TOP_LOGPROBS)),
        "top_logprobs": NULL,
    }
    return record(properties, ["prompt"])


def _chat() -> Schema:
    properties = {
        **common_properties(),
        **_conversation(),
        "max_completion_tokens": or_null(integer(1), about="max_tokens by its newer name."),
        "logprobs": or_null(BOOLEAN),
        "top_logprobs": or_null(integer(0, MAX_TOP_LOGPROBS), about="Above 0 with logprobs only."),
    }
    return record(properties, ["messages"])


def _tokenize() -> Schema:
    text_body = {"model": or_null(STRING), "prompt": STRING}
    # The fields of chats are there as null at most.
    nulls = {name: NULL for name in _conversation()}
    chat_body = {"model": or_null(STRING), **_conversation(), "prompt": NULL}
    return {
        "anyOf": [record({**text_body, **nulls}, ["prompt"]), record(chat_body, ["messages"])],
    }


def _conversation() -> dict[str, Schema]:
    """The fields that say what a conversation is."""
    messages = array({"anyOf": [_plain_message(), _assistant_message(), _tool_message()]}, 1)
    function = record(
        {
            "name": STRING,
            "description": or_null(STRING),
            "parameters": or_null({"type": "object"}, about="A JSON schema."),
            "strict": one_of_values([False]),
        },
        ["name"],
        may_have_nulls=True,
    )
    tool = record(
        {"type": {"const": "function"}, "function": function},
        ["type", "function"],
        may_have_nulls=True,
    )
    kind = record({"type": {"enum": ["enabled", "disabled"]}}, ["type"])
    return {
        "messages": {**messages, "description": "The last one is not the assistant's."},
        "tools": or_null(array(tool)),
        "tool_choice": one_of_values(["auto", "none"]),
        "thinking": or_null(kind),
        "reasoning_effort": one_of_values(EFFORTS),
    }


def _content() -> Schema:
    part = record({"type": {"const": "text"}, "text": STRING}, ["type", "text"])
    return {"anyOf": [STRING, array(part)]}


def _plain_message() -> Schema:
    roles = {"enum": ["system", "developer", "user"]}
    properties = {"role": roles, "content": _content()}
    return record(properties, ["role", "content"], may_have_nulls=True)


def _tool_message() -> Schema:
    properties = {"role": {"const": "tool"}, "content": _content(), "tool_call_id": STRING}
    return record(properties, ["role", "content", "tool_call_id"], may_have_nulls=True)


def _assistant_message() -> Schema:
    """An answer of before, which has a text or calls."""
    function = record(
        {"name": STRING, "arguments": STRING}, ["name", "arguments"], may_have_nulls=True
    )
    call = record(
        {"id": STRING, "type": {"const": "function"}, "function": function},
        ["id", "function"],
        may_have_nulls=True,
    )
    message = record(
        {
            "role": {"const": "assistant"},
            "content": or_null(_content()),
            "tool_calls": or_null(array(call)),
            "reasoning_content": or_null(STRING),
        },
        ["role"],
        may_have_nulls=True,
    )
    has_text = {"required": ["content"], "properties": {"content": _content()}}
    has_calls = {"required": ["tool_calls"], "properties": {"tool_calls": array(call, 1)}}
    return {**message, "anyOf": [has_text, has_calls]}
