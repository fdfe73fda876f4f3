"""JSON schemas of OpenAI's responses: the body of a request and its answer.

Data flow: tables and limits of the parser -> components of the OpenAPI document.
"""

from typing import Final

from decodegrid.engine.chat_body import EFFORTS
from decodegrid.engine.responses_body import INERT, LABELS, MAX_METADATA, SAMPLING, STATE_FIELDS
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
    text,
)
from decodegrid.engine.server_schema_tools import format_schemas, tool_properties

RESPONSE_REQUEST: Final = "ResponseRequest"
RESPONSE_ANSWER: Final = "Response"
_ITEM_LABELS: Final = {"id": or_null(STRING), "status": or_null(STRING)}


def response_schemas() -> dict[str, Schema]:
    """The body and the answer, by their names among the components."""
    sampling = sampling_properties()
    options = record({"include_obfuscation": one_of_values([False])}, may_have_nulls=True)
    effort = record({"effort": one_of_values(EFFORTS)}, may_have_nulls=True)
    properties = {
        "model": or_null(STRING, about="The name of the model that is served, or empty."),
        "input": {"anyOf": [text(1), array({"anyOf": _items()}, 1)]},
        "instructions": or_null(STRING),
        "max_output_tokens": or_null(integer(1)),
        "metadata": or_null(
            {"type": "object", "additionalProperties": STRING, "maxProperties": MAX_METADATA},
            about="The answer repeats it.",
        ),
        "reasoning": or_null(effort),
        "text": or_null(_text_form()),
        "stream": or_null(BOOLEAN),
        "stream_options": or_null(options, about="Only in a stream."),
        **tool_properties(is_flat=True),
        **{name: sampling[name] for name in SAMPLING},
        **dict.fromkeys(LABELS, or_null(STRING, about="The answer repeats it.")),
        **{name: one_of_values(values) for name, values in INERT.items()},
        **dict.fromkeys(STATE_FIELDS, NULL),
    }
    return {RESPONSE_REQUEST: record(properties, ["input"]), RESPONSE_ANSWER: _answer()}


def _text_form() -> Schema:
    formats = format_schemas(json_schema_record(), is_flat=True)
    properties = {"format": or_null(*formats), "verbosity": one_of_values(["medium"])}
    return record(properties, may_have_nulls=True)


def _items() -> list[Schema]:
    """The kinds of items of the input."""
    empty: Schema = one_of_values([[]])
    part = record(
        {
            "type": {"enum": ["input_text", "output_text"]},
            "text": STRING,
            "annotations": empty,
            "logprobs": empty,
        },
        ["type", "text"],
        may_have_nulls=True,
    )
    content: Schema = {"anyOf": [STRING, array(part)]}
    thought = record(
        {"type": {"const": "reasoning_text"}, "text": STRING}, ["type", "text"], may_have_nulls=True
    )
    roles = {"enum": ["user", "system", "developer", "assistant"]}
    message: dict[str, Schema] = {"type": {"const": "message"}, "role": roles, "content": content}
    call = {"call_id": STRING, "name": STRING, "arguments": STRING}
    output = {"call_id": STRING, "output": content}
    return [
        record({**message, **_ITEM_LABELS}, ["role", "content"], may_have_nulls=True),
        _item("function_call", call, list(call)),
        _item("function_call_output", output, list(output)),
        _item("reasoning", {"summary": empty, "content": array(thought)}, ["content"]),
    ]


def _item(kind: str, properties: dict[str, Schema], required: list[str]) -> Schema:
    known = {"type": {"const": kind}, **properties, **_ITEM_LABELS}
    return record(known, ["type", *required], may_have_nulls=True)


def _answer() -> Schema:
    """Its main fields; those of the request are repeated beside them."""
    details = {"type": "object"}
    counts = ("input_tokens", "output_tokens", "total_tokens")
    usage = {
        **dict.fromkeys(counts, integer(0)),
        "input_tokens_details": details,
        "output_tokens_details": details,
    }
    properties = {
        "id": STRING,
        "object": {"const": "response"},
        "created_at": {"type": "number"},
        "model": STRING,
        "status": {"enum": ["completed", "incomplete"]},
        "output": array({"type": "object", "required": ["type"]}),
        "usage": record(usage, usage),
    }
    return {"type": "object", "properties": properties, "required": list(properties)}
