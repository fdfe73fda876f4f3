"""Soak: clients in threads against one engine, everything that requests may ask for in one mix.

A small real model in float64 serves twice as many requests as it has slots, from a pool that is too
small for them, with the prefix cache and a step in flight. Every greedy output is compared with the
uncached forward under a plain form of the request's parameters, every structured one with its form,
every output that was asked for before with what it was then, and at the end nothing may be held.
`make soak` does it for ten minutes; the seconds are in DECODEGRID_SOAK_SECONDS.
"""

import asyncio
import json
import math
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.block_manager import BlockManager
from decodegrid.engine.grammar_params import StructuredOutputsParams
from decodegrid.engine.llm import LLM
from decodegrid.engine.request import Request
from decodegrid.engine.request_output import CompletionOutput, RequestOutput
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.window_snapshots import window_slack
from decodegrid.graphs.drafter import DraftModel

SEED = 20260
NUM_SLOTS = 3
NUM_CLIENTS = 2 * NUM_SLOTS
MAX_MODEL_LEN = 64
BLOCK_SIZE = 4
NUM_BLOCKS = 18
"""17 blocks, where three requests at their limits need 48."""
WINDOW = 10
"""Different requests from which clients choose at a time; the window moves on with the work."""
TIMEOUT_S = 300
FORMS = (
    StructuredOutputsParams(regex="[a-f]{2,6}"),
    StructuredOutputsParams(choice=["yes", "no, never", "no"]),
    StructuredOutputsParams(
        json={
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
            "required": ["a"],
        },
        disable_any_whitespace=True,
    ),
)
NEEDED = (
    "by its form",
    "by the oracle", "rich by the oracle", "equal to before", "cut short", "verified drafts",
    "preemptions", "submit", "stream", "abort", "cancel", "leave",
)  # fmt: skip
"""A run in which one of these did not happen shows nothing."""


