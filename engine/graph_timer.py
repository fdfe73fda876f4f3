"""Times the replays of captured graphs without waiting for them.

Owns the choice of clock: on the CPU a replay runs in the host's thread and the host's clock times
it; on another device events around it do, which are read once the step's results are there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch


@dataclass(frozen=True, slots=True)
class GraphTime:
    """One replay's time."""

    host_s: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None

    def seconds(self) -> float:
        """Of the device; to be asked when the replay is known to be over."""
        if self.events is None:
            return self.host_s
        first, last = self.events
        return first.elapsed_time(last) * 1e-3


class GraphTimer:
    """Runs replays on one device."""

    __slots__ = ("_on_host",)

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"

    def run(self, replay: Callable[[], None]) -> GraphTime:
        """Start a replay, and on the CPU finish it."""
        if self._on_host:
            began = perf_counter()
            replay()
            return GraphTime(perf_counter() - began, None)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        replay()
        last.record()
        return GraphTime(0.0, (first, last))
