"""The benchmark of overlapping steps: what it counts, on a runner whose times are known."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.async_period import BATCH, Period, _summary, run_batch


class Clockwork:
    """A stream table whose request emits in every step; its graphs take 2 s of a clock of calls."""

    def __init__(self, num_steps: int, num_full: int) -> None:
        self.num_left, self.num_full = num_steps, num_full
        self.stats = SimpleNamespace(
            num_query_tokens=0, num_late_query_tokens=0, graph_seconds=0.0, num_decode_steps=0
        )
        self.scheduler = SimpleNamespace(running=[])
        self.stream_table = self
        self.discarded: list[Any] = []

    def build(self, prompt: tuple[int, ...], params: Any, *, index: int) -> Any:
        output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1, 2))])
        stream = SimpleNamespace(index=index, is_finished=False, output=lambda: output)
        return stream

    def open(self, streams: list[Any]) -> None:
        self.streams = streams

    def step(self) -> list[Any]:
        self.num_left -= 1
        full = self.num_left < self.num_full
        self.scheduler.running = [0] * (2 if full else 1)
        self.stats.num_decode_steps += 1
        self.stats.graph_seconds += 2.0
        self.stats.num_query_tokens += 10
        self.stats.num_late_query_tokens += not self.num_left
        for stream in self.streams:
            stream.is_finished = not self.num_left
        return self.streams

    def discard(self, streams: list[Any]) -> None:
        self.discarded += streams


def test_only_steps_with_all_rows_count() -> None:
    """Of ten steps the last four have both rows, and of those the first began with one."""
    llm: Any = Clockwork(10, 4)
    run = run_batch(llm, [(1, 2), (3,)], 8)
    assert run.num_steps == 3 and run.graph_s == 2.0
    assert run.late_share == 1 / 100
    assert run.period_s > 0 and run.first_token_s > 0 and len(llm.discarded) == 2
    with pytest.raises(ValueError, match="no step had all 2 rows"):
        run_batch(llm=Clockwork(3, 0), prompts=[(1, 2), (3,)], max_tokens=8)  # type: ignore[arg-type]


def test_ratios_are_of_one_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    ids = tuple((i,) for i in range(BATCH))
    on = [Period(1.1, 1.0, 5, 10.0, 0.5, 0.0, ids), Period(4.4, 4.0, 5, 5.0, 0.5, 0.0, ids)]
    off = [Period(1.3, 1.0, 5, 8.0, 0.5, 0.0, ids)]
    off.append(Period(5.2, 4.0, 5, 4.0, 0.5, 0.0, ((9,), *ids[1:])))
    found = _summary({"on": on, "off": off})
    assert found["on"]["period_over_graph"]["median"] == pytest.approx(1.1)
    assert found["off"]["period_over_graph"]["max"] == pytest.approx(1.3)
    assert found["on_over_off_tokens_per_s"]["median"] == pytest.approx(1.25)
    assert found["same_output_share"] == 15 / 16
    assert "goal for period over graph, on: 1.15; met" in capsys.readouterr().out