@dataclass(frozen=True)
class Job:
    """A prompt with its parameters; equal for equal numbers."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def is_rich(self) -> bool:
        asked = self.params
        penalties = (asked.frequency_penalty, asked.presence_penalty, asked.repetition_penalty - 1)
        return any(penalties) or asked.logprobs is not None or bool(asked.logit_bias)


def make_job(number: int, vocab_size: int) -> Job:
    """The number-th job of the soak."""
    rng = random.Random(f"{SEED}/{number}")
    length = rng.choice((1, 2, 7, 8, 9, 15, 17, 24, rng.randint(1, 40)))
    # Half of them begin alike, for the prefix cache.
    shared = [10 + place * 7 % 90 for place in range(24)] if rng.random() < 0.5 else []
    own = [rng.randrange(10, vocab_size) for _ in range(length)]
    prompt = (shared + own)[:length]
    params = SamplingParams(
        temperature=rng.choice((0, 0, 0, 0.7, 1.5)),
        max_tokens=rng.choice((1, 2, 5, 13, 20, 30)),
        seed=rng.randrange(2**63),
        n=rng.choice((1, 1, 1, 2)),
        stop=rng.choice((None, None, ["e", "QQ"], ["a", "9", "~"])),
        stop_token_ids=tuple(rng.sample(range(10, vocab_size), rng.choice((0, 0, 9)))),
        ignore_eos=rng.random() < 0.3,
        speculation=rng.choice(("auto", "auto", "off", 1)),
        top_p=rng.choice((1.0, 0.8)),
        top_k=rng.choice((-1, 20)),
    )
    if rng.random() < 0.4:
        params = replace(
            params,
            frequency_penalty=rng.choice((0.0, 0.9, -0.4)),
            presence_penalty=rng.choice((0.0, 0.5)),
            repetition_penalty=rng.choice((1.0, 1.3)),
            logit_bias={rng.randrange(vocab_size): 3.0, rng.randrange(vocab_size): -50.0},
            logprobs=rng.choice((None, 0, 3)),
        )
    if rng.random() < 0.25:
        form = rng.choice(FORMS)
        params = replace(
            params, structured_outputs=form, stop=None, stop_token_ids=(), ignore_eos=False
        )
    return Job(tuple(prompt), params)


class Oracle:
    """What must come out, by the uncached forward and plain loops."""

    def __init__(self, model: DraftModel, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer

    def check_tokens(self, job: Job, ids: tuple[int, ...], told: CompletionOutput | None) -> None:
        """Each greedy token is the best one; told: its logprobs are looked at."""
        if not ids:
            return
        with torch.no_grad():
            whole = torch.tensor([*job.prompt, *ids[:-1]])
            rows = self._model.logits(whole)[len(job.prompt) - 1 :]
        for place, token in enumerate(ids):
            wanted = self._adjusted(job, rows[place], ids[:place])
            margin = float(wanted.max() - wanted[token])
            assert margin <= 1e-9, f"token {place} is {token}, {margin} below the best; {job}"
            if told is not None and told.logprobs is not None:
                true = float(rows[place].log_softmax(0)[token])
                given = told.logprobs[place][token].logprob
                assert math.isclose(given, true, abs_tol=1e-5), f"logprob {place} of {job}"

    def _adjusted(self, job: Job, logits: torch.Tensor, before: tuple[int, ...]) -> torch.Tensor:
        params, result = job.params, logits.clone()
        for token, bias in (params.logit_bias or {}).items():
            result[token] += bias
        for token in {*job.prompt, *before}:
            value = float(result[token])
            factor = params.repetition_penalty
            result[token] = value / factor if value > 0 else value * factor
        for token, count in Counter(before).items():
            result[token] -= params.frequency_penalty * count + params.presence_penalty
        return result

    def check_form(self, job: Job, output: CompletionOutput) -> None:
        """A text that ended by itself has the form that was asked for."""
        form, text = job.params.structured_outputs, output.text
        assert form is not None
        if output.finish_reason == "length":
            assert len(output.token_ids) <= (job.params.max_tokens or MAX_MODEL_LEN)
        elif form.regex is not None:
            assert re.fullmatch(form.regex, text), f"{text!r} is not of {form}"
        elif form.choice is not None:
            assert text in form.choice, f"{text!r} is not of {form}"
        else:
            value = json.loads(text)
            assert isinstance(value.pop("a"), bool) and value.pop("b", "x") in ("x", "yy")
            assert not value, f"{text!r} is not of {form}"

    def check_end(self, job: Job, output: CompletionOutput) -> None:
        """It ended where the first reason to end stands, and says so."""
        params, ids = job.params, output.token_ids
        stops = {*params.stop_token_ids}
        if not params.ignore_eos:
            stops.add(self._tokenizer.eos_token_id)
        assert not stops & {*ids[:-1]}, f"a stop token is passed: {job}"
        strings = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
        assert not any(text in output.text for text in strings), f"a stop string is left in: {job}"
        limit = min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(job.prompt))
        assert 1 <= len(ids) <= limit
        if output.finish_reason == "length":
            assert len(ids) == limit and ids[-1] not in stops, f"length comes last: {job}"
        elif not isinstance(output.stop_reason, str):
            assert ids[-1] in stops, f"stopped without a reason: {job}"
        else:
            assert output.stop_reason in strings


class Soak:
    """Clients and what they found."""

    def __init__(
        self, llm: LLM, oracle: Oracle, seconds: float, max_jobs: int, needs: tuple[str, ...]
    ) -> None:
        """It goes on until every count of `needs` has moved, then to max_jobs or the seconds."""
        self._llm, self._oracle, self._needs = llm, oracle, needs
        self._engine = AsyncLLM(llm)
        self._end, self._max_jobs = time.monotonic() + seconds, max_jobs
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], CompletionOutput] = {}
        """Whole completions by job and place."""
        self._cut: list[tuple[int, int, tuple[int, ...]]] = []
        """What aborted ones had."""
        self.errors: list[BaseException] = []
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """All clients to their ends, and the engine to its own."""
        clients = [
            threading.Thread(target=self._client, args=(number,), name=f"client-{number}")
            for number in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        if self.errors:
            self._engine.close()
            raise self.errors[0]
        end = time.monotonic() + TIMEOUT_S
        # Those that were left are aborted at the next step; one more may be in flight behind it.
        while self._engine.num_open or self._llm.stream_table.has_unfinished:
            assert time.monotonic() < end, "a request that was left is still open"
            time.sleep(0.001)
        self._engine.close()
        for number, place, ids in self._cut:
            self._check_cut(number, place, ids)

    def missing(self) -> list[str]:
        """What a conclusive run needs and this one has not had."""
        return [name for name in self._needs if not self.counts[name]]

    def _client(self, number: int) -> None:
        rng = random.Random(f"{SEED}/client/{number}")
        ways = (self._submit, self._submit, self._stream, self._abort, self._cancel, self._leave)
        try:
            while not self.errors and (time.monotonic() < self._end or self.missing()):
                assert time.monotonic() < self._end + TIMEOUT_S, f"never seen: {self.missing()}"
                with self._lock:
                    count = self.counts["jobs"]
                    self.counts["jobs"] += 1
                if count >= self._max_jobs and not self.missing():
                    return
                job = count // WINDOW * WINDOW // 2 + rng.randrange(WINDOW)
                way = rng.choice(ways)
                way(job, make_job(job, self._llm.tokenizer.vocab_size), rng)
                self.counts[way.__name__.strip("_")] += 1
        except BaseException as error:  # told by the main thread
            self.errors.append(error)

    def _submit(self, number: int, job: Job, rng: random.Random) -> None:
        future = self._engine.submit(job.prompt, job.params, priority=rng.randrange(3))
        self._take(number, job, future.result(TIMEOUT_S))

    def _abort(self, number: int, job: Job, rng: random.Random) -> None:
        name = f"{threading.current_thread().name}/{rng.random()}"
        future = self._engine.submit(job.prompt, job.params, request_id=name, priority=1)
        time.sleep(rng.choice((0.0, 0.01, 0.1, 0.4)))
        self._engine.abort(name)
        self._take(number, job, future.result(TIMEOUT_S))

    def _cancel(self, number: int, job: Job, rng: random.Random) -> None:
        future = self._engine.submit(job.prompt, job.params)
        time.sleep(rng.choice((0.0, 0.02, 0.2)))
        future.cancel()
        try:
            self._take(number, job, future.result(TIMEOUT_S))
        except CancelledError:
            self.counts["cancelled"] += 1

    def _stream(self, number: int, job: Job, rng: random.Random) -> None:
        asyncio.run(self._read(number, job, rng.randrange(3), None))

    def _leave(self, number: int, job: Job, rng: random.Random) -> None:
        asyncio.run(self._read(number, job, rng.randrange(3), rng.randrange(1, 4)))

    async def _read(self, number: int, job: Job, priority: int, most: int | None) -> None:
        """most: pieces after which the reader goes away."""
        ids: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        stream = self._engine.stream(job.prompt, job.params, priority=priority)
        count = 0
        async for piece in stream:
            ids.setdefault(piece.completion_index, []).extend(piece.token_ids)
            texts[piece.completion_index] = texts.get(piece.completion_index, "") + piece.text
            count += 1
            if piece.output is not None:
                self._take(number, job, piece.output)
                for output in piece.output.outputs:
                    assert output.token_ids == tuple(ids.get(output.index, ()))
                    assert output.text == texts.get(output.index, "")
            elif count == most:
                await stream.aclose()
                return

    def _take(self, number: int, job: Job, result: RequestOutput) -> None:
        """Check a result against the oracle, or against what the same job gave before."""
        assert result.finished and len(result.outputs) == job.params.n
        for output in result.outputs:
            key = (number, output.index)
            if output.finish_reason == "abort":
                with self._lock:
                    self._cut.append((*key, output.token_ids))
                    self.counts["cut short"] += 1
                continue
            with self._lock:
                known = self._known.setdefault(key, output)
            if known is not output:
                same = (known.token_ids, known.text, known.finish_reason, known.stop_reason)
                now = (output.token_ids, output.text, output.finish_reason, output.stop_reason)
                assert same == now, f"another output than before: {job}"
                self.counts["equal to before"] += 1
                continue
            if job.params.structured_outputs is not None:
                self._oracle.check_form(job, output)
                self.counts["by its form"] += output.finish_reason == "stop"
                continue
            self._oracle.check_end(job, output)
            if job.is_greedy:
                self._oracle.check_tokens(job, output.token_ids, output)
                self.counts["rich by the oracle" if job.is_rich else "by the oracle"] += 1
        with self._lock:
            self.counts["verified drafts"] += result.num_verified
            self.counts["preemptions"] += result.num_preemptions

    def _check_cut(self, number: int, place: int, ids: tuple[int, ...]) -> None:
        job = make_job(number, self._llm.tokenizer.vocab_size)
        whole = self._known.get((number, place))
        if whole is not None:
            assert whole.token_ids[: len(ids)] == ids, f"cut short, and different: {job}"
        elif job.is_greedy and job.params.structured_outputs is None:
            self._oracle.check_tokens(job, ids, None)


@pytest.fixture(scope="module")
def model(make_model: Callable[..., DraftModel], tokenizer: Tokenizer) -> DraftModel:
    return make_model(vocab_size=tokenizer.vocab_size, hc_sinkhorn_iters=2)


@pytest.fixture
def soak(
    model: DraftModel, tokenizer: Tokenizer, make_eager_runner: Callable[..., Any]
) -> Callable[..., None]:
    """soak(seconds, max_jobs, needs): run it and check that nothing is held."""

    def run(seconds: float, max_jobs: int, needs: tuple[str, ...] = NEEDED) -> None:
        runner = make_eager_runner(
            model,
            NUM_SLOTS,
            MAX_MODEL_LEN,
            num_snapshots=8,
            window_slack=window_slack(BLOCK_SIZE, 2),
            rich=True,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
        )
        llm = LLM.from_runner(runner, tokenizer, async_scheduling=True)
        scheduler = llm.scheduler
        free = scheduler.blocks.num_free, scheduler.slots.num_free
        made = Soak(llm, Oracle(model, tokenizer), seconds, max_jobs, needs)
        made.run()
        assert (scheduler.blocks.num_free, scheduler.slots.num_free) == free, "something is held"
        assert all(scheduler.blocks.ref_count(block) == 0 for block in range(NUM_BLOCKS))
        assert not scheduler.waiting and not scheduler.running and scheduler.prefilling is None
        print(f"\nsoak, seed {SEED}: {dict(made.counts)}")

    return run


def test_soak(soak: Callable[..., None]) -> None:
    soak(60.0, 10**9)


@pytest.mark.slow
def test_long_soak(soak: Callable[..., None]) -> None:
    seconds = float(os.environ.get("DECODEGRID_SOAK_SECONDS", "600"))
    soak(seconds, 10**9)


def test_a_leak_is_found(soak: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One block is not given back."""
    free = BlockManager.free

    def leak(self: BlockManager, block_ids: list[int]) -> None:
        free(self, [block for block in block_ids if block != 3])

    monkeypatch.setattr(BlockManager, "free", leak)
    with pytest.raises(AssertionError, match="something is held"):
        soak(4.0, 8, ())


def test_an_index_that_is_off_by_one_is_found(
    soak: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids before a chunk that is not the first are those before the position ahead of it."""
    history = Request.history

    def wrong(self: Request, position: int) -> tuple[int, int, int]:
        return history(self, position - 1 if position and position % 4 == 0 else position)

    monkeypatch.setattr(Request, "history", wrong)
    with pytest.raises(AssertionError, match=r"below the best|another output|logprob"):
        soak(60.0, 60, ())
