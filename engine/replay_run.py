"""Runs a dumped step again, through its captured graph and eagerly, and compares the two.

Owns what is compared and the words for it. Data flow: StateBuilder puts the runner into the step's
state before each run -> captured graph, or the plain functions of the same regions on the same
weights and buffers -> StepView -> verdict.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from decodegrid.capture.grid import CoverageError, GraphKey
from decodegrid.engine.replay_dump import ChunkFacts, DecodeFacts, Dump
from decodegrid.engine.replay_file import DumpError
from decodegrid.engine.replay_state import StateBuilder
from decodegrid.engine.runner import Runner
from decodegrid.graphs.decode_step import choice_half, decode_step, forward_half
from decodegrid.graphs.prefill_step import prefill_step
from decodegrid.graphs.regions import RegionTable, build_regions, plain_regions
from decodegrid.kernels.providers.laid_out import PLAIN_OF_ANY

Form = Literal["graph", "eager"]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of logits that counts as equal, by the model's dtype."""


@dataclass(frozen=True, slots=True)
class StepView:
    """What one run of a step made, on the host."""

    values: Tensor
    """(tokens, vocab) logits of a decode step, (tokens, streams, D) hidden states of a chunk."""
    query_lens: list[int]
    """Query tokens of each row; empty for a chunk."""
    emitted: list[list[int]]
    """Emitted token ids of each row; empty for a chunk."""
    problem: str | None
    """What cannot be right in it; None for a run that may be."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one step from one state."""

    max_difference: float
    """Of logits (hidden states for a chunk); inf where one is finite and the other is not, or where
    the rows have other query tokens."""
    tokens_equal: bool
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return self.tokens_equal and self.max_difference <= self.tolerance


