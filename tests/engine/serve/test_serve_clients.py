"""`decodegrid serve` with the embedded model, through the official clients of both companies.

One conversation in three protocols has one answer; what comes in pieces is what comes whole.
"""

import json
from typing import Any

import anthropic
import jsonschema
import openai
import pydantic
import pytest

from decodegrid.configs.load import load_config
from decodegrid.engine.llm import LLM

SYSTEM = "Answer in a few words."
USER: Any = {"role": "user", "content": "What is the capital of France?"}
CHAT: Any = {
    "model": "tiny",
    "messages": [{"role": "system", "content": SYSTEM}, USER],
    "temperature": 0,
    "max_tokens": 24,
}
RESPONSE: Any = {
    "model": "tiny", "instructions": SYSTEM, "input": [USER], "temperature": 0,
    "max_output_tokens": 24,
}  # fmt: skip
MESSAGE: Any = {
    "model": "tiny", "system": SYSTEM, "messages": [USER], "max_tokens": 24,
    "extra_body": {"temperature": 0},
}  # fmt: skip
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL: Any = {"name": "weather", "description": "the weather of a city", "parameters": SCHEMA}


class Place(pydantic.BaseModel):
    city: str
    is_large: bool


@pytest.fixture(scope="module")
def server(serve_shared: Any) -> Any:
    llm = LLM(load_config(None))  # before the server: the first start on a machine compiles
    return serve_shared(lambda: llm, "server.max_body_bytes=64KiB")


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    made: openai.OpenAI = server.client()
    return made


@pytest.fixture(scope="module")
def other(server: Any) -> anthropic.Anthropic:
    made: anthropic.Anthropic = server.anthropic()
    return made


def test_three_protocols_have_one_answer(server: Any, client: Any, other: Any) -> None:
    count = server.post("/tokenize", {"messages": CHAT["messages"]}).json()["count"]
    chat = client.chat.completions.create(**CHAT)
    text = chat.choices[0].message.content
    assert text and chat.usage.prompt_tokens == count
    response = client.responses.create(**RESPONSE)
    message = other.messages.create(**MESSAGE)
    assert response.output_text == message.content[0].text == text
    used = chat.usage.completion_tokens
    assert response.usage.output_tokens == message.usage.output_tokens == used <= 24
    assert response.usage.input_tokens == count
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    ended = (chat.choices[0].finish_reason, response.status, message.stop_reason)
    assert ended in (("stop", "completed", "end_turn"), ("length", "incomplete", "max_tokens"))


def test_a_stream_is_the_whole_in_pieces(client: Any, other: Any) -> None:
    whole = client.chat.completions.create(**CHAT).choices[0].message.content
    with client.chat.completions.stream(**CHAT) as chat:
        assert chat.get_final_completion().choices[0].message.content == whole
    with client.responses.stream(**RESPONSE) as response:
        assert response.get_final_response().output_text == whole
    with other.messages.stream(**MESSAGE) as message:
        assert message.get_final_text() == whole
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_logprobs(client: Any) -> None:
    fields: Any = {**CHAT, "logprobs": True, "top_logprobs": 2}
    found = client.chat.completions.create(**fields)
    items = found.choices[0].logprobs.content
    assert len(items) == found.usage.completion_tokens
    for item in items:
        # Greedy, of a model whose probabilities are what they are: the first is the best.
        assert item.logprob == max(top.logprob for top in item.top_logprobs) <= 0
    chunks = client.chat.completions.create(**fields, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    streamed = [item for part in parts if part for item in part.content]
    assert [item.token for item in streamed] == [item.token for item in items]
    want = [item.logprob for item in items]
    assert [item.logprob for item in streamed] == pytest.approx(want, abs=1e-4)


def test_calls_and_their_results(client: Any, other: Any) -> None:
    """A call that must come, its result, and the turn after it, in each protocol."""
    tool: Any = {"type": "function", "function": TOOL}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    chat: Any = {**CHAT, "tools": [tool], "max_tokens": 300}
    found = client.chat.completions.create(**chat, tool_choice=named).choices[0]
    (call,) = found.message.tool_calls
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMA)
    assert found.finish_reason == "tool_calls"
    turns = [*CHAT["messages"], found.message, {"role": "tool", "tool_call_id": call.id,
             "content": "sunny"}]  # fmt: skip
    after = client.chat.completions.create(**{**chat, "messages": turns, "max_tokens": 8})
    assert after.usage.completion_tokens <= 8

    response: Any = {**RESPONSE, "max_output_tokens": 300}
    response["tools"] = [{"type": "function", **TOOL}]
    one = client.responses.create(**response, tool_choice="required", parallel_tool_calls=False)
    (item,) = one.output
    assert item.type == "function_call" and json.loads(item.arguments) == arguments
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    items = [USER, item, result]
    again = client.responses.create(**{**response, "input": items, "max_output_tokens": 8})
    assert again.usage.input_tokens == after.usage.prompt_tokens

    blocks: Any = [{"name": "weather", "description": TOOL["description"], "input_schema": SCHEMA}]
    message: Any = {**MESSAGE, "tools": blocks, "max_tokens": 300}
    use = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with other.messages.stream(**message, tool_choice=use) as stream:
        made = stream.get_final_message()
    (block,) = made.content
    assert made.stop_reason == "tool_use" and block.name == "weather"
    jsonschema.validate(block.input, SCHEMA)
    reply = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    turns = [
        USER,
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": [reply]},
    ]
    last = other.messages.create(**{**message, "messages": turns, "max_tokens": 8})
    assert last.usage.output_tokens <= 8


