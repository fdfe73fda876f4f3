"""Logprobs of outputs and prompts as callers see them: kept, dropped, joined and decoded."""

import asyncio
import random
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest

from decodegrid.engine.async_sinks import Mailbox
from decodegrid.engine.llm import LLM
from decodegrid.engine.logprobs import Logprob, OutputLogprobs, PromptLogprobList, RowLogprobs
from decodegrid.engine.request_output import StreamOutput
from decodegrid.engine.runner_protocol import MAX_TOP_LOGPROBS, PromptLogprobs
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

PROMPT = [20, 21, 22]
DRAFTS = (0, 2, 99, "mixed", "random")
FLUSHED = "\ufffd"


@pytest.fixture
def make_llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    return lambda **options: LLM.from_runner(make_runner(**options), tokenizer)


def fake_logprob(token_id: int, place: int = 0) -> float:
    """What the fake device says of an emitted token (place 0) and of the next ids."""
    return -1.0 - token_id % 7 - place


def certain_text(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    """What every continuation of the ids' bytes has in common."""
    data = b"".join(map(tokenizer.token_bytes, token_ids))
    tails = [bytes(tail) for count in range(4) for tail in product(b"\x80\x90\xbfa", repeat=count)]
    texts = [(data + tail).decode(errors="replace") for tail in tails]
    same = [len(set(chars)) == 1 for chars in zip(*texts, strict=False)]
    return texts[0][: (*same, False).index(False)]


@pytest.mark.parametrize("drafts", DRAFTS)
def test_what_stands_behind_the_end_has_no_logprobs(
    make_llm: Callable[..., LLM], scripted: Any, byte_id: Callable[[int], int], drafts: Any
) -> None:
    """A stop string spans two tokens of a block, and more of the block was accepted behind it."""
    script = [byte_id(byte) for byte in b"a<|bcdef"]
    llm = make_llm(model=scripted(len(PROMPT), script), drafts=drafts)
    params = SamplingParams(temperature=0, max_tokens=8, stop="<|", logprobs=2)
    (output,) = llm.generate([PROMPT], params)
    completion = output.outputs[0]
    assert completion.token_ids == tuple(script[:3]) and completion.text == "a"
    assert completion.logprobs is not None and len(completion.logprobs) == 3
    for token_id, entries in zip(script, completion.logprobs, strict=False):
        assert list(entries) == [token_id, token_id + 1]
        values = [(entry.logprob, entry.rank) for entry in entries.values()]
        assert values == [(fake_logprob(token_id), 1), (fake_logprob(token_id, 1), 2)]
    assert completion.cumulative_logprob == sum(map(fake_logprob, script[:3]))
    pieces = list(llm.stream([PROMPT], params))
    assert all(len(piece.token_ids) == len(piece.logprobs or ()) for piece in pieces)
    joined = [entries for piece in pieces for entries in piece.logprobs or ()]
    assert tuple(joined) == completion.logprobs
    assert output.prompt_logprobs is None
    (plain,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=3))
    assert plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("drafts", [0, 99, "mixed"])
def test_texts_of_tokens_make_up_the_output(
    tokenizer: Tokenizer,
    make_llm: Callable[..., LLM],
    scripted: Any,
    byte_id: Callable[[int], int],
    drafts: Any,
    skip: bool,
) -> None:
    """Characters of several tokens, broken ones and special tokens; of other tokens, the text that
    they would have added."""
    rng = random.Random(1)
    pieces = [b"a", "\u00e9".encode(), "\u20ac".encode(), "\U0001f600".encode(), b"\xe2", b"\x80"]
    for _ in range(12):
        script: list[int] = []
        while len(script) < 16:
            script += map(byte_id, rng.choice(pieces))
            script += rng.choice([[], [], [5]])
        llm = make_llm(model=scripted(len(PROMPT), script), drafts=drafts)
        params = SamplingParams(
            temperature=0, max_tokens=16, logprobs=20, skip_special_tokens=skip, ignore_eos=True
        )
        (completion,) = llm.generate([PROMPT], params)[0].outputs
        assert completion.logprobs is not None
        texts = [entries[i].decoded_token or "" for i, entries in zip(
            completion.token_ids, completion.logprobs, strict=True
        )]  # fmt: skip
        assert completion.text in ("".join(texts), "".join(texts) + FLUSHED)
        if not skip:
            continue
        for place, entries in enumerate(completion.logprobs):
            before = completion.token_ids[:place]
            for token_id, entry in entries.items():
                whole = certain_text(tokenizer, [*before, token_id])
                assert entry.decoded_token == whole[len("".join(texts[:place])) :]


def row(chosen: float, top_ids: list[int], top_logprobs: list[float]) -> RowLogprobs:
    """A row of one token; ids and values are filled up as the device does."""
    left = MAX_TOP_LOGPROBS - len(top_ids)
    return RowLogprobs(
        np.array([chosen], dtype=np.float32),
        np.array([[*top_ids, *[-1] * left]], dtype=np.int64),
        np.array([[*top_logprobs, *[-np.inf] * left]], dtype=np.float32),
    )


