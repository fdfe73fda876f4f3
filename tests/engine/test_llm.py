"""generate, stream and abort; preemption and mixed load change no token and leak nothing."""

import random
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify


def greedy(max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


@pytest.fixture
def make_llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    def make(verify_tokens: int | None = None, **options: Any) -> LLM:
        return LLM.from_runner(make_runner(**options), tokenizer, policy=FixedVerify(verify_tokens))

    return make


def assert_idle(llm: LLM) -> None:
    scheduler = llm.scheduler
    assert not scheduler.has_unfinished and not llm.stream_table.open_ids
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable
    assert scheduler.slots.num_free == scheduler.slots.num_usable
    assert not llm.stream_table.loop.runner.slots  # type: ignore[attr-defined]


def test_generate_keeps_the_order_of_prompts(make_llm: Callable[..., LLM], toy: Any) -> None:
    llm = make_llm(max_num_reqs=3, drafts="mixed")
    prompts = [[20 + i, 30] * (1 + i) for i in range(7)]
    params = [greedy(20 - 2 * i) for i in range(7)]
    outputs = llm.generate(prompts, params)
    for i, output in enumerate(outputs):
        assert output.prompt is None and output.prompt_token_ids == tuple(prompts[i])
        assert output.finished and output.outputs[0].index == 0
        assert output.outputs[0].token_ids == tuple(toy.generate(prompts[i], 20 - 2 * i))
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
        assert output.num_drafted >= output.num_verified >= output.num_accepted > 0
    assert_idle(llm)


def test_text_prompts(make_llm: Callable[..., LLM], toy: Any) -> None:
    llm = make_llm()
    (one,) = llm.generate("hi", greedy())
    also, _ = llm.generate(["hi", "ho"], greedy())
    assert one.prompt == "hi" and one.prompt_token_ids == tuple(llm.tokenizer.encode("hi"))
    assert one.outputs[0].token_ids == tuple(toy.generate(one.prompt_token_ids, 16))
    assert also.outputs == one.outputs
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["fine", ""], "prompt 1: the prompt is empty"),
        ([[20, 21], []], "prompt 1: the prompt is empty"),
        ([[20], [20, 999]], "prompt 1: prompt token id 1 is 999"),
        ([[20], [20] * 96], "prompt 1: the prompt has 96 tokens"),
        ([20, 21], r"prompt 0 must be a text or a list of token ids, got 20; .*\[\[...\]\]"),
        (["fine", "\udc80"], "prompt 1: .*not valid Unicode"),
        (["fine", None], "prompt 1 must be"),
    ],
)
def test_a_bad_prompt_in_a_batch_stops_it_before_anything_runs(
    make_llm: Callable[..., LLM], toy: Any, prompts: Any, message: str
) -> None:
    llm = make_llm()
    running = llm.stream([[40, 41, 42]], greedy(20))
    first = next(running)
    log = list(llm.stream_table.loop.runner.log)  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, greedy())
    with pytest.raises(RequestError, match=message):
        llm.stream(prompts, greedy())
    assert llm.stream_table.loop.runner.log == log  # type: ignore[attr-defined]
    ids = [*first.token_ids, *(t for piece in running for t in piece.token_ids)]
    assert ids == toy.generate([40, 41, 42], 20)
    assert llm.generate("again", greedy())[0].finished
    assert_idle(llm)