def test_structured_output(client: Any, other: Any) -> None:
    chat = client.chat.completions.parse(**{**CHAT, "max_tokens": 300}, response_format=Place)
    assert isinstance(chat.choices[0].message.parsed, Place)
    response = client.responses.parse(**{**RESPONSE, "max_output_tokens": 300}, text_format=Place)
    assert isinstance(response.output_parsed, Place)
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = other.messages.create(**{**MESSAGE, "max_tokens": 300}, output_config=form)
    jsonschema.validate(json.loads(message.content[0].text), SCHEMA)


def test_reasoning(client: Any, other: Any) -> None:
    chat = client.chat.completions.create(**CHAT, reasoning_effort="low")
    reasoning = chat.choices[0].message.reasoning_content
    num_reasoning = chat.usage.completion_tokens_details.reasoning_tokens
    assert reasoning and 0 < num_reasoning <= chat.usage.completion_tokens
    response = client.responses.create(**RESPONSE, reasoning={"effort": "low"})
    assert response.output[0].content[0].text == reasoning
    assert response.usage.output_tokens_details.reasoning_tokens == num_reasoning
    thinking: Any = {"type": "enabled", "budget_tokens": 24}
    effort: Any = {"effort": "low"}
    message = other.messages.create(**MESSAGE, thinking=thinking, output_config=effort)
    assert message.content[0].thinking == reasoning
    assert message.usage.output_tokens_details.thinking_tokens == num_reasoning
    budget: Any = {"type": "enabled", "budget_tokens": 3}
    short = other.messages.create(**MESSAGE, thinking=budget, output_config=effort)
    assert short.usage.output_tokens_details.thinking_tokens == min(num_reasoning, 3 + 1)


def test_errors(server: Any, client: Any, other: Any) -> None:
    for create, fields in (
        (client.chat.completions.create, CHAT),
        (client.responses.create, RESPONSE),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            create(**fields, extra_body={"temprature": 1})
        assert refusal.value.param == "temprature"
        assert "did you mean temperature?" in str(refusal.value)
        with pytest.raises(openai.NotFoundError):
            create(**{**fields, "model": "gpt"})
    for words, status in (("a " * 4096, 400), ("a " * 40000, 413)):
        messages = [{"role": "user", "content": words}]
        with pytest.raises(openai.APIStatusError) as large:
            client.chat.completions.create(**{**CHAT, "messages": messages})
        assert large.value.status_code == status
        with pytest.raises(anthropic.APIStatusError) as other_large:
            other.messages.create(**{**MESSAGE, "messages": messages})
        assert other_large.value.status_code == status
    assert server.metric("decodegrid_compilations_after_ready_total") == 0
