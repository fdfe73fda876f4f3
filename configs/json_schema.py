"""The schema of a deployment file as JSON Schema (draft 2020-12), for editors and for CI.

Owns what pydantic cannot derive from the fields: the rules of their validators, sizes in bytes that
may be texts, units. Rules between fields are left to `decodegrid config check`. Data flow: the
schema's classes -> one JSON object that refuses every key that is not there.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from decodegrid.configs.byte_size import SIZE_PATTERN
from decodegrid.configs.schema import SCHEMA_VERSION, DeploymentConfig

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_ASCENDING: Final = MappingProxyType({"uniqueItems": True})
_SIZE_TEXT: Final = MappingProxyType({"type": "string", "pattern": SIZE_PATTERN})

_RULES: Final = MappingProxyType[str, Mapping[str, Any]](
    {
        "schema_version": {"const": SCHEMA_VERSION},
        "scheduler.prefill_chunk_sizes": {**_ASCENDING, "minItems": 1},
        "grid.num_reqs": _ASCENDING,
        "grid.num_query_tokens_per_req": _ASCENDING,
        "grid.pairs": _ASCENDING,
        "cache.block_size": {"multipleOf": 2},
        "cache.num_blocks": {"not": {"const": 1}},
        "dumps.num_steps": {"not": {"const": 1}},
        "sampling.temperature": {"anyOf": [{"const": 0}, {"minimum": 1e-5, "maximum": 100}]},
        "sampling.top_k": {"anyOf": [{"const": -1}, {"minimum": 1}]},
        # A URL with a host and without a user.
        "server.otel_endpoint": {"pattern": r"^$|^https?://(?![^/?#]*@)[^/?#:\s]"},
    }
)
"""Dotted key -> keywords that stand beside those of its type."""

SIZES: Final = ("cache.pool_bytes", "server.max_body_bytes")
"""Keys that take a text with a unit, such as 512MiB, as well as a number."""

_UNITS: Final = MappingProxyType(
    {
        "_s": "seconds",
        "_bytes": "bytes",
        "_tokens": "tokens",
        "_len": "tokens",
        "_sizes": "tokens",
        "block_size": "tokens",
        "num_blocks": "blocks",
        "_reqs": "requests",
        "_requests": "requests",
        "_threads": "threads",
        "_steps": "steps",
        "_snapshots": "windows",
        "expert": "processes",
    }
)
"""End of a key's name -> the unit of its number."""


def deployment_schema() -> dict[str, Any]:
    """The JSON Schema of a deployment file; JSON values only, keys in the schema's order."""
    raw = DeploymentConfig.model_json_schema()
    definitions: dict[str, Any] = raw.pop("$defs")
    root = _tidy(raw)
    root["properties"]["schema_version"] |= {"type": "integer"}
    for name, section in definitions.items():
        definitions[name] = _tidy(section)
    for key, field, info in _fields(root, definitions, DeploymentConfig):
        field |= _RULES.get(key, {})
        if key in SIZES:
            _allow_texts(field, info)
        unit = _unit(key, field)
        if unit is not None:
            field["x-unit"] = unit
    root["description"] = (
        "A decodegrid deployment. Rules between keys are not here: `decodegrid config check` knows "
        "them."
    )
    head = {"$schema": DIALECT, "title": "decodegrid deployment"}
    return {**head, **root, "$defs": definitions}


def _tidy(node: dict[str, Any]) -> dict[str, Any]:
    """A section without pydantic's titles, with descriptions on one line each."""
    node.pop("title", None)
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    for field in node["properties"].values():
        field.pop("title", None)
        if "description" in field:
            field["description"] = " ".join(field["description"].split())
    return node


def _fields(
    node: dict[str, Any], definitions: dict[str, Any], model: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, dict[str, Any], FieldInfo]]:
    """(dotted key, its schema, the field) of every key that is no section."""
    for name, info in model.model_fields.items():
        field: dict[str, Any] = node["properties"][name]
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner = definitions[kind.__name__]
            # The field's own words, where it has some, are about this use of the section.
            field.setdefault("description", inner.get("description", ""))
            yield from _fields(inner, definitions, kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field, info


def _allow_texts(field: dict[str, Any], info: FieldInfo) -> None:
    """Let a number of bytes, within its bounds, be a text with a unit too."""
    number = {"type": field.pop("type")}
    for bound in info.metadata:
        # pydantic drops them behind a validator that turns texts into numbers.
        if isinstance(bound, Ge):
            number["minimum"] = bound.ge
        elif isinstance(bound, Le):
            number["maximum"] = bound.le
    field["anyOf"] = [number, dict(_SIZE_TEXT)]


def _unit(key: str, field: Mapping[str, Any]) -> str | None:
    """The unit of a key that holds numbers, by the end of its name; None without one."""
    if field.get("type") not in ("integer", "number", "array") and key not in SIZES:
        return None
    return next((unit for end, unit in _UNITS.items() if key.endswith(end)), None)
