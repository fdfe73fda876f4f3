"""`decodegrid serve`: tool calls, reasoning and structured output through the official client."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest

from decodegrid.engine.batch_body import read_body
from decodegrid.engine.llm import LLM
from decodegrid.engine.tokenizer import Tokenizer

MESSAGES: Any = [{"role": "user", "content": "add 1"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "string"}},
            },
        },
    }
]
CALLS = (
    "\n\n<\uff5cDSML\uff5c calls>\n"
    '<\uff5cDSML\uff5c invoke name="add">\n'
    '<\uff5cDSML\uff5c parameter name="a" string="false">1</\uff5cDSML\uff5c parameter>\n'
    '<\uff5cDSML\uff5c parameter name="b" string="true">x"y</\uff5cDSML\uff5c parameter>\n'
    "</\uff5cDSML\uff5c invoke>\n</\uff5cDSML\uff5c calls>"
)
SPECIAL = ("\uff5cDSML\uff5c", "</think>")


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of an answer, its special tokens in one piece, with the end of text."""
    ids: list[int] = []
    while text:
        starts = {text.find(name): name for name in SPECIAL if name in text}
        place = min(starts, default=len(text))
        ids += tokenizer.encode(text[:place])[1:] if place else []
        if starts:
            name = starts[place]
            ids.append(next(i for i in range(10) if tokenizer.spelled_bytes(i).decode() == name))
        text = text[place + len(starts[place]) :] if starts else ""
    return [*ids, tokenizer.eos_token_id]


@pytest.fixture
def scripted_server(
    serve: Any, make_runner: Callable[..., Any], scripted: Any, tokenizer: Tokenizer
) -> Callable[..., Any]:
    """scripted_server(text, **fields): a server whose model answers a chat of the fields so."""

    def start(text: str, sampling: Any, **fields: Any) -> Any:
        ids = read_body("chat", {"messages": MESSAGES, **fields}, tokenizer, sampling).prompt
        model = scripted(len(ids), ids_of(tokenizer, text))
        make = lambda: LLM.from_runner(  # noqa: E731
            make_runner(max_model_len=4096, drafts="mixed", model=model), tokenizer
        )
        return serve(make)

    return start


@pytest.fixture
def sampling() -> Any:
    from decodegrid.configs.sampling_section import SamplingSection

    return SamplingSection(temperature=0.0, max_tokens=600)


def merged_calls(chunks: list[Any]) -> list[tuple[str, str]]:
    """(name, arguments) of the tool calls of a stream."""
    found: list[list[str]] = []
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.index == len(found):
                assert call.id and call.type == "function"
                found.append(["", ""])
            found[call.index][0] += call.function.name or ""
            found[call.index][1] += call.function.arguments or ""
    return [(name, arguments) for name, arguments in found]


def test_tool_calls_come_whole_and_in_pieces(
    scripted_server: Any, sampling: Any, tokenizer: Tokenizer
) -> None:
    answer = "I add." + CALLS
    server = scripted_server(answer, sampling, tools=TOOLS)
    client = server.client()
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    fields["max_tokens"] = 600
    found = client.chat.completions.create(**fields)
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": 'x"y'}
    assert found.usage.completion_tokens == len(ids_of(tokenizer, answer))
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert merged_calls(chunks) == [("add", call.function.arguments)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I add."
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    # The next turn: the call and its result are part of the conversation.
    turns = [
        *MESSAGES,
        choice.message.model_dump(include={"role", "content", "tool_calls"}),
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    ids = server.post("/tokenize", {"messages": turns, "tools": TOOLS}).json()["tokens"]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith("<tool_result>2</tool_result><\uff5cAssistant\uff5c></think>")
    assert 'I add.\n\n<\uff5cDSML\uff5c calls>\n<\uff5cDSML\uff5c invoke name="add">' in text
    # Without tools the same text is no call, and its marks are no text.
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="tiny", messages=[*turns[:2], turns[0]], tools=TOOLS)
    assert refusal.value.param == "messages" and "tool_call_id" in str(refusal.value)


def test_reasoning_has_its_own_field_and_count(
    scripted_server: Any, sampling: Any, tokenizer: Tokenizer
) -> None:
    thinking: Any = {"thinking": {"type": "enabled"}}
    server = scripted_server("Hm, yes.</think>It is 2.", sampling, **thinking)
    client = server.client()
    fields: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 100}
    found = client.chat.completions.create(**fields, extra_body=thinking)
    message = found.choices[0].message
    assert message.content == "It is 2." and message.reasoning_content == "Hm, yes."
    assert found.choices[0].finish_reason == "stop"
    num_reasoning = len(ids_of(tokenizer, "Hm, yes.</think>")) - 1
    assert found.usage.completion_tokens_details.reasoning_tokens == num_reasoning
    stream = client.chat.completions.create(
        **fields, extra_body=thinking, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "It is 2."
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == "Hm, yes."
    assert usage.usage.completion_tokens_details.reasoning_tokens == num_reasoning
    # Ended while the reasoning is open: all tokens are of it.
    cut: Any = {**fields, "max_tokens": 5}
    found = client.chat.completions.create(**cut, extra_body=thinking)
    assert found.usage.completion_tokens_details.reasoning_tokens == 5
    assert found.usage.completion_tokens == 5 and found.choices[0].finish_reason == "length"
    assert found.choices[0].message.content == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "some", "tools": TOOLS}, "tool_choice"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "skip_special_tokens": True}, "skip_special_tokens"),
        ({"tools": TOOLS, "parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages[0].tool_ca"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].conte"),
    ],
)
def test_what_a_chat_may_not_ask(fields: Any, param: str, tokenizer: Tokenizer) -> None:
    from decodegrid.configs.sampling_section import SamplingSection
    from decodegrid.engine.body_fields import BodyError

    with pytest.raises(BodyError) as refusal:
        read_body("chat", {"messages": MESSAGES, **fields}, tokenizer, SamplingSection())
    assert str(refusal.value.param).startswith(param)


def test_structured_output_follows_its_schema(
    serve: Any, make_runner: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    """The toy would emit noise; masks alone make it JSON. Requests without a form run beside."""
    schema: Any = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}},
        "required": ["ok", "kind"],
    }
    server = serve(lambda: LLM.from_runner(make_runner(max_model_len=4096), tokenizer))
    client = server.client()
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    fields: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 2000}
    found = client.chat.completions.create(**fields, response_format=form)
    assert found.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(found.choices[0].message.content), schema)
    chunks = list(client.chat.completions.create(**fields, response_format=form, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == found.choices[0].message.content
    choice: Any = {"structured_outputs": {"choice": ["left", "right"]}}
    found = client.chat.completions.create(**fields, extra_body=choice)
    assert found.choices[0].message.content in ("left", "right")
    bad: Any = {"structured_outputs": {"grammar": 'root ::= "a'}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="grammar"):
            client.chat.completions.create(**fields, extra_body=bad, stream=stream)
