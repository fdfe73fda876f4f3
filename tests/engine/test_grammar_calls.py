"""The grammar of tool calls: which texts it takes, and that drafts leave no trace in it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from decodegrid.configs.grammar_section import StructuredOutputsSection
from decodegrid.engine.grammar_calls import CallSchema, CallsParams
from decodegrid.engine.grammar_compiler import GrammarCompiler
from decodegrid.engine.grammar_matcher import RequestGrammar, TokenVerdict
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.tool_use import Tool, ToolUse, calls_grammar

SWITCH: Any = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
NAME: Any = {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}
TOOLS = (CallSchema("light", SWITCH), CallSchema("greet", NAME))
D = "\uff5cDSML\uff5c"
OPENING = f"\n\n<{D} calls>\n"
CLOSING = f"</{D} calls>"


def call(tool: str, name: str, value: str, is_text: str = "false") -> str:
    return (
        f'<{D} invoke name="{tool}">\n'
        f'<{D} parameter name="{name}" string="{is_text}">{value}</{D} parameter>\n'
        f"</{D} invoke>\n"
    )


LIGHT, GREET = call("light", "on", "true"), call("greet", "who", "you\t& I\n<3", "true")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Any:
    made = GrammarCompiler(
        tokenizer.token_bytes,
        tokenizer.vocab_size,
        tokenizer.eos_token_id,
        StructuredOutputsSection(),
        tokenizer.mark_bytes,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def verdict(
    compiler: Any, tokenizer: Tokenizer, spell: Callable[[str], list[int]]
) -> Callable[..., TokenVerdict]:
    """verdict(params, text): of the last token of the text that is taken."""

    def run(params: CallsParams, text: str) -> TokenVerdict:
        job = compiler.submit(params.source)
        while not job.is_done:
            compiler.wait(1.0)
        assert job.error is None, job.error
        grammar = RequestGrammar(params, tokenizer.eos_token_id)
        grammar.begin(compiler.matcher(job), compiler.num_words)
        ids = spell(text)[:-1]
        for place, token_id in enumerate(ids):
            # The next five as drafts, right ones and one that is not: the masks must not care.
            drafts = np.array((ids[place : place + 4] + [9] * 5)[:5], dtype=np.int64)
            masks = np.full((6, compiler.num_words), -1, dtype=np.int32)
            grammar.fill(masks, drafts)
            word, bit = divmod(token_id, 32)
            is_allowed = bool(int(masks[0, word]) >> bit & 1)
            found = grammar.advance(token_id)
            assert (found is not TokenVerdict.REFUSED) is is_allowed, (place, text[:place])
            if found is not TokenVerdict.OPEN:
                assert place == len(ids) - 1 or found is TokenVerdict.REFUSED
                return found
        return TokenVerdict.OPEN

    return run


@pytest.mark.parametrize(
    ("fields", "text", "want"),
    [
        ({"mode": "must"}, OPENING + LIGHT + CLOSING, TokenVerdict.COMPLETE),
        ({"mode": "must"}, OPENING + LIGHT + GREET + CLOSING, TokenVerdict.COMPLETE),
        ({"mode": "must"}, "Hello", TokenVerdict.REFUSED),
        ({"mode": "must"}, OPENING + CLOSING, TokenVerdict.REFUSED),
        ({"mode": "must"}, OPENING + call("nobody", "on", "true"), TokenVerdict.REFUSED),
        ({"mode": "must"}, OPENING + call("light", "off", "true"), TokenVerdict.REFUSED),
        ({"mode": "must"}, OPENING + call("light", "on", "5"), TokenVerdict.REFUSED),
        ({"mode": "must", "is_open": True}, LIGHT + CLOSING, TokenVerdict.COMPLETE),
        ({"mode": "must", "is_open": True}, OPENING, TokenVerdict.REFUSED),
        ({"mode": "one"}, OPENING + LIGHT + CLOSING, TokenVerdict.COMPLETE),
        ({"mode": "one"}, OPENING + LIGHT + GREET, TokenVerdict.REFUSED),
        ({"mode": "must", "is_parallel": False}, OPENING + LIGHT + GREET, TokenVerdict.REFUSED),
        ({"mode": "may"}, "Hello <3 " + OPENING + GREET + CLOSING, TokenVerdict.COMPLETE),
        ({"mode": "may"}, "Hello", TokenVerdict.OPEN),
        ({"mode": "may"}, OPENING + call("nobody", "on", "true"), TokenVerdict.REFUSED),
        ({"mode": "may"}, "Hello</think>", TokenVerdict.REFUSED),
        ({"mode": "none", "tools": ()}, "Hello", TokenVerdict.OPEN),
        ({"mode": "none", "tools": ()}, OPENING, TokenVerdict.REFUSED),
    ],
)
def test_what_may_be_written(
    fields: Any, text: str, want: TokenVerdict, verdict: Callable[..., TokenVerdict]
) -> None:
    assert verdict(CallsParams(**{"tools": TOOLS, **fields}), text) is want


def test_reasoning_has_a_bound_in_tokens(
    verdict: Callable[..., TokenVerdict], tokenizer: Tokenizer
) -> None:
    end = tokenizer.thinking_end_id
    fields: Any = {"tools": TOOLS, "mode": "must", "thinking_end_id": end}
    calls = OPENING + LIGHT + CLOSING
    free = CallsParams(**fields)
    assert verdict(free, "Hm, h\u00e9</think>" + calls) is TokenVerdict.COMPLETE
    assert verdict(free, "Hm</think>no") is TokenVerdict.REFUSED
    assert verdict(free, "Hm" + OPENING) is TokenVerdict.REFUSED
    bound = CallsParams(**fields, max_thinking_tokens=3)
    assert verdict(bound, "abc</think>" + calls) is TokenVerdict.COMPLETE
    assert verdict(bound, "abcd") is TokenVerdict.REFUSED


def test_which_calls_are_held_to_what() -> None:
    """The rules of tool_use: the schema of a call that must come, and of a strict tool."""
    tools = [
        Tool("a", SWITCH, None, "tools[0]"),
        Tool("b", SWITCH, True, "tools[1]"),
        Tool("c", SWITCH, False, "tools[2]"),
    ]

    def schemas(use: ToolUse, *names: str) -> Any:
        some = [tool for tool in tools if tool.name in names]
        found = calls_grammar(some, use, thinking_end_id=None, is_open=False)
        return found and [(tool.name, tool.parameters is not None) for tool in found.tools]

    must = ToolUse("must")
    assert schemas(must, "a", "b", "c") == [("a", True), ("b", True), ("c", False)]
    assert schemas(ToolUse("one", ("c",)), "a", "c") == [("c", False)]
    assert schemas(ToolUse(), "a", "c") is None
    assert schemas(ToolUse(), "a", "b", "c") == [("a", False), ("b", True), ("c", False)]
    assert schemas(ToolUse(is_parallel=False), "a") == [("a", False)]
    assert schemas(ToolUse("may", ("a",)), "a", "c") == [("a", False)]
    assert schemas(ToolUse("none"), "a", "b") is None


def test_a_schema_without_a_grammar_is_refused_as_tools(compiler: Any) -> None:
    bad: Any = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}},
    }
    params = CallsParams(tools=(CallSchema("x", bad),), mode="must")
    with pytest.raises(RequestError, match=r"^tools: "):
        compiler.check(params.source)
