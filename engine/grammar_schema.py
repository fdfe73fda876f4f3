"""Refuses JSON schemas that the grammar library would only follow in part.

Owns the list of keywords, and of their combinations, that it ignores or reads otherwise: what is
let through is enforced by the grammar, so that an output that is complete validates. Keywords that
JSON Schema itself does not know, and those that only describe, are ignored as it says. What the
library refuses itself (bounds that contradict each other, a missing definition) is left to it.
One gap stays: beside `additionalProperties`, a name may come a second time in another spelling of
JSON's, such as with an escape.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final

from decodegrid.engine.grammar_branches import are_disjoint, json_type
from decodegrid.engine.grammar_regex import check_regex
from decodegrid.engine.grammar_schema_refs import check_reference, resolve
from decodegrid.engine.request_error import RequestError

Schema = Mapping[str, Any]

MAX_DEPTH: Final = 64
"""Nested objects and lists of a schema; the time to compile one grows with the cube of it."""

_REFUSED: Final = (
    "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_KEYWORDS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("minItems", "maxItems", "unevaluatedItems"),
    "object": ("patternProperties", "propertyNames", "required", "minProperties", "maxProperties"),
}
"""Keywords that are followed only beside a `type` that they belong to."""
_INFERRING: Final[Mapping[str, tuple[str, ...]]] = {
    "array": ("items", "prefixItems"),
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
}
"""Keywords that stand for their type where `type` is absent."""
_ASSERTIONS: Final = frozenset(
    [
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "uniqueItems"),
        *chain.from_iterable(_KEYWORDS_OF.values()),
        *chain.from_iterable(_INFERRING.values()),
    ]
)
_FORMATS: Final = frozenset(
    [
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    ]
)
_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_EXACT: Final = 2**53


def check_schema(name: str, schema: Schema) -> None:
    """Raise RequestError naming the keyword, its place, and what is wrong with it.

    name: of the field. schema: what json.loads makes.
    """
    _check_depth(name, schema)
    for place, part in _parts(name, schema):
        _check_part(place, part, schema)


def _check_depth(name: str, schema: Schema) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in _children(value)]
        if not level:
            return
    raise RequestError(f"{name} is nested deeper than {MAX_DEPTH} levels")


def _children(value: object) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _parts(name: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Every schema in a schema, with the way to it."""
    left: list[tuple[str, Any]] = [(name, schema)]
    while left:
        place, part = left.pop()
        if not isinstance(part, Mapping):
            continue  # true and false; anything else the library refuses
        yield place, part
        for key in ("properties", "patternProperties", "$defs", "definitions"):
            found = part.get(key)
            if isinstance(found, Mapping):
                left += [(f"{place}.{key}.{child}", value) for child, value in found.items()]
        for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            found = part.get(key)
            if isinstance(found, list):
                left += [(f"{place}.{key}[{i}]", value) for i, value in enumerate(found)]
        for key in ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties",
                    "propertyNames"):  # fmt: skip
            left.append((f"{place}.{key}", part.get(key)))


def _check_part(place: str, part: Schema, root: Schema) -> None:
    for keyword in _REFUSED:
        if keyword in part:
            raise _unsupported(place, keyword)
    if part.get("uniqueItems", False) is not False:
        raise _unsupported(place, "uniqueItems")
    types = _types_of(place, part)
    for keyword in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const"):
        if keyword in part:
            _check_alone(place, part, keyword)
    if "$ref" in part:
        check_reference(place, part["$ref"], root)
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        raise _unsupported(place, "allOf with more than one schema")
    if "oneOf" in part and not are_disjoint(part["oneOf"], lambda ref: resolve(ref, root)):
        raise _unsupported(place, "oneOf whose schemas are not plainly exclusive (use anyOf)")
    _check_values(place, part, types)
    _check_counts(place, part)
    _check_types(place, part, types)
    _check_string(place, part)
    _check_number(place, part, types)
    _check_object(place, part)
    if isinstance(part.get("items"), list):
        raise _unsupported(place, "items as a list (use prefixItems)")


def _types_of(place: str, part: Schema) -> tuple[str, ...]:
    """The types that `type` names; none where it is absent."""
    given = part.get("type", ())
    types = (given,) if isinstance(given, str) else given
    is_list = isinstance(types, (list, tuple))
    if not is_list or not all(isinstance(item, str) and item in _TYPES for item in types):
        raise RequestError(
            f"{place}.type must be one of {', '.join(_TYPES)}, or a list of them, got {given!r}"
        )
    if "type" in part and not types:
        raise RequestError(f"{place}.type must not be an empty list")
    return tuple(types)


