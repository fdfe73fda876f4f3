"""JSON schemas of Anthropic's messages: bodies, answers and errors.

Data flow: tables and limits of the parser -> components of the OpenAPI document.
"""

from typing import Final

from decodegrid.engine.messages_body import (
    COUNT_FIELDS,
    EFFORTS,
    INERT,
    MAX_BUDGET,
    SAMPLING,
)
from decodegrid.engine.messages_tools import INERT as TOOL_INERT
from decodegrid.engine.server_schema_fields import (
    BOOLEAN,
    STRING,
    Schema,
    array,
    integer,
    one_of_values,
    or_null,
    record,
    sampling_properties,
    text,
)

MESSAGE_REQUEST: Final = "MessageRequest"
COUNT_REQUEST: Final = "CountTokensRequest"
MESSAGE_ANSWER: Final = "Message"
COUNT_ANSWER: Final = "TokenCount"
MESSAGE_ERROR: Final = "MessageError"
_OBJECT: Final[Schema] = {"type": "object"}


def message_schemas() -> dict[str, Schema]:
    """The bodies, answers and errors, by their names among the components."""
    body = _body()
    detail = record({"type": STRING, "message": STRING}, ["type", "message"])
    error = {"type": {"const": "error"}, "error": detail, "request_id": STRING}
    counted = {name: body[name] for name in COUNT_FIELDS}
    return {
        MESSAGE_REQUEST: record(body, ["messages"]),
        COUNT_REQUEST: record(counted, ["messages"]),
        MESSAGE_ANSWER: _answer(),
        COUNT_ANSWER: record({"input_tokens": integer(0)}, ["input_tokens"]),
        MESSAGE_ERROR: record(error, error),
    }


def _body() -> dict[str, Schema]:
    sampling = sampling_properties()
    text_block = _text_block()
    config = {"effort": one_of_values(EFFORTS), "format": or_null(_format())}
    metadata = record({"user_id": or_null(STRING)}, may_have_nulls=True)
    return {
        "model": or_null(STRING, about="The name of the model that is served, or empty."),
        "messages": array({"anyOf": _messages(text_block)}, 1),
        "system": or_null(STRING, array(text_block)),
        "tools": or_null(array(_tool())),
        "tool_choice": or_null(*_choices()),
        "thinking": or_null(*_thinking()),
        "output_config": or_null(record(config, may_have_nulls=True)),
        "cache_control": or_null(_cache()),
        "max_tokens": or_null(integer(1)),
        "stop_sequences": or_null(array(text(1))),
        "stream": or_null(BOOLEAN),
        "metadata": or_null(metadata, about="A label of the caller, which changes nothing."),
        **{name: sampling[name] for name in SAMPLING},
        **{name: one_of_values(values) for name, values in INERT.items()},
    }


def _cache() -> Schema:
    return record({"type": {"const": "ephemeral"}}, ["type"], may_have_nulls=True)


def _block(kind: str, properties: dict[str, Schema], required: list[str]) -> Schema:
    known = {"type": {"const": kind}, **properties}
    return record(known, ["type", *required], may_have_nulls=True)


def _text_block() -> Schema:
    properties = {
        "text": STRING,
        "citations": one_of_values([[]]),
        "cache_control": or_null(_cache()),
    }
    return _block("text", properties, ["text"])


def _messages(text_block: Schema) -> list[Schema]:
    cache = {"cache_control": or_null(_cache())}
    result = {
        "tool_use_id": STRING,
        "content": or_null(STRING, array(text_block)),
        "is_error": or_null(BOOLEAN),
        **cache,
    }
    call = {"id": STRING, "name": STRING, "input": _OBJECT, **cache}
    thought = {"thinking": STRING, "signature": STRING}
    blocks = {
        "user": [text_block, _block("tool_result", result, ["tool_use_id"])],
        "system": [text_block],
        "assistant": [
            text_block,
            _block("thinking", thought, list(thought)),
            _block("tool_use", call, ["id", "name", "input"]),
        ],
    }
    found = []
    for role, kinds in blocks.items():
        content: Schema = {"anyOf": [STRING, array({"anyOf": kinds})]}
        properties = {"role": {"const": role}, "content": content}
        found.append(record(properties, properties, may_have_nulls=True))
    return found


def _tool() -> Schema:
    properties = {
        "name": STRING,
        "description": or_null(STRING),
        "input_schema": _OBJECT,
        "strict": or_null(BOOLEAN),
        "cache_control": or_null(_cache()),
        **{name: one_of_values(values) for name, values in TOOL_INERT.items()},
    }
    return record(properties, ["name", "input_schema"], may_have_nulls=True)


def _choices() -> list[Schema]:
    single = {"disable_parallel_tool_use": or_null(BOOLEAN)}
    kinds: dict[str, dict[str, Schema]] = {
        "auto": single,
        "any": single,
        "tool": {**single, "name": STRING},
        "none": {},
    }
    return [
        _block(kind, properties, ["name"] if "name" in properties else [])
        for kind, properties in kinds.items()
    ]


def _thinking() -> list[Schema]:
    budget = or_null(integer(1, MAX_BUDGET))
    return [
        _block("enabled", {"budget_tokens": budget}, []),
        _block("disabled", {}, []),
        _block("adaptive", {}, []),
    ]


def _format() -> Schema:
    return _block("json_schema", {"schema": _OBJECT}, ["schema"])


def _answer() -> Schema:
    """Its main fields."""
    usage = dict.fromkeys(("input_tokens", "output_tokens"), integer(0))
    properties = {
        "id": STRING,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": STRING,
        "content": array({"type": "object", "required": ["type"]}),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": or_null(STRING),
        "usage": {"type": "object", "properties": usage, "required": list(usage)},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}
