"""Requests: their side of the split, and the score of right, partly right and broken answers."""

import json
from itertools import islice

from training.conversation import Call, Turn, user
from training.data import is_heldout
from training.measure_answers import most_a_round, shares
from training.render import render_full, render_prompt
from training.requests import (
    KINDS,
    Request,
    Score,
    chat_requests,
    heldout_requests,
    score,
    story_requests,
)
from training.tool_templates import TOOL_TEMPLATES
from training.vocabulary import Vocabulary


def test_heldout_requests_are_heldout_and_repeat() -> None:
    vocabulary = Vocabulary.from_file()
    found = heldout_requests(vocabulary, 9, 1)
    assert [request.kind for request in found] == list(KINDS) * 3
    assert found == heldout_requests(vocabulary, 9, 1)
    for request in found:
        text = vocabulary.decode(list(request.ids))
        question = text.split("User\uff5c>")[1].split("<\uff5cAssistant")[0]
        assert is_heldout(question)
        values = json.loads(request.expected)
        if request.kind == "call":
            assert all(str(value) in question for value in values[1].values())


def test_other_prompts_end_where_the_assistant_speaks() -> None:
    vocabulary = Vocabulary.from_file()
    heldout = list(islice(story_requests(vocabulary, heldout=True), 5))
    trained = list(islice(story_requests(vocabulary, heldout=False), 5))
    assert not {r.ids for r in heldout} & {r.ids for r in trained}
    ids = vocabulary.ids
    for request in [*heldout, *trained, *chat_requests(vocabulary, 8, 3)]:
        assert request.ids[-2:] == (ids.assistant, ids.thinking_end)


def test_scores() -> None:
    record = Request("object", (), '{"name": "Ada", "age": 7}')
    assert score(record, '{"name": "Ada", "age": 7}') == Score(True, 2, 2)
    assert score(record, '{"name": "Eva", "age": 7}') == Score(True, 1, 2)
    assert score(record, '{"name": "Ada", "age": 7') == Score(False, 0, 2)
    assert score(record, '["Ada"]') == Score(False, 0, 2)
    items = Request("array", (), "[3, 4, 5]")
    assert score(items, "[3, 5, 4, 5]") == Score(True, 1, 3)
    arguments = {"minutes": 5, "label": "tea"}
    call = Request("call", (), json.dumps(["set_timer", arguments]))
    tool = next(t.tool for t in TOOL_TEMPLATES if t.tool.name == "set_timer")

    def dsml(name: str, values: dict[str, object]) -> str:
        turns = (user("x"), Turn("assistant", "", (Call(name, json.dumps(values)),)))
        full = render_full(turns, (tool,), complete=False)
        return full.removeprefix(render_prompt(turns[:1], (tool,)))

    assert score(call, dsml("set_timer", arguments)) == Score(True, 2, 2)
    assert score(call, dsml("set_timer", {"minutes": 5, "label": "pie"})) == Score(True, 1, 2)
    assert score(call, dsml("add_item", arguments)) == Score(False, 0, 2)
    assert score(call, "The timer is set.") == Score(False, 0, 2)


def test_shares() -> None:
    kinds = ["object", "array", "call", "object"]
    scores = [Score(True, 2, 2), Score(True, 1, 3), Score(False, 0, 1), Score(True, 1, 2)]
    parsed, copied = shares(kinds, scores)
    assert parsed == {"all": 0.75, "object": 1.0, "array": 1.0, "call": 0.0}
    assert copied == {"all": 0.5, "object": 0.75, "array": 0.3333, "call": 0.0}


def test_the_last_round_of_an_answer_is_cut_short() -> None:
    assert most_a_round([6, 12, 18], 5) == 6.0
    assert most_a_round([7, 1], 5) == round(8 / 3, 3)
    assert most_a_round([5, 5], 0) == 1.0
