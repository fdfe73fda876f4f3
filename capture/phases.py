"""Where start-up time goes: named phases whose table sums to the wall clock, and a progress bar.

Owns the stop watch and the bar. Does not decide what a phase is. Data flow: loaders, the region
compiler and the capture driver open phases; the command line prints `PhaseClock.format`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

OTHER = "other"
"""Name of the line that holds wall-clock time inside no phase."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One line of the phase table."""

    name: str
    seconds: float
    """Time in this phase, without the phases opened inside it."""
    count: int
    """How often the phase was entered; 0 for the remainder line."""


class PhaseClock:
    """A stop watch over nested phases.

    A phase opened inside another one pauses the outer one, so each second is counted once and the
    table sums to the wall clock. Phases of one name add up.

    Args:
        now: a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._start = now()
        self._end: float | None = None
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._open: list[str] = []
        self._since = self._start

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as `name`.

        Raises:
            RuntimeError: the clock was stopped.
        """
        if self._end is not None:
            raise RuntimeError(f"phase {name!r} opened after the clock was stopped")
        self._settle()
        self._open.append(name)
        self._seconds.setdefault(name, 0.0)
        self._counts[name] = self._counts.get(name, 0) + 1
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def stop(self) -> None:
        """Freeze the wall clock; later calls change nothing.

        Raises:
            RuntimeError: a phase is still open.
        """
        if self._open:
            raise RuntimeError(f"phase {self._open[-1]!r} is still open")
        if self._end is None:
            self._end = self._now()

    @property
    def wall_seconds(self) -> float:
        """Seconds from construction to `stop`, or to now."""
        return (self._now() if self._end is None else self._end) - self._start

    @property
    def other_share(self) -> float:
        """Share of the wall clock spent in no phase, 0..1."""
        wall = self.wall_seconds
        return (wall - sum(self._seconds.values())) / wall if wall > 0 else 0.0

    def table(self) -> list[PhaseTime]:
        """The phases in order of first entry and the remainder; seconds sum to the wall clock.

        Raises:
            RuntimeError: a phase is still open.
        """
        if self._open:
            raise RuntimeError(f"phase {self._open[-1]!r} is still open")
        wall = self.wall_seconds
        lines = [PhaseTime(name, s, self._counts[name]) for name, s in self._seconds.items()]
        lines.append(PhaseTime(OTHER, wall - sum(self._seconds.values()), 0))
        return lines

    def format(self) -> str:
        """The table as text: phase, times entered, seconds, share of the wall clock."""
        lines = self.table()
        wall = sum(line.seconds for line in lines)
        width = max(len("wall clock"), *(len(line.name) for line in lines))
        rows = [f"{'phase':<{width}} {'count':>6} {'seconds':>9} {'share':>6}"]
        for line in [*lines, PhaseTime("wall clock", wall, 0)]:
            share = line.seconds / wall if wall > 0 else 0.0
            count = str(line.count) if line.count else ""
            rows.append(f"{line.name:<{width}} {count:>6} {line.seconds:>9.3f} {share:>6.1%}")
        return "\n".join(rows)

    def _settle(self) -> None:
        now = self._now()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


class Progress:
    """A bar with an estimate of the time left over compilations and captures, on standard error.

    Args:
        total: compilations and captures to come.
        forced: draw it even when standard error is not a terminal.
    """

    def __init__(self, total: int, forced: bool = False) -> None:
        hidden = not forced and not sys.stderr.isatty()
        self._bar = tqdm(
            total=total, file=sys.stderr, disable=hidden, unit="graph", leave=False, mininterval=0
        )

    def describe(self, what: str) -> None:
        """Show what is being worked on."""
        self._bar.set_description(what)

    def advance(self) -> None:
        """Count one finished compilation or capture."""
        self._bar.update(1)

    def close(self) -> None:
        """Remove the bar; safe to call twice."""
        self._bar.close()
