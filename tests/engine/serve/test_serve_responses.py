"""`decodegrid serve`: OpenAI's responses API through the official client."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from decodegrid.engine.llm import LLM
from decodegrid.engine.responses_body import FIELDS, INERT, STATE_FIELDS, read_response
from decodegrid.engine.tokenizer import Tokenizer

PARAMETERS: Any = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "string"}},
}
TOOLS: Any = [
    {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS},
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
BODY: Any = {"model": "tiny", "input": "add 1", "temperature": 0, "max_output_tokens": 600}


@pytest.fixture(scope="module")
def server(serve_shared: Any, make_runner: Callable[..., Any], tokenizer: Tokenizer) -> Any:
    return serve_shared(
        lambda: LLM.from_runner(make_runner(max_model_len=4000, drafts="mixed"), tokenizer),
        "scheduler.max_model_len=4000",
        "server.max_body_bytes=64KiB",
    )


def test_a_response_is_answered_whole_and_in_pieces(
    server: Any, tokenizer: Tokenizer, toy: Any
) -> None:
    client = server.client()
    fields: Any = {
        **BODY, "max_output_tokens": 9, "instructions": "be kind", "metadata": {"k": "v"},
        "user": "u", "store": False,
    }  # fmt: skip
    prompt = server.post(
        "/tokenize",
        {
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "add 1"},
            ]
        },
    ).json()["tokens"]
    want = tokenizer.decode(toy.generate(prompt, 9)).lstrip("\n")
    found = client.responses.create(**fields)
    assert found.output_text == want and found.model == "tiny" and found.object == "response"
    # Nine tokens were asked for, and the toy never ends by itself.
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.input_tokens == len(prompt) and found.usage.output_tokens == 9
    assert found.usage.total_tokens == len(prompt) + 9
    assert found.usage.input_tokens_details.cached_tokens == 0
    assert found.metadata == {"k": "v"} and found.user == "u" and found.store is False
    assert found.instructions == "be kind" and found.max_output_tokens == 9
    assert found.id.startswith("resp_") and abs(found.created_at - found.created_at // 1) == 0
    events = list(client.responses.create(**fields, stream=True))
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == want == events[-1].response.output_text
    assert events[-1].response.usage == found.usage
    assert events[-1].response.metadata == {"k": "v"}
    raw = server.post("/v1/responses", {**fields, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.startswith("event: response.created\ndata: {") and "[DONE]" not in raw.text


def test_the_answer_names_the_penalties_that_were_taken(server: Any) -> None:
    client = server.client()
    plain = client.responses.create(**{**BODY, "max_output_tokens": 2})
    assert plain.presence_penalty == 0 == plain.frequency_penalty
    body: Any = {**BODY, "max_output_tokens": 2}
    body["extra_body"] = {"presence_penalty": 1.5, "frequency_penalty": -0.5}
    found = client.responses.create(**body)
    assert (found.presence_penalty, found.frequency_penalty) == (1.5, -0.5)
    last = list(client.responses.create(**body, stream=True))[-1].response
    assert (last.presence_penalty, last.frequency_penalty) == (1.5, -0.5)


def test_the_stream_helper_collects_tool_calls(answering: Any, spell: Any) -> None:
    """Two calls in one answer; their results are sent back, and the text before them is kept."""
    body = {**BODY, "tools": TOOLS}
    server = answering(read_response, body, CALLS)
    client = server.client()
    found = client.responses.create(**body)
    assert found.status == "completed"
    kinds = [item.type for item in found.output]
    assert kinds == ["message", "function_call", "function_call"]
    assert found.output_text == "I add."
    calls = found.output[1:]
    assert [call.name for call in calls] == ["add", "add"]
    assert [json.loads(call.arguments) for call in calls] == [
        {"a": 1, "b": 'x"y'},
        {"a": 2, "b": 'x"y'},
    ]
    assert found.usage.output_tokens == len(spell(CALLS))
    with client.responses.stream(**body) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == kinds and final.output_text == "I add."
    assert [call.arguments for call in final.output[1:]] == [call.arguments for call in calls]
    assert "response.function_call_arguments.delta" in {event.type for event in events}
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls
    ]
    turns = [{"role": "user", "content": "add 1"}, *found.output, *results]
    again = client.responses.create(**{**body, "input": turns, "max_output_tokens": 3})
    assert again.usage.input_tokens > found.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(**{**body, "input": [*turns[:3], turns[0]]})
    assert refusal.value.param == "input"


def test_reasoning_is_an_item_with_a_count(answering: Any, spell: Any) -> None:
    body = {**BODY, "reasoning": {"effort": "low"}}
    server = answering(read_response, body, "Hm, yes.</think>It is 2.")
    client = server.client()
    found = client.responses.create(**body)
    assert [item.type for item in found.output] == ["reasoning", "message"]
    assert found.output_text == "It is 2." and "Hm, yes." in str(found.output[0])
    num_reasoning = len(spell("Hm, yes.</think>")) - 1
    assert found.usage.output_tokens_details.reasoning_tokens == num_reasoning
    assert found.usage.output_tokens == len(spell("Hm, yes.</think>It is 2."))
    with client.responses.stream(**body) as stream:
        final = stream.until_done().get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.usage == found.usage
    turns = [
        {"role": "user", "content": "add 1"},
        *found.output,
        {"role": "user", "content": "?" * 200},
    ]
    again = client.responses.create(**{**body, "input": turns, "max_output_tokens": 3})
    assert again.usage.output_tokens_details.reasoning_tokens == 3


class Answer(pydantic.BaseModel):
    ok: bool
    kind: int


def test_structured_output_is_parsed(server: Any) -> None:
    client = server.client()
    found = client.responses.parse(**BODY, text_format=Answer)
    assert isinstance(found.output_parsed, Answer) and found.status == "completed"
    schema: Any = {"type": "object", "properties": {"x": {"enum": ["p", "q"]}}, "required": ["x"]}
    form: Any = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    found = client.responses.create(**BODY, text=form)
    jsonschema.validate(json.loads(found.output_text), schema)
    with client.responses.stream(**BODY, text=form) as stream:
        assert stream.get_final_response().output_text == found.output_text
    parsed = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        temperature=0,
        max_tokens=600,
        response_format=Answer,
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def test_a_form_begins_behind_the_reasoning(answering: Any) -> None:
    """The model would go on with words; they become the form, in two protocols."""
    schema: Any = {"type": "object", "properties": {"x": {"enum": ["p", "q"]}}, "required": ["x"]}
    form = {"type": "json_schema", "name": "s", "schema": schema}
    body = {**BODY, "reasoning": {"effort": "low"}, "text": {"format": form}}
    server = answering(read_response, body, "Hm, yes.</think>It is p.")
    client = server.client()
    found = client.responses.create(**body)
    assert [item.type for item in found.output] == ["reasoning", "message"]
    assert found.output[0].content[0].text == "Hm, yes." and found.status == "completed"
    jsonschema.validate(json.loads(found.output_text), schema)
    chat: Any = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "add 1"}],
        temperature=0,
        max_tokens=600,
        reasoning_effort="low",
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    )
    message = chat.choices[0].message
    assert message.reasoning_content == "Hm, yes." and message.content == found.output_text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_token": 3}, "max_token", "did you mean"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is kept"),
        ({"conversation": "c"}, "conversation", "nothing is kept"),
        ({"store": True}, "store", "nothing is kept"),
        ({"background": True}, "background", "got True; it can only be False"),
        ({"truncation": "auto"}, "truncation", "auto"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs", "got 2; it can only be 0"),
        ({"max_tool_calls": 1}, "max_tool_calls", "not supported"),
        ({"input": []}, "input", "not empty"),
        ({"input": ""}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"input": [{"role": "assistant", "content": "a"}]}, "input", "must end with"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "input_image"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading", "supported"),
        ({"tool_choice": "required"}, "tool_choice", "tools are not given"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "huge"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "low"),
        ({"text": {"format": {"type": "x"}}}, "text.format", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "schema"),
        ({"text": {"format": {"type": "json_object"}}, "tools": TOOLS}, "text.format", "tools"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream is not"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ],
)
def test_refusals_name_the_field(server: Any, fields: Any, param: str | None, words: str) -> None:
    answer = server.post("/v1/responses", {**BODY, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param or param is None


def test_errors_are_those_of_the_client(server: Any, hold: Any) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt", input="a")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(**{**BODY, "max_output_tokens": 4000})
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.param == "max_output_tokens" and "4000" in str(refusal.value)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(**{**BODY, "input": "a" * 5000})
    assert refusal.value.code == "context_length_exceeded" and refusal.value.param == "input"
    with pytest.raises(openai.APIStatusError) as large:
        client.responses.create(**{**BODY, "input": "a" * 70000})
    assert large.value.status_code == 413


def test_a_stream_that_fails_says_so(start: Any, hold: Any) -> None:
    """Events of its own, which the client turns into its error."""
    server, _, runner = start("server.request_timeout_s=0.5", max_model_len=400)
    gate = hold(runner, "launch", permits=1)
    fields: Any = {**BODY, "max_output_tokens": 300, "stream": True}
    with pytest.raises(openai.APIError, match=r"0\.5 s"):
        list(server.client().responses.create(**fields))
    gate.open()


def test_every_field_is_known_or_refused(tokenizer: Tokenizer) -> None:
    """The table, and the fields that the client's types have."""
    from openai.types.responses import response_create_params as params

    from decodegrid.configs.load import load_config
    from decodegrid.engine.body_fields import BodyError

    assert len(set(FIELDS)) == len(FIELDS) and {*INERT, *STATE_FIELDS} < {*FIELDS}
    known = params.ResponseCreateParamsBase.__annotations__.keys() | {"stream"}
    sampling = load_config(None).config.sampling
    for name in sorted(known - {*FIELDS}):
        with pytest.raises(BodyError, match=f"{name} is not supported") as refusal:
            read_response({"input": "a", name: "x"}, "tiny", tokenizer, sampling)
        assert refusal.value.param == name
