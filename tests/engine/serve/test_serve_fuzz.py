"""`decodegrid serve` and bodies that no client should send: a JSON error for each, and the server
goes on.

How many are tried, and whether anew in each run: DECODEGRID_FUZZ_EXAMPLES, see tests/conftest.py.
"""

import copy
import json
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodegrid import __version__
from decodegrid.configs.strict_json import load_json
from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.llm import LLM
from decodegrid.engine.server_errors import ApiError
from decodegrid.engine.server_profile import _read as read_order
from decodegrid.engine.server_schema import OPERATIONS, openapi_document
from decodegrid.engine.tokenizer import Tokenizer

DOCUMENT = openapi_document(__version__, needs_key=False)
TRACES = "/profile"
"""Needs a directory and something to trace; its body is tried without them."""
PATHS = [found.path for found in OPERATIONS if found.body is not None and found.path != TRACES]

USER: Any = {"role": "user", "content": "hi"}
FUNCTION: Any = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: Any = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "thinking": {"type": "enabled"},
    "reasoning_effort": "low",
}
SAMPLING: Any = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "max_tokens": 5,
    "stop": ["zz"], "stop_token_ids": [9], "min_tokens": 1, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"20": 1.0},
    "stream": True, "stream_options": {"include_usage": True}, "user": "u", "speculation": 2,
}  # fmt: skip
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
MESSAGES: Any = {
    "model": "tiny",
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 100},
}
VALID: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {**CHAT, **SAMPLING},
        {"messages": [USER], "logprobs": True, "top_logprobs": 2, "response_format": FORMAT},
    ],
    "/v1/completions": [
        {"model": "tiny", "prompt": "abc", **SAMPLING, "logprobs": 2},
        {"prompt": [20, 21], "prompt_logprobs": 1, "max_tokens": 3, "stream": False},
        {"prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": "[ab]{2}"}},
    ],
    "/v1/responses": [
        {
            "model": "tiny",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "instructions": "i",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "auto",
            "reasoning": {"effort": "low"},
            "metadata": {"a": "b"},
            "max_output_tokens": 5,
            "temperature": 0.7,
            "top_k": 5,
            "stream": True,
        },
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
    ],
    "/v1/messages": [
        {**MESSAGES, "max_tokens": 5, "stop_sequences": ["zz"], "stream": True, "min_p": 0.1},
        {"messages": [USER], "max_tokens": 3, "temperature": 0},
    ],
    "/v1/messages/count_tokens": [MESSAGES, {"messages": [USER]}],
    "/tokenize": [{"model": "tiny", "prompt": "abc"}, CHAT],
    "/detokenize": [{"tokens": [20, 21]}],
}
"""Bodies of each path that are served as they are."""

