"""`decodegrid serve`: Anthropic's messages API through the official client."""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from decodegrid.engine.llm import LLM
from decodegrid.engine.messages_body import COUNT_FIELDS, FIELDS, INERT, read_message
from decodegrid.engine.tokenizer import Tokenizer

TOOLS: Any = [
    {
        "name": "add",
        "description": "adds",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "string"}},
        },
    }
]
CALL = (
    '<\uff5cDSML\uff5c invoke name="add">\n'
    '<\uff5cDSML\uff5c parameter name="a" string="false">{a}</\uff5cDSML\uff5c parameter>\n'
    '<\uff5cDSML\uff5c parameter name="b" string="true">x"y</\uff5cDSML\uff5c parameter>\n'
    "</\uff5cDSML\uff5c invoke>\n"
)
CALLS = (
    "I add.\n\n<\uff5cDSML\uff5c calls>\n"
    + CALL.format(a=1)
    + CALL.format(a=2)
    + "</\uff5cDSML\uff5c calls>"
)
USER: Any = {"role": "user", "content": "add 1"}
BODY: Any = {"model": "tiny", "messages": [USER], "max_tokens": 600}
GREEDY = "sampling.temperature=0"
"""The client has no field for it."""
KEY = "k" * 20


@pytest.fixture(scope="module")
def server(serve_shared: Any, make_runner: Callable[..., Any], tokenizer: Tokenizer) -> Any:
    return serve_shared(
        lambda: LLM.from_runner(make_runner(max_model_len=4000, drafts="mixed"), tokenizer),
        "scheduler.max_model_len=4000",
        "server.max_body_bytes=64KiB",
        GREEDY,
    )


def test_a_message_is_answered_whole_and_in_pieces(
    server: Any, tokenizer: Tokenizer, toy: Any
) -> None:
    client = server.anthropic()
    fields: Any = {
        **BODY, "max_tokens": 9, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
    }  # fmt: skip
    chat = {"messages": [{"role": "system", "content": "be kind"}, USER]}
    prompt = server.post("/tokenize", chat).json()["tokens"]
    want = tokenizer.decode(toy.generate(prompt, 9)).lstrip("\n")
    found = client.messages.create(**fields)
    (block,) = found.content
    assert block.type == "text" and block.text == want
    assert found.role == "assistant" and found.model == "tiny" and found.id.startswith("msg_")
    assert found.stop_reason == "max_tokens" and found.stop_sequence is None
    assert found.usage.input_tokens == len(prompt) and found.usage.output_tokens == 9
    assert found.usage.cache_read_input_tokens == 0
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == want
        final = stream.get_final_message()
    assert final.content[0].text == want and final.usage == found.usage
    assert final.stop_reason == "max_tokens"
    events = list(client.messages.create(**fields, stream=True))
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    counted = client.messages.count_tokens(
        model="tiny", messages=fields["messages"], system=fields["system"]
    )
    assert counted.input_tokens == len(prompt)
    raw = server.post("/v1/messages", {**fields, "stream": True})
    assert raw.text.startswith("event: message_start\ndata: {") and "[DONE]" not in raw.text
    assert raw.headers["request-id"] == raw.headers["x-request-id"]


def test_tool_calls_and_their_results(answering: Any, spell: Any) -> None:
    body = {**BODY, "tools": TOOLS}
    server = answering(read_message, body, CALLS, GREEDY)
    client = server.anthropic()
    found = client.messages.create(**body)
    assert [block.type for block in found.content] == ["text", "tool_use", "tool_use"]
    assert found.content[0].text == "I add." and found.stop_reason == "tool_use"
    calls = found.content[1:]
    assert [(call.name, call.input) for call in calls] == [
        ("add", {"a": 1, "b": 'x"y'}),
        ("add", {"a": 2, "b": 'x"y'}),
    ]
    assert len({call.id for call in calls}) == 2
    assert found.usage.output_tokens == len(spell(CALLS))
    with client.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert [call.input for call in final.content[1:]] == [call.input for call in calls]
    assert final.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
        for call in calls
    ]
    turns: Any = [
        USER,
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": results},
    ]
    again = client.messages.create(**{**body, "messages": turns, "max_tokens": 3})
    assert again.usage.input_tokens > found.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**{**body, "messages": [*turns[:2], USER]})


