"""A trace that runs over the steps of an engine while it serves.

Owns its place in the engine's thread: at most one, begun and ended between two steps. What is
traced and written, the trace itself knows.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from decodegrid.engine.llm import LLM
from decodegrid.engine.output_stream import OutputStream
from decodegrid.engine.stream_table import StreamTable


class StepTrace(Protocol):
    """All methods are called by the engine's thread and raise nothing."""

    @property
    def is_done(self) -> bool:
        """Whether it has seen enough."""

    def begin(self, llm: LLM) -> None:
        """The next step is the first one."""

    def step(self) -> AbstractContextManager[object]:
        """What a step runs in."""

    def end(self, error: BaseException | None) -> None:
        """The last step is over; error: why it ended early, where the engine did."""


class TraceSlot:
    """The trace of an engine, or none; used by its thread alone."""

    __slots__ = ("_trace",)

    def __init__(self) -> None:
        self._trace: StepTrace | None = None

    def step(self, table: StreamTable) -> list[OutputStream]:
        """Run the engine once, under the trace if there is one."""
        trace = self._trace
        if trace is None:
            return table.step()
        with trace.step():
            streams = table.step()
        if trace.is_done:
            self.end(trace)
        return streams

    def begin(self, trace: StepTrace, llm: LLM) -> None:
        """Start a trace; one that comes while another runs ends at once."""
        if self._trace is not None:
            trace.end(RuntimeError("another trace runs"))
            return
        self._trace = trace
        trace.begin(llm)

    def end(self, trace: StepTrace, error: BaseException | None = None) -> None:
        """End a trace; nothing if it is not the one that runs."""
        if self._trace is trace:
            self._trace = None
            trace.end(error)

    def close(self, error: BaseException) -> None:
        """The engine ends for this reason."""
        if self._trace is not None:
            self.end(self._trace, error)