def _check_alone(place: str, part: Schema, keyword: str) -> None:
    """The keyword stands beside nothing that restricts too, but `type` beside enum and const."""
    allowed = {keyword, "type"} if keyword in ("enum", "const") else {keyword}
    others = [name for name in part if name in _ASSERTIONS and name not in allowed]
    if others:
        raise _unsupported(place, f"{others[0]} beside {keyword}")


def _check_values(place: str, part: Schema, types: tuple[str, ...]) -> None:
    """Values of enum and const are of `type`, and numbers that every reader reads alike."""
    values = part.get("enum", ())
    if not isinstance(values, (list, tuple)):
        raise RequestError(f"{place}.enum must be a list, got {values!r}")
    for value in [*values, *([part["const"]] if "const" in part else [])]:
        kind = json_type(value)
        if types and kind not in types and not (kind == "integer" and "number" in types):
            raise RequestError(f"{place} allows the value {value!r}, which is not of its type")
        if kind == "integer" and abs(value) > _MAX_EXACT:
            raise _unsupported(place, f"the value {value}, above 2**53,")


def _check_counts(place: str, part: Schema) -> None:
    for name in ("Length", "Items", "Properties"):
        for keyword in (f"min{name}", f"max{name}"):
            value = part.get(keyword, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise RequestError(f"{place}.{keyword} must be an integer from 0, got {value!r}")


def _check_types(place: str, part: Schema, types: tuple[str, ...]) -> None:
    """Keywords that need a type have one."""
    if types or "enum" in part or "const" in part:
        return
    inferred = [kind for kind, names in _INFERRING.items() if any(name in part for name in names)]
    if len(inferred) > 1:
        raise RequestError(f"{place} has keywords of objects and of arrays, and no type")
    for kind, names in _KEYWORDS_OF.items():
        for keyword in names:
            if keyword in part and kind not in inferred:
                raise RequestError(f"{place}.{keyword} needs a type beside it ({kind!r})")


def _check_string(place: str, part: Schema) -> None:
    shapes = [name for name in ("pattern", "format", "minLength", "maxLength") if name in part]
    if len(shapes) > 1 and shapes[0] in ("pattern", "format"):
        raise _unsupported(place, f"{shapes[1]} beside {shapes[0]}")
    if "format" in part and str(part["format"]) not in _FORMATS:
        raise _unsupported(place, f"format {part['format']!r}")
    if "pattern" in part:
        if not isinstance(part["pattern"], str):
            raise RequestError(f"{place}.pattern must be a string, got {part['pattern']!r}")
        check_regex(f"{place}.pattern", part["pattern"], in_json=True)


def _check_number(place: str, part: Schema, types: tuple[str, ...]) -> None:
    if "multipleOf" not in part:
        return
    if "number" in types:
        raise _unsupported(place, 'multipleOf for the type "number"')
    step = part["multipleOf"]
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise _unsupported(place, f"multipleOf {step!r}, which is no positive integer,")
    bounds = [name for name in _KEYWORDS_OF["number"] if name in part and name != "multipleOf"]
    if bounds:
        raise _unsupported(place, f"{bounds[0]} beside multipleOf")


def _check_object(place: str, part: Schema) -> None:
    properties = part.get("properties", {})
    required = part.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise RequestError(f"{place}: properties must be an object, and required a list")
    for name in required:
        if name not in properties:
            raise RequestError(
                f"{place}.required names {name!r}, which properties does not: not supported"
            )
    patterns = part.get("patternProperties", {})
    if not isinstance(patterns, Mapping):
        raise RequestError(f"{place}.patternProperties must be an object, got {patterns!r}")
    for pattern in patterns:
        check_regex(f"{place}.patternProperties", pattern, in_json=True)
    if len(patterns) > 1:
        raise _unsupported(place, "more than one pattern in patternProperties")
    is_open = part.get("additionalProperties", False) is not False
    is_open |= part.get("unevaluatedProperties", False) is not False
    by_name = [name for name in ("patternProperties", "propertyNames") if name in part]
    # Each property has to fit all that apply to its name; the library takes one of them.
    if by_name and properties:
        raise _unsupported(place, f"properties beside {by_name[0]}")
    if "patternProperties" in part and (is_open or len(by_name) > 1):
        other = "propertyNames" if len(by_name) > 1 else "additionalProperties"
        raise _unsupported(place, f"{other} beside patternProperties")
    least = part.get("minProperties", 0)
    # A name that comes twice is counted twice, and is one property to whoever reads the JSON.
    if (is_open or by_name) and isinstance(least, int) and least > max(1, len(required)):
        raise _unsupported(
            place, f"minProperties {least} for an object whose property names are open"
        )


def _unsupported(place: str, what: str) -> RequestError:
    return RequestError(f"{place}: {what} is not supported in a JSON schema for outputs")
