"""Passes over the toy model: what is counted, against counts made from the outputs alone."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from decodegrid.engine.bench_drive import (
    BenchClock,
    ClosedLoop,
    OpenLoop,
    PassRequest,
    run_pass,
)
from decodegrid.engine.bench_stats import BenchPass, RequestRecord
from decodegrid.engine.bench_summary import DraftCounts, summarise
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify

PROMPTS = [tuple(range(20 + i, 27 + 2 * i)) for i in range(7)]
LENGTHS = [11, 1, 8, 20, 5, 13, 2]


def requests_of(speculation: Any = "auto") -> list[PassRequest]:
    return [
        PassRequest(
            prompt,
            SamplingParams(
                temperature=0.5, seed=i, max_tokens=length, ignore_eos=True, speculation=speculation
            ),
        )
        for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]


@pytest.fixture
def make_llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    def make(drafts: Any = "mixed", *, overlap: bool = True, **options: Any) -> LLM:
        runner = make_runner(drafts=drafts, **options)
        return LLM.from_runner(runner, tokenizer, async_scheduling=overlap)

    return make


def recount(found: BenchPass, num_drafts: int) -> None:
    """The counts of a pass from nothing but when tokens came, and how many."""
    counts = DraftCounts.of([found])
    arrivals = [count for record in found.requests for _, count in record.arrivals]
    assert counts.emitted == sum(arrivals) == sum(len(r.token_ids) for r in found.requests)
    assert counts.rounds == len(arrivals)
    # A step emits its accepted drafts and one token more; what is behind an end is dropped.
    assert sum(counts.accepted) == sum(count - 1 for count in arrivals) + counts.dropped
    # Every request begins with a step without drafts and has all of them in each later one.
    assert counts.drafted == (len(arrivals) - len(found.requests),) * num_drafts
    for one, other in (("drafted", "offered"), ("offered", "verified"), ("verified", "accepted")):
        pairs = zip(getattr(counts, one), getattr(counts, other), strict=True)
        assert all(more >= fewer for more, fewer in pairs)
    assert counts.tokens_per_round == counts.emitted / len(arrivals)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_closed_loop(make_llm: Callable[..., LLM], toy: Any, batch: int, overlap: bool) -> None:
    llm, clock = make_llm(overlap=overlap), Clock(0.25)
    clock.move_with(llm)
    found = run_pass(
        llm, requests_of(), FixedVerify(), ClosedLoop(batch), clock=clock.bench_clock()
    )
    assert found.outputs == tuple(
        tuple(toy.generate(prompt, length, 0.5, i))
        for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    )
    assert found.max_open == batch and found.idle_s == 0
    assert [record.finish_reason for record in found.requests] == ["length"] * 7
    recount(found, 5)
    assert max(step.num_reqs for step in found.stats.steps) <= batch
    ends = [record.finished_s for record in found.requests]
    assert found.wall_s == max(ends) and min(r.arrived_s for r in found.requests) >= 0
    # A request is opened when another one has ended: no step is taken between.
    assert {record.arrived_s for record in found.requests[batch:]} <= {*ends}
    prompt_tokens = sum(len(prompt) - 1 for prompt in PROMPTS)
    assert found.stats.num_prefill_tokens == prompt_tokens
    assert sum(chunk.num_tokens for chunk in found.stats.chunks) == prompt_tokens
    assert {chunk.captured_size for chunk in found.stats.chunks} == {4, 8}
    assert found.tokens_per_s < found.tokens_per_s_without_prefill


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_a_limit_on_every_row(make_llm: Callable[..., LLM], limit: int) -> None:
    """Drafts are all right, so that each step emits its limit and one more, up to the end."""
    llm = make_llm(drafts=5)
    found = run_pass(llm, requests_of(limit), FixedVerify(), ClosedLoop(4))
    recount(found, 5)
    for record, length in zip(found.requests, LENGTHS, strict=True):
        wanted, left = [1], length - 1
        while left:
            wanted.append(min(limit + 1, left))
            left -= wanted[-1]
        assert [count for _, count in record.arrivals] == wanted
    counts = DraftCounts.of([found])
    assert counts.offered == counts.verified == counts.accepted
    assert all(count == 0 for count in counts.offered[limit:]) and counts.offered[limit - 1]


class Clock:
    """A clock that moves when a step runs, and when somebody sleeps."""

    def __init__(self, step_s: float) -> None:
        self.time, self.step_s = 100.0, step_s
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds

    def move_with(self, llm: LLM) -> None:
        step = llm.stream_table.step

        def slow_step() -> Any:
            self.time += self.step_s
            return step()

        llm.stream_table.step = slow_step  # type: ignore[method-assign]

    def bench_clock(self) -> BenchClock:
        return BenchClock(lambda: self.time, self.sleep)


def test_an_open_loop_counts_waits_from_when_requests_were_due(
    make_llm: Callable[..., LLM],
) -> None:
    llm, clock = make_llm(drafts=2, overlap=False), Clock(0.25)
    clock.move_with(llm)
    traffic = OpenLoop(0.7)
    found = run_pass(llm, requests_of(), FixedVerify(), traffic, seed=3, clock=clock.bench_clock())
    due = traffic.arrivals(7, 3)
    assert [record.arrived_s for record in found.requests] == list(due)
    assert due[0] == 0.0 and list(due) == sorted(due) and len(set(due)) == 7
    assert traffic.arrivals(7, 4) != due
    # Twice the rate is the same process in half the time.
    assert OpenLoop(1.4).arrivals(7, 3) == pytest.approx([time / 2 for time in due])
    recount(found, 5)
    assert found.idle_s == pytest.approx(sum(clock.slept)) and found.idle_s > 0
    for record in found.requests:
        # Steps take whole quarters of a second, arrivals do not wait for their end.
        assert record.first_token_s > 0
        assert record.arrivals[0][0] > record.arrived_s
    assert any(record.first_token_s % 0.25 > 1e-6 for record in found.requests)
    assert 1 <= found.max_open <= 7
    summary = summarise([found])
    assert summary.requests_per_s.median == pytest.approx(7 / found.wall_s)
    assert summary.idle_share == pytest.approx(found.idle_s / found.wall_s)


def test_a_load_that_is_too_much_queues_up(make_llm: Callable[..., LLM]) -> None:
    found = run_pass(make_llm(), requests_of(), FixedVerify(), OpenLoop(1e9), seed=1)
    assert found.max_open == 7 and found.idle_s < found.wall_s


def test_rates_of_arrivals() -> None:
    times = OpenLoop(4.0).arrivals(4001, 0)
    assert times[-1] / 4000 == pytest.approx(0.25, rel=0.05)
    gaps = [after - before for before, after in pairwise(times)]
    # Of exponential gaps the share that is shorter than the mean is 1 - 1/e.
    assert sum(gap < 0.25 for gap in gaps) / 4000 == pytest.approx(0.632, abs=0.02)


def test_what_a_user_sees() -> None:
    record = RequestRecord(0, 1.0, ((1.5, 1), (1.7, 4), (2.3, 2)), tuple(range(7)), "stop", 0)
    assert record.first_token_s == 0.5 and record.finished_s == 2.3
    assert record.tokens_per_s == pytest.approx(6 / 0.8)
    assert record.waits_s == pytest.approx([0.2, 0.6])
    assert record.inter_token_s == pytest.approx([0.05] * 4 + [0.3] * 2)
    alone = RequestRecord(0, 1.0, ((1.5, 3),), (1, 2, 3), "stop", 0)
    assert alone.tokens_per_s is None and alone.inter_token_s == alone.waits_s == []


def test_the_engine_is_as_before_afterwards(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    policy, stats = llm.scheduler.policy, llm.stats
    run_pass(llm, requests_of(), FixedVerify(1), ClosedLoop(2))
    assert llm.scheduler.policy is policy and llm.stats is stats
    assert llm.stream_table.loop.stats is stats and stats.num_decode_steps == 0
    with pytest.raises(RequestError, match="the context of 96 tokens"):
        long = PassRequest(tuple([20] * 200), SamplingParams())
        run_pass(llm, [*requests_of(), long], FixedVerify(1), ClosedLoop(2))
    assert not llm.stream_table.open_ids

    def fail() -> Any:
        raise RuntimeError("the device is gone")

    llm.stream_table.step = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="gone"):
        run_pass(llm, requests_of(), FixedVerify(1), ClosedLoop(2))
    assert llm.scheduler.policy is policy and llm.stream_table.loop.stats is stats
    assert not llm.stream_table.open_ids and not llm.scheduler.has_unfinished


def test_summary_over_passes(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(overlap=False)
    passes = [run_pass(llm, requests_of(), FixedVerify(), ClosedLoop(3)) for _ in range(3)]
    found = summarise(passes)
    assert found.counts.emitted == 3 * sum(LENGTHS)
    assert found.num_without_speed == 3  # the request of one token
    assert found.user_tokens_per_s is not None
    assert found.user_tokens_per_s.count == 3 * 6
    speeds = [record.tokens_per_s for each in passes for record in each.requests]
    known = sorted(speed for speed in speeds if speed is not None)
    assert found.user_tokens_per_s.low == known[0] and found.user_tokens_per_s.high == known[-1]
    assert found.inter_token_ms is not None
    assert found.inter_token_ms.count == 3 * (sum(LENGTHS) - len(LENGTHS))
    assert found.tokens_per_s.count == 3
    rates = sorted(each.num_emitted / each.wall_s for each in passes)
    assert (found.tokens_per_s.low, found.tokens_per_s.high) == (rates[0], rates[2])
    assert sum(found.graph_hits.values()) == found.num_steps
    # The toy's keys have twice the query tokens that were asked for.
    assert found.pad_share == pytest.approx(0.5)
    assert found.graph_ms is not None and found.graph_ms.p50 == pytest.approx(1.0)
    assert found.period_ms is not None and found.period_ms.low >= found.graph_ms.low
    document = found.as_json()
    assert document["counts"]["emitted"] == 3 * sum(LENGTHS)
    assert document["counts"]["verified"] == sum(document["counts"]["by_position"]["verified"])
