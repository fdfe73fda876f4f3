"""What proofs found, as values and as a table.

Owns the words. Data flow: engine/proofs.py fills a ProofReport; commands print `format` and take
their exit status from `ok`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphProof:
    """The two proofs of one captured graph."""

    graph: str
    max_difference: float
    """Largest difference to the eager step in the last draw, as a share of max(1, largest value of
    the tensor); 0 where every bit of every number agrees."""
    where: str
    """The tensor that has it; empty where nothing differs."""
    near_ties: int
    """Rows, over all draws, that rounding decided otherwise."""
    draws: int
    """Draws of random inputs that were needed."""
    unequal: str | None
    """Why it is not the eager step; None for a graph that is."""
    not_inert: str | None
    """What its pads reach; None for a graph whose pads reach nothing."""

    @property
    def ok(self) -> bool:
        return self.unequal is None and self.not_inert is None


@dataclass(frozen=True, slots=True)
class PlanProof:
    """A proof about all graphs together."""

    name: str
    words: str
    """What was counted."""
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True)
class ProofReport:
    """All proofs of one runner."""

    graphs: tuple[GraphProof, ...]
    plans: tuple[PlanProof, ...]
    """Coverage, counters."""
    tolerance: float
    """Of max_difference."""
    dtype: str

    @property
    def ok(self) -> bool:
        """Whether every proof passed."""
        return all(graph.ok for graph in self.graphs) and all(plan.ok for plan in self.plans)

    @property
    def problems(self) -> list[str]:
        """One line for each proof that failed."""
        found = []
        for graph in self.graphs:
            if graph.unequal is not None:
                found.append(f"{graph.graph}: not the eager step: {graph.unequal}")
            if graph.not_inert is not None:
                found.append(f"{graph.graph}: pads are not inert: {graph.not_inert}")
        found += [f"{plan.name}: {plan.problem}" for plan in self.plans if not plan.ok]
        return found

    def format(self) -> str:
        """A table with a line for each graph, the counts, the failures, and the verdict."""
        lines = _table(self.graphs)
        ties = sum(graph.near_ties for graph in self.graphs)
        lines.append(
            f"equal: every whole number, and numbers up to {self.tolerance:g} of max(1, largest "
            f"value of the tensor), in {self.dtype}; near ties: rows, {ties} in all, that the "
            "eager step itself decides otherwise under rounding noise"
        )
        lines += [f"{plan.name}: {plan.words}" for plan in self.plans if plan.ok]
        lines += [f"FAILED {problem}" for problem in self.problems]
        count = len(self.graphs)
        if self.ok:
            lines.append(f"proofs: passed, {count} graphs equal to the eager step and pads inert")
        else:
            bad = sum(not graph.ok for graph in self.graphs)
            plans = sum(not plan.ok for plan in self.plans)
            lines.append(f"proofs: FAILED for {bad} of {count} graphs and {plans} plans")
        return "\n".join(lines)


def _table(graphs: Sequence[GraphProof]) -> list[str]:
    width = max([len("graph"), *(len(graph.graph) for graph in graphs)])
    where = max([len("in"), *(len(graph.where) for graph in graphs)])
    lines = [
        f"{'graph':<{width}} {'max difference':>14}  {'in':<{where}} {'near ties':>9} {'draws':>5} "
        f"{'eager':>6} {'pads':>6}"
    ]
    for graph in graphs:
        equal = "equal" if graph.unequal is None else "FAILED"
        inert = "inert" if graph.not_inert is None else "FAILED"
        lines.append(
            f"{graph.graph:<{width}} {graph.max_difference:>14.2g}  {graph.where:<{where}} "
            f"{graph.near_ties:>9} {graph.draws:>5} {equal:>6} {inert:>6}"
        )
    return lines
