"""The prefix cache with a model behind it, in float64: every output is that of an engine without
the cache, and what it decodes greedily is the uncached forward's own choice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine.admission import build_request
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.window_snapshots import window_slack
from decodegrid.graphs.state import Capacity

BLOCK, DRAFTS = 8, 2
TRUNK = "Once upon a time there was a block,"
PROMPTS = [TRUNK, TRUNK + " two", TRUNK + " and then", TRUNK[:17]]


@pytest.fixture(scope="module")
def make_llm(make_model: Callable[..., Any], tokenizer: Tokenizer) -> Callable[..., LLM]:
    """make_llm(num_snapshots, num_blocks=40, keep_tokens=0): over one model of four layers."""
    model = make_model(
        vocab_size=tokenizer.vocab_size,
        hc_sinkhorn_iters=2,
        num_hidden_layers=4,
        compress_ratios=[0, 2, 1, 1, 0],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2, 3],
        candidate_source_layer_id=2,
        engram_layer_ids=[1],
        engram_num_embeddings=[184],
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=[2, 3],
    )

    def make(num_snapshots: int, num_blocks: int = 40, keep_tokens: int = 0) -> LLM:
        slack = window_slack(BLOCK, DRAFTS) if num_snapshots else 0
        options = RunnerOptions(
            capacity=Capacity(
                4,
                num_blocks,
                BLOCK,
                96,
                DRAFTS,
                window_slack=slack,
                bounded_replay="compact" if keep_tokens else "off",
                keep_tokens=keep_tokens,
            ),
            grid=build_grid(3, DRAFTS, (3,)),
            prefill_chunk_sizes=(8, 16),
            dtype=torch.float64,
            device="cpu",
            compile_options=CompileOptions("none", None, 1),
            draft_temperatures=(1.0, 1.0),
            show_progress=False,
            num_snapshots=num_snapshots,
        )
        llm = LLM.from_runner(make_runner(model, options, PhaseClock()), tokenizer)
        llm.oracle = model  # type: ignore[attr-defined]
        return llm

    return make


def tokens(llm: LLM, prompts: list[str], params: SamplingParams) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in output.outputs] for output in llm.generate(prompts, params)]


def test_hits_and_misses_decode_the_same(make_llm: Callable[..., LLM]) -> None:
    """Twice all prompts, sampled and greedy, several completions; conversations go on."""
    cached, plain = make_llm(8), make_llm(0)
    sampled = SamplingParams(temperature=0.8, seed=5, max_tokens=6, n=2)
    greedy = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)
    for params in (sampled, greedy):
        assert tokens(cached, PROMPTS, params) == tokens(plain, PROMPTS, params)
    assert cached.scheduler.prefix is not None and plain.scheduler.prefix is None
    stats = cached.scheduler.prefix.stats
    assert stats.num_hits > 8 and stats.hit_rate > 0.5
    assert "prefix cache: " in cached.report() and "prefix cache" not in plain.report()
    text = list(cached.tokenizer.encode(TRUNK))
    for turn in range(3):
        before = stats.num_tokens_hit
        output = cached.generate([text], greedy)[0]
        assert output.num_cached_tokens == stats.num_tokens_hit - before
        ids = output.outputs[0].token_ids
        logits = cached.oracle.logits(torch.tensor([*text, *ids]))  # type: ignore[attr-defined]
        assert logits[len(text) - 1 : -1].argmax(-1).tolist() == list(ids)
        if turn:  # all full blocks of the turns before, answers included
            known = len(text) - 2
            assert stats.num_tokens_hit - before == known // BLOCK * BLOCK
        text += [*ids, 40]
    assert plain.generate([text], greedy)[0].num_cached_tokens == 0


def test_preempted_requests_of_a_small_pool(make_llm: Callable[..., LLM]) -> None:
    cached, plain = make_llm(8, 14), make_llm(0, 14)
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=30, ignore_eos=True)
    outputs = cached.generate(PROMPTS[:3], params)
    assert sum(output.num_preemptions for output in outputs) > 0
    want = plain.generate(PROMPTS[:3], params)
    assert [o.outputs for o in outputs] == [o.outputs for o in want]
    assert cached.scheduler.prefix is not None
    assert cached.scheduler.prefix.stats.num_hits > 0
    blocks = cached.scheduler.blocks
    assert blocks.num_free == blocks.num_usable


def test_with_bounded_replay_the_kept_tokens_are_computed(make_llm: Callable[..., LLM]) -> None:
    """A hit ends before them, so that it decodes what a miss does."""
    cached, plain = make_llm(8, keep_tokens=12), make_llm(0, keep_tokens=12)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=6)
    for prompt in (TRUNK, TRUNK + " and then", TRUNK):
        assert tokens(cached, [prompt], params) == tokens(plain, [prompt], params)
    assert cached.scheduler.prefix is not None
    length = len(cached.tokenizer.encode(TRUNK))
    known = (length - 12) // BLOCK * BLOCK
    assert cached.scheduler.prefix.stats.num_tokens_hit >= 2 * known - BLOCK > 0
    limits = replace(cached.limits, has_rich=True)
    with pytest.raises(RequestError, match=r"prompt_logprobs .*bounded_replay .* last 12 tokens"):
        build_request(
            "r", [5], SamplingParams(prompt_logprobs=0), seed=0, eos_token_id=1, limits=limits
        )
