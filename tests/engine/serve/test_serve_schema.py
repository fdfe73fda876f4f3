"""/openapi.json, held to what the server does: its routes, the fields of bodies, and every limit.

Also that no field is accepted and ignored, which the same tables say.
"""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import jsonschema
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completion
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from decodegrid import __version__
from decodegrid.configs.load import load_config
from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.configs.strict_json import load_json
from decodegrid.engine.batch_body import INERT, BodyRequest, read_body
from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.messages_body import INERT as MESSAGE_INERT
from decodegrid.engine.messages_body import read_message
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.responses_body import INERT as RESPONSE_INERT
from decodegrid.engine.responses_body import read_response
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.server_app import build_app
from decodegrid.engine.server_front import OPEN_PATHS
from decodegrid.engine.server_keys import ApiKeys
from decodegrid.engine.server_request import ServedRequest
from decodegrid.engine.server_schema import openapi_document
from decodegrid.engine.server_state import ServerState
from decodegrid.engine.tokenizer import Tokenizer

_COMPONENTS = openapi_document(__version__, needs_key=False)["components"]["schemas"]
SCHEMAS: dict[str, Any] = {
    "chat": _COMPONENTS["ChatCompletionRequest"],
    "completion": _COMPONENTS["CompletionRequest"],
    "message": _COMPONENTS["MessageRequest"],
    "response": _COMPONENTS["ResponseRequest"],
}
USER: Any = {"role": "user", "content": "hi"}
BASES: dict[str, Any] = {
    "chat": {"messages": [USER]},
    "completion": {"prompt": "hi"},
    "message": {"messages": [USER]},
    "response": {"input": "hi"},
}
KINDS = sorted(SCHEMAS)
LONG = 10**30
FUNCTION: Any = {"name": "f", "parameters": {"type": "object"}}
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "completion": [],
    "message": [{"name": "f", "input_schema": {"type": "object"}}],
    "response": [{"type": "function", **FUNCTION}],
}
ENABLED: Any = {"type": "enabled"}


def beside(kind: str, name: str) -> dict[str, Any]:
    """What a field needs beside it to be accepted, or to matter."""
    length = "max_output_tokens" if kind == "response" else "max_tokens"
    known: dict[str, dict[str, Any]] = {
        "top_logprobs": {"logprobs": True} if kind == "chat" else {},
        "stream_options": {"stream": True},
        "min_tokens": {length: LONG},
        "include_stop_str_in_output": {"stop": "z"},
        "tool_choice": {"tools": TOOLS[kind]},
        "parallel_tool_calls": {"tools": TOOLS[kind]},
        "output_config": {"thinking": ENABLED},
    }
    return known.get(name, {})


DEFAULTS = SamplingSection()


def read(kind: Any, body: Any, tokenizer: Tokenizer) -> BodyRequest | ServedRequest:
    if kind == "response":
        return read_response(body, "tiny", tokenizer, DEFAULTS)
    if kind == "message":
        return read_message(body, "tiny", tokenizer, DEFAULTS)
    return read_body(kind, body, tokenizer, DEFAULTS, may_stream=True, may_be_many=True)


def is_of(param: str | None, name: str) -> bool:
    """Whether an error names a field or a part of it."""
    return str(param).split(".")[0].split("[")[0] == name


def test_the_document_has_the_routes_and_says_which_need_a_key() -> None:
    state = ServerState(load_config(None), ApiKeys())
    app: Any = build_app(state)
    routes = {path.replace(":path}", "}") for path in app._paths}
    state.close()
    for needs_key in (False, True):
        document = openapi_document(__version__, needs_key=needs_key)
        assert routes - document["paths"].keys() == {"/openapi.json"}
        assert document["paths"].keys() <= routes
        for path, operations in document["paths"].items():
            (operation,) = operations.values()
            asks = needs_key and path not in OPEN_PATHS
            assert ("security" in operation) is asks is ("401" in operation["responses"])
        assert ("securitySchemes" in document["components"]) is needs_key
        ids = [one["operationId"] for item in document["paths"].values() for one in item.values()]
        assert len(set(ids)) == len(ids)


def test_its_schemas_are_schemas_and_all_are_used() -> None:
    document = openapi_document(__version__, needs_key=True)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    named = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert named == schemas.keys()


