"""What each capture costs: seconds without the compilation in it, and the memory that it adds.

Owns the measurement around another back end's captures. Captures nothing itself. Data flow: start-
up puts a `MeasuringBackend` around the device's back end and a `RegionClock` between the region
compiler and the start-up's clock; the ledger reads `MeasuringBackend.costs`.
"""

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from decodegrid.capture.backend import CaptureBackend, CapturedGraph, Step
from decodegrid.capture.phases import PhaseClock

_STATM = Path("/proc/self/statm")


class MemoryUse(NamedTuple):
    """Bytes in use at a moment."""

    pool: int
    """In torch's allocator, free blocks of its pools included; 0 on the CPU, where it has none."""
    total: int
    """Of the process in memory (CPU), or of the card (CUDA)."""


@dataclass(slots=True)
class CaptureCost:
    """What the capture of one key took; both halves of a step that is cut together."""

    seconds: float = 0.0
    """Without the regions that were compiled or loaded on the way."""
    pool_bytes: int = 0
    """Growth of the allocator's pool."""
    unseen_bytes: int = 0
    """Growth beside it."""


class RegionClock(PhaseClock):
    """Books its phases into another clock and adds their seconds up.

    The phases must not be nested in each other, as those of the region compiler are not.
    """

    def __init__(self, clock: PhaseClock) -> None:
        super().__init__()
        self._into = clock
        self.seconds = 0.0
        """In all phases so far."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as `name`, in the other clock."""
        with self._into.phase(name):
            began = perf_counter()
            try:
                yield
            finally:
                self.seconds += perf_counter() - began


class MeasuringBackend:
    """Captures through another back end and keeps what that cost.

    Args:
        regions: the clock of the compiler whose regions the steps call.
        memory: bytes in use now.
    """

    def __init__(
        self, backend: CaptureBackend, regions: RegionClock, memory: Callable[[], MemoryUse]
    ) -> None:
        self._backend = backend
        self._regions = regions
        self._memory = memory
        self.costs: dict[Hashable, CaptureCost] = {}
        """By key, in the order of the captures."""

    def capture(self, key: Hashable, step: Step) -> CapturedGraph:
        """As the other back end does."""
        before, region_s = self._memory(), self._regions.seconds
        began = perf_counter()
        graph = self._backend.capture(key, step)
        seconds = perf_counter() - began
        after = self._memory()
        cost = self.costs.setdefault(key, CaptureCost())
        cost.seconds += max(0.0, seconds - (self._regions.seconds - region_s))
        grown = after.pool - before.pool
        cost.pool_bytes += max(0, grown)
        cost.unseen_bytes += max(0, after.total - before.total - grown)
        return graph


def memory_use(device: torch.device) -> MemoryUse:
    """Bytes in use now; a total of 0 where the system does not tell."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryUse(torch.cuda.memory_reserved(device), total - free)
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        return MemoryUse(0, 0)
    return MemoryUse(0, pages * os.sysconf("SC_PAGE_SIZE"))
