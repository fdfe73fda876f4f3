"""JSON schemas of the fields that several protocols have, and what they are made of.

Owns how types and limits are written down; their numbers come from the modules that check them.
What a schema cannot say (rules between fields, the vocabulary) only the parsers know, so that a
schema allows no less than they do. Data flow: limits and tables of the parsers -> properties.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from decodegrid.engine.grammar_params import MAX_CHARACTERS, MAX_TRIGGER_TOKENS
from decodegrid.engine.runner_protocol import MAX_TOP_LOGPROBS
from decodegrid.engine.sampling_checks import MAX_LOGIT_BIAS, MAX_NUM_LOGIT_BIAS
from decodegrid.engine.sampling_params import (
    MAX_COMPLETIONS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
)

Schema = dict[str, Any]
"""A JSON schema of draft 2020-12."""

NULL: Final[Schema] = {"type": "null"}
STRING: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
_TOKEN_ID: Final[Schema] = {"type": "integer", "minimum": 0}


def or_null(*schemas: Schema, about: str = "") -> Schema:
    """One of the schemas, or null, which stands for a field that is not there."""
    found: Schema = {"anyOf": [*schemas, NULL]}
    return {"description": about, **found} if about else found


def integer(low: int, high: int | None = None) -> Schema:
    """An integer in low..high."""
    found: Schema = {"type": "integer", "minimum": low}
    return found if high is None else {**found, "maximum": high}


def number(low: float, high: float) -> Schema:
    """A number in low..high."""
    return {"type": "number", "minimum": low, "maximum": high}


def text(low: int = 0, high: int | None = None) -> Schema:
    """A string of low..high characters."""
    found: Schema = {"type": "string", "minLength": low} if low else {"type": "string"}
    return found if high is None else {**found, "maxLength": high}


def array(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    """A list of low..high items."""
    found: Schema = {"type": "array", "items": items}
    if low:
        found["minItems"] = low
    return found if high is None else {**found, "maxItems": high}


def record(
    properties: Mapping[str, Schema], required: Iterable[str] = (), *, may_have_nulls: bool = False
) -> Schema:
    """An object with these fields and no other.

    may_have_nulls: others may be there as null, as in what clients give back of an answer.
    """
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": NULL if may_have_nulls else False,
    }


def reference(name: str) -> Schema:
    """A schema of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of_values(values: Iterable[Any]) -> Schema:
    """Null or one of these; a float and an integer that are equal are one number to JSON."""
    found: list[Any] = []
    for value in (*values, None):
        is_bool = isinstance(value, bool)
        if not any(item == value and isinstance(item, bool) == is_bool for item in found):
            found.append(value)
    return {"enum": found}


def sampling_properties() -> dict[str, Schema]:
    """The fields that SamplingParams checks, by their names in a body."""
    count, top = integer(1), integer(0, MAX_TOP_LOGPROBS)
    penalty = or_null(number(-MAX_PENALTY, MAX_PENALTY))
    repetition = number(1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    bias = {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,17})$"},
        "additionalProperties": number(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS),
        "maxProperties": MAX_NUM_LOGIT_BIAS,
    }
    return {
        "temperature": or_null(
            {"const": 0}, number(MIN_TEMPERATURE, MAX_TEMPERATURE), about="0 is greedy."
        ),
        "top_p": or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "top_k": or_null({"const": -1}, count, about="-1 keeps all tokens."),
        "min_p": or_null(number(0, 1)),
        "seed": or_null(integer(0, MAX_SEED)),
        "n": or_null(
            integer(1, MAX_COMPLETIONS),
            about="At most scheduler.max_num_reqs plus server.max_queued_requests as well.",
        ),
        "stop": or_null(
            text(1), array(text(1)), about=f"At most {MAX_STOP_STRINGS} different strings."
        ),
        "stop_token_ids": or_null(array(_TOKEN_ID), about="Ids of the vocabulary."),
        "ignore_eos": or_null(BOOLEAN),
        "include_stop_str_in_output": or_null(BOOLEAN),
        "skip_special_tokens": or_null(BOOLEAN, about="Not beside tools and thinking."),
        "speculation": or_null(
            {"enum": ["auto", "off"]}, count, about="Drafts that a step may verify."
        ),
        "min_tokens": or_null(integer(0), about="At most max_tokens."),
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "repetition_penalty": or_null(repetition),
        "logit_bias": or_null(bias, about="By token id."),
        "prompt_logprobs": or_null(top, about="Not in a stream."),
    }


def json_schema_record() -> Schema:
    """A schema for the text, with its name."""
    return record(
        {
            "name": or_null(STRING, about="A label, which changes nothing."),
            "description": NULL,
            "strict": or_null(BOOLEAN, about="The schema is followed either way."),
            "schema": {"type": "object"},
        },
        ["schema"],
    )


def structured_outputs() -> Schema:
    """vLLM's field for the form of the text."""
    outputs = record(
        {
            "json": or_null({"type": "object"}, text(1, MAX_CHARACTERS["json"])),
            "regex": or_null(text(1, MAX_CHARACTERS["regex"])),
            "choice": or_null(array(text(1), 1)),
            "grammar": or_null(text(1, MAX_CHARACTERS["grammar"])),
            "json_object": or_null(BOOLEAN),
            "disable_any_whitespace": or_null(BOOLEAN, about="With json and json_object."),
            "trigger_token_ids": or_null(array(_TOKEN_ID, 0, MAX_TRIGGER_TOKENS)),
        }
    )
    return or_null(outputs, about="Exactly one of json, regex, choice, grammar and json_object.")
