"""What may be asked for, and that whatever is let through is what the grammar enforces.

The library ignores parts of JSON Schema. Each row of REFUSED is one of them, with a text that its
grammar would let through although it does not validate; each row of ENFORCED is let through, with
texts that validate and texts that must not.
"""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar

from decodegrid.configs.grammar_section import StructuredOutputsSection
from decodegrid.engine.grammar_compiler import GrammarCompiler, check_grammar
from decodegrid.engine.grammar_params import GrammarSource, StructuredOutputsParams
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams

NULL = {"type": "null"}


def obj(**fields: Any) -> dict[str, Any]:
    return {"type": "object", **fields}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": NULL, "uniqueItems": True}, "uniqueItems"),
    ({"type": "integer", "not": {"const": 1}}, "not"),
    ({"type": "integer", "if": {"const": 1}, "then": False}, "if"),
    (obj(properties={"a": NULL, "b": NULL}, dependentRequired={"a": ["b"]}), "dependentRequired"),
    (obj(properties={"a": NULL}, dependentSchemas={"a": {}}), "dependentSchemas"),
    (obj(properties={"a": NULL}, dependencies={"a": []}), "dependencies"),
    ({"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}}, "contains"),
    ({"allOf": [{"type": "string"}, {"maxLength": 1}]}, "allOf with more than one"),
    (obj(allOf=[obj(properties={"a": NULL})]), "type beside allOf"),
    ({"type": "string", "anyOf": [{"maxLength": 1}, {"pattern": "^b$"}]}, "type beside anyOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}, "oneOf"),
    ({"oneOf": [obj(properties={"k": {"const": 1}}), obj(properties={"k": NULL})]}, "oneOf"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "maxLength beside pattern"),
    ({"type": "string", "format": "email", "maxLength": 3}, "maxLength beside format"),
    ({"type": "string", "pattern": "^a$", "format": "date"}, "format beside pattern"),
    ({"type": "string", "format": "idn-email"}, "format 'idn-email'"),
    ({"type": "string", "pattern": '^"$'}, "pattern"),
    ({"type": "string", "pattern": "^\\\\$"}, "pattern"),
    ({"type": "string", "pattern": "^\\n$"}, "pattern"),
    ({"type": "string", "pattern": "a^b"}, "^ at character 1"),
    ({"type": "number", "multipleOf": 2}, "multipleOf"),
    ({"type": "integer", "multipleOf": 2.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 5, "minimum": 3}, "minimum beside multipleOf"),
    ({"$ref": "http://x/y"}, "references into the same schema"),
    ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, "references into the same schema"),
    ({"$ref": "#/$defs/q"}, "which the schema does not have"),
    ({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a", "maxLength": 1}, "beside $ref"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"type": "string", "enum": ["a", 1]}, "not of its type"),
    ({"type": "string", "enum": ["a", "bb"], "minLength": 2}, "minLength beside enum"),
    ({"const": 2**53 + 2}, "2**53"),
    ({"minimum": 3}, "minimum needs a type"),
    ({"minLength": 2}, "minLength needs a type"),
    ({"minItems": 2}, "minItems needs a type"),
    ({"required": ["a"]}, "required"),
    ({"properties": {"a": NULL}, "items": NULL}, "objects and of arrays"),
    (obj(required=["z"], additionalProperties=True), "required names 'z'"),
    (obj(additionalProperties=NULL, minProperties=2), "minProperties 2"),
    (obj(properties={"aa": NULL}, propertyNames={"maxLength": 1}), "properties beside"),
    (obj(patternProperties={"^a$": NULL, "^a?$": {"type": "boolean"}}), "more than one pattern"),
    (obj(patternProperties={"^a": NULL}, additionalProperties=True), "additionalProperties beside"),
    ({"type": "array", "items": [NULL]}, "items as a list"),
    ({"type": "foo"}, "type must be one of"),
    (obj(properties={"a": {"items": {"not": {}}}}), "json.properties.a.items: not"),
]  # fmt: skip

ENFORCED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 11], [-4, 12]),
    ({"type": "number", "minimum": 0, "maximum": 1.5}, [0, 1.25], [1.6, -1]),
    ({"type": "integer", "multipleOf": 7}, [21, -7], [20]),
    ({"type": ["string", "null"], "maxLength": 1}, ["a", None], ["ab", 1]),
    ({"type": "string", "pattern": "^[^a]\\d$"}, ["b1"], ["a1", "bb"]),
    ({"type": "array", "prefixItems": [NULL, {"type": "boolean"}], "items": False},
     [[None, True], []], [[True], [None, True, None]]),
    ({"type": "array", "items": NULL, "minItems": 1, "maxItems": 2}, [[None]], [[], [None] * 3]),
    (obj(properties={"a": NULL, "b": NULL}, required=["b"]), [{"b": None}], [{"a": None}, {}]),
    (obj(properties={"a": NULL}, additionalProperties={"type": "integer"}),
     [{"a": None, "q": 1}, {"q": 1}], [{"a": 1}, {"q": None}]),
    (obj(patternProperties={"^a+$": NULL}), [{"aa": None}], [{"aa": 1}, {"b": None}]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 3], [None]),
    ({"oneOf": [obj(properties={"k": {"const": name}}, required=["k"]) for name in "xy"]},
     [{"k": "x"}, {"k": "y"}], [{"k": "z"}]),
    ({"$defs": {"n": obj(properties={"c": {"$ref": "#/$defs/n"}})}, "$ref": "#/$defs/n"},
     [{"c": {"c": {}}}], [{"d": {}}]),
    ({"$defs": {"a/b": NULL}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}}, [[None]], [[1]]),
    ({"allOf": [{"type": "string", "maxLength": 1}]}, ["a"], ["aa"]),
    ({"type": "string", "format": "date"}, ["2024-01-31"], ["x"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def library() -> xgrammar.GrammarCompiler:
    vocabulary = [b""] + [bytes([value]) for value in range(256)]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=range(len(REFUSED)))
def test_schemas_that_would_be_followed_in_part_are_refused_by_name(
    schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(json=schema)
    assert words in str(caught.value) and str(caught.value).startswith("structured_outputs.json")


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=range(len(ENFORCED)))
def test_schemas_that_are_let_through_are_enforced(
    library: xgrammar.GrammarCompiler, schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    source = StructuredOutputsParams(json=schema).source
    check_grammar(source)
    compiled = library.compile_json_schema(source.text)
    for value, is_good in [*((v, True) for v in good), *((v, False) for v in bad)]:
        matcher = xgrammar.GrammarMatcher(compiled)
        assert (matcher.accept_string(json.dumps(value)) and matcher.is_completed()) is is_good
        assert jsonschema.Draft202012Validator(schema).is_valid(value) or not is_good


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one of"),
        ({"json_object": False}, "none of them"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"regex": ""}, "regex must not be empty"),
        ({"regex": 3}, "regex must be a string, got 3"),
        ({"regex": "a" * 20000}, "20000 characters; at most 16384"),
        ({"regex": "a\ud800"}, "not valid Unicode at character 1"),
        ({"regex": "a$b"}, "$ at character 1"),
        ({"regex": "\\Aab"}, "\\A at character 0"),
        ({"choice": "ab"}, "choice must be a list of strings"),
        ({"choice": []}, "no empty one"),
        ({"choice": ["a", ""]}, "no empty one"),
        ({"grammar": 1}, "grammar must be a string"),
        ({"json": "{"}, "json: not JSON at line 1, column 2"),
        ({"json": '{"type": "string", "type": "integer"}'}, "'type' is there twice"),
        ({"json": {"type": "string", "minLength": -5}}, "json.minLength must be an integer from 0"),
        ({"json": {"type": "array", "maxItems": 1.5}}, "json.maxItems must be an integer from 0"),
        ({"json": {"type": "object", "minProperties": True}}, "integer from 0, got True"),
        ({"regex": "ab", "json": False}, "got json and regex"),
        ({"regex": "ab", "choice": 0}, "got regex and choice"),
        ({"json": 0}, "must be a JSON schema, an object, got 0"),
        ({"json": "[1]"}, "must be a JSON schema, an object"),
        ({"json": '{"const": NaN}'}, "NaN is no JSON number"),
        ({"json": {"const": float("inf")}}, "json is not JSON"),
        ({"json": {"default": object()}}, "json is not JSON"),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace must be"),
        ({"json_object": True, "trigger_token_ids": [-1]}, "trigger_token_ids[0]"),
        ({"json_object": True, "trigger_token_ids": [1] * 65}, "at most 64"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**fields)
    assert words in str(caught.value) and str(caught.value).startswith("structured_outputs")


def test_deep_schemas_are_refused_without_deep_recursion() -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(2000):
        deep = {"type": "array", "items": deep}
    for schema in (deep, "[" * 5000, '{"items":' * 100 + "{}" + "}" * 100):
        with pytest.raises(RequestError, match=r"nested deeper than 64|nested too deeply|not JSON"):
            StructuredOutputsParams(json=schema)


def test_anchors_at_the_ends_of_alternatives_are_no_mistake() -> None:
    for pattern in ("^abc$", "^a|b$", "(^a|^b)c", "(a|b)$", "[$^]x", "\\$\\^", "a|^b$", "(?:^a)"):
        assert StructuredOutputsParams(regex=pattern).source.text == pattern


def test_one_source_for_equal_schemas_in_any_spelling() -> None:
    schema = {"type": "object", "properties": {"b": NULL, "a": NULL}}
    spelled = StructuredOutputsParams(json=json.dumps(schema, indent=3))
    assert spelled.source == StructuredOutputsParams(json=schema).source
    assert spelled.source.text.index('"b"') < spelled.source.text.index('"a"')
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def compiler(**settings: Any) -> GrammarCompiler:
    def bytes_of(token_id: int) -> bytes:
        return bytes([token_id - 2]) if 2 <= token_id < 258 else b""

    return GrammarCompiler(bytes_of, 260, 1, StructuredOutputsSection(**settings))


def finish(made: GrammarCompiler, text: str) -> Any:
    job = made.submit(GrammarSource("regex", text))
    while not job.is_done:
        made.wait(0.01)
    return job


def test_cache_is_shared_bounded_and_forgets_the_unused_first() -> None:
    made = compiler(compile_threads=2, cache_bytes=0)
    size = finish(made, "[a-f]{3}").num_bytes
    assert size > 0 and made.cached_bytes == 0, "a grammar larger than the cache is not kept"
    made = compiler(compile_threads=2, cache_bytes=int(2.5 * size))
    first = finish(made, "[a-f]{3}")
    assert made.submit(GrammarSource("regex", "[a-f]{3}")) is first
    second = finish(made, "[a-e]{3}")
    assert finish(made, "[a-f]{3}") is first
    finish(made, "[a-d]{3}")
    assert made.cached_bytes <= 2.5 * size
    assert finish(made, "[a-f]{3}") is first and finish(made, "[a-e]{3}") is not second
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.submit(GrammarSource("regex", "a"))


def test_choices_are_taken_as_they_are_spelled() -> None:
    made = compiler()
    choices = ['a"b\\', "line\nend", "gr\u00fcn", "\U0001f600", "a]|[", "\u2028", "x\x00y"]
    source = StructuredOutputsParams(choice=choices).source
    job = made.submit(source)
    while not job.is_done:
        made.wait(0.01)
    for choice in choices:
        matcher: Any = made.matcher(job)
        assert all(matcher.accept_token(2 + byte) for byte in choice.encode())
        assert matcher.is_completed()
    made.close()


def test_json_has_no_raw_control_characters_however_its_strings_are_bounded() -> None:
    """The library's own grammar lets them into strings whose length has a bound."""
    made = compiler()
    for schema in ({"type": "string", "maxLength": 9}, {"type": "string"}, {}):
        job = made.submit(StructuredOutputsParams(json=schema).source)
        while not job.is_done:
            made.wait(0.01)
        matcher: Any = made.matcher(job)
        assert matcher.accept_token(2 + ord('"'))
        mask = np.zeros((1, made.num_words), dtype=np.int32)
        matcher.fill_next_token_bitmask(mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert not bits[2 : 2 + 0x20].any() and bits[2 + 0x20 : 2 + 0x22].all()
    made.close()
