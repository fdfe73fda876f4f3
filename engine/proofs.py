"""Proofs at capture time: what was captured computes what the model says, and nothing else.

Owns which proofs there are and on which inputs each captured graph is proven.
Equivalence: the graph and the same step in plain torch, from one state and one set of inputs, agree
in all outputs and all state of the rows that take part. Pads: with NaN, huge ids and lengths of -1
in every buffer, in the null slot, the null block and everything that no live row owns, live outputs
and live state keep their bits, and the poison itself stays where it was. Coverage: every admissible
batch has a captured pair, every chunk a captured size. Counters: compilations and captures equal
their plans and do not move while all this runs.

Data flow: an idle runner -> scenes of made-up requests -> cases -> ProofReport.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decodegrid.capture.backend import CapturedGraph
from decodegrid.capture.grid import CoverageError, StepVariant
from decodegrid.engine.proof_cases import DecodeCase, PrefillCase, ProofCase
from decodegrid.engine.proof_compare import (
    NOISE,
    TOLERANCES,
    Distances,
    View,
    beyond,
    count_requests,
    distances,
    largest,
    same_bits,
    unexplained,
    widest,
)
from decodegrid.engine.proof_eager import EagerSteps
from decodegrid.engine.proof_report import GraphProof, PlanProof, ProofReport
from decodegrid.engine.proof_scene import Scene
from decodegrid.engine.proof_state import POISONS, buffer_tensors
from decodegrid.engine.runner import Runner
from decodegrid.engine.step_graphs import PrefillKey, StepKey

MAX_DRAWS = 6
"""Draws of inputs for one graph until one has no near tie."""

NUM_DISTURBED = 12
"""Eager runs with rounding noise that tell near ties from faults."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One captured graph, with whatever must run before it."""

    key: PrefillKey | StepKey
    graphs: tuple[CapturedGraph, ...]

    def replay(self) -> None:
        for graph in self.graphs:
            graph.replay()


def run_proofs(runner: Runner, draft_temperatures: Sequence[float], seed: int = 0) -> ProofReport:
    """Prove every captured graph of a runner that serves nobody and keeps no prefix.

    Slot rows are put back; pools, rings and buffers are zero afterwards.

    Args:
        runner: as `build_runner` returns it.
        draft_temperatures: `runner.draft_temperatures`, as captured.
        seed: of the made-up requests.

    Returns:
        The report; a proof that fails is in it and raises nothing.
    """
    before = (runner.num_compilations, runner.num_captured)
    kept = _keep(runner)
    proofs = _Proofs(runner, draft_temperatures, seed)
    try:
        graphs = tuple(proofs.prove(subject) for subject in subjects(runner))
    finally:
        _put_back(runner, kept)
    plans = (prove_coverage(runner), prove_counters(runner, before))
    dtype = str(proofs.dtype).removeprefix("torch.")
    return ProofReport(graphs, plans, TOLERANCES[proofs.dtype], dtype)


def subjects(runner: Runner) -> Iterator[Subject]:
    """Every captured graph, prefill sizes first."""
    for size, chunk in sorted(runner.prefill_graphs.items()):
        yield Subject(PrefillKey(size), (chunk,))
    for size, report in sorted(runner.prompt_reports.items()):
        chunk = runner.prefill_graphs[size]
        yield Subject(PrefillKey(size, StepVariant.RICH), (chunk, report))
    for pair in sorted(runner.decode_graphs):
        yield Subject(StepKey(pair, StepVariant.FUSED), (runner.decode_graphs[pair],))
    for pair in sorted(runner.rich_graphs):
        cut = runner.rich_graphs[pair]
        yield Subject(StepKey(pair, StepVariant.RICH), (cut.first, cut.second))