LAST_EVENTS = ("response.completed", "response.incomplete", "message_stop")
DEEP = object()
"""Stands for lists within lists."""
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, 5e-324, math.nan, math.inf, -math.inf,
    2**31, 2**53 + 1, 2**63, -(2**63), 10**30, "", "\x00", "\ud800", "\udfff\ud800", "a\n\r\t",
    "\u2028", "\U0001f600" * 3, "x" * 5000, "</think>", "\uff5cDSML\uff5c", [], [[]], [None], {},
    {"": ""}, {"\ud800": 1}, [0] * 300, DEEP, "auto", "null", "1", [1, "a"], {"type": "text"},
]  # fmt: skip
HEADERS = [
    {}, {"content-type": "application/json"}, {"content-type": "application/json; charset=utf-8"},
    {"content-type": "application/problem+json"}, {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"}, {"content-type": ";"},
    {"content-type": b"\xff"}, {"content-encoding": "gzip"}, {"x-request-id": "a" * 200},
]  # fmt: skip


@pytest.fixture(scope="module")
def engine_of() -> dict[str, LLM]:
    return {}


@pytest.fixture(scope="module")
def server(
    serve_shared: Any,
    make_runner: Callable[..., Any],
    tokenizer: Tokenizer,
    engine_of: dict[str, LLM],
) -> Iterator[Any]:
    """Small limits, so that whatever is accepted ends soon."""

    def make() -> LLM:
        engine_of["llm"] = LLM.from_runner(
            make_runner(max_model_len=1300, drafts="mixed"), tokenizer
        )
        return engine_of["llm"]

    found = serve_shared(
        make,
        "scheduler.max_model_len=1300",
        "scheduler.max_num_reqs=4",
        "server.max_queued_requests=4",
        "server.max_body_bytes=64KiB",
        "sampling.max_tokens=6",
        "structured_outputs.compile_timeout_s=5",
    )
    # One client: to make one takes longer than a request.
    with httpx2.Client(base_url=found.url, timeout=60) as client:
        found.http = client
        yield found


@pytest.fixture(autouse=True)
def goes_on(server: Any, engine_of: dict[str, LLM], idle: Callable[[LLM], bool]) -> Iterator[None]:
    """Behind each test: a good request is served, and nothing is left of the others."""
    yield
    for path, bodies in VALID.items():
        for body in bodies:
            assert check(server, path, encode(body)) == 200, path
    server.wait_until(lambda: idle(engine_of["llm"]) and not server.state.queue.open_ids)
    assert server.state.queue.num_open == 0 == server.state.queue.num_waiting_tokens
    assert server.state.health.problem() is None


def encode(value: Any) -> bytes:
    """JSON with what only Python writes, such as NaN and lone surrogates."""
    text = json.dumps(value, default=lambda _: "DEEP")
    return text.replace('"DEEP"', "[" * 2000 + "]" * 2000).encode()


def check(server: Any, path: str, data: bytes, headers: dict[str, Any] | None = None) -> int:
    """Send a body; the answer is one that a client can read. Returns its status."""
    answer = server.http.post(path, content=data, headers=headers)
    assert answer.status_code < 500, (path, data[:300], answer.text)
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            last = answer.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")[-1]
            assert last == "data: [DONE]" or json.loads(last[6:])["type"] in LAST_EVENTS, last
        else:
            assert isinstance(answer.json(), dict)
        return 200
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert error["message"] and isinstance(error["message"], str), (data, error)
    assert len(error["message"]) <= 1000 and error["type"]
    if answer.status_code == 400 and path.startswith("/v1/") and error_has_param(path):
        try:
            is_object = isinstance(load_json(data.decode()), dict)
        except ValueError:
            is_object = False
        # A field may be called "".
        assert not is_object or error["param"] is not None, (data[:300], error)
    return int(answer.status_code)


def error_has_param(path: str) -> bool:
    """Whether the errors of a path name a field: those of OpenAI's protocols do."""
    operation = next(found for found in OPERATIONS if found.path == path)
    error = DOCUMENT["components"]["schemas"][operation.error]
    return "param" in error["properties"]["error"]["properties"]


def places_of(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values inside a value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*way, key)
        yield from places_of(inner, (*way, key))


@st.composite
def changed_bodies(draw: st.DrawFn, path: str) -> Any:
    """A valid body with one to three values replaced, left out, renamed or put elsewhere."""
    body = copy.deepcopy(draw(st.sampled_from(VALID[path])))
    for _ in range(draw(st.integers(1, 3))):
        way = draw(st.sampled_from(list(places_of(body)) or [()]))
        if not way:
            return body
        holder = body
        for key in way[:-1]:
            holder = holder[key]
        kind = draw(st.sampled_from(["nasty", "any", "other", "gone", "renamed"]))
        if kind == "nasty":
            holder[way[-1]] = copy.copy(draw(st.sampled_from(NASTY)))
        elif kind == "any":
            holder[way[-1]] = draw(anything())
        elif kind == "other":
            other = body
            for key in draw(st.sampled_from(list(places_of(body)))):
                other = other[key]
            holder[way[-1]] = copy.deepcopy(other)
        elif kind == "gone":
            del holder[way[-1]]
        elif isinstance(holder, dict):
            holder[draw(st.text(max_size=6) | st.sampled_from(NAMES))] = holder.pop(way[-1])
    return body


NAMES = sorted(
    {
        name
        for path in PATHS
        for body in VALID.get(path, ())
        for way in places_of(body)
        for name in way
        if isinstance(name, str)
    }
)


def anything() -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=6,
    )