def test_thinking_is_a_block_with_a_count(answering: Any, spell: Any) -> None:
    body: Any = {**BODY, "thinking": {"type": "enabled", "budget_tokens": 600}}
    server = answering(read_message, body, "Hm, yes.</think>It is 2.", GREEDY)
    client = server.anthropic()
    found = client.messages.create(**body)
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found.content[0].thinking == "Hm, yes." and found.content[1].text == "It is 2."
    assert found.stop_reason == "end_turn"
    num_thinking = len(spell("Hm, yes.</think>")) - 1
    assert found.usage.output_tokens_details.thinking_tokens == num_thinking
    assert found.usage.output_tokens == len(spell("Hm, yes.</think>It is 2."))
    with client.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == "Hm, yes." and final.usage == found.usage
    assert final.content[0].signature
    # Longer than the script, which the model would go on with.
    last = {"role": "user", "content": "?" * 200}
    turns: Any = [USER, {"role": "assistant", "content": found.content}, last]
    adaptive: Any = {"type": "adaptive"}
    again = client.messages.create(
        **{**body, "messages": turns, "max_tokens": 3, "thinking": adaptive}
    )
    assert again.stop_reason == "max_tokens"
    assert again.usage.output_tokens_details.thinking_tokens == 3
    prompts = [
        server.post("/tokenize", {"messages": [USER], "reasoning_effort": effort}).json()["count"]
        for effort in ("low", "max")
    ]
    for effort, want in zip(("low", "max"), prompts, strict=True):
        counted = client.messages.count_tokens(
            model="tiny", messages=[USER], thinking=adaptive, output_config={"effort": effort}
        )
        assert counted.input_tokens == want


def test_a_budget_bounds_the_thinking(server: Any) -> None:
    """The toy would think for ever; the grammar ends it, and the answer follows."""
    client = server.anthropic()
    body: Any = {**BODY, "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 20}}
    found = client.messages.create(**body)
    # The end of the reasoning is a token of it.
    assert found.usage.output_tokens_details.thinking_tokens == 20 + 1
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found.usage.output_tokens == 60 and found.stop_reason == "max_tokens"


def test_a_stop_sequence_is_named(server: Any, tokenizer: Tokenizer, toy: Any) -> None:
    client = server.anthropic()
    prompt = server.post("/tokenize", {"messages": [USER]}).json()["tokens"]
    text = tokenizer.decode(toy.generate(prompt, 60)).lstrip("\n")
    place = next(i for i in range(5, 50) if "\ufffd" not in text[i : i + 2])
    stop = text[place : place + 2]
    body = {**BODY, "stop_sequences": [stop, "never this"]}
    found = client.messages.create(**body)
    assert found.content[0].text == text[: text.index(stop)]
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    with client.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert final.content[0].text == found.content[0].text


def test_structured_output(server: Any) -> None:
    schema: Any = {"type": "object", "properties": {"x": {"enum": ["p", "q"]}}, "required": ["x"]}
    found = server.anthropic().messages.create(
        **BODY, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    jsonschema.validate(json.loads(found.content[0].text), schema)
    assert found.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_token": 3}, "did you mean max_tokens?"),
        ({"container": "x"}, "container is not supported"),
        ({"service_tier": "priority"}, "got 'priority'; it can only be 'auto' or"),
        ({"messages": []}, "messages must be a list"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "object", "maxProperties": 2**70}}]},
            "integer is outside the JSON number range",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "Sure, "}]}, "must end with"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role must be one of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "is_error": 0}]}]},
            "is_error must be true or false",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].type"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]},
                ]
            },
            "messages[0].content[0].x is not supported",
        ),
        ({"system": 5}, "system must be a string or a list"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "it can only be 'custom'"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema must be a JSON schema"),
        ({"tool_choice": {"type": "any"}}, "tools are not given"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "the tool 'x'"),
        ({"tools": TOOLS, "tool_choice": "any"}, "one of the types"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens must be"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"effort": "low"}}, "thinking is not asked for"),
        ({"stop_sequences": "a"}, "stop_sequences must be a list"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, "cache_control.ttl"),
        ({"max_tokens": 4000}, "4000"),
    ],
)
def test_refusals_name_the_field(server: Any, fields: Any, words: str) -> None:
    answer = server.post("/v1/messages", {**BODY, **fields})
    body = answer.json()
    assert answer.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and words in body["error"]["message"]
    assert body["request_id"] == answer.headers["request-id"]


