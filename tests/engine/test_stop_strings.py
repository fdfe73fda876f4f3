"""Stop strings and several completions, against plain search in the text of one token at a time."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.stop_strings import StopStrings
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify

PROMPT = [20, 30, 40]
DRAFTS = (0, 99, "mixed", "random")


def plain_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop string that ends first, the longest of those that end together."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, negative, stop = min(ends)
    return text[: end if include else end + negative], stop


@pytest.mark.parametrize("include", [False, True])
def test_any_cut_into_pieces_finds_what_plain_search_finds(include: bool) -> None:
    rng = random.Random(5)
    found = 0
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randrange(25)))
        count = rng.choice((1, 3))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(count)]
        search = StopStrings(stops, include=include)
        given, left = "", text
        want, matched = plain_cut(text, stops, include)
        while left:
            size = rng.randrange(1, 4)
            given += search.push(left[:size])
            left = left[size:]
            assert want.startswith(given), "text was given that a stop string may take back"
        given += search.flush()
        assert (given, search.matched) == (want, matched), (text, stops)
        found += matched is not None
    assert 300 < found < 2900


@pytest.fixture
def make_llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        return LLM.from_runner(make_runner(**options), tokenizer, policy=FixedVerify())

    return make


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_its_request_inside_an_accepted_block(
    make_llm: Callable[..., LLM], toy: Any, drafts: Any, include: bool
) -> None:
    """Whatever the drafts, the tokens are those up to the one that completes the stop string."""
    ids = toy.generate(PROMPT, 24)
    llm = make_llm(drafts=drafts)
    text = llm.tokenizer.decode(ids)
    for place in range(2, 20, 3):
        stop = text[place : place + 2]
        want, matched = plain_cut(text, [stop], include)
        params = SamplingParams(
            temperature=0, max_tokens=24, stop=[stop], include_stop_str_in_output=include
        )
        (output,) = llm.generate([PROMPT], params)
        (also,) = llm.generate([PROMPT, [50, 60]], [params, SamplingParams(max_tokens=30)])[:1]
        completion = output.outputs[0]
        assert completion == also.outputs[0]
        assert completion.text == want
        assert completion.finish_reason == "stop" and completion.stop_reason == matched == stop
        assert list(completion.token_ids) == ids[: len(completion.token_ids)]
        pieces = list(llm.stream([PROMPT], params))
        assert "".join(piece.text for piece in pieces) == want
    assert not llm.scheduler.has_unfinished


@pytest.mark.parametrize("drafts", DRAFTS)
def test_several_completions_differ_and_the_first_is_that_of_one(
    make_llm: Callable[..., LLM], drafts: Any
) -> None:
    llm = make_llm(drafts=drafts)
    one = SamplingParams(temperature=0.8, max_tokens=12, seed=11)
    three = SamplingParams(temperature=0.8, max_tokens=12, seed=11, n=3)
    (single,) = llm.generate([PROMPT], one)
    (several,) = llm.generate([PROMPT], three)
    (again,) = llm.generate([PROMPT], three)
    assert [completion.index for completion in several.outputs] == [0, 1, 2]
    assert several.outputs[0].token_ids == single.outputs[0].token_ids
    assert len({completion.token_ids for completion in several.outputs}) == 3
    assert several.outputs == again.outputs
    assert all(len(completion.token_ids) == 12 for completion in several.outputs)
