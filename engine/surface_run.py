"""The step-time surface of a runner: taken from the cache, or measured on its captured graphs.

Owns what the slots hold while a pair is measured, and the policy that a deployment asks for. Data
flow: a ready runner -> replays of every pair on made-up rows -> Surface, kept in the cache
directory -> VerifyBudget -> ScheduledVerify. Only fused steps are measured; a rich step costs more
by what its rows ask for. Slot rows are put back afterwards; pool and rings keep
what was written, which no request reads before it has written it.
"""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from decodegrid.capture.budget import VerifyBudget
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.surface import (
    StepProbe,
    Surface,
    SurfaceError,
    measure_surface,
    measure_twice,
)
from decodegrid.capture.surface_store import SurfaceStore
from decodegrid.capture.total_scan import MakeScan, NumpyScan
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.package_surface import packaged_surface
from decodegrid.engine.runner import Runner
from decodegrid.engine.verify_policy import FixedVerify, ScheduledVerify, VerifyPolicy
from decodegrid.graphs.state import SlotState
from decodegrid.kernels.native import loaded_library
from decodegrid.kernels.total_scan import native_scan

TEMPERATURE = 0.7
"""Rows draw their tokens while a pair is measured: noise costs time, and greedy rows have none."""


def surface_facts(runner: Runner) -> dict[str, str]:
    """What the times depend on: the captured code, and the machine."""
    return {**runner.facts, **machine_facts(runner.model.state.slots.last_token.device)}


def machine_facts(device: torch.device) -> dict[str, str]:
    """What the times depend on beside the captured code."""
    return {"processor": _processor(device), "cores": str(os.cpu_count())}


