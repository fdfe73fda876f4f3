"""JSON schemas of the bodies that the server reads.

Owns which fields each endpoint's body has; single fields stand in server_schema_fields.py. Data
flow: properties -> components of the OpenAPI document.
"""

from typing import Final

from decodegrid.engine.batch_body import INERT
from decodegrid.engine.chat_body import EFFORTS
from decodegrid.engine.runner_protocol import MAX_TOP_LOGPROBS
from decodegrid.engine.server_profile import MAX_SECONDS, MAX_STEPS
from decodegrid.engine.server_schema_fields import (
    BOOLEAN,
    NULL,
    STRING,
    Schema,
    array,
    integer,
    json_schema_record,
    one_of_values,
    or_null,
    record,
    sampling_properties,
    structured_outputs,
    text,
)
from decodegrid.engine.server_schema_tools import format_schemas, tool_properties

CHAT_REQUEST: Final = "ChatCompletionRequest"
COMPLETION_REQUEST: Final = "CompletionRequest"
TOKENIZE_REQUEST: Final = "TokenizeRequest"
DETOKENIZE_REQUEST: Final = "DetokenizeRequest"
PROFILE_REQUEST: Final = "ProfileRequest"


def body_schemas() -> dict[str, Schema]:
    """The bodies of completions, chats and the rest, by their names among the components."""
    return {
        CHAT_REQUEST: _chat(),
        COMPLETION_REQUEST: _completion(),
        TOKENIZE_REQUEST: _tokenize(),
        DETOKENIZE_REQUEST: record(
            {"model": or_null(STRING), "tokens": array(integer(0))}, ["tokens"]
        ),
        PROFILE_REQUEST: record(
            {
                "num_steps": integer(1, MAX_STEPS),
                "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
            }
        ),
    }


def _completion() -> Schema:
    one = [text(1), array(integer(0), 1)]
    properties = {
        **_common(),
        "prompt": {
            "description": "Text, or token ids, or a list of either.",
            "anyOf": [*one, array({"anyOf": one}, 1)],
        },
        "logprobs": or_null({"const": False}, integer(0, MAX_TOP_LOGPROBS)),
        "top_logprobs": NULL,
    }
    return record(properties, ["prompt"])


def _chat() -> Schema:
    properties = {
        **_common(),
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


def _common() -> dict[str, Schema]:
    """What a completion and a chat both have."""
    options = record({"include_usage": BOOLEAN})
    return {
        "model": or_null(STRING, about="The name of the model that is served, or empty."),
        "user": or_null(STRING, about="A label of the caller, which changes nothing."),
        "max_tokens": or_null(integer(1)),
        "stream": or_null(BOOLEAN),
        "stream_options": or_null(options, about="Only in a stream."),
        **sampling_properties(),
        "response_format": or_null(*format_schemas(json_schema_record(), is_flat=False)),
        "structured_outputs": structured_outputs(),
        **{name: one_of_values(values) for name, values in INERT.items()},
    }


def _conversation() -> dict[str, Schema]:
    """The fields that say what a conversation is."""
    messages = array({"anyOf": [_plain_message(), _assistant_message(), _tool_message()]}, 1)
    kind = record({"type": {"enum": ["enabled", "disabled"]}}, ["type"])
    return {
        "messages": {**messages, "description": "The last one is not the assistant's."},
        **tool_properties(is_flat=False),
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