def test_errors_are_those_of_the_client(server: Any) -> None:
    client = server.anthropic()
    with pytest.raises(anthropic.NotFoundError, match="gpt"):
        client.messages.create(**{**BODY, "model": "gpt"})
    with pytest.raises(anthropic.BadRequestError, match="4000 tokens"):
        client.messages.create(**{**BODY, "messages": [{"role": "user", "content": "a" * 5000}]})
    with pytest.raises(anthropic.APIStatusError) as large:
        client.messages.create(**{**BODY, "messages": [{"role": "user", "content": "a" * 70000}]})
    assert large.value.status_code == 413 and large.value.type == "request_too_large"
    assert server.get("/v1/messages")[0] == 405


def test_keys_and_a_full_server(start: Any, tmp_path: Any, hold: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    server, _, runner = start(
        f"server.api_keys_file={keys}", "server.max_queued_requests=1", max_num_reqs=1
    )
    gate = hold(runner, "launch")
    with pytest.raises(anthropic.AuthenticationError) as refusal:
        server.anthropic().messages.create(**{**BODY, "max_tokens": 4})
    assert refusal.value.body["error"]["type"] == "authentication_error"
    head = f"x-api-key: {KEY}\r\n".encode()
    data = json.dumps({**BODY, "max_tokens": 4}).encode()
    request = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n" + head
    request += f"Content-Length: {len(data)}\r\n\r\n".encode() + data
    open_ = [server.connect(request) for _ in range(2)]
    server.wait_until(lambda: len(server.state.queue.open_ids) == 2)
    for client in (server.anthropic(api_key=KEY), server.anthropic(api_key=None, auth_token=KEY)):
        with pytest.raises(anthropic.RateLimitError) as full:
            client.messages.create(**{**BODY, "max_tokens": 4})
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.body["error"]["type"] == "rate_limit_error"
    openai_fields: Any = {"model": "tiny", "input": "a", "max_output_tokens": 4}
    with pytest.raises(openai.AuthenticationError):
        server.client().responses.create(**openai_fields)
    with pytest.raises(openai.RateLimitError) as openai_full:
        server.client(api_key=KEY).responses.create(**openai_fields)
    assert openai_full.value.code == "rate_limit_exceeded"
    gate.open()
    for connection in open_:
        assert json.loads(server.read_answer(connection))["usage"]["output_tokens"] == 4


def test_a_stream_that_fails_says_so(start: Any, hold: Any) -> None:
    server, _, runner = start("server.request_timeout_s=0.5")
    gate = hold(runner, "launch", permits=1)
    with pytest.raises(anthropic.APIStatusError, match=r"0\.5 s") as error:
        list(server.anthropic().messages.create(**{**BODY, "max_tokens": 300}, stream=True))
    assert error.value.body["error"]["type"] == "timeout_error"
    gate.open()


def test_every_field_is_known_or_refused(tokenizer: Tokenizer) -> None:
    from anthropic.types import message_count_tokens_params, message_create_params

    from decodegrid.configs.load import load_config
    from decodegrid.engine.body_fields import BodyError

    assert len(set(FIELDS)) == len(FIELDS) and {*COUNT_FIELDS, *INERT} <= {*FIELDS}
    known = message_create_params.MessageCreateParamsBase.__annotations__.keys()
    counted = message_count_tokens_params.MessageCountTokensParams.__annotations__.keys()
    sampling = load_config(None).config.sampling
    for name in sorted({*known, *counted} - {*FIELDS}):
        with pytest.raises(BodyError, match=f"{name} is not supported") as refusal:
            read_message({"messages": [USER], name: "x"}, "tiny", tokenizer, sampling)
        assert refusal.value.param == name
