"""Where a request ends inside a step that emits several tokens (C2, C3, C4, C17)."""

from collections.abc import Callable
from typing import Any

import pytest

from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

PROMPT = [20, 21, 22]
STOP = 50


@pytest.fixture
def make_llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    return lambda **options: LLM.from_runner(make_runner(**options), tokenizer)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **options)


@pytest.mark.parametrize(
    ("script", "max_tokens", "reason", "count"),
    [
        # The first token comes from the fresh step; the accepted block follows it.
        ([30, 31, 32, STOP, 33, 34, 35], 6, "stop", 4),
        ([30, 31, 32, 33, 34, 35, STOP], 6, "length", 6),
        ([30, 31, 32, STOP, 33, 34, 35], 4, "stop", 4),
        ([30, 31, 32, STOP, 33, 34, 35], 3, "length", 3),
        ([STOP, 31, 32], 5, "stop", 1),
        ([30, STOP, STOP, 31], 5, "stop", 2),
    ],
)
def test_first_of_stop_and_length(
    make_llm: Callable[..., LLM],
    scripted: Any,
    script: list[int],
    max_tokens: int,
    reason: str,
    count: int,
) -> None:
    llm = make_llm(model=scripted(len(PROMPT), script))
    params = greedy(max_tokens=max_tokens, stop_token_ids=[STOP])
    (output,) = llm.generate([PROMPT], params)
    completion = output.outputs[0]
    assert completion.token_ids == tuple(script[:count])
    assert completion.finish_reason == reason
    assert llm.stats.num_emitted == count
    blocks = llm.scheduler.blocks
    assert blocks.num_free == blocks.num_usable


def test_eos_in_an_accepted_block_ends_as_it_does_without_drafts(
    make_llm: Callable[..., LLM], scripted: Any
) -> None:
    """C3: the third token is declared the end of text."""
    script = [30, 31, 1, 33, 34, 35]
    model = scripted(len(PROMPT), script)
    results = [
        make_llm(model=model, drafts=drafts, num_draft_tokens=k).generate([PROMPT], greedy())[0]
        for drafts, k in ((99, 5), (0, 5), (0, 0))
    ]
    assert [r.outputs[0].token_ids for r in results] == [(30, 31, 1)] * 3
    assert [r.outputs[0].finish_reason for r in results] == ["stop"] * 3
    assert results[0].num_accepted > 0
    (free,) = make_llm(model=model).generate([PROMPT], greedy(ignore_eos=True, max_tokens=6))
    assert free.outputs[0].token_ids == tuple(script)
    assert free.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 12, 13])
def test_exactly_max_tokens(make_llm: Callable[..., LLM], toy: Any, max_tokens: int) -> None:
    """C4: every draft is right, so steps would emit 1, 6, 6, ..."""
    llm = make_llm()
    (output,) = llm.generate([PROMPT], greedy(max_tokens=max_tokens))
    assert output.outputs[0].token_ids == tuple(toy.generate(PROMPT, max_tokens))
    assert output.outputs[0].finish_reason == "length"
    assert llm.stats.num_emitted == max_tokens
    assert llm.stats.num_decode_steps == 1 + -(-(max_tokens - 1) // 6)


@pytest.mark.parametrize("num_prompt", [80, 89, 90, 91, 94, 95])
@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_the_context_limit(
    make_llm: Callable[..., LLM], toy: Any, num_prompt: int, max_tokens: int | None
) -> None:
    """C17: the last token stands at the limit; drafts that would pass it are not verified."""
    prompt = [20 + i for i in range(num_prompt)]
    llm = make_llm(max_model_len=96)
    (output,) = llm.generate([prompt], greedy(max_tokens=max_tokens))
    completion = output.outputs[0]
    assert completion.finish_reason == "length"
    assert num_prompt + len(completion.token_ids) == 96
    assert completion.token_ids == tuple(toy.generate(prompt, 96 - num_prompt))


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 4, 5, "mixed"])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_drafts_never_change_the_tokens(
    make_llm: Callable[..., LLM], toy: Any, drafts: Any, k: int
) -> None:
    llm = make_llm(drafts=drafts, num_draft_tokens=k)
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=33)
    (output,) = llm.generate([PROMPT], params)
    assert output.outputs[0].token_ids == tuple(toy.generate(PROMPT, 33, 0.7, 11))
    if k:
        assert output.num_verified > 0
    if k and drafts != "mixed":
        right = min(drafts, k)
        assert llm.stats.accepted_per_position[right:] == [0] * (k - right)
        assert all(count > 0 for count in llm.stats.accepted_per_position[:right])
