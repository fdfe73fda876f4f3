"""The capture driver, the counters against their plans, phases and progress."""

import contextlib
import types

import pytest
import torch

from decodegrid.capture.backend import capture_all
from decodegrid.capture.compile import RegionCompiler
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.cpu import CpuBackend
from decodegrid.capture.cuda import CudaBackend
from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import OTHER, PhaseClock, Progress


def make_grid(num_pairs):
    """A grid with exactly that many pairs."""
    max_num_reqs, num_draft_tokens = {9: (3, 2), 64: (8, 7), 257: (257, 0), 312: (52, 5)}[num_pairs]
    grid = build_grid(max_num_reqs, num_draft_tokens, num_reqs=range(1, max_num_reqs + 1))
    assert len(grid) == num_pairs
    return grid


def capture_stub(grid, variants=1):
    """Capture a stub step that adds one to a leading slice for every pair of a grid."""
    counters = CaptureCounters()
    compiler = RegionCompiler(CompileOptions("eager"), counters)

    def add(x):
        x.add_(1)

    region = compiler.region(add, {"x": (0,)}, variants=variants)
    buffer = torch.zeros(grid.largest_key.num_query_tokens + 1)
    graphs = capture_all(
        grid.capture_order(),
        CpuBackend(compiler),
        lambda key: lambda: region(buffer[: key.num_query_tokens + 1]),
        counters,
    )
    return compiler, counters, buffer, graphs


@pytest.mark.parametrize("num_pairs", [9, 64, 257, 312])
def test_counters_equal_plan_and_stay_still(num_pairs):
    grid = make_grid(num_pairs)
    compiler, counters, buffer, graphs = capture_stub(grid)
    compiler.freeze()
    counters.declare_ready()
    assert (counters.num_compilations, counters.planned_compilations) == (1, 1)
    assert (counters.num_captured, counters.planned_captures) == (num_pairs, num_pairs)
    assert list(graphs) == list(grid.capture_order())
    for key in grid.keys:
        buffer.zero_()
        graphs[key].replay()
        assert buffer.sum().item() == key.num_query_tokens + 1
    counters.check_still()
    assert counters.compilations_after_ready == counters.captures_after_ready == 0


def test_missing_compilation_fails_start_up():
    _, counters, _, _ = capture_stub(make_grid(9), variants=2)
    with pytest.raises(RuntimeError, match="add compiled or loaded 1 of 2"):
        counters.declare_ready()
    assert not counters.is_ready


def test_failed_capture_fails_start_up():
    counters = CaptureCounters()
    compiler = RegionCompiler(CompileOptions("none"), counters)
    with pytest.raises(ValueError, match="called no region"):
        capture_all([1, 2], CpuBackend(compiler), lambda key: lambda: None, counters)
    with pytest.raises(RuntimeError, match="captured 0 of 2 pairs"):
        counters.declare_ready()


def test_late_events_are_seen():
    compiler, counters, buffer, _ = capture_stub(make_grid(9))
    with pytest.raises(RuntimeError, match="not ready"):
        counters.check_still()
    counters.declare_ready()

    def add_late(x):
        x.add_(2)

    compiler.region(add_late, {})(buffer)
    assert counters.compilations_after_ready == 1
    with pytest.raises(RuntimeError, match="1 compilations and 0 captures"):
        counters.check_still()


class FakeTime:
    """A clock that moves when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_phases_sum_to_the_wall_clock():
    time = FakeTime()
    clock = PhaseClock(time)
    time.now += 1
    with clock.phase("capture"):
        time.now += 2
        with clock.phase("compile a"):
            time.now += 8
        time.now += 4
    with contextlib.suppress(KeyError), clock.phase("load"):
        time.now += 16
        raise KeyError
    with clock.phase("capture"):
        time.now += 32
        with pytest.raises(RuntimeError, match="'capture' is still open"):
            clock.table()
    time.now += 1
    clock.stop()
    time.now += 1000
    table = {line.name: (line.seconds, line.count) for line in clock.table()}
    assert table == {"capture": (38, 2), "compile a": (8, 1), "load": (16, 1), OTHER: (2, 0)}
    assert clock.wall_seconds == 64 and clock.other_share == 2 / 64
    assert "64.000 100.0%" in clock.format()
    with pytest.raises(RuntimeError, match="stopped"), clock.phase("late"):
        pass


def test_compile_and_capture_are_booked(capsys):
    clock, progress = PhaseClock(), Progress(total=3, forced=True)
    counters = CaptureCounters()
    compiler = RegionCompiler(CompileOptions("eager"), counters, clock, progress)

    def add(x):
        x.add_(1)

    region = compiler.region(add, {"x": (0,)})
    buffer = torch.zeros(8)
    capture_all(
        [4, 2],
        CpuBackend(compiler),
        lambda key: lambda: region(buffer[:key]),
        counters,
        clock,
        progress,
    )
    progress.close()
    lines = {line.name: line for line in clock.table()}
    assert lines["compile add"].count == 1 and lines["capture"].count == 2
    assert sum(line.seconds for line in lines.values()) == pytest.approx(
        clock.wall_seconds, rel=0.05
    )
    shown = capsys.readouterr().err
    assert "compile add" in shown and "3/3" in shown


def test_progress_is_silent_without_a_terminal(capsys):
    progress = Progress(total=1)
    progress.advance()
    progress.close()
    assert capsys.readouterr().err == ""


def test_cuda_back_end_needs_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="cuda:0 needs a CUDA device"):
        CudaBackend(torch.device("cuda:0"))


def test_cuda_capture_order(monkeypatch):
    """Against a stand-in for torch.cuda: warm-ups on the side stream, one stream and one pool for
    all."""
    log = []

    class Stream:
        def __init__(self, device=None):
            self.device = device

        def wait_stream(self, other):
            log.append("wait")

        def synchronize(self):
            log.append("synchronize")

    @contextlib.contextmanager
    def block(what):
        log.append(f"enter {what}")
        yield
        log.append(f"leave {what}")

    main = Stream()
    seen = []

    def graph(graph, pool, stream, capture_error_mode):
        seen.append((pool, stream, capture_error_mode))
        return block("capture")

    fakes = {
        "is_available": lambda: True,
        "Stream": Stream,
        "graph_pool_handle": object,
        "CUDAGraph": lambda keep_graph: types.SimpleNamespace(
            replay=lambda: log.append("replay"),
            instantiate=lambda: log.append(f"instantiate, kept: {keep_graph}"),
            raw_cuda_graph=lambda: 77,
        ),
        "current_stream": lambda device: main,
        "device": lambda device: block("device"),
        "stream": lambda stream: block("stream"),
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    backend = CudaBackend(torch.device("cuda:0"))
    graphs = [backend.capture(key, lambda: log.append("step")) for key in ("large", "small")]
    once = ["enter device", "wait", "enter stream", "step", "step", "leave stream", "synchronize"]
    once += ["enter capture", "step", "leave capture", "instantiate, kept: True"]
    once += ["wait", "leave device"]
    assert log == once * 2
    assert seen[0] == seen[1] and seen[0][2] == "thread_local"
    graphs[1].replay()
    assert log[-1] == "replay" and graphs[1].key == "small" and graphs[1].raw_graph == 77