def test_what_a_dictionary_holds() -> None:
    """The chosen token first; its rank as far as the device counts; ids that do not exist never."""
    ranks = list(range(100, 120))
    values = [-0.5 * place for place in range(20)]
    found = OutputLogprobs(3)
    found.add(7, row(-11.5, ranks, values), 0, None)
    found.add(101, row(-0.5, ranks, values), 0, None)
    found.add(115, row(-7.5, ranks, values), 0, None)
    found.add(3, row(-2.0, [4, 3], [-1.0, -2.0]), 0, lambda token_id: f"<{token_id}>")
    best = {100: (-0.0, 1), 101: (-0.5, 2), 102: (-1.0, 3)}

    def values_of(index: int) -> dict[int, tuple[float, int | None]]:
        return {i: (e.logprob, e.rank) for i, e in found.tokens[index].items()}

    assert list(values_of(0).items()) == [(7, (-11.5, None)), *best.items()]
    assert list(values_of(1).items()) == [(101, (-0.5, 2)), (100, best[100]), (102, best[102])]
    assert values_of(2)[115] == (-7.5, 16)
    assert found.tokens[3] == {3: Logprob(-2.0, 2, "<3>"), 4: Logprob(-1.0, 1, "<4>")}
    assert found.tokens[0][7].decoded_token is None
    assert found.cumulative == -21.5
    own = OutputLogprobs(0)
    own.add(101, row(-0.5, ranks, values), 0, None)
    assert own.tokens == [{101: Logprob(-0.5, 2, None)}]


def chunk_of(token_ids: list[int]) -> PromptLogprobs:
    ids = np.array(token_ids, dtype=np.int64)
    top = ids[:, None] + np.arange(MAX_TOP_LOGPROBS)
    return PromptLogprobs(-(ids % 7).astype(np.float32), top, -top.astype(np.float32))


def test_a_prompt_comes_in_chunks_and_once() -> None:
    """Also if a request starts again in the midst, in chunks of other sizes."""
    prompt = [10, 11, 12, 13, 14, 15]
    found = PromptLogprobList(prompt, 0)
    assert not found.is_complete and found.following(0, 2) == (11, 12)
    found.add(0, chunk_of([11, 12]))
    assert found.following(0, 2) is None and found.following(0, 3) == (11, 12, 13)
    found.add(0, chunk_of([11, 12, 13]))
    assert found.following(3, 2) == (14, 15)
    found.add(3, chunk_of([14, 15]))
    assert found.is_complete and found.following(3, 2) is None
    assert found.tokens[0] is None and len(found.tokens) == 6
    for token_id, entries in zip(prompt[1:], found.tokens[1:], strict=True):
        assert entries == {token_id: Logprob(-(token_id % 7), 1, None)}
    assert PromptLogprobList([10], 5).is_complete
    with pytest.raises(AssertionError, match="left out"):
        PromptLogprobList(prompt, 0).add(2, chunk_of([13]))


@pytest.mark.parametrize("length", [1, 2, 5, 9, 20])
def test_prompt_logprobs_through_the_engine(
    make_llm: Callable[..., LLM], tokenizer: Tokenizer, length: int
) -> None:
    """Chunks of 4 and 8 tokens; the first of three completions brings them."""
    prompt = list(range(70, 70 + length))
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, n=3)
    output, other = llm.generate([prompt, PROMPT], [params, SamplingParams(temperature=0)])
    assert other.prompt_logprobs is None
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == length
    assert output.prompt_logprobs[0] is None
    for token_id, entries in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
        text = tokenizer.decode([token_id])
        assert entries == {token_id: Logprob(fake_logprob(token_id), 1, text)}
    assert all(completion.logprobs is None for completion in output.outputs)
    runner: Any = llm.stream_table.loop.runner
    assert [step[0] for step in runner.log].count("start") == 4


def test_completions_have_their_own(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_reqs=2, drafts="mixed")
    params = SamplingParams(temperature=1, seed=7, n=3, max_tokens=12, logprobs=0)
    (output,) = llm.generate([PROMPT], params)
    assert len({completion.token_ids for completion in output.outputs}) == 3
    streamed: list[list[Any]] = [[], [], []]
    for piece in llm.stream([PROMPT], params):
        streamed[piece.completion_index] += piece.logprobs or ()
    for completion, joined in zip(output.outputs, streamed, strict=True):
        assert completion.logprobs == tuple(joined)
        assert [list(entries) for entries in joined] == [[i] for i in completion.token_ids]
        assert completion.cumulative_logprob == sum(map(fake_logprob, completion.token_ids))


def test_an_abort_keeps_what_was_delivered(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(drafts=0)
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=1, prompt_logprobs=0)
    last: StreamOutput | None = None
    for piece in llm.stream([PROMPT], params):
        last = piece
        if piece.finish_reason is None:
            llm.abort(piece.request_id)
    assert last is not None and last.output is not None and last.finish_reason == "abort"
    completion = last.output.outputs[0]
    assert 1 <= len(completion.token_ids) == len(completion.logprobs or ())
    assert len(last.output.prompt_logprobs or ()) == len(PROMPT)


def test_pieces_that_wait_are_joined_with_their_logprobs() -> None:
    def piece(token_id: int, asks: bool) -> StreamOutput:
        entries = ({token_id: Logprob(-1.0, 1, "x")},) if asks else None
        return StreamOutput(0, "r", "x", (token_id,), None, None, logprobs=entries)

    async def run(asks: bool) -> StreamOutput:
        box = Mailbox(asyncio.get_running_loop())
        for token_id in (4, 5, 6):
            assert box.put(piece(token_id, asks))
        return await box.get()

    joined = asyncio.run(run(True))
    assert joined.token_ids == (4, 5, 6)
    assert [list(entries) for entries in joined.logprobs or ()] == [[4], [5], [6]]
    assert asyncio.run(run(False)).logprobs is None
