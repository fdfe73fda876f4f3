"""The counters, checked on steps whose outcome is known, and the closing report."""

from collections.abc import Callable
from typing import Any

from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify


def test_counts_of_two_right_drafts(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> None:
    """11 tokens, drafts right up to 2: 1, then 3 a step; the last step has room for 1."""
    llm = LLM.from_runner(make_runner(drafts=2), tokenizer)
    llm.generate([[20] * 10], SamplingParams(temperature=0, max_tokens=11))
    stats = llm.stats
    assert stats.num_emitted == 11
    assert (stats.num_prefill_steps, stats.num_prefill_tokens) == (2, 9)
    assert (stats.num_decode_steps, stats.num_decode_rows) == (5, 5)
    assert stats.drafted_per_position == [4, 4, 4, 4, 4]
    # Rooms: 10, 7, 4 and 1 tokens after the fresh step.
    assert stats.offered_per_position == [3, 3, 3, 2, 2]
    assert stats.verified_per_position == [3, 3, 3, 2, 2]
    assert stats.accepted_per_position == [3, 3, 0, 0, 0]
    # Position 3 is reached in the two full steps; the last has room for one draft.
    assert stats.reached_per_position == [3, 3, 3, 0, 0]
    assert stats.tokens_per_round == 11 / 5
    # The runner pads 1 row to 1 and q query tokens to 2q; q is 1, 6, 6, 4, 1.
    assert stats.graph_hits == {(1, 2): 2, (1, 12): 2, (1, 8): 1}
    assert stats.pad_row_share == 0 and stats.surplus_token_share == 0.5


def test_fewer_are_verified_than_offered(
    tokenizer: Tokenizer, make_runner: Callable[..., Any]
) -> None:
    llm = LLM.from_runner(make_runner(drafts=5), tokenizer, policy=FixedVerify(3))
    llm.generate([[20], [21], [22]], SamplingParams(temperature=0, max_tokens=4))
    assert llm.stats.drafted_per_position == [9] * 5
    assert llm.stats.offered_per_position[0] == 6
    assert llm.stats.verified_per_position == [0] * 5
    assert llm.stats.pad_row_share == 0.25
    assert "(4,6) x4" in llm.stats.report()


def test_report(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> None:
    runner = make_runner(drafts=2)
    llm = LLM.from_runner(runner, tokenizer)
    assert "emitted tokens: 0 (no time measured" in llm.stats.report()
    llm.generate([[20] * 10], SamplingParams(temperature=0, max_tokens=11))
    lines = llm.stats.report().splitlines()
    assert lines[-1] == "compilations after ready: 0"
    assert "  1: 4 / 3 / 3 / 3 (100.0%; 100.0%)" in lines
    assert "  3: 4 / 3 / 3 / 0 (0.0%; 0.0%)" in lines
    assert "graph hits: (1,2) x2, (1,8) x1, (1,12) x2" in lines
    assert "padding: 0.0% of rows, 50.0% of query tokens" in lines
    runner.num_compilations += 2
    runner.num_captured += 1
    assert llm.stats.report().splitlines()[-1] == "compilations after ready: 2"
    assert llm.stats.num_captured_after_ready == 1


def test_report_without_drafter(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> None:
    llm = LLM.from_runner(make_runner(num_draft_tokens=0), tokenizer)
    llm.generate([[20]], SamplingParams(temperature=0, max_tokens=3))
    assert "drafts: none" in llm.stats.report().splitlines()
    assert llm.stats.tokens_per_round == 1