def prove_coverage(runner: Runner) -> PlanProof:
    """Every batch (b, q) that may come is asked for, one by one."""
    count, most = 0, runner.num_draft_tokens + 1
    name = "coverage"
    for num_reqs in range(1, runner.max_num_reqs + 1):
        for tokens in range(num_reqs, num_reqs * most + 1):
            count += 1
            try:
                key = runner.grid.select(num_reqs, tokens)
            except CoverageError as error:
                return PlanProof(name, "", str(error))
            captured = key in runner.decode_graphs and (
                not runner.has_rich or key in runner.rich_graphs
            )
            if not captured or not key.covers(num_reqs, tokens):
                what = "does not cover it" if captured else "is not captured"
                problem = f"batch ({num_reqs}, {tokens}) is given the pair {key}, which {what}"
                return PlanProof(name, "", problem)
    missing = sorted(set(runner.prefill_chunk_sizes) ^ set(runner.prefill_graphs))
    if missing:
        return PlanProof(name, "", f"prefill size {missing[0]} is planned or captured, not both")
    words = (
        f"{count} batches of requests and query tokens, and chunks of "
        f"1..{runner.prefill_chunk_sizes[-1]} tokens: each has a captured graph"
    )
    return PlanProof(name, words, None)


def prove_counters(runner: Runner, before: tuple[int, int]) -> PlanProof:
    """Both counters equal their plans and what they were.

    before: compilations and captures when the proofs began.
    """
    counters, name = runner.counters, "counters"
    present = {region: counters.num_present(region) for region in counters.planned_by_region}
    now = (counters.num_compilations, counters.num_captured)
    wrong = [
        f"{region} is compiled or loaded {present[region]} times, planned {planned}"
        for region, planned in counters.planned_by_region.items()
        if present[region] != planned
    ]
    if counters.num_captured != counters.planned_captures:
        wrong.append(f"{counters.num_captured} captures, planned {counters.planned_captures}")
    if now != before:
        wrong.append(
            f"during the proofs {now[0] - before[0]} compilations and {now[1] - before[1]} "
            "captures were made"
        )
    try:
        counters.check_still()
    except RuntimeError as error:
        wrong.append(str(error))
    words = (
        f"{counters.num_compilations} compilations and {counters.num_loaded} regions from a cache "
        f"of {counters.planned_compilations}, {counters.num_captured} captures of "
        f"{counters.planned_captures}; none since start-up"
    )
    return PlanProof(name, words, "; ".join(wrong) or None)


@dataclass(frozen=True, slots=True)
class _Compared:
    """A graph beside the eager step."""

    found: Distances
    """Of the last draw."""
    near_ties: int
    draws: int
    unequal: str | None


