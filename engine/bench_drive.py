"""Drives an engine through one pass of requests, as many at once as asked or as they arrive.

Owns the clock and the order in which requests are opened. In a closed loop a new request is opened
when one ends, so that the number of open ones stays fixed; in an open loop requests arrive at drawn
times whatever the engine does, and their waits count from when they were due. Everything runs in
the caller's thread; there is no server and no network in it. Data flow: prompts and seeds -> the
stream table of the LLM -> BenchPass.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from decodegrid.engine.bench_stats import BenchPass, PassStats, RequestRecord, StepObserver
from decodegrid.engine.llm import LLM
from decodegrid.engine.output_stream import OutputStream
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.verify_policy import VerifyPolicy


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of open requests."""

    batch: int

    def arrivals(self, count: int, seed: int) -> tuple[float, ...] | None:
        """None: the next request comes when one ends."""
        return None

    def __str__(self) -> str:
        return f"batch {self.batch}"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that arrive as a Poisson process."""

    rate: float
    """Requests a second on average, above 0."""

    def arrivals(self, count: int, seed: int) -> tuple[float, ...]:
        """Seconds from the start of the pass to each arrival, ascending; the first is at 0, which
        is when the pass begins. The same for the same seed; at another rate the same, scaled."""
        rng, times = random.Random(f"arrivals {seed}"), [0.0]
        for _ in range(count - 1):
            times.append(times[-1] + rng.expovariate(1.0) / self.rate)
        return tuple(times)

    def __str__(self) -> str:
        return f"rate {self.rate:g}/s"


Traffic = ClosedLoop | OpenLoop

_HAIR_S = 1e-9
"""What rounding may leave between a due time and a clock that was waited for."""


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A prompt with how it is to be continued."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class BenchClock:
    """Time, and waiting for it; tests bring their own."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


@dataclass(slots=True)
class _Open:
    """A request that was opened."""

    arrived_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)


def run_pass(
    llm: LLM,
    requests: Sequence[PassRequest],
    policy: VerifyPolicy,
    traffic: Traffic,
    *,
    seed: int = 0,
    observers: Sequence[StepObserver] = (),
    clock: BenchClock | None = None,
) -> BenchPass:
    """Decode every request to its end; the LLM has its own policy and counters again afterwards.

    seed: of the arrival times. Raises RequestError, before anything runs, for a prompt that the
    deployment cannot hold; ValueError where a request failed.
    """
    clock = BenchClock() if clock is None else clock
    stats = PassStats(llm.stream_table.loop.runner, observers)
    streams = [
        llm.stream_table.build(request.prompt, request.params, index=index)
        for index, request in enumerate(requests)
    ]
    driver = _Driver(llm, streams, traffic, seed, clock)
    with _installed(llm, policy, stats):
        records, wall_s = driver.run()
    stats.let_go()
    found = BenchPass(tuple(records), stats, wall_s, driver.idle_s, driver.max_open)
    # Two ways to count the same: what the requests gave out, and what the engine committed.
    assert found.num_emitted == stats.num_emitted, (found.num_emitted, stats.num_emitted)
    return found


@contextmanager
def _installed(llm: LLM, policy: VerifyPolicy, stats: PassStats) -> Iterator[None]:
    """Give an LLM without open requests a policy and counters for a while."""
    scheduler, loop = llm.scheduler, llm.stream_table.loop
    saved = scheduler.policy, llm.stats
    scheduler.policy, llm.stats, loop.stats = policy, stats, stats
    try:
        yield
    finally:
        scheduler.policy, llm.stats = saved
        loop.stats = saved[1]


class _Driver:
    """One pass."""

    def __init__(
        self, llm: LLM, streams: list[OutputStream], traffic: Traffic, seed: int, clock: BenchClock
    ) -> None:
        self._table = llm.stream_table
        self._streams, self._clock = streams, clock
        self._limit = traffic.batch if isinstance(traffic, ClosedLoop) else len(streams)
        self._due = traffic.arrivals(len(streams), seed)
        self._waiting = deque(streams)
        self._open: dict[str, _Open] = {}
        self._records: dict[int, RequestRecord] = {}
        self._began = 0.0
        self.idle_s = 0.0
        self.max_open = 0

    def run(self) -> tuple[list[RequestRecord], float]:
        """All requests in their order, and the seconds that they took together."""
        self._began = self._clock.now()
        try:
            while self._waiting or self._open:
                self._admit()
                if not self._open:
                    self._wait()
                    continue
                for stream in self._table.step():
                    self._take(stream)
        finally:
            self._table.discard(self._streams)
        ends = [record.finished_s for record in self._records.values()]
        return [self._records[index] for index in range(len(self._streams))], max(ends)

    def _seconds(self) -> float:
        return self._clock.now() - self._began

    def _next_due(self) -> float:
        """When the next waiting request may be opened."""
        index = len(self._streams) - len(self._waiting)
        return 0.0 if self._due is None else self._due[index]

    def _admit(self) -> None:
        while self._waiting and len(self._open) < self._limit:
            now, due = self._seconds(), self._next_due()
            if due - now > _HAIR_S:
                return
            stream = self._waiting.popleft()
            self._open[stream.request_id] = _Open(now if self._due is None else due)
            self.max_open = max(self.max_open, len(self._open))
            self._table.open([stream])

    def _wait(self) -> None:
        """Sleep until the next request is due."""
        before = self._seconds()
        self._clock.sleep(max(0.0, self._next_due() - before))
        self.idle_s += self._seconds() - before

    def _take(self, stream: OutputStream) -> None:
        now, opened = self._seconds(), self._open[stream.request_id]
        while (piece := stream.take()) is not None:
            if piece.token_ids:
                opened.arrivals.append((now, len(piece.token_ids)))
            if piece.output is None:
                continue
            completion = piece.output.outputs[0]
            if completion.error is not None or not opened.arrivals:
                raise ValueError(f"request {stream.index} failed: {completion.error}")
            self._records[stream.index] = RequestRecord(
                stream.index,
                opened.arrived_s,
                tuple(opened.arrivals),
                completion.token_ids,
                completion.finish_reason,
                piece.output.num_preemptions,
            )
        if stream.is_finished:
            del self._open[stream.request_id]
            self._table.discard([stream])
