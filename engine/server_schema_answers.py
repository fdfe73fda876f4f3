"""JSON schemas of what the server answers.

Owns the shape of every answer's body and of errors. Data flow: components of the OpenAPI document.
"""

from collections.abc import Mapping
from typing import Final

from decodegrid.engine.server_schema_fields import (
    BOOLEAN,
    STRING,
    Schema,
    array,
    integer,
    or_null,
    record,
    reference,
)

ERROR: Final = "Error"
CHAT_ANSWER: Final = "ChatCompletion"
COMPLETION_ANSWER: Final = "Completion"
_USAGE: Final = "Usage"
_SPECULATION: Final = "Speculation"
_CHAT_LOGPROB: Final = "ChatLogprob"
_REASONS: Final = ("stop", "length", "tool_calls")
_COUNT: Final[Schema] = integer(0)
_NUMBER: Final[Schema] = {"type": "number"}


def answer_schemas() -> dict[str, Schema]:
    """The answers to completions, chats and the rest, by their names among the components."""
    return {
        ERROR: _error(),
        CHAT_ANSWER: _answer("chat.completion", _chat_choice(), _prompt_logprobs()),
        COMPLETION_ANSWER: _answer("text_completion", _text_choice(), {}),
        _USAGE: _usage(),
        _SPECULATION: _whole(
            dict.fromkeys(("num_drafted", "num_verified", "num_accepted"), _COUNT)
        ),
        _CHAT_LOGPROB: _chat_logprob(),
        "Model": _model(),
        "ModelList": _whole({"object": {"const": "list"}, "data": array(reference("Model"))}),
        "Tokens": _whole({"count": _COUNT, "max_model_len": integer(1), "tokens": array(_COUNT)}),
        "Text": _whole({"prompt": STRING}),
        "Profile": _profile(),
        "Version": _whole({"version": STRING}),
        "Status": record({"status": STRING, "reason": STRING}, ["status"]),
    }


def _whole(properties: Mapping[str, Schema]) -> Schema:
    """An object that has all of these fields."""
    return record(properties, properties)


def _profile() -> Schema:
    return _whole(
        {
            "path": STRING,
            "num_bytes": _COUNT,
            "num_steps": _COUNT,
            "is_complete": BOOLEAN,
            "seconds": _NUMBER,
            "times": array({"type": "object"}),
        }
    )


def _error() -> Schema:
    names = ("message", "type", "param", "code")
    fields = {"message": STRING, "type": STRING, "param": or_null(STRING), "code": or_null(STRING)}
    return _whole({"error": record(fields, names)})


def _usage() -> Schema:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = _whole({"cached_tokens": _COUNT})
    reasoning = _whole({"reasoning_tokens": _COUNT})
    return record(
        {
            **dict.fromkeys(names, _COUNT),
            "prompt_tokens_details": cached,
            "completion_tokens_details": reasoning,
        },
        [*names, "prompt_tokens_details"],
    )


def _answer(kind: str, choice: Schema, more: Mapping[str, Schema]) -> Schema:
    properties = {
        "id": STRING,
        "object": {"const": kind},
        "created": _COUNT,
        "model": STRING,
        "choices": array(choice, 1),
        "usage": reference(_USAGE),
        "speculation": reference(_SPECULATION),
    }
    return record({**properties, **more}, properties)


def _choice(properties: Mapping[str, Schema], more: Mapping[str, Schema]) -> Schema:
    """more: fields that are not always there."""
    known = {
        "index": _COUNT,
        **properties,
        "finish_reason": {"enum": list(_REASONS)},
        "stop_reason": or_null(STRING, _COUNT),
    }
    return record({**known, **more}, known)


def _chat_choice() -> Schema:
    function = _whole({"name": STRING, "arguments": STRING})
    call = _whole({"id": STRING, "type": {"const": "function"}, "function": function})
    message = record(
        {
            "role": {"const": "assistant"},
            "content": or_null(STRING),
            "reasoning_content": STRING,
            "tool_calls": array(call, 1),
        },
        ["role", "content"],
    )
    logprobs = _whole({"content": array(reference(_CHAT_LOGPROB))})
    return _choice({"message": message, "logprobs": or_null(logprobs)}, {})


def _chat_logprob() -> Schema:
    entry = {"token": STRING, "logprob": _NUMBER, "bytes": array(integer(0, 255))}
    return _whole({**entry, "top_logprobs": array(_whole(entry))})


def _text_choice() -> Schema:
    top = {"type": "object", "additionalProperties": _NUMBER}
    logprobs = _whole(
        {
            "tokens": array(STRING),
            "token_logprobs": array(_NUMBER),
            "top_logprobs": array(top),
            "text_offset": array(_COUNT),
        }
    )
    return _choice({"text": STRING, "logprobs": or_null(logprobs)}, _prompt_logprobs())


def _prompt_logprobs() -> dict[str, Schema]:
    """Where they are asked for: of each token of the prompt, by token id."""
    entry = _whole({"logprob": _NUMBER, "rank": or_null(_COUNT), "decoded_token": or_null(STRING)})
    tokens = {"type": "object", "additionalProperties": entry}
    return {"prompt_logprobs": array(or_null(tokens))}


def _model() -> Schema:
    return _whole(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": STRING,
            "max_model_len": integer(1),
        }
    )
