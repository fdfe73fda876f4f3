"""What start-up leaves for the ledger: its phases, the cost of each capture, and the graphs."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from decodegrid.capture.backend import CapturedGraph
from decodegrid.capture.grid import StepVariant
from decodegrid.capture.ledger_backend import CaptureCost
from decodegrid.capture.phases import PhaseTime
from decodegrid.engine.step_graphs import PrefillKey, StepGraphs, StepKey

GraphKind = Literal["fused", "rich", "prefill", "prompt logprobs"]


@dataclass(frozen=True, slots=True)
class NamedGraph:
    """One line of the ledger: a key and what is replayed for it, in order."""

    kind: GraphKind
    key: StepKey | PrefillKey
    graphs: tuple[CapturedGraph, ...]


@dataclass(frozen=True, slots=True)
class StartUp:
    """Facts of one start-up; the engine's own graphs, so that a reader can look into them."""

    phases: tuple[PhaseTime, ...]
    costs: Mapping[Hashable, CaptureCost]
    """By the keys of `named_graphs`."""
    graphs: StepGraphs

    def named_graphs(self) -> Iterator[NamedGraph]:
        """Every captured graph: prefill sizes and pairs, the largest first."""
        graphs = self.graphs
        for size in sorted(graphs.prefill, reverse=True):
            yield NamedGraph("prefill", PrefillKey(size), (graphs.prefill[size],))
        for pair, graph in graphs.fused.items():
            yield NamedGraph("fused", StepKey(pair, StepVariant.FUSED), (graph,))
        for size in sorted(graphs.prompt_reports, reverse=True):
            report = PrefillKey(size, StepVariant.RICH)
            yield NamedGraph("prompt logprobs", report, (graphs.prompt_reports[size],))
        for pair, cut in graphs.rich.items():
            key = StepKey(pair, StepVariant.RICH)
            yield NamedGraph("rich", key, (cut.first, cut.second))
