"""What a capture costs, with a clock and a memory that the test drives."""

from collections.abc import Iterator

import pytest
import torch

from decodegrid.capture import ledger_backend
from decodegrid.capture.backend import CapturedGraph, Step, capture_cut
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.ledger_backend import (
    CaptureCost,
    MeasuringBackend,
    MemoryUse,
    RegionClock,
    memory_use,
)
from decodegrid.capture.phases import PhaseClock


class Time:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    time = Time()
    monkeypatch.setattr(ledger_backend, "perf_counter", time)
    yield time


class Plain:
    """A back end that runs the step and captures nothing."""

    def __init__(self) -> None:
        self.keys: list[object] = []

    def capture(self, key: object, step: Step) -> CapturedGraph:
        self.keys.append(key)
        step()
        return f"graph of {key}"  # type: ignore[return-value]  # nothing looks into it


def test_seconds_are_those_of_the_capture_alone(time: Time) -> None:
    """Regions compiled and loaded on the way are booked elsewhere; both halves count together."""
    clock = PhaseClock(time)
    regions = RegionClock(clock)
    backend = MeasuringBackend(Plain(), regions, lambda: MemoryUse(0, 0))

    def first() -> None:
        time.work(2.0)
        with regions.phase("compile moe"):
            time.work(100.0)
        with regions.phase("load regions"):
            time.work(10.0)

    with clock.phase("other work"), regions.phase("compile tap"):
        time.work(1000.0)
    graphs = capture_cut(
        ["a", "b"],
        backend,
        lambda key: (first, lambda: time.work(3.0 if key == "a" else 4.0)),
        CaptureCounters(),
        clock,
    )
    assert {key: cut.second for key, cut in graphs.items()} == {
        "a": "graph of a",
        "b": "graph of b",
    }
    assert backend.costs == {"a": CaptureCost(5.0), "b": CaptureCost(6.0)}
    assert list(backend.costs) == ["a", "b"]
    clock.stop()
    booked = {line.name: (line.seconds, line.count) for line in clock.table()}
    assert booked["capture"] == (11.0, 2)
    assert booked["compile moe"] == (200.0, 2) and booked["load regions"] == (20.0, 2)
    assert booked["compile tap"] == (1000.0, 1)
    assert regions.seconds == 1220.0


def test_memory_in_the_pool_and_beside_it() -> None:
    use = [0, 0]
    backend = MeasuringBackend(Plain(), RegionClock(PhaseClock()), lambda: MemoryUse(*use))

    def grow(pool: int, total: int) -> None:
        use[0] += pool
        use[1] += total

    backend.capture("large", lambda: grow(600, 1000))
    backend.capture("small", lambda: grow(0, 50))
    backend.capture("freed", lambda: grow(-100, -300))
    found = {key: (cost.pool_bytes, cost.unseen_bytes) for key, cost in backend.costs.items()}
    assert found == {"large": (600, 400), "small": (0, 50), "freed": (0, 0)}


def test_the_process_is_seen_to_grow() -> None:
    before = memory_use(torch.device("cpu"))
    block = torch.ones(16 * 2**20)
    after = memory_use(torch.device("cpu"))
    assert before.pool == after.pool == 0
    assert after.total - before.total > block.nbytes // 2