def test_the_server_gives_it(serve: Any, make_runner: Any, tokenizer: Tokenizer) -> None:
    from decodegrid.engine.llm import LLM

    server = serve(lambda: LLM.from_runner(make_runner(), tokenizer))
    status, text = server.get("/openapi.json")
    assert status == 200 and json.loads(text) == openapi_document(__version__, needs_key=False)


def other_names() -> set[str]:
    """Names that clients know: OpenAI's, vLLM's, and some that nobody has."""
    hints: set[str] = set()
    for params in (
        openai_chat.CompletionCreateParamsBase,
        openai_completion.CompletionCreateParamsBase,
        ResponseCreateParamsBase,
        MessageCreateParamsBase,
    ):
        hints |= params.__annotations__.keys()
    assert {"logit_bias", "functions", "service_tier", "previous_response_id", "thinking"} <= hints
    ours = {field.name for field in fields(SamplingParams)}
    return hints | ours | {"", "extra_body", "prompts", "Messages", "max_token", "guided_json"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_accepted_if_and_only_if_the_schema_has_it(
    kind: str, tokenizer: Tokenizer
) -> None:
    """Null stands for a field that is not there, so that it shows what is known alone."""
    base, known = BASES[kind], SCHEMAS[kind]["properties"]
    read(kind, base, tokenizer)
    for name in (known.keys() | other_names()) - base.keys():
        if name in known:
            read(kind, {**base, name: None}, tokenizer)
        else:
            with pytest.raises(BodyError, match="is not supported") as refusal:
                read(kind, {**base, name: None}, tokenizer)
            assert refusal.value.param == name


def inner_schemas(schema: Any) -> Iterator[Any]:
    """The alternatives of a schema."""
    if "anyOf" in schema and "type" not in schema:
        for one in schema["anyOf"]:
            yield from inner_schemas(one)
    else:
        yield schema


def edges(schema: Any) -> Iterator[Any]:
    """Values at each limit of a property, and next to it on both sides."""
    for one in inner_schemas(schema):
        match one.get("type"):
            case "integer" | "number":
                step = 1 if one["type"] == "integer" else None
                for name in ("minimum", "maximum", "exclusiveMinimum"):
                    if name in one:
                        at = one[name]
                        below = at - 1 if step else math.nextafter(at, -math.inf)
                        above = at + 1 if step else math.nextafter(at, math.inf)
                        yield from (below, at, above)
            case "string":
                yield from ("", "a")
                if "maxLength" in one:
                    yield from ("a" * one["maxLength"], "a" * (one["maxLength"] + 1))
            case "array":
                item = next(iter(edges(one["items"])), None)
                inner = [value for value in edges(one["items"])] or [item]
                yield from ([], *([value] for value in inner))
                if "maxItems" in one:
                    yield from ([5] * one["maxItems"], [5] * (one["maxItems"] + 1))
            case "boolean":
                yield from (True, False)
            case "object" if "maxProperties" in one:
                inner = one["additionalProperties"]
                good: Any = "a" if inner["type"] == "string" else 1
                for key in ("0", "01", "", "-1", "9" * 18, "9" * 19, "1 ", "a"):
                    yield {key: good}
                yield from ({"5": value} for value in edges(inner))
                for count in (0, one["maxProperties"], one["maxProperties"] + 1):
                    yield {str(key): good for key in range(count)}
        yield from one.get("enum", ())
        if "const" in one:
            yield one["const"]
    yield from (0, 1, -1, 0.5, True, False, "auto", [], {}, [True], ["a"], {"a": 1})


DEEP = ("tools", "tool_choice", "response_format", "structured_outputs", "text", "system")
"""Fields whose parts other tests try."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_limit_of_the_schema_is_the_parsers(kind: str, tokenizer: Tokenizer) -> None:
    """At it and on both sides of it; what is beyond is refused by the field's name."""
    num_tried = 0
    for name, schema in SCHEMAS[kind]["properties"].items():
        if name in BASES[kind] or name in DEEP:
            continue
        for value in edges(schema):
            if value is None or (name == "model" and value != ""):
                continue
            body = {**BASES[kind], **beside(kind, name), name: value}
            num_tried += 1
            if allows(schema, value):
                read(kind, body, tokenizer)
            else:
                with pytest.raises(BodyError) as refusal:
                    read(kind, body, tokenizer)
                    pytest.fail(f"{name}={value!r} is accepted")
                assert is_of(refusal.value.param, name), (name, value, str(refusal.value))
    assert num_tried > 300


def allows(schema: Any, value: Any) -> bool:
    """As JSON Schema has it, but that 1.0 is no integer."""
    return any(
        jsonschema.Draft202012Validator(one).is_valid(value)
        and not (isinstance(value, float) and one.get("type") == "integer")
        for one in inner_schemas(schema)
    )


def test_limits_of_forms_are_the_parsers(tokenizer: Tokenizer) -> None:
    forms = SCHEMAS["completion"]["properties"]["structured_outputs"]["anyOf"][0]["properties"]
    for name, schema in forms.items():
        check = jsonschema.Draft202012Validator(schema)
        other = {} if name in ("json", "regex", "choice", "grammar") else {"json_object": True}
        for value in edges(schema):
            if value is None or (name, value) in (("json_object", False), ("json", "a")):
                continue
            text = value
            if name == "json" and isinstance(value, str) and value:
                text = json.dumps({"title": "a" * (len(value) - len('{"title": ""}'))})
            body = {"prompt": "a", "structured_outputs": {**other, name: text}}
            if check.is_valid(text):
                read("completion", body, tokenizer)
            else:
                with pytest.raises(BodyError) as refusal:
                    read("completion", body, tokenizer)
                assert refusal.value.param == "structured_outputs"


SCALARS = st.none() | st.booleans() | st.integers(-2, 200) | st.floats(-3, 3) | st.text(max_size=4)
WORDS = (
    "type", "function", "name", "role", "content", "text", "id", "arguments", "strict", "x",
    "tools", "mode", "is_error", "summary", "signature", "cache_control", "budget_tokens", "format",
)  # fmt: skip
VALUES = st.recursive(
    SCALARS | st.sampled_from(["function", "user", "assistant", "text", "json_object", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3)
    ),
    max_leaves=4,
)
EMPTY: list[Any] = [0, 0.0, False, "", [], {}, True, 1, "a", "auto", [None], [[]]]
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CACHE: Any = {"type": "ephemeral"}
RICH: dict[str, Any] = {
    "chat": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a", "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [
            {"type": "function", "function": {**FUNCTION, "description": "d", "strict": True}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "thinking": ENABLED,
    },
    "completion": {
        "prompt": [5, 6],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}},
        },
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {"5": 1.0},
        "stop": ["a"],
    },
    "message": {
        "system": [{"type": "text", "text": "s", "cache_control": CACHE, "citations": []}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "1", "is_error": True}
                ],
            },
        ],
        "tools": [{**TOOLS["message"][0], "description": "d", "strict": True}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low"},
        "max_tokens": 9,
        "stop_sequences": ["a"],
        "metadata": {"user_id": "u"},
    },
    "response": {
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}], "id": "m"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "tools": [{"type": "function", **FUNCTION, "description": "d", "strict": True}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "f"}],
        },
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "medium"},
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "metadata": {"a": "b"},
    },
}


