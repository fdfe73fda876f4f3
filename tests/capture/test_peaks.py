"""The roofline's two measurements, with a clock that the test drives."""

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from decodegrid.capture import peaks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each look at it is half a second after the last."""
    ticks = count()
    monkeypatch.setattr(peaks, "perf_counter", lambda: next(ticks) * 0.5)
    monkeypatch.setattr(peaks, "BUFFER_BYTES", 2**20)
    monkeypatch.setattr(peaks, "MATRIX_SIZE", 32)
    yield


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaks_are_work_over_time(dtype: torch.dtype) -> None:
    found = peaks.measure_peaks(torch.device("cpu"), dtype)
    assert found.read_bytes_per_s == 2**20 / 0.5
    assert found.flops_per_s == 2 * 32**3 / 0.5
    assert found.num_threads == torch.get_num_threads()


def test_the_best_repeat_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 3.0, 10.0, 11.0, 20.0, 25.0, 30.0, 32.0])
    monkeypatch.setattr(peaks, "perf_counter", lambda: next(times))
    calls = []
    assert peaks._best_seconds(lambda: calls.append(1), torch.device("cpu")) == 1.0
    assert len(calls) == 1 + peaks.REPEATS
