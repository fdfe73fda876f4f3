"""The small interface that every device back end has, and the driver that captures a grid through
it.

Owns the names `CapturedGraph` and `CaptureBackend`, steps that are cut in two, the order of
captures, and their count, phase and progress. Does not own a device's way to capture. Data flow: a
grid, a back end and a maker of steps go in, a look-up table from keys to captured graphs comes out.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.phases import PhaseClock, Progress

Step = Callable[[], None]
"""A step bound to its static buffers: no arguments, no result, no host decision that a replay may
change."""


class CapturedGraph(Protocol):
    """One captured step."""

    @property
    def key(self) -> Hashable:
        """What the graph was captured for."""
        ...

    @property
    def num_nodes(self) -> int:
        """Entries of the captured program; 0 where the device does not tell."""
        ...

    def replay(self) -> None:
        """Run the captured step on what its static buffers hold now."""
        ...


class CaptureBackend(Protocol):
    """A device's way to capture steps."""

    def capture(self, key: Hashable, step: Step) -> CapturedGraph:
        """Run the step and capture it; what it writes is really written, unless the back end knows
        the step's code beforehand and has nothing to run.

        Raises:
            ValueError: the step does something that a replay would not repeat.
        """
        ...


@dataclass(frozen=True, slots=True)
class CutGraph:
    """A captured step that the host cuts in two: it does something between the halves."""

    key: Hashable
    first: CapturedGraph
    second: CapturedGraph


Key = TypeVar("Key", bound=Hashable)
Graph = TypeVar("Graph")


def capture_all(
    keys: Sequence[Key],
    backend: CaptureBackend,
    make_step: Callable[[Key], Step],
    counters: CaptureCounters,
    clock: PhaseClock | None = None,
    progress: Progress | None = None,
) -> dict[Key, CapturedGraph]:
    """Capture one graph per key, in the order given, and count them against the plan.

    Args:
        keys: largest first (`Grid.capture_order`), so that a shared pool never has to grow.
        backend: the device's back end.
        make_step: binds the step function to the static buffers of a key.
        counters: gets len(keys) planned captures and one capture per key.
        clock: books the phase "capture"; None books nothing.
        progress: advanced once per key; None shows nothing.

    Returns:
        Captured graphs by key.
    """

    def capture(key: Key) -> CapturedGraph:
        return backend.capture(key, make_step(key))

    return _capture_each(keys, capture, counters, clock, progress)


def capture_cut(
    keys: Sequence[Key],
    backend: CaptureBackend,
    make_steps: Callable[[Key], tuple[Step, Step]],
    counters: CaptureCounters,
    clock: PhaseClock | None = None,
    progress: Progress | None = None,
) -> dict[Key, CutGraph]:
    """`capture_all` for steps in two halves, which run in order; a key counts once."""

    def capture(key: Key) -> CutGraph:
        first, second = make_steps(key)
        return CutGraph(key, backend.capture(key, first), backend.capture(key, second))

    return _capture_each(keys, capture, counters, clock, progress)


def _capture_each(
    keys: Sequence[Key],
    capture: Callable[[Key], Graph],
    counters: CaptureCounters,
    clock: PhaseClock | None,
    progress: Progress | None,
) -> dict[Key, Graph]:
    counters.planned_captures += len(keys)
    graphs: dict[Key, Graph] = {}
    for key in keys:
        if progress is not None:
            progress.describe(f"capture {key}")
        with nullcontext() if clock is None else clock.phase("capture"):
            graphs[key] = capture(key)
        counters.num_captured += 1
        if progress is not None:
            progress.advance()
    return graphs