def test_one_set_of_parameters_a_prompt(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        make_llm().generate(["a", "b"], [greedy()])


def test_seeds(make_llm: Callable[..., LLM], toy: Any) -> None:
    """C11: a seeded request does not see its neighbours; unseeded ones differ."""
    llm = make_llm(drafts="mixed")
    seeded = SamplingParams(temperature=1.0, seed=42)
    (alone,) = llm.generate([[20, 21]], seeded)
    assert alone.outputs[0].token_ids == tuple(toy.generate([20, 21], 16, 1.0, 42))
    crowd = llm.generate([[30]] * 3 + [[20, 21]], [SamplingParams()] * 3 + [seeded])
    assert crowd[3].outputs == alone.outputs
    assert len({output.outputs[0].token_ids for output in crowd[:3]}) == 3


def test_streams_are_interleaved_and_equal_generate(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(drafts="mixed")
    prompts = ["one", "two", "three"]
    expected = llm.generate(prompts, greedy(30))
    texts = ["", "", ""]
    ids: list[list[int]] = [[], [], []]
    order = []
    for piece in llm.stream(prompts, greedy(30)):
        assert (piece.output is not None) == (piece.finish_reason is not None)
        texts[piece.index] += piece.text
        ids[piece.index] += piece.token_ids
        order.append(piece.index)
        if piece.output is not None:
            assert piece.output.outputs == expected[piece.index].outputs
    assert texts == [output.outputs[0].text for output in expected]
    assert [tuple(i) for i in ids] == [output.outputs[0].token_ids for output in expected]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes > len(prompts)
    assert_idle(llm)


def test_two_streams_at_once(make_llm: Callable[..., LLM], toy: Any) -> None:
    llm = make_llm()
    streams = [llm.stream([[20 + i, 21]], greedy(20)) for i in range(2)]
    ids: list[list[int]] = [[], []]
    open_streams = {0, 1}
    while open_streams:
        for i in sorted(open_streams):
            piece = next(streams[i], None)
            if piece is None:
                open_streams.remove(i)
            else:
                ids[i] += piece.token_ids
    assert ids == [toy.generate([20 + i, 21], 20) for i in range(2)]
    assert_idle(llm)


def test_closing_a_stream_frees_its_requests(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_reqs=2)
    unstarted = llm.stream("never asked for", greedy())
    stream = llm.stream([[20] * 30, [21], [22]], greedy(60))
    next(stream)
    assert llm.scheduler.has_unfinished
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)
    unstarted.close()  # type: ignore[attr-defined]
    assert_idle(llm)


def test_abort_in_a_stream(make_llm: Callable[..., LLM], toy: Any) -> None:
    llm = make_llm(drafts=0)
    ends = {}
    num_seen = 0
    for piece in llm.stream([[20, 21], [30, 31]], greedy(30)):
        if piece.index == 0 and piece.finish_reason is None:
            num_seen += len(piece.token_ids)
            if num_seen == 5:
                assert llm.abort(piece.request_id)
                assert not llm.abort(piece.request_id)
        if piece.output is not None:
            ends[piece.index] = piece.output.outputs[0]
    assert ends[0].finish_reason == "abort"
    assert ends[0].token_ids == tuple(toy.generate([20, 21], 5))
    assert ends[1].finish_reason == "length"
    assert ends[1].token_ids == tuple(toy.generate([30, 31], 30))
    assert not llm.abort("no such request")
    assert_idle(llm)


def test_a_runner_that_fails_leaves_the_llm_usable(
    make_llm: Callable[..., LLM], toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    with monkeypatch.context() as patch:
        patch.setattr(llm.stream_table.loop.runner, "launch", lambda slots, num: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[20, 21], [22, 23]], greedy())
    assert_idle(llm)
    (output,) = llm.generate([[20, 21]], greedy())
    assert output.outputs[0].token_ids == tuple(toy.generate([20, 21], 16))


@pytest.mark.parametrize("drafts", [0, 2, 99, "mixed"])
def test_preemption_changes_no_token(make_llm: Callable[..., LLM], toy: Any, drafts: Any) -> None:
    llm = make_llm(num_blocks=18, drafts=drafts)
    prompts = [list(range(20 + i, 25 + 2 * i)) for i in range(6)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.5, seed=3, max_tokens=40))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == tuple(toy.generate(prompt, 40, 0.5, 3))
    assert sum(output.num_preemptions for output in outputs) > 0
    assert_idle(llm)


@pytest.mark.parametrize(
    ("seed", "options", "preempts"),
    [
        (0, {"num_blocks": 21, "block_size": 2, "max_num_reqs": 6}, True),
        (1, {"num_blocks": 11, "block_size": 4, "max_num_reqs": 3, "num_draft_tokens": 1}, True),
        (2, {"num_blocks": 21, "block_size": 2, "max_num_reqs": 5, "verify_tokens": 7}, True),
        (3, {"num_blocks": 25, "block_size": 4, "max_num_reqs": 6, "verify_tokens": 9}, False),
        (4, {"num_blocks": 22, "block_size": 2, "max_num_reqs": 1}, False),
    ],
)
def test_soak(
    make_llm: Callable[..., LLM], toy: Any, seed: int, options: dict[str, Any], preempts: bool
) -> None:
    """Random arrivals, aborts and preemptions; every token is the toy's and nothing leaks."""
    rng = random.Random(seed)
    llm = make_llm(drafts="mixed", max_model_len=40, **options)
    made = []
    for _ in range(300):
        if rng.random() < 0.25:
            prompt = [rng.randrange(10, 200) for _ in range(rng.randrange(1, 20))]
            (stream,) = llm._build_streams([prompt], greedy(rng.randrange(1, 19)))
            llm.stream_table.open([stream])
            made.append((prompt, stream))
        if made and rng.random() < 0.05:
            llm.abort(rng.choice(made)[1].request_id)
        llm.stream_table.step()
        blocks, requests = llm.scheduler.blocks, llm.scheduler.running
        held = sum(len(r.block_ids) for r in requests)
        if llm.scheduler.prefilling is not None:
            held += len(llm.scheduler.prefilling.block_ids)
        assert blocks.num_free + held == blocks.num_usable
    while llm.scheduler.has_unfinished:
        llm.stream_table.step()
    reasons = [stream.requests[0].finish_reason for _, stream in made]
    for prompt, stream in made:
        ids = stream.requests[0].output_token_ids
        assert ids == toy.generate(prompt, len(ids))
        if stream.requests[0].finish_reason == "length":
            assert len(ids) == stream.requests[0].max_seq_len - len(prompt)
    assert {"length", "abort"} <= set(reasons)
    assert sum(llm.stats.verified_per_position) > 0
    assert any(stream.requests[0].num_preemptions for _, stream in made) or not preempts
    llm.stream_table.discard([stream for _, stream in made])
    assert_idle(llm)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, None, "prompts must be a text or a list of prompts, got None"),
        (5, None, "prompts must be a text or a list of prompts, got 5"),
        (["a"], {"max_tokens": 2}, "sampling_params must be SamplingParams"),
        (["a"], [{"max_tokens": 2}], "sampling_params must be SamplingParams"),
    ],
)
def test_arguments_of_a_wrong_type(
    make_llm: Callable[..., LLM], prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        make_llm().generate(prompts, params)