def from_schema(schema: Any) -> st.SearchStrategy[Any]:
    """Values that a schema of the document allows."""
    if "$ref" in schema:
        found = DOCUMENT
        for key in schema["$ref"].removeprefix("#/").split("/"):
            found = found[key]
        return from_schema(found)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "type" not in schema:
        return st.one_of([from_schema(one) for one in schema["anyOf"]]) if schema else anything()
    match schema["type"]:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = schema.get("minimum"), schema.get("maximum")
            small = st.integers(low, min(high, low + 30) if high is not None else (low or 0) + 30)
            return small | st.integers(low, high)
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            return st.floats(low, schema.get("maximum"), exclude_min="exclusiveMinimum" in schema)
        case "string":
            low = schema.get("minLength", 0)
            return st.text(min_size=low, max_size=max(low, 8))
        case "array":
            low = schema.get("minItems", 0)
            return st.lists(from_schema(schema["items"]), min_size=low, max_size=low + 2)
        case _:
            return objects(schema)


@st.composite
def objects(draw: st.DrawFn, schema: Any) -> Any:
    """An object with the required fields and a few of the others."""
    properties = schema.get("properties", {})
    names = {*schema.get("required", ())}
    if "anyOf" in schema:  # beside `type`: one of them has to hold too
        names |= {*draw(st.sampled_from(schema["anyOf"]))["required"]}
    others = sorted(properties.keys() - names)
    if others:
        names |= draw(st.sets(st.sampled_from(others), max_size=4))
    found = {name: draw(from_schema(properties[name])) for name in sorted(names)}
    if not properties:
        keys = st.integers(0, 300).map(str) if "propertyNames" in schema else st.text(max_size=4)
        inner = schema.get("additionalProperties", True)
        values = from_schema(inner) if isinstance(inner, dict) else anything()
        found |= draw(st.dictionaries(keys, values, max_size=3))
    return found


def body_schema(path: str) -> Any:
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
    return content["application/json"]["schema"]


