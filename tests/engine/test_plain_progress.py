"""Lines of progress on a standard error that is no terminal."""

import io
import sys

import pytest

from decodegrid.capture.phases import Progress
from decodegrid.engine.plain_progress import PlainProgress, make_progress


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_start_up_that_compiles() -> None:
    """The first compilation is told at once, then a line in ten seconds."""
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(20, stream, clock)
    for index in range(10):
        progress.describe(f"compile region{index}")
        clock.seconds += 4.0
        progress.advance()
    progress.close()
    assert stream.getvalue().splitlines() == [
        "start-up: 0 of 20 (0%) after 0 s, compile region0",
        "start-up: 3 of 20 (15%) after 12 s, compile region2",
        "start-up: 6 of 20 (30%) after 24 s, compile region5",
        "start-up: 9 of 20 (45%) after 36 s, compile region8",
    ]


def test_a_start_up_from_the_cache_says_nothing_while_it_is_quick() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(3, stream, clock)
    for _ in range(2):
        progress.describe("capture (1, 1) fused")
        clock.seconds += 4.0
        progress.advance()
    assert stream.getvalue() == ""
    clock.seconds += 4.0
    progress.advance()
    assert stream.getvalue() == "start-up: 3 of 3 (100%) after 12 s, capture (1, 1) fused\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    progress = make_progress(4)
    assert type(progress) is (Progress if is_terminal else PlainProgress)
    progress.describe("compile x")
    progress.close()
    assert stream.getvalue().startswith("start-up: 0 of 4") is not is_terminal
