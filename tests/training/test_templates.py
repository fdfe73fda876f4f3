"""The template generator: determinism, right answers, calls that deepseek-recipe parses back, a
clean split."""

import ast
import json
import operator
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from training.conversation import Call, Conversation
from training.data import Document, build_templated_documents, is_heldout, split_key, write_stream
from training.render import render_full, render_prompt
from training.requests import parse_calls
from training.stories import read_stories
from training.templates import PAIR_DOMAINS, generate
from training.vocabulary import Vocabulary


def answers_with_calls(conversation: Conversation) -> list[tuple[str, tuple[Call, ...]]]:
    """(answer text in DSML, calls) of each calling turn: the document minus its prompt."""
    found = []
    for index, turn in enumerate(conversation.turns):
        if turn.calls:
            prompt = render_prompt(conversation.turns[:index], conversation.tools)
            full = render_full(conversation.turns[: index + 1], conversation.tools, complete=False)
            assert full.startswith(prompt)
            found.append((full[len(prompt) :], turn.calls))
    return found


def pairs_of(domain: str, count: int) -> list[tuple[str, str]]:
    conversations = [c for c in generate(4, 2500) if c.domain == domain][:count]
    assert len(conversations) == count
    return [(c.turns[-2].content, c.turns[-1].content) for c in conversations]


def test_deterministic_prefix() -> None:
    long, short = generate(1, 60), generate(1, 20)
    assert long[:20] == short
    assert generate(1, 60) == long
    assert generate(2, 60) != long


def test_negative_count() -> None:
    with pytest.raises(ValueError, match="-1"):
        generate(1, -1)


def test_all_domains_and_many_values() -> None:
    conversations = generate(3, 2000)
    domains = Counter(c.domain for c in conversations)
    assert set(domains) == {name for name, _, _ in PAIR_DOMAINS} | {"tools", "mixed"}
    assert min(domains.values()) >= 20
    documents = {render_full(c.turns, c.tools, c.json_output) for c in conversations}
    assert len(documents) > 0.93 * len(conversations)
    cities = {
        json.loads(call.arguments_json)["city"]
        for c in conversations
        for turn in c.turns
        for call in turn.calls
        if call.name == "get_weather"
    }
    assert len(cities) > 80


def test_tool_calls_parse_back() -> None:
    num_calls, names = 0, set()
    for conversation in (c for c in generate(9, 500) if c.tools):
        for text, calls in answers_with_calls(conversation):
            expected = [(call.name, json.loads(call.arguments_json)) for call in calls]
            assert parse_calls(text) == expected
            num_calls += len(calls)
            names |= {call.name for call in calls}
    assert num_calls > 100
    assert len(names) == 6


def test_calls_fit_their_schema() -> None:
    types = {"string": str, "integer": int, "number": (int, float)}
    for conversation in (c for c in generate(10, 400) if c.tools):
        schemas = {tool.name: json.loads(tool.parameters_json) for tool in conversation.tools}
        for call in (call for turn in conversation.turns for call in turn.calls):
            schema, arguments = schemas[call.name], json.loads(call.arguments_json)
            assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
            for key, value in arguments.items():
                assert isinstance(value, types[schema["properties"][key]["type"]])


def test_arguments_stand_in_the_request() -> None:
    """A call copies: each argument's text is in the user turn before it."""
    for conversation in (c for c in generate(11, 400) if c.tools):
        for before, turn in zip(conversation.turns, conversation.turns[1:], strict=False):
            for call in turn.calls:
                for value in json.loads(call.arguments_json).values():
                    assert str(value) in before.content


def test_sums_are_right() -> None:
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    for question, answer in pairs_of("sum", 70):
        match = re.search(r"(\d+) ([-+*]) (\d+)", question)
        assert match is not None
        left, sign, right = match.groups()
        value = signs[sign](int(left), int(right))
        assert answer in (str(value), f"{left} {sign} {right} = {value}")
        assert value >= 0


def test_json_answers_hold_the_facts() -> None:
    for question, answer in pairs_of("json", 100):
        record = json.loads(answer)
        for key, value in record.items():
            text = {True: "open", False: "closed"}[value] if key == "open" else str(value)
            assert text in question


def test_list_answers() -> None:
    arrays = 0
    for question, answer in pairs_of("list", 150):
        items = question.split(": ", 1)[1].split(", ")
        if answer.startswith("["):
            arrays += 1
            found = [str(item) for item in json.loads(answer)]
            assert found == (items[::-1] if question.startswith("Reverse") else items)
        else:
            assert answer in (items[0], items[-1], str(len(items)))
    assert arrays > 50


def test_python_answers_run() -> None:
    for question, answer in pairs_of("python", 100):
        body = answer.removeprefix("```python\n").removesuffix("\n```")
        function = ast.parse(body).body[0]
        assert isinstance(function, ast.FunctionDef)
        named = re.search(r"Call it (\w+)\.|function (\w+) that", question)
        if named and (given := named.group(1) or named.group(2)):
            assert function.name == given


def test_lookups_are_right() -> None:
    for question, answer in pairs_of("lookup", 100):
        lines = re.findall(r'"?(\w+)"?(?: = |: )"?([\w-]+)', question)
        key = re.search(r"(?:What is|Value of|Look up|[ \n])\s?(\w+)[?.]$", question)
        assert key is not None
        assert dict(lines)[key.group(1)] == answer


def test_split_is_stable_and_disjoint() -> None:
    sides: dict[bool, set[str]] = {False: set(), True: set()}
    for conversation in generate(12, 3000):
        sides[is_heldout(split_key(conversation))].add(split_key(conversation))
    assert not sides[False] & sides[True]
    assert 0.02 < len(sides[True]) / (len(sides[True]) + len(sides[False])) < 0.08
    assert [is_heldout(text) for text in ("a", "b", "c", "hi")] == [False] * 4
    prompts = {story.prompt for story in read_stories()}
    heldout = {prompt for prompt in prompts if is_heldout(prompt)}
    assert 0.03 < len(heldout) / len(prompts) < 0.07


def test_templated_documents_reach_the_budget() -> None:
    documents = list(build_templated_documents(Vocabulary.from_file(), 20_000))
    total = sum(len(d.ids) for d in documents)
    assert total - len(documents[-1].ids) < 20_000 <= total
    assert all(d.ids[0] == 0 and d.ids[-1] == 1 and 0 not in d.ids[1:] for d in documents)


def test_stream_packs_documents_end_to_end(tmp_path: Path) -> None:
    documents = [
        Document("a", (0, 5, 1), (False, True, True), 3, False),
        Document("b", (0, 2047), (False, True), 2, False),
    ]
    assert write_stream(tmp_path, "train", documents) == 5
    ids = np.load(tmp_path / "train.npy")
    assert ids.dtype == np.uint16 and ids.tolist() == [0, 5, 1, 0, 2047]
    assert np.load(tmp_path / "train_answers.npy").tolist() == [False, True, True, False, True]
