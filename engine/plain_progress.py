"""Progress of a start-up that compiles, for standard errors that are no terminal.

Owns when a line is worth printing: a bar is redrawn, a line in a log stays. Data flow: as of
`decodegrid.capture.phases.Progress`, whose place it takes.
"""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from decodegrid.capture.phases import Progress

SECONDS_BETWEEN = 10.0
"""At most one line in so many seconds."""
COMPILING = "compile "
"""Start of what a compilation is described by."""


class PlainProgress(Progress):
    """A line at the first compilation and then at most every SECONDS_BETWEEN; none where nothing is
    compiled and start-up is over before.

    Args:
        total: compilations and captures to come.
        stream: where lines go; None is standard error.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(total)
        self._total, self._stream, self._now = total, stream, now
        self._begun = self._last = now()
        self._done = 0
        self._what = ""
        self._has_told = False

    def describe(self, what: str) -> None:
        """Take in what is being worked on."""
        self._what = what
        if not self._has_told and what.startswith(COMPILING):
            self._tell()
        else:
            self._tell_now_and_then()

    def advance(self) -> None:
        """Count one finished compilation or capture."""
        self._done += 1
        self._tell_now_and_then()

    def _tell_now_and_then(self) -> None:
        if self._now() - self._last >= SECONDS_BETWEEN:
            self._tell()

    def _tell(self) -> None:
        self._has_told, self._last = True, self._now()
        share = self._done / self._total if self._total else 1.0
        print(
            f"start-up: {self._done} of {self._total} ({share:.0%}) after "
            f"{self._last - self._begun:.0f} s, {self._what}",
            file=sys.stderr if self._stream is None else self._stream,
            flush=True,
        )


def make_progress(total: int) -> Progress:
    """A bar on a terminal, lines elsewhere."""
    return Progress(total) if sys.stderr.isatty() else PlainProgress(total)
