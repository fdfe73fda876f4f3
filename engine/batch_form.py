"""The fields of a request's body that ask for the form of its text.

Owns OpenAI's `response_format` and vLLM's `structured_outputs`, which are two ways to say the same.
Checks no grammar (StructuredOutputsParams does). Data flow: body -> StructuredOutputsParams.
"""

from collections.abc import Mapping
from typing import Any, Final

from decodegrid.engine.grammar_params import StructuredOutputsParams
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_checks import show

Json = Any
"""What json.loads makes."""

FORM_FIELDS: Final = ("response_format", "structured_outputs")
_FORMAT_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
}
_SCHEMA_KEYS: Final = frozenset({"name", "description", "schema", "strict"})
_PARAMS: Final = frozenset(
    {
        *("json", "regex", "choice", "grammar", "json_object"),
        *("disable_any_whitespace", "trigger_token_ids"),
    }
)


def read_form(fields: Mapping[str, Json]) -> StructuredOutputsParams | None:
    """The form that a body asks for, None for free text.

    fields: of the body, without nulls. `strict: false` is taken for true: the schema is followed
    either way; its `name` is a label. Raises RequestError that begins with the field's name.
    """
    form = _read_response_format(fields.get("response_format", {"type": "text"}))
    given = fields.get("structured_outputs")
    if given is None:
        return form
    if form is not None:
        raise RequestError("structured_outputs and response_format are both given")
    if not isinstance(given, dict):
        raise RequestError(f"structured_outputs must be an object, got {show(given)}")
    for name in given:
        if name not in _PARAMS:
            raise RequestError(f"structured_outputs.{name} is not supported")
    return StructuredOutputsParams(**{name: v for name, v in given.items() if v is not None})


def _read_response_format(given: Json) -> StructuredOutputsParams | None:
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise RequestError(
            "response_format must have the type text, json_object or json_schema, "
            f"got {show(given)}"
        )
    for name, value in given.items():
        if value is not None and name not in _FORMAT_KEYS[kind]:
            raise RequestError(f"response_format.{name} is not supported beside type {kind!r}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return _read_json_schema(given.get("json_schema"))


def _read_json_schema(given: Json) -> StructuredOutputsParams:
    where = "response_format.json_schema"
    if not isinstance(given, dict):
        raise RequestError(f"{where} must be an object, got {show(given)}")
    for name in given:
        if name not in _SCHEMA_KEYS:
            raise RequestError(f"{where}.{name} is not supported")
    if given.get("description") is not None:
        raise RequestError(
            f"{where}.description is not supported: the model is not shown it; a message can say it"
        )
    for name, kind in (("name", str), ("strict", bool)):
        if given.get(name) is not None and not isinstance(given[name], kind):
            raise RequestError(f"{where}.{name} must be a {kind.__name__}, got {show(given[name])}")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise RequestError(f"{where}.schema must be an object, got {show(schema)}")
    try:
        return StructuredOutputsParams(json=schema)
    except RequestError as error:
        raise RequestError(f"{where}.schema: {error}") from None