def places_of(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield (*way, key)
        if isinstance(value[key], (dict, list)):
            yield from places_of(value[key], (*way, key))


def without(value: Any, way: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(value)
    holder = changed
    for key in way[:-1]:
        holder = holder[key]
    del holder[way[-1]]
    return changed


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_parser_accepts_the_schema_allows(kind: str, tokenizer: Tokenizer) -> None:
    """So that a body that the schema forbids is refused."""
    validator = jsonschema.Draft202012Validator(SCHEMAS[kind])
    assert validator.is_valid(RICH[kind])
    read(kind, RICH[kind], tokenizer)
    num_accepted = 0

    @settings(max_examples=10 * settings().max_examples)
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        nonlocal num_accepted
        body = copy.deepcopy(RICH[kind])
        way = data.draw(st.sampled_from(list(places_of(body))))
        holder = body
        for key in way[:-1]:
            holder = holder[key]
        match data.draw(st.sampled_from(["other", "none", "any", "new"])):
            case "other":
                holder[way[-1]] = data.draw(st.sampled_from(EMPTY))
            case "none":
                holder[way[-1]] = None
            case "any":
                holder[way[-1]] = data.draw(VALUES)
            case "new" if isinstance(holder, dict):
                holder[data.draw(st.sampled_from(WORDS))] = data.draw(VALUES)
        body = load_json(json.dumps(body))
        try:
            read(kind, body, tokenizer)
        except RequestError:
            return
        num_accepted += 1
        errors = [error.message for error in validator.iter_errors(body)]
        assert not errors, (body, errors)

    attempt()
    assert num_accepted > settings().max_examples // 8


def outcome(request: BodyRequest | ServedRequest, tokenizer: Tokenizer) -> Any:
    """All that a body comes down to; what says the same in two ways is one."""
    params = replace(
        request.params,
        stop=request.params.stop_strings,
        stop_token_ids=tuple(request.params.stop_token_ids),
        logit_bias=request.params.logit_bias or None,
    )
    if isinstance(request, ServedRequest):
        return request.prompts, params, request.stream
    ids = [
        tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in request.prompts
    ]
    chat = request.chat
    form = None if chat is None else (chat.has_tools, chat.is_thinking)
    return ids, params, request.model, request.stream, request.include_usage, form


SAMPLING_DEFAULTS = {name: getattr(SamplingParams(), name) for name in SamplingParams.__slots__}
INERT_OF: dict[str, Any] = {
    "chat": INERT, "completion": INERT, "message": MESSAGE_INERT, "response": RESPONSE_INERT,
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in SAMPLING_DEFAULTS.items()},
    "temperature": (DEFAULTS.temperature,),
    "model": ("",),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), (128,)),
    "stop": ([],),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("auto", {"type": "auto"}),
    "parallel_tool_calls": (True,),
    "thinking": ({"type": "disabled"},),
    "reasoning_effort": ("none",),
    "reasoning": ({}, {"effort": "none"}),
    "text": ({}, {"format": {"type": "text"}}),
    "output_config": ({},),
    "instructions": ("",),
}
"""Values that ask for what happens anyway."""
STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {
    "chat": ({}, {"include_usage": False}),
    "completion": ({}, {"include_usage": False}),
    "response": ({}, {"include_obfuscation": False}),
}
SILENT: dict[str, set[str]] = {
    "chat": {"user"},
    "completion": {"user", "top_logprobs"},
    "message": {"model", "metadata", "cache_control"},
    "response": {
        *("model", "user", "safety_identifier", "prompt_cache_key", "metadata", "stream_options"),
        *("previous_response_id", "conversation"),
    },
}
"""Labels, which the schema says; the model's name, which others check; what is null at most."""
SPECIAL: dict[str, list[Any]] = {
    "thinking": [ENABLED, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 4}],
    "stream_options": [{"include_usage": True}, {"include_obfuscation": False}],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}},
    ],
    "structured_outputs": [{"regex": "a"}, {"json_object": True}],
    "text": [{"format": {"type": "text"}}, {"format": {"type": "json_object"}}],
    "reasoning": [{"effort": "none"}, {"effort": "max"}],
    "output_config": [{"effort": "low"}],
    "system": ["s", [{"type": "text", "text": "s"}]],
    "metadata": [{"user_id": "u"}],
    "cache_control": [CACHE],
    "tool_choice": [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, "required"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_is_accepted_and_ignored(kind: str, tokenizer: Tokenizer) -> None:
    """Each accepted value but the neutral ones changes what a body comes down to."""
    effective = set()
    properties = SCHEMAS[kind]["properties"]
    neutral = {**NEUTRAL, **INERT_OF[kind], "stream_options": STREAM_OPTIONS.get(kind, ())}
    for name, schema in properties.items():
        if name in BASES[kind]:
            continue
        base = {**BASES[kind], **beside(kind, name)}
        plain = outcome(read(kind, base, tokenizer), tokenizer)
        own = {"tools": [TOOLS[kind]]}
        for value in [*edges(schema), *SPECIAL.get(name, ()), *own.get(name, ())]:
            try:
                found = outcome(read(kind, {**base, name: value}, tokenizer), tokenizer)
            except RequestError:
                continue
            # Of numbers, 1 is the neutral value where 1.0 is.
            is_neutral = value is None or any(
                isinstance(value, bool) == isinstance(one, bool) and value == one
                for one in neutral.get(name, ())
            )
            if is_neutral or name in SILENT[kind]:
                assert found == plain or name == "model", (name, value)
            else:
                assert found != plain, f"{name}={value!r} is accepted and ignored"
                effective.add(name)
    assert effective == properties.keys() - BASES[kind].keys() - SILENT[kind] - {*INERT_OF[kind]}


IGNORED: dict[str, set[tuple[Any, ...]]] = {
    "chat": {
        # A call that has to come is held to its schema anyway.
        ("tools", 0, "function", "strict"),
    },
    "completion": {
        ("response_format", "json_schema", "name"),
        ("response_format", "json_schema", "strict"),
    },
    "message": {
        ("system", 0, "cache_control"),
        ("system", 0, "citations"),
        ("tools", 0, "strict"),
        ("metadata",),
        ("metadata", "user_id"),
    },
    "response": {
        ("input", 0, "id"),
        ("tools", 0, "strict"),
        ("text",),
        ("text", "verbosity"),
        ("stream_options",),
        ("stream_options", "include_obfuscation"),
        ("metadata",),
        ("metadata", "a"),
    },
}
"""Parts that may be left out: labels, and what asks for what is so anyway."""


@pytest.mark.parametrize("kind", KINDS)
def test_no_part_of_a_field_is_accepted_and_ignored(kind: str, tokenizer: Tokenizer) -> None:
    """Left out, each part of a rich body changes what it comes down to, or the body is refused."""
    body = RICH[kind]
    plain = outcome(read(kind, body, tokenizer), tokenizer)
    ignored = []
    for way in places_of(body):
        try:
            found = outcome(read(kind, without(body, way), tokenizer), tokenizer)
        except RequestError:
            continue
        if found == plain:
            ignored.append(way)
    assert set(ignored) == IGNORED[kind]


@pytest.mark.parametrize(
    ("kind", "way", "value"),
    [
        ("chat", ("messages", 2, "tool_calls"), 0),
        ("chat", ("messages", 2, "tool_calls"), ""),
        ("chat", ("messages", 2, "tool_calls"), False),
        ("chat", ("messages", 2, "tool_calls"), {}),
        ("chat", ("tools", 0, "function", "description"), 0),
        ("chat", ("tools", 0, "function", "description"), []),
        ("chat", ("tools", 0, "function", "parameters"), 0),
        ("chat", ("tools", 0, "function", "parameters"), ""),
        ("chat", ("tools", 0, "function", "parameters"), []),
        ("chat", ("tools", 0, "function", "strict"), 0),
        ("chat", ("tools", 0, "function", "strict"), ""),
        ("message", ("messages", 2, "content", 0, "content"), 0),
        ("message", ("messages", 2, "content", 0, "content"), False),
        ("message", ("messages", 2, "content", 0, "content"), {}),
        ("message", ("messages", 2, "content", 0, "is_error"), 0),
        ("message", ("messages", 2, "content", 0, "is_error"), ""),
        ("message", ("tool_choice", "disable_parallel_tool_use"), 0),
        ("message", ("tool_choice", "disable_parallel_tool_use"), []),
        ("completion", ("response_format", "json_schema", "description"), "d"),
    ],
)
def test_values_that_python_takes_for_none_are_none_of_them(
    kind: str, way: tuple[Any, ...], value: Any, tokenizer: Tokenizer
) -> None:
    body = copy.deepcopy(RICH[kind])
    holder = body
    for key in way[:-1]:
        holder = holder[key]
    holder[way[-1]] = value
    with pytest.raises(BodyError) as refusal:
        read(kind, body, tokenizer)
    assert is_of(refusal.value.param, str(way[0]))


def test_whitespace_is_a_matter_of_json(tokenizer: Tokenizer) -> None:
    for form in ({"regex": "a"}, {"choice": ["a"]}, {"grammar": "root ::= [a]"}):
        body = {"prompt": "a", "structured_outputs": {**form, "disable_any_whitespace": True}}
        with pytest.raises(BodyError, match="is for json and json_object"):
            read("completion", body, tokenizer)
