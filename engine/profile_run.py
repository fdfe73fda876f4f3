"""Measures a ready runner for its profile: steps at several contexts, prefill, both variants.

Owns what is measured on which rows. Slot rows are put back afterwards; pools and rings keep what
was written, which no request reads before it has written it. Data flow: idle runner -> `Measured`
-> `decodegrid.engine.ledger`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from time import perf_counter

import numpy as np
import torch

from decodegrid.capture.grid import GraphKey
from decodegrid.capture.peaks import measure_peaks
from decodegrid.capture.profile_document import PrefillTime
from decodegrid.capture.surface import StepProbe, Surface, measure_surface
from decodegrid.engine.ledger import Measured
from decodegrid.engine.runner import Runner
from decodegrid.engine.surface_run import SurfaceRun, measure, surface_facts

SLOT = 1
"""The slot that chunks are measured in."""


def measure_runner(runner: Runner, context_lens: Sequence[int], repeats: int) -> Measured:
    """Everything but a live run, on a runner without started slots.

    context_lens: at least one, each with room for a step; the first is the one that the graphs are
    compared at. Raises ValueError for a context without room.
    """
    surfaces = tuple(measure(runner, context, repeats) for context in context_lens)
    rich = measure_rich(runner, context_lens[0], repeats) if runner.rich_graphs else None
    prefill, reports = measure_prefill(runner, context_lens, repeats)
    device = _device(runner)
    dtype = torch.float32 if device.type == "cpu" else runner.model.weights.embed.dtype
    return Measured(surfaces, prefill, rich, reports, measure_peaks(device, dtype))


def measure_rich(runner: Runner, context_len: int, repeats: int) -> Surface:
    """Times of the rich variant, both halves, over rows that ask for nothing of it."""
    work = SurfaceRun(runner, context_len)

    def run(key: GraphKey) -> None:
        graph = runner.rich_graphs[key]
        graph.first.replay()
        graph.second.replay()

    try:
        with torch.no_grad():
            return measure_surface(
                runner.grid.keys,
                StepProbe(run, work.prepare, _waiter(runner)),
                context_len=context_len,
                facts=surface_facts(runner),
                repeats=repeats,
            )
    finally:
        work.restore()


def measure_prefill(
    runner: Runner, context_lens: Sequence[int], repeats: int
) -> tuple[tuple[PrefillTime, ...], tuple[PrefillTime, ...]]:
    """Times of every chunk size, full of tokens, behind each context and behind none.

    A context that leaves no room for the chunk is cut to what does. Returns the chunks', by size
    and in the order of the contexts, and those of the reports of log-probabilities, one a size.
    """
    assert runner.start_up is not None
    slots = SurfaceRun(runner, 1)  # holds what the slots held
    reports = runner.start_up.graphs.prompt_reports
    samples: dict[tuple[int, int], list[float]] = {}
    report_samples: dict[int, list[float]] = {}
    wait, rng = _waiter(runner) or (lambda: None), Random(0)
    try:
        for turn in range(1 + repeats):  # the first is not counted
            for size, start in _chunks(runner, context_lens):
                ms = _timed(_chunk(runner, size, start, rng), wait)
                report = reports.get(size)
                report_ms = 0.0 if report is None else _timed(report.replay, wait)
                if turn == 0:
                    continue
                samples.setdefault((size, start), []).append(ms)
                if report is not None:
                    report_samples.setdefault(size, []).append(report_ms)
    finally:
        slots.restore()
    return (
        tuple(_time_of(size, start, ms) for (size, start), ms in samples.items()),
        tuple(_time_of(size, 0, ms) for size, ms in report_samples.items()),
    )


def _chunks(runner: Runner, context_lens: Sequence[int]) -> list[tuple[int, int]]:
    """(tokens, tokens before them) of every chunk, without repeats."""
    found: dict[tuple[int, int], None] = {}
    for size in runner.prefill_chunk_sizes:
        room = runner.max_model_len - 1 - size
        for context in (*context_lens, 0):
            found[size, max(0, min(context, room))] = None
    return list(found)


def _chunk(runner: Runner, size: int, start: int, rng: Random) -> Callable[[], object]:
    """The call that prefills a full chunk of random tokens, or one as long as a text can be."""
    count = min(size, runner.max_model_len - start)
    needed = -(-(start + count) // runner.block_size)
    blocks = [index % (runner.num_blocks - 1) + 1 for index in range(needed)]
    tokens = [rng.randrange(runner.vocab_size) for _ in range(count)]
    if runner.keep_tokens:
        runner.bound_prefill(max(0, start + count + 1 - runner.keep_tokens))
    return partial(runner.prefill, SLOT, tokens, start, (-1, -1, -1), blocks)


def _timed(call: Callable[[], object], wait: Callable[[], None]) -> float:
    """Milliseconds of a call, until the device is done."""
    wait()
    began = perf_counter()
    with torch.no_grad():
        call()
    wait()
    return (perf_counter() - began) * 1e3


def _time_of(size: int, context: int, ms: list[float]) -> PrefillTime:
    return PrefillTime(
        num_tokens=size,
        context_len=context,
        median_ms=float(np.median(ms)),
        low_ms=min(ms),
        high_ms=max(ms),
        repeats=len(ms),
    )


def _device(runner: Runner) -> torch.device:
    return runner.model.state.slots.last_token.device


def _waiter(runner: Runner) -> Callable[[], None] | None:
    """What waits for the device; None on the CPU, which is never behind."""
    return torch.cuda.synchronize if _device(runner).type == "cuda" else None
