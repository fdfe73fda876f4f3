"""Whether no value fits two of several JSON schemas, by what can be seen at a glance.

Owns the rule under which `oneOf` is the same as `anyOf`, which is all that the grammar library
makes of it. Knows nothing of the rest of a schema.
"""

import json
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, Final

Resolve = Callable[[object], object]
_MAX_REFERENCES: Final = 16


def are_disjoint(branches: object, resolve: Resolve) -> bool:
    """Whether the schemas exclude each other: by their types, by the values they list, or by a
    required property of objects that does. resolve: what a reference names."""
    if not isinstance(branches, list):
        return False
    seen = [_follow(branch, resolve) for branch in branches]
    return all(_exclude(first, second, resolve) for first, second in combinations(seen, 2))


def json_type(value: object) -> str:
    """JSON Schema's name for the type of what json.loads made; whole numbers are "integer"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _follow(schema: object, resolve: Resolve) -> Mapping[str, Any]:
    """A schema, or what its reference names; {} where that cannot be seen."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if "$ref" not in schema:
            return schema
        schema = resolve(schema["$ref"])
    return {}


def _exclude(first: Mapping[str, Any], second: Mapping[str, Any], resolve: Resolve) -> bool:
    values, others = _values(first), _values(second)
    if values is not None and others is not None:
        return values.keys().isdisjoint(others.keys())
    if values is not None:
        return {json_type(value) for value in values.values()}.isdisjoint(_types(second))
    if others is not None:
        return {json_type(value) for value in others.values()}.isdisjoint(_types(first))
    types, other_types = _types(first), _types(second)
    if types.isdisjoint(other_types):
        return True
    return types & other_types == {"object"} and _tagged_apart(first, second, resolve)


def _tagged_apart(first: Mapping[str, Any], second: Mapping[str, Any], resolve: Resolve) -> bool:
    """Whether objects of the two differ in a property that both must have."""
    for name in first.get("required", ()):
        if name in second.get("required", ()):
            pair = [_follow(each.get("properties", {}).get(name), resolve)
                    for each in (first, second)]  # fmt: skip
            values, others = _values(pair[0]), _values(pair[1])
            if values is not None and others is not None and values.keys().isdisjoint(others):
                return True
    return False


def _values(schema: Mapping[str, Any]) -> dict[str, object] | None:
    """The values of const or enum by a spelling that equal ones share, None where neither is."""
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    else:
        return None
    return {json.dumps(_plain(value), sort_keys=True): value for value in values}


def _plain(value: object) -> object:
    """A value with whole floats as integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Types that a schema lets through, every one where it does not say; numbers are integers
    too."""
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given or ())
    if not types:
        types = {"null", "boolean", "number", "string", "array", "object"}
    return types | {"integer"} if "number" in types else types