class StepReplay:
    """A step of a dump on a runner that serves nobody.

    draft_temperatures: divisors of the confidence logits, one per draft, as captured. Raises
    DumpError where the step does not fit the runner.
    """

    def __init__(
        self,
        runner: Runner,
        dump: Dump,
        step: DecodeFacts | ChunkFacts,
        draft_temperatures: tuple[float, ...],
    ) -> None:
        self._runner, self.step = runner, step
        self._builder = StateBuilder(runner, dump, step)
        self.notes = self._builder.notes()
        self._temperatures = draft_temperatures
        if isinstance(step, DecodeFacts):
            self.key = self._choose_key(step)

    def run(self, form: Form) -> StepView:
        """Rebuild the state and run the step once."""
        with torch.no_grad():
            self._builder.build()
            if isinstance(self.step, ChunkFacts):
                return self._run_chunk(self.step, form)
            return self._run_decode(self.step, form)

    @property
    def tolerance(self) -> float:
        """Of `compare`, for the model's dtype."""
        return TOLERANCES[self._runner.buffers.target.stream.dtype]

    def _choose_key(self, step: DecodeFacts) -> GraphKey:
        """The dumped pair; without one, what this runner would take."""
        grid = self._runner.grid
        rows, tokens = len(step.rows), step.num_query_tokens
        if step.key is None:
            try:
                key = grid.select(rows, tokens)
            except CoverageError as error:
                raise DumpError(f"step {step.index}: {error}") from error
            self.notes.append(f"captured pair: not in the dump; {key} is what fits here")
            return key
        if step.key.num_reqs < rows or step.key.num_query_tokens < tokens:
            raise DumpError(f"step {step.index} does not fit the pair that the dump names")
        key = GraphKey(step.key.num_reqs, step.key.num_query_tokens)
        if step.variant == "rich" and not self._runner.has_rich:
            raise DumpError(f"step {step.index} is a rich one, and grid.rich is off here")
        if key not in grid.keys:
            raise DumpError(f"step {step.index} ran in the pair {key}, which is not captured here")
        return key

    def _eager_regions(self) -> RegionTable:
        model = self._runner.model
        specs = build_regions(
            model.config, model.state.capacity, as_ops=False, kernels=PLAIN_OF_ANY
        )
        return plain_regions(specs)

    def _run_decode(self, step: DecodeFacts, form: Form) -> StepView:
        runner, key = self._runner, self.key
        buffers = runner.buffers
        runner.write_step(key, [row.slot for row in step.rows], step.num_query_tokens)
        if buffers.rich is not None:
            buffers.rich.masks.fill_(-1)
        if form == "eager":
            self._run_eagerly(key, is_rich=step.variant == "rich")
        elif step.variant == "rich":
            runner.rich_graphs[key].first.replay()
            runner.rich_graphs[key].second.replay()
        else:
            runner.decode_graphs[key].replay()
        rows, count = buffers.rows, len(step.rows)
        lens: list[int] = rows.query_lens[:count].tolist()
        numbers: list[int] = rows.num_emitted[:count].tolist()
        ids: list[list[int]] = rows.token_ids[:count].tolist()
        emitted = [row[: max(number, 0)] for row, number in zip(ids, numbers, strict=True)]
        # Copies: the next run writes the same buffers.
        logits = buffers.output.logits[: sum(lens)].to("cpu", torch.float64, copy=True)
        slots = [row.slot for row in step.rows]
        rates = runner.model.state.slots.confidence[slots, : runner.num_draft_tokens].cpu()
        return StepView(logits, lens, emitted, _problem(logits, lens, rates))

    def _run_eagerly(self, key: GraphKey, *, is_rich: bool) -> None:
        runner = self._runner
        pair = (runner.model, runner.buffers)
        temperatures = torch.tensor(
            self._temperatures,
            dtype=runner.model.state.slots.confidence.dtype,
            device=runner.buffers.total.device,
        )
        regions, size = self._eager_regions(), (key.num_reqs, key.num_query_tokens)
        if is_rich:
            forward_half(regions, *pair, *size)
            choice_half(regions, *pair, temperatures, *size)
        else:
            decode_step(regions, *pair, temperatures, *size)

    def _run_chunk(self, step: ChunkFacts, form: Form) -> StepView:
        runner = self._runner
        slot, ids, start, history, blocks = self._builder.chunk()
        if form == "graph":
            runner.prefill(slot, ids, start, history, blocks)
        else:
            size = next(size for size in runner.prefill_chunk_sizes if size >= len(ids))
            runner.set_blocks(slot, blocks)
            inputs = runner.buffers.prefill
            inputs.token_ids[:size] = 0
            inputs.token_ids[: len(ids)] = torch.tensor(ids)
            inputs.facts.copy_(torch.tensor((slot, start, len(ids), *history)))
            prefill_step(self._eager_regions(), runner.model, runner.buffers, size)
        stream = runner.buffers.target.stream[: step.num_tokens]
        hidden = stream.to("cpu", torch.float64, copy=True)
        return StepView(hidden, [], [], _problem(hidden, [], torch.empty(0, 0)))


def compare(graph: StepView, eager: StepView, tolerance: float) -> Comparison:
    """How far two runs are from each other; not finite at the same places counts as equal."""
    tokens_equal = graph.emitted == eager.emitted and graph.query_lens == eager.query_lens
    if graph.values.shape != eager.values.shape:
        return Comparison(float("inf"), tokens_equal, tolerance)
    left, right = graph.values, eager.values
    finite = torch.isfinite(left) & torch.isfinite(right)
    same = (left == right) | (torch.isnan(left) & torch.isnan(right))
    difference = (left - right).abs().where(finite, torch.zeros_like(left))
    difference = difference.where(finite | same, torch.full_like(left, torch.inf))
    largest = float(difference.max()) if difference.numel() else 0.0
    return Comparison(largest, tokens_equal, tolerance)


def _problem(values: Tensor, query_lens: list[int], rates: Tensor) -> str | None:
    found = []
    bad = (~torch.isfinite(values)).flatten(1).any(1).tolist()
    if any(bad):
        where = ""
        if query_lens:
            owner = [row for row, count in enumerate(query_lens) for _ in range(count)]
            rows = sorted({row for row, is_bad in zip(owner, bad, strict=True) if is_bad})
            where = f" (rows {', '.join(map(str, rows))})"
        what = "logits" if query_lens else "hidden states"
        found.append(f"{what} are not finite for {sum(bad)} of {len(bad)} tokens{where}")
    wrong = (~((rates >= 0) & (rates <= 1))).any(1).nonzero().flatten().tolist()
    if wrong:
        found.append(f"confidences are out of 0..1 for rows {', '.join(map(str, wrong))}")
    return "; ".join(found) or None
