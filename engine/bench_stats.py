"""What one pass of the benchmark saw: its steps, its chunks, its requests.

Owns the samples. Counting is the engine's own (`EngineStats`), with every step and chunk kept
beside the sums; emitted tokens are counted from what the requests gave out. Data flow: the loop
tells a `PassStats` of each step, the driver makes a `RequestRecord` of each request, and a
`BenchPass` holds both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decodegrid.capture.grid import GraphKey
from decodegrid.engine.runner_protocol import StepResult, StepRunner
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.step_plan import DecodeStep, TokenUpdate

StepObserver = Callable[[DecodeStep, StepResult, Sequence[TokenUpdate]], None]
"""Is told of each decode step after it was committed, with the rows that were not late."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """One decode step."""

    key: GraphKey
    """The captured pair."""
    num_reqs: int
    """Rows, those of requests that had ended included."""
    num_query_tokens: int
    """Query tokens that belonged to a row."""
    graph_s: float
    """Of the captured graph alone."""
    period_s: float
    """With scheduling, launch and commit; not less than the graph."""


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """One prefill chunk."""

    num_tokens: int
    captured_size: int
    """Tokens of the captured graph that ran it."""
    seconds: float


class PassStats(EngineStats):
    """The counters of one pass, from 0, with every step kept."""

    def __init__(self, runner: StepRunner, observers: Sequence[StepObserver] = ()) -> None:
        super().__init__(runner)
        self.steps: list[StepSample] = []
        self.chunks: list[ChunkSample] = []
        self._chunk_sizes = runner.prefill_chunk_sizes
        self._observers = tuple(observers)

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """See EngineStats."""
        super().record_prefill(num_tokens, seconds)
        size = next(size for size in self._chunk_sizes if size >= num_tokens)
        self.chunks.append(ChunkSample(num_tokens, size, seconds))

    def record_decode(
        self, step: DecodeStep, result: StepResult, updates: Sequence[TokenUpdate], seconds: float
    ) -> None:
        """See EngineStats."""
        super().record_decode(step, result, updates, seconds)
        sample = StepSample(
            result.key,
            len(step.slots),
            result.num_query_tokens,
            result.graph_s,
            max(seconds, result.graph_s),
        )
        self.steps.append(sample)
        for observer in self._observers:
            observer(step, result, updates)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its user saw it; times are seconds since the pass began."""

    index: int
    arrived_s: float
    """When it was asked; where arrivals are drawn, when it was due, whether or not the engine was
    in a step then."""
    arrivals: tuple[tuple[float, int], ...]
    """(time, tokens) of every step that gave it tokens."""
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_preemptions: int

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.arrivals[0][0] - self.arrived_s

    @property
    def finished_s(self) -> float:
        return self.arrivals[-1][0]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens behind the first arrival over the time since then; None with one arrival only."""
        behind = sum(count for _, count in self.arrivals[1:])
        seconds = self.finished_s - self.arrivals[0][0]
        return behind / seconds if behind and seconds > 0 else None

    @property
    def waits_s(self) -> list[float]:
        """Time between one arrival and the next."""
        return [
            after[0] - before[0]
            for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)
        ]

    @property
    def inter_token_s(self) -> list[float]:
        """For each token behind the first arrival its share of the wait: tokens that come together
        share it evenly."""
        counts = [count for _, count in self.arrivals[1:]]
        pairs = zip(self.waits_s, counts, strict=True)
        return [wait / count for wait, count in pairs for _ in range(count)]


@dataclass(frozen=True, slots=True)
class BenchPass:
    """All requests of one pass, which ended."""

    requests: tuple[RequestRecord, ...]
    """In the order of the prompts."""
    stats: PassStats
    wall_s: float
    """From the first request to the end of the last one, idle time included."""
    idle_s: float
    """Of that, time without an open request."""
    max_open: int
    """Most requests that were open at once, those that waited for a slot included."""

    @property
    def num_emitted(self) -> int:
        """Counted from the outputs."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens over the whole time: prefill is charged."""
        return self.num_emitted / self.wall_s

    @property
    def tokens_per_s_without_prefill(self) -> float:
        """Emitted tokens over the time outside prefill chunks."""
        return self.num_emitted / (self.wall_s - self.stats.prefill_seconds)

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        return tuple(request.token_ids for request in self.requests)