def _processor(device: torch.device) -> str:
    """Name of the device that runs the steps, as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "")


class SurfaceRun:
    """Made-up rows in the slots of an idle runner; restores the slots at the end.

    Args:
        context_len: tokens in each row's context, at least 1 and with room for a step.
    """

    def __init__(self, runner: Runner, context_len: int) -> None:
        self.runner = runner
        self.context_len = context_len
        self._generator = torch.Generator().manual_seed(0)
        slots = runner.model.state.slots
        self._saved = {name: getattr(slots, name).clone() for name in SlotState.__slots__}

    def prepare(self, key: GraphKey) -> None:
        """Fill slots 1 to B with rows whose drafts add up to the pair's query tokens."""
        runner, count = self.runner, key.num_reqs
        slots, rows = runner.model.state.slots, slice(1, count + 1)
        vocab, drafts = runner.vocab_size, runner.num_draft_tokens
        # Tokens differ between rows, so that they go to different experts.
        slots.last_token[rows] = self._ids(vocab, count)
        slots.history[rows] = self._ids(vocab, count, 3)
        slots.drafts[rows] = self._ids(vocab, *slots.drafts[rows].shape)
        slots.seq_len[rows] = self.context_len
        slots.max_seq_len[rows] = runner.max_model_len
        slots.num_drafts[rows] = drafts
        slots.confidence[rows] = 1.0
        slots.temperature[rows] = TEMPERATURE
        slots.seed[rows] = torch.arange(count, device=slots.seed.device)
        slots.stop_token_ids[rows] = -1
        slots.block_table[rows] = 0
        needed = -(-(self.context_len + drafts + 1) // runner.block_size)
        blocks = torch.arange(count * needed).remainder(runner.num_blocks - 1) + 1
        slots.block_table[rows, :needed] = blocks.view(count, needed).to(slots.seed.device)
        runner.write_step(key, range(1, count + 1), key.num_query_tokens)

    def run(self, key: GraphKey) -> None:
        """Replay the pair."""
        self.runner.decode_graphs[key].replay()

    def restore(self) -> None:
        """Give the slots back what they held."""
        slots = self.runner.model.state.slots
        for name, saved in self._saved.items():
            getattr(slots, name).copy_(saved)

    def _ids(self, vocab: int, *shape: int) -> torch.Tensor:
        ids = torch.randint(vocab, shape, generator=self._generator)
        return ids.to(self.runner.model.state.slots.last_token.device)


def longest_context(runner: Runner) -> int:
    """Tokens of context that leave room for a step."""
    return runner.max_model_len - runner.num_draft_tokens - 1


def context_for(runner: Runner, loaded: LoadedConfig) -> int:
    """The deployment's context for the surface, as long as it leaves room for a step."""
    return min(loaded.config.surface.context_len, longest_context(runner))


def measure(runner: Runner, context_len: int, repeats: int) -> Surface:
    """Measure every captured pair of a runner without started slots.

    Raises ValueError for a context that leaves no room for a step.
    """
    with _probe(runner, context_len) as probe:
        return measure_surface(
            runner.grid.keys,
            probe,
            context_len=context_len,
            facts=surface_facts(runner),
            repeats=repeats,
        )


def measure_in_turns(runner: Runner, context_len: int, repeats: int) -> tuple[Surface, Surface]:
    """Two measurements whose rounds take turns; as `measure` otherwise."""
    with _probe(runner, context_len) as probe:
        return measure_twice(
            runner.grid.keys,
            probe,
            context_len=context_len,
            facts=surface_facts(runner),
            repeats=repeats,
        )


@contextmanager
def _probe(runner: Runner, context_len: int) -> Iterator[StepProbe]:
    """Replays on made-up rows, which are gone afterwards."""
    most = longest_context(runner)
    if not 1 <= context_len <= most:
        raise ValueError(f"the surface's context is {context_len} tokens; allowed are 1..{most}")
    device = runner.model.state.slots.last_token.device
    work = SurfaceRun(runner, context_len)
    wait = torch.cuda.synchronize if device.type == "cuda" else None
    try:
        with torch.no_grad():
            yield StepProbe(work.run, work.prepare, wait)
    finally:
        work.restore()


def obtain_surface(runner: Runner, loaded: LoadedConfig) -> tuple[Surface | None, str]:
    """A surface that fits the deployment, and where it came from; a new one is saved.

    None where `surface.repeats` is 0 and none is kept.

    Raises ValueError for a context that leaves no room for a step.
    """
    settings = loaded.config.surface
    store = SurfaceStore(loaded.cache_dir)
    context_len, now = context_for(runner, loaded), time.time()
    packaged, lacking = packaged_surface(
        runner.source, runner.grid.keys, context_len, surface_facts(runner), now
    )
    if packaged is not None:
        return packaged, f"of the package, measured {packaged.age(now):.0f} s ago"
    surface, reason = store.load(
        runner.grid.keys,
        context_len=context_len,
        facts=surface_facts(runner),
        max_age_s=settings.max_age_s,
        now=now,
    )
    if surface is not None:
        return surface, f"measured {surface.age(now):.0f} s ago"
    reason = "; ".join(filter(None, (lacking, reason)))
    if not settings.repeats:
        return None, f"surface.repeats is 0; {reason}"
    surface = measure(runner, context_len, settings.repeats)
    try:
        store.save(surface)
    except SurfaceError as error:
        return surface, f"measured at this start and not kept: {error}"
    return surface, f"measured at this start: {reason}"


def fastest_scan() -> MakeScan:
    """The compiled walk over the rates where the native kernels are in use, or the NumPy one."""
    library = loaded_library()
    if library is None:
        return NumpyScan
    make = native_scan(library)
    return lambda memory: make(*memory)


def make_policy(runner: Runner, loaded: LoadedConfig) -> VerifyPolicy:
    """The policy that `speculation.verify_tokens` asks for."""
    settings = loaded.config.speculation
    if settings.verify_tokens == "all" or runner.num_draft_tokens == 0:
        return FixedVerify()
    if settings.verify_tokens != "scheduled":
        return FixedVerify(settings.verify_tokens)
    surface, note = obtain_surface(runner, loaded)
    if surface is not None:
        runner.grid = runner.grid.with_cost(surface.selection_cost)
    scan = fastest_scan()
    budget = VerifyBudget(runner.grid, surface, runner.num_draft_tokens, scan)
    return ScheduledVerify(
        budget,
        runner.max_num_reqs + 1,
        fresh_rates=settings.budget_rates == "fresh",
        note=note,
    )
