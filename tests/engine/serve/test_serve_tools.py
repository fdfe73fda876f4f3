"""`decodegrid serve`: which tools an answer calls, held by the grammar of the model's own marks.

The toy emits noise: that calls come at all, with these names and arguments, the masks do alone.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jsonschema
import openai
import pytest

from decodegrid.engine.llm import LLM
from decodegrid.engine.server_openai import read_openai
from decodegrid.engine.tokenizer import Tokenizer

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"const": 3}, "minItems": 1, "maxItems": 1},
    },
    "required": ["unit", "days"],
}
OTHER: Any = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
SCHEMAS = {"weather": SCHEMA, "light": OTHER}


def chat_tool(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], **more}}


TOOLS = [chat_tool("weather"), chat_tool("light")]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
BLOCKS: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3000}
NAMED: Any = {"type": "function", "function": {"name": "light"}}


@pytest.fixture(scope="module")
def server(serve_shared: Any, make_runner: Callable[..., Any], tokenizer: Tokenizer) -> Any:
    return serve_shared(
        lambda: LLM.from_runner(
            make_runner(max_model_len=8192, drafts="mixed", block_size=64), tokenizer
        ),
        "scheduler.max_model_len=8192",
    )


def calls_of(found: Any) -> list[tuple[str, Any]]:
    """Names and arguments of a chat's calls, which fit the tools."""
    (choice,) = found.choices
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls
    ]
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
    assert choice.finish_reason == "tool_calls"
    return calls


def test_calls_that_must_come(server: Any) -> None:
    client = server.client()
    fields: Any = {**CHAT, "tools": TOOLS, "seed": 3}
    required = client.chat.completions.create(**fields, tool_choice="required")
    assert calls_of(required) and not required.choices[0].message.content
    (call,) = calls_of(client.chat.completions.create(**fields, tool_choice=NAMED))
    assert call[0] == "light"
    one = client.chat.completions.create(
        **fields, tool_choice="required", parallel_tool_calls=False
    )
    assert len(calls_of(one)) == 1
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [NAMED]},
    }
    some = client.chat.completions.create(**fields, tool_choice=allowed, parallel_tool_calls=False)
    assert [name for name, _ in calls_of(some)] == ["light"]
    stream = client.chat.completions.create(**fields, tool_choice=NAMED, stream=True)
    pieces = [
        delta.function.arguments
        for chunk in stream
        for delta in chunk.choices[0].delta.tool_calls or ()
    ]
    assert json.loads("".join(piece or "" for piece in pieces)) == call[1]
    with client.chat.completions.stream(**fields, tool_choice=NAMED) as helper:
        final = helper.get_final_completion()
    assert calls_of(final) == [call]


def test_reasoning_comes_before_calls_that_must_come(answering: Any, spell: Any) -> None:
    """The model would go on with words; behind its reasoning they become the call."""
    body: Any = {**CHAT, "max_tokens": 1000, "tools": TOOLS, "tool_choice": NAMED}
    body |= {"temperature": 0, "reasoning_effort": "low"}
    server = answering(partial(read_openai, "chat"), body, "Hm, yes.</think>It is on.")
    found = server.client().chat.completions.create(**body)
    message = found.choices[0].message
    assert [name for name, _ in calls_of(found)] == ["light"]
    assert message.reasoning_content == "Hm, yes." and not message.content
    num_reasoning = len(spell("Hm, yes.</think>")) - 1
    assert found.usage.completion_tokens_details.reasoning_tokens == num_reasoning


def test_the_other_protocols_ask_for_calls_too(server: Any) -> None:
    # Greedy: the blanks that a grammar allows are of any number, and drawn ones may not end.
    fields: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 3000, "tools": FLAT}
    fields["temperature"] = 0
    client = server.client()
    for choice in ("required", {"type": "function", "name": "light"}):
        found = client.responses.create(**fields, tool_choice=choice, parallel_tool_calls=False)
        calls = [(item.name, json.loads(item.arguments)) for item in found.output]
        assert calls and found.status == "completed"
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        assert isinstance(choice, str) or [name for name, _ in calls] == ["light"]
    anthropic = server.anthropic()
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3000, "tools": BLOCKS}
    body["extra_body"] = {"temperature": 0}
    for use in ({"type": "any"}, {"type": "tool", "name": "light"}):
        use["disable_parallel_tool_use"] = True
        message = anthropic.messages.create(**body, tool_choice=use)
        assert message.stop_reason == "tool_use"
        (block,) = message.content
        jsonschema.validate(block.input, SCHEMAS[block.name])
        assert use["type"] == "any" or block.name == "light"


STRICT = (
    "\n\n<\uff5cDSML\uff5c calls>\n"
    '<\uff5cDSML\uff5c invoke name="nobody">\n'
    '<\uff5cDSML\uff5c parameter name="x" string="true">y</\uff5cDSML\uff5c parameter>\n'
    "</\uff5cDSML\uff5c invoke>\n</\uff5cDSML\uff5c calls>"
)


@pytest.mark.parametrize(
    ("more", "is_held"),
    [
        ({}, False),
        ({"tools": [chat_tool("weather", strict=True), TOOLS[1]]}, True),
        ({"parallel_tool_calls": False}, True),
    ],
)
def test_a_call_that_may_come_is_held_where_that_is_asked(
    more: Any, is_held: bool, answering: Any
) -> None:
    """The model writes a call of no tool: free, it comes out so; held, it becomes one of a tool."""
    body = {**CHAT, "max_tokens": 1000, "temperature": 0, "tools": TOOLS, **more}
    server = answering(partial(read_openai, "chat"), body, STRICT)
    found = server.client().chat.completions.create(**body)
    names = [call.function.name for call in found.choices[0].message.tool_calls or ()]
    assert (names == ["nobody"]) is not is_held
    assert is_held is (names != [] and {*names} <= {*SCHEMAS})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "tools are not given"),
        ({"tool_choice": "some", "tools": TOOLS}, "tool_choice", "'some'"),
        ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, "tool_choice", "custom"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS},
            "tool_choice",
            "the tools are: weather, light",
        ),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "not given"),
        ({"parallel_tool_calls": 0, "tools": TOOLS}, "parallel_tool_calls", "true or false"),
        (
            {
                "tools": [
                    chat_tool("weather", parameters={"type": "object", "not": {}}, strict=True)
                ]
            },
            "tools[0].function.parameters",
            "not is not supported",
        ),
        (
            {
                "tools": [chat_tool("weather", parameters={"type": "object", "if": {}})],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
            "strict=false",
        ),
        ({"tools": [chat_tool("weather", strict=1)]}, "tools[0].function.strict", "true or"),
        ({"tools": TOOLS, "tool_choise": "auto"}, "tool_choise", "did you mean tool_choice?"),
    ],
)
def test_refusals_name_the_field(server: Any, fields: Any, param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        server.client().post("/chat/completions", body={**CHAT, **fields}, cast_to=object)
    assert refusal.value.param == param and words in str(refusal.value)


def test_a_schema_that_no_grammar_has_is_refused(server: Any) -> None:
    """By the library, before anything is queued; the next request is served."""
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}},
    }
    tools = [chat_tool("weather", parameters=parameters)]
    client = server.client()
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(
                **CHAT, tools=tools, tool_choice="required", stream=stream
            )
        assert refusal.value.param == "tools"
    free = client.chat.completions.create(**{**CHAT, "max_tokens": 2}, tools=tools)
    assert free.usage.completion_tokens == 2