def test_every_path_with_a_body_is_tried() -> None:
    assert sorted(VALID) == sorted(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_the_schema(server: Any, path: str) -> None:
    found = set()

    @given(from_schema(body_schema(path)))
    def attempt(body: Any) -> None:
        found.add(check(server, path, encode(body)))

    attempt()
    assert 200 in found, "no body of the schema is served"


@pytest.mark.parametrize("path", PATHS)
def test_changed_bodies(server: Any, path: str) -> None:
    found = set()

    @given(changed_bodies(path), st.sampled_from(HEADERS))
    def attempt(body: Any, headers: dict[str, Any]) -> None:
        found.add(check(server, path, encode(body), headers))

    attempt()
    assert {200, 400, 415} <= found


@pytest.mark.parametrize("path", PATHS)
def test_changed_bytes(server: Any, path: str) -> None:
    """A body cut short, with bytes put into it, or with a field that is there twice."""

    @given(
        st.sampled_from([encode(body) for body in VALID[path]]),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from([b"", b"\xff", b"\x00", b"\xed\xa0\x80", b'"', b"{", b"]", b"NaN", b"1e999",
                         b"-", b"\\u", b",", b"9" * 5000, b"[" * 300, b'"n": 1, "n": 2,'])
        | st.binary(max_size=6),
        st.integers(0, 30),
    )  # fmt: skip
    def attempt(data: bytes, part: float, word: bytes, gone: int) -> None:
        at = int(part * len(data))
        check(server, path, data[:at] + word + data[at + gone :])
        check(server, path, data[:at])

    attempt()


@pytest.mark.parametrize("path", PATHS)
def test_nesting_of_any_depth(server: Any, path: str) -> None:
    """Near the limit of the reader and near Python's, in a field of each kind."""
    body = VALID[path][0]
    for depth in (250, 254, 255, 256, 257, 300, *range(960, 1000, 8), 1100, 20000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            inner = opening * depth + ("1" if closing == "}" else "") + closing * depth
            for name in (*list(body)[1:3], "nonsense"):
                text = json.dumps({**body, name: "DEEP"}).replace('"DEEP"', inner)
                if len(text) < 60000:
                    check(server, path, text.encode())


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_never_comes_whole(server: Any, path: str) -> None:
    """The client says more bytes than it sends, and goes."""
    host, port = server.url.removeprefix("http://").split(":")
    data = encode(VALID[path][0])
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    failures = server.metric("decodegrid_http_responses_total", path=path, status="500")
    for sent in (b"", data[:5], data[:-1]):
        before = server.metric("decodegrid_http_responses_total", path=path, status="499")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + sent)
        server.wait_until(
            lambda: (
                server.metric("decodegrid_http_responses_total", path=path, status="499")
                == before + 1  # noqa: B023
            )
        )
    assert server.metric("decodegrid_http_responses_total", path=path, status="500") == failures


@pytest.mark.parametrize(
    ("data", "param", "words"),
    [
        (b'{"\\ud800": 1}', "\\ud800", "\\ud800 is not supported"),
        (b'{"' + b"x" * 5000 + b'": 1}', "x" * 997 + "...", "x" * 900),
        (b'{"prompt": "a", "temperature": "' + b"y" * 9000 + b'"}', "temperature", "..."),
        (b'{"prompt": "a", "stop": "\\ud800"}', "stop", "not valid Unicode"),
        (b'{"prompt": "a", "model": 5}', "model", "must be a string, got a number"),
        (b'{"prompt": "a", "model": false}', "model", "must be a string, got a boolean"),
        (b'{"prompt": "a", "model": []}', "model", "must be a string, got a list"),
    ],
)
def test_what_a_client_sent_can_be_sent_back(
    server: Any, data: bytes, param: str, words: str
) -> None:
    """Names that UTF-8 does not have, and long ones; and values that Python takes for none."""
    answer = server.post("/v1/completions", data)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert words in error["message"] and len(error["message"]) <= 1000


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
@pytest.mark.parametrize("path", PATHS)
def test_other_kinds_of_bodies_are_refused(server: Any, path: str, kind: str) -> None:
    """Those are what a page of another site may send without being asked."""
    data = encode(VALID[path][0])
    answer = server.post(path, data, **{"content-type": kind})
    assert answer.status_code == 415 and repr(kind) in answer.json()["error"]["message"]
    assert server.post(path, data, **{"content-type": "Application/JSON"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"content-type": "application/json; charset=latin-1"}, "must be UTF-8"),
        ({"content-type": 'application/json;x=y; Charset="utf-16"'}, "must be UTF-8"),
        ({"content-encoding": "gzip"}, "must not be compressed, got the content encoding 'gzip'"),
        ({"content-encoding": "identity, br"}, "must not be compressed"),
        ({"content-type": 'application/json;charset="UTF-8"'}, None),
        ({"content-type": "application/json; x=charset=latin-1"}, None),
        ({"content-encoding": "Identity"}, None),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_bodies_in_other_codes_are_refused(
    server: Any, path: str, headers: dict[str, str], words: str | None
) -> None:
    """Read as UTF-8 they would be taken for something else."""
    answer = server.post(path, encode(VALID[path][0]), **headers)
    assert answer.status_code == (200 if words is None else 415)
    assert words is None or words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("data", "param"),
    [(b'{"timeout_s": 1' + b"0" * 400 + b"}", "timeout_s"), (b'{"num_steps": 1e999}', "num_steps")],
)
def test_bodies_of_traces(data: bytes, param: str) -> None:
    with pytest.raises(BodyError) as refusal:
        read_order(data)
    assert refusal.value.param == param

    @given(st.dictionaries(st.sampled_from(["num_steps", "timeout_s", "x"]), anything()))
    def attempt(body: Any) -> None:
        with suppress(ApiError, BodyError):
            order = read_order(encode(body))
            assert 1 <= order.num_steps <= 200 and 0 < order.timeout_s <= 300

    attempt()
