"""Every graph that a runner replays: what is captured, under which key, in which order.

Owns the table of captured steps and the way to fill it. Fused steps are one graph a pair; the rich
variant of a pair is two, cut after the logits, and counts as one capture. Prefill has one graph a
chunk size, and with the rich variant one more that reports log-probabilities of the chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from decodegrid.capture.backend import (
    CaptureBackend,
    CapturedGraph,
    CutGraph,
    Step,
    capture_all,
    capture_cut,
)
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.grid import GraphKey, Grid, StepVariant
from decodegrid.capture.phases import PhaseClock, Progress
from decodegrid.graphs.decode_step import choice_half, decode_step, forward_half
from decodegrid.graphs.prefill_step import prefill_step, report_prompt
from decodegrid.graphs.regions import RegionTable
from decodegrid.graphs.step_buffers import StepBuffers
from decodegrid.graphs.target_step import StepModel


@dataclass(frozen=True, slots=True)
class PrefillKey:
    """A captured prefill chunk of up to `num_tokens` tokens."""

    num_tokens: int
    variant: StepVariant = StepVariant.FUSED
    """RICH is the report behind the chunk."""

    def __str__(self) -> str:
        what = "prefill" if self.variant is StepVariant.FUSED else "prompt logprobs"
        return f"{what} {self.num_tokens}"


@dataclass(frozen=True, slots=True)
class StepKey:
    """A captured decode step: a pair and a variant of it."""

    pair: GraphKey
    variant: StepVariant

    @property
    def sizes(self) -> tuple[int, int]:
        """Requests and query tokens."""
        return self.pair.num_reqs, self.pair.num_query_tokens

    def __str__(self) -> str:
        return f"{self.pair} {self.variant}"


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Captured graphs by what they are for."""

    fused: Mapping[GraphKey, CapturedGraph]
    prefill: Mapping[int, CapturedGraph]
    """By chunk size."""
    rich: Mapping[GraphKey, CutGraph] = field(default_factory=dict)
    """Empty, or the pairs of `fused`."""
    prompt_reports: Mapping[int, CapturedGraph] = field(default_factory=dict)
    """Empty, or the sizes of `prefill`."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """What steps are made of."""

    regions: RegionTable
    model: StepModel
    buffers: StepBuffers
    draft_temperatures: Tensor
    """(K,) divisors of the confidence logits."""

    def prefill(self, key: PrefillKey) -> Step:
        """A chunk, or the report behind it."""
        step = prefill_step if key.variant is StepVariant.FUSED else report_prompt
        return lambda: step(self.regions, self.model, self.buffers, key.num_tokens)

    def fused(self, key: StepKey) -> Step:
        """The whole step of a pair."""
        parts, sizes = (self.regions, self.model, self.buffers), key.sizes
        return lambda: decode_step(*parts, self.draft_temperatures, *sizes)

    def rich(self, key: StepKey) -> tuple[Step, Step]:
        """The two halves of a pair's rich step."""
        parts, sizes = (self.regions, self.model, self.buffers), key.sizes
        return (
            lambda: forward_half(*parts, *sizes),
            lambda: choice_half(*parts, self.draft_temperatures, *sizes),
        )


def num_graphs(grid: Grid, num_prefill_sizes: int, *, rich: bool) -> int:
    """The planned number of captures: pairs and prefill sizes, in one variant or two."""
    return (len(grid) + num_prefill_sizes) * (2 if rich else 1)


def capture_graphs(
    parts: StepParts,
    grid: Grid,
    prefill_sizes: tuple[int, ...],
    backend: CaptureBackend,
    counters: CaptureCounters,
    clock: PhaseClock | None = None,
    progress: Progress | None = None,
) -> StepGraphs:
    """Capture every prefill size and every pair of the grid in each variant, largest first.

    Rows stay at slot 0 meanwhile, so that capture writes null rows only.
    """
    shown = counters, clock, progress
    sizes, pairs = sorted(prefill_sizes, reverse=True), grid.capture_order()

    def prefill_keys(variant: StepVariant) -> list[PrefillKey]:
        return [PrefillKey(size, variant) for size in sizes]

    def step_keys(variant: StepVariant) -> list[StepKey]:
        return [StepKey(pair, variant) for pair in pairs]

    prefill = capture_all(prefill_keys(StepVariant.FUSED), backend, parts.prefill, *shown)
    fused = capture_all(step_keys(StepVariant.FUSED), backend, parts.fused, *shown)
    reports: dict[PrefillKey, CapturedGraph] = {}
    rich: dict[StepKey, CutGraph] = {}
    if parts.model.state.capacity.rich:
        reports = capture_all(prefill_keys(StepVariant.RICH), backend, parts.prefill, *shown)
        rich = capture_cut(step_keys(StepVariant.RICH), backend, parts.rich, *shown)
    return StepGraphs(
        {key.pair: graph for key, graph in fused.items()},
        {key.num_tokens: graph for key, graph in prefill.items()},
        {key.pair: graph for key, graph in rich.items()},
        {key.num_tokens: graph for key, graph in reports.items()},
    )
