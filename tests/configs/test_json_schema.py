"""The JSON Schema of a deployment: what it says, and that it refuses what the loader refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from decodegrid.configs.json_schema import SIZES, deployment_schema
from decodegrid.configs.load import CONFIGS_DIR, ConfigError, load_config
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.configs.yaml_nodes import parse

SHIPPED = sorted(CONFIGS_DIR.glob("*.yaml"))
Leaf = tuple[str, type[BaseModel], str]


def leaves(model: type[BaseModel] = DeploymentConfig, prefix: str = "") -> Iterator[Leaf]:
    """(dotted key, its section's class, its name) of every key that is no section."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", model, name


LEAVES = list(leaves())


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return deployment_schema()


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def field_of(schema: dict[str, Any], key: str) -> dict[str, Any]:
    node = schema
    for name in key.split("."):
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
        node = node["properties"][name]
    return node


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_deployments_are_valid(
    path: Path, validator: jsonschema.Draft202012Validator
) -> None:
    document = parse(path.read_text())
    assert document.problems == ()
    assert isinstance(document.value, dict) and document.value["schema_version"] == 1
    assert document.value["model"]["checkpoint"]
    validator.validate(document.value)
    load_config(path)


def test_there_are_four_of_them() -> None:
    names = {path.name for path in SHIPPED}
    assert names >= {"tiny.yaml", "tiny-v41.yaml", "h200.yaml", "v41-flash-8gpu.yaml"}


def test_every_key_is_described_with_its_default(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert len(LEAVES) > 60
    for key, model, name in LEAVES:
        field = field_of(schema, key)
        assert field["description"].strip(), key
        assert "\n" not in field["description"], key
        info = model.model_fields[name]
        assert info.default is not PydanticUndefined
        default = list(info.default) if isinstance(info.default, tuple) else info.default
        assert field["default"] == default, key
    sections = [schema, *schema["$defs"].values()]
    assert all(section["additionalProperties"] is False for section in sections)
    assert all(section["description"] for section in sections)


@pytest.mark.parametrize(
    ("key", "unit"),
    [
        ("scheduler.max_model_len", "tokens"),
        ("scheduler.max_num_reqs", "requests"),
        ("scheduler.prefill_chunk_sizes", "tokens"),
        ("cache.block_size", "tokens"),
        ("cache.num_blocks", "blocks"),
        ("cache.pool_bytes", "bytes"),
        ("server.max_body_bytes", "bytes"),
        ("server.drain_timeout_s", "seconds"),
        ("surface.max_age_s", "seconds"),
        ("parallel.expert", "processes"),
    ],
)
def test_units(schema: dict[str, Any], key: str, unit: str) -> None:
    assert field_of(schema, key)["x-unit"] == unit


def test_every_number_of_seconds_or_bytes_has_its_unit(schema: dict[str, Any]) -> None:
    for key, _, _ in LEAVES:
        for end, unit in (("_s", "seconds"), ("_bytes", "bytes")):
            if key.endswith(end):
                assert field_of(schema, key)["x-unit"] == unit, key


VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "on", "off", "auto", "all", "512MiB", "1.5 GB", "1.5", "1,000",
    " 7 b ", "-1", -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 64, 1023, 1024, 1025, 65536, 65537, 10**9,
    2**53, 10**15, 10**16, -0.5, 1e-6, 1e-5, 0.5, 0.95, 0.951, 1.5, 100.5, [], {}, [1], [2], [2, 4],
    [4, 4], [1.5], ["x"], [[1, 2]], [[1, 2], [2, 2]], [[1, 2], [1, 2]], [[1, 2, 3]], [None],
    {"a": 1}, "cpu", "cuda", "float32", "eager", "coupled", "v41", "normal", "info",
)  # fmt: skip
"""Tried on every key: each kind of value, on both sides of most bounds."""


def loader_refuses(model: type[BaseModel], name: str, value: Any) -> bool:
    """Whether the key is refused for what it says alone; what others say is not asked."""
    try:
        model.model_validate({name: value})
    except ValidationError as error:
        return any(details["loc"][:1] == (name,) for details in error.errors())
    return False


def is_descending(value: Any) -> bool:
    return isinstance(value, list) and value != sorted(value, key=str)


@pytest.mark.parametrize(("key", "model", "name"), LEAVES, ids=[leaf[0] for leaf in LEAVES])
def test_it_refuses_what_the_loader_refuses(
    validator: jsonschema.Draft202012Validator, key: str, model: type[BaseModel], name: str
) -> None:
    bounds = [v for m in model.model_fields[name].metadata for v in vars_of(m)]
    near = [v + d for v in bounds for d in (-1, 0, 1)]
    refused = 0
    for value in (*VALUES, *near):
        if is_descending(value) or (key == "server.max_body_bytes" and value == " 7 b "):
            continue  # order, and how much a text comes to, no schema can say
        wanted = loader_refuses(model, name, value)
        refused += wanted
        assert (not validator.is_valid(nested(key, value))) == wanted, (key, value)
    assert refused, key


def vars_of(constraint: Any) -> list[int]:
    """The whole numbers that bound a field."""
    found = (getattr(constraint, name, None) for name in ("ge", "le", "gt", "lt"))
    return [value for value in found if isinstance(value, int)]


@pytest.mark.parametrize(
    "text",
    [
        "scheduler: {max_num_req: 3}",
        "shedule: {}",
        "model: {checkpoint: tiny, model_path: x}",
        "tensor_parallel_size: 8",
        "cache: null",
        "cache: []",
        "speculation: {confidence_temperatures: {coupled: [0.0]}}",
        "speculation: {confidence_temperatures: {mixed: []}}",
        "schema_version: 2",
        "schema_version: '1'",
        "[]",
    ],
)
def test_planted_errors(
    text: str, validator: jsonschema.Draft202012Validator, tmp_path: Path
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_config(path)
    assert not validator.is_valid(parse(text).value)


def test_sizes_are_the_keys_of_bytes_with_units() -> None:
    takes_texts = [key for key, model, name in LEAVES if not loader_refuses(model, name, "512MiB")]
    numbers = [key for key in takes_texts if not loader_refuses(*dict(pairs())[key], 2**20)]
    assert sorted(numbers) == sorted(SIZES)


def pairs() -> Iterator[tuple[str, tuple[type[BaseModel], str]]]:
    for key, model, name in LEAVES:
        yield key, (model, name)
