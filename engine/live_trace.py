"""A torch.profiler trace of the next steps of an engine that serves.

Owns when the profiler runs, the names in the trace and the table made of it. It is begun and ended
by the engine's thread, whose operations are recorded, and written by another one. Data flow: steps
under a profiler -> RecordedTrace -> a chrome trace and the times of its regions.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch.profiler import profile, record_function

from decodegrid.engine.llm import LLM
from decodegrid.engine.profile_trace import (
    export_trace,
    named_graphs,
    range_maker,
    trace_activities,
)
from decodegrid.engine.runner import Runner
from decodegrid.engine.step_graphs import StepGraphs

_STEP = "step"


@dataclass(frozen=True, slots=True)
class RangeTime:
    """The ranges of one name in a trace."""

    name: str
    count: int
    total_ms: float
    """Of the thread that launched them; on the CPU that is their work."""
    device_ms: float
    """Of what they launched; 0 without a card."""


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """What a trace holds when its last step is over."""

    profiler: profile
    num_steps: int
    seconds: float
    """From the first step's begin to the last one's end."""
    names: frozenset[str]
    """Of the graphs and regions that ran."""

    def write(self, path: Path) -> list[RangeTime]:
        """Write the chrome trace; the times of the steps and of what ran in them, longest first.

        Takes a while for many steps. Raises OSError for the file.
        """
        export_trace(self.profiler, path)
        found = [
            RangeTime(
                name=event.key,
                count=event.count,
                total_ms=event.cpu_time_total / 1e3,
                device_ms=event.device_time_total / 1e3,
            )
            for event in self.profiler.key_averages()
            if event.key in self.names or event.key == _STEP
        ]
        return sorted(found, key=lambda row: (-row.total_ms, row.name))


class LiveTrace:
    """One trace; see StepTrace for who calls what."""

    def __init__(self, num_steps: int) -> None:
        """num_steps: chunks of prompts and decode steps that it ends after."""
        self.future: Future[RecordedTrace] = Future()
        """Its result, or why there is none."""
        self._num_steps = num_steps
        self._names: set[str] = set()
        self._llm: LLM | None = None
        self._profiler: profile | None = None
        self._plain: tuple[Runner, StepGraphs] | None = None
        """The runner whose graphs have names for now, and those without."""
        self._first = 0
        self._began = 0.0

    @property
    def is_done(self) -> bool:
        """Whether it has its steps, or failed."""
        return self.future.done() or self._num_done >= self._num_steps

    @property
    def _num_done(self) -> int:
        return 0 if self._llm is None else _num_steps(self._llm) - self._first

    def begin(self, llm: LLM) -> None:
        """Start the profiler."""
        try:
            runner = llm.stream_table.loop.runner
            device = torch.device("cpu")
            if isinstance(runner, Runner):
                device = runner.model.state.slots.last_token.device
            profiler = profile(activities=trace_activities(device))
            profiler.start()
            self._profiler, self._llm, self._first = profiler, llm, _num_steps(llm)
            if isinstance(runner, Runner):
                self._name_ranges(runner, device)
            self._began = perf_counter()
        except Exception as error:  # of the profiler; the engine has nothing to do with it
            self.end(error)

    def step(self) -> AbstractContextManager[object]:
        """A range of its own for each step."""
        return record_function(_STEP)

    def end(self, error: BaseException | None) -> None:
        """Stop the profiler and give the graphs their names back."""
        seconds, num_steps = perf_counter() - self._began, self._num_done
        if self._plain is not None:
            runner, graphs = self._plain
            runner.replay_instead(graphs)
        profiler, self._profiler, self._plain, self._llm = self._profiler, None, None, None
        try:
            if profiler is not None:
                profiler.stop()
        except Exception as stop_error:  # as in begin
            error = error or stop_error
        if self.future.done():
            return
        if error is not None or profiler is None:
            self.future.set_exception(error or RuntimeError("it was never begun"))
            return
        names = frozenset(self._names)
        self.future.set_result(RecordedTrace(profiler, num_steps, seconds, names))

    def _name_ranges(self, runner: Runner, device: torch.device) -> None:
        make = range_maker(device)

        @contextmanager
        def annotate(name: str) -> Iterator[None]:
            self._names.add(name)
            with make(name):
                yield

        graphs = runner.graphs
        runner.replay_instead(named_graphs(graphs, annotate))
        self._plain = (runner, graphs)


def _num_steps(llm: LLM) -> int:
    return llm.stats.num_decode_steps + llm.stats.num_prefill_steps