class _Proofs:
    """The proofs of one runner's graphs, one after another."""

    def __init__(self, runner: Runner, draft_temperatures: Sequence[float], seed: int) -> None:
        self._runner, self._temperatures, self._seed = runner, draft_temperatures, seed
        self._eager = EagerSteps(runner, draft_temperatures)
        self._scenes: list[Scene] = []
        capacity = runner.model.state.capacity
        self.dtype = runner.buffers.target.stream.dtype
        self._tolerance = TOLERANCES[self.dtype]
        # Quantisers and short mantissas put a near tie into almost every step.
        self._rounds = capacity.kv_cache != "compute" or self.dtype == torch.bfloat16

    def prove(self, subject: Subject) -> GraphProof:
        """Both proofs of one graph; an error that it raises is a proof that fails."""
        try:
            compared = self._compare(subject)
        except (RuntimeError, IndexError) as error:
            compared = _Compared({}, 0, 0, _raised(error))
        try:
            not_inert = self._poison(subject)
        except (RuntimeError, IndexError) as error:
            not_inert = _raised(error)
        gap = largest(compared.found)
        return GraphProof(
            str(subject.key), gap.distance, gap.name, compared.near_ties, compared.draws,
            compared.unequal, not_inert,
        )  # fmt: skip

    def _compare(self, subject: Subject) -> _Compared:
        ties, found = 0, {}
        for draw in range(MAX_DRAWS):
            case = self._full_case(subject.key, draw)
            got = self._graph_view(subject, case)
            want = self._eager_view(self._eager, subject, case)
            found = distances(got, want, case.num_requests)
            over = beyond(found, want, self._tolerance)
            if not count_requests(over):
                return _Compared(found, ties, draw + 1, None)
            left = unexplained(over, self._spread(subject, case, want))
            if count_requests(left):
                problem = f"{largest(left)}, and no rounding explains it"
                return _Compared(found, ties, draw + 1, problem)
            ties += count_requests(over)
            if self._rounds:
                return _Compared(found, ties, draw + 1, None)
        problem = f"{MAX_DRAWS} draws all had near ties; nothing is shown"
        return _Compared(found, ties, MAX_DRAWS, problem)

    def _poison(self, subject: Subject) -> str | None:
        """What pads reach, or what else is written."""
        case = self._padded_case(subject.key)
        case.live.clear()
        want = self._graph_view(subject, case)
        try:
            return self._poisoned(subject, case, want)
        finally:
            case.live.clear()

    def _poisoned(self, subject: Subject, case: ProofCase, want: View) -> str | None:
        for value in POISONS:
            got = self._graph_view(subject, case, value)
            changed = same_bits(got, want)
            if changed:
                return f"poison {value} changes {', '.join(changed)}"
            touched = case.live.touched(value)
            if touched:
                return f"rows that no live request owns are written in {', '.join(touched)}"
        return None

    def _spread(self, subject: Subject, case: ProofCase, want: View) -> Distances:
        """How far the eager step is from itself under rounding noise."""
        spread: dict[str, Tensor] = {}
        for index in range(NUM_DISTURBED):
            eager = EagerSteps(self._runner, self._temperatures, NOISE[self.dtype], index)
            view = self._eager_view(eager, subject, case)
            apart = distances(view, want, case.num_requests)
            spread = widest(apart, spread) if spread else apart
        return spread

    def _graph_view(
        self, subject: Subject, case: ProofCase, poison_value: int | None = None
    ) -> View:
        with torch.no_grad():
            case.start(poison_value)
            subject.replay()
            return case.view()

    def _eager_view(self, eager: EagerSteps, subject: Subject, case: ProofCase) -> View:
        with torch.no_grad():
            case.start()
            eager.run(subject.key)
            return case.view()

    def _scene(self, draw: int) -> Scene:
        while len(self._scenes) <= draw:
            with torch.no_grad():
                self._scenes.append(Scene(self._runner, self._seed * 1000 + len(self._scenes)))
        return self._scenes[draw]

    def _full_case(self, key: PrefillKey | StepKey, draw: int) -> ProofCase:
        """As many rows and tokens as the graph has."""
        scene = self._scene(draw)
        if isinstance(key, PrefillKey):
            return PrefillCase(scene, key, key.num_tokens, draw)
        num_reqs, tokens = key.sizes
        count = min(num_reqs, len(scene.slots))
        rows = random.Random(tokens).sample(range(len(scene.slots)), count)
        return DecodeCase(scene, rows, key, tokens)

    def _padded_case(self, key: PrefillKey | StepKey) -> ProofCase:
        """Fewer rows and tokens, so that pads and surplus tokens stand beside live ones."""
        scene = self._scene(0)
        if isinstance(key, PrefillKey):
            return PrefillCase(scene, key, max(1, key.num_tokens * 5 // 8), 1)
        num_reqs, tokens = key.sizes
        count = min(max(1, num_reqs // 2), len(scene.slots))
        rows = random.Random(tokens + 1).sample(range(len(scene.slots)), count)
        most = count * (self._runner.num_draft_tokens + 1)
        return DecodeCase(scene, rows, key, max(count, min(most, tokens - 1)))


def _raised(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"it raises {type(error).__name__}: {lines[0] if lines else ''}"


def _keep(runner: Runner) -> dict[str, Tensor]:
    """Copies of what the runner expects to find again: slot rows and inputs that outlive steps."""
    kept = {
        name: tensor.clone()
        for name, tensor in runner.model.state.tensors()
        if name.startswith(("slots.", "rich."))
    }
    return kept | {name: tensor.clone() for name, tensor in _lasting_inputs(runner).items()}


def _lasting_inputs(runner: Runner) -> dict[str, Tensor]:
    found = {"prefill.lower": runner.buffers.prefill.lower}
    if runner.buffers.rich is not None:
        found["rich.masks"] = runner.buffers.rich.masks
    return found


def _put_back(runner: Runner, kept: dict[str, Tensor]) -> None:
    for slot in range(1, runner.max_num_reqs + 1):
        runner.stop(slot)
    for name, tensor in runner.model.state.tensors():
        if name in kept:
            tensor.copy_(kept[name])
        else:
            tensor.zero_()
    for _, tensor in buffer_tensors(runner.buffers):
        tensor.zero_()
    for name, tensor in _lasting_inputs(runner).items():
        tensor.copy_(kept[name])
