"""The runner: a model, its state and its captured grid behind the request side's protocol.

Owns the device's tensors and the graphs, and is the only writer of slot rows. Knows slots, blocks
and token counts; knows no requests. Data flow: the engine's loop calls prefill / start / launch;
each fills a few static inputs and replays captured graphs; collect reads copies of a few static
outputs. On the CPU a launch returns when its step has run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.grid import GraphKey, Grid, StepVariant
from decodegrid.engine.graph_timer import GraphTime, GraphTimer
from decodegrid.engine.host_copies import HostInput, HostOutputs, PendingCopies
from decodegrid.engine.ledger_start import StartUp
from decodegrid.engine.package_start import StartSource
from decodegrid.engine.runner_protocol import (
    LaunchedStep,
    PromptLogprobs,
    SlotRequest,
    StepLogprobs,
    StepResult,
)
from decodegrid.engine.slot_rows import write_rich, write_slot
from decodegrid.engine.step_graphs import StepGraphs
from decodegrid.engine.window_snapshots import WindowSnapshots
from decodegrid.graphs.step_buffers import MIN_ROWS, StepBuffers
from decodegrid.graphs.target_step import StepModel


@dataclass(slots=True, eq=False)
class DeviceStep(LaunchedStep):
    """A launched step with the copies of its outputs; a rich one has them after both halves."""

    copies: PendingCopies | None = None
    graph_times: list[GraphTime] = field(default_factory=list)
    """Of its one graph or its two."""


class Runner:
    """See decodegrid.engine.runner_protocol.StepRunner for the contract of the public methods."""

    def __init__(
        self,
        model: StepModel,
        buffers: StepBuffers,
        grid: Grid,
        graphs: StepGraphs,
        counters: CaptureCounters,
        start_up_report: str = "",
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """facts: what the captured code and its speed depend on, by name."""
        capacity = model.state.capacity
        self.model, self.buffers, self.grid, self.counters = model, buffers, grid, counters
        self._graphs = graphs
        self.decode_graphs = graphs.fused
        """The fused steps, whose times the verify budget counts with."""
        self.rich_graphs = graphs.rich
        self.prefill_graphs, self.prompt_reports = graphs.prefill, graphs.prompt_reports
        self.facts = dict(facts or {})
        self.num_draft_tokens = capacity.num_draft_tokens
        self.max_num_reqs = capacity.num_slots - 1
        self.max_model_len = capacity.max_model_len
        self.block_size, self.num_blocks = capacity.block_size, capacity.num_blocks
        self.vocab_size = model.config.vocab_size
        self.has_rich = bool(graphs.rich)
        self.start_up_report = start_up_report
        self.snapshots: WindowSnapshots | None = None
        """Where windows are kept for a prefix cache; None without one."""
        self.source: StartSource | None = None
        """Where its compiled code came from and is kept; None where it is not kept."""
        self.start_up: StartUp | None = None
        """What start-up measured; None for a runner that was made by hand."""
        self.draft_temperatures: tuple[float, ...] = (1.0,) * max(1, self.num_draft_tokens)
        """Divisors of the confidence logits that its graphs were captured with."""
        self.prefill_chunk_sizes = tuple(sorted(graphs.prefill))
        self._max_drafts: dict[int, int] = {}
        """Started slots that may not have every draft verified."""
        self._rich_slots: set[int] = set()
        self._half_step: DeviceStep | None = None
        """A rich step between its halves."""
        self._timer = GraphTimer(model.state.slots.seq_len.device)
        self._make_copies()

    @property
    def graphs(self) -> StepGraphs:
        """What is replayed."""
        return self._graphs

    def replay_instead(self, graphs: StepGraphs) -> None:
        """From the next step on replay these, which are the same with something around them."""
        self._graphs = graphs

    def _make_copies(self) -> None:
        buffers, slots = self.buffers, self.model.state.slots
        rows, rich = buffers.rows, buffers.rich
        self._slots, self._total = HostInput(rows.slots), HostInput(buffers.total)
        self._prompt = HostInput(buffers.prefill.token_ids)
        self._facts = HostInput(buffers.prefill.facts)
        self._lower = HostInput(buffers.prefill.lower)
        read = {
            "token_ids": rows.token_ids,
            "num_emitted": rows.num_emitted,
            "query_lens": rows.query_lens,
            "confidence": slots.confidence,
            "drafts": slots.drafts,
        }
        self._outputs = HostOutputs(read)
        self._rich_outputs = self._prompt_outputs = None
        self._masks = self._following = None
        self._has_masks = False
        """Whether the masks of the last rich step are still in place."""
        if rich is None:
            return
        self._masks, self._following = HostInput(rich.masks), HostInput(rich.following)
        reported = {
            "chosen": rich.chosen,
            "top_ids": rich.top_ids,
            "top_logprobs": rich.top_logprobs,
        }
        self._rich_outputs = HostOutputs({**read, **reported})
        self._prompt_outputs = HostOutputs(
            {
                "chosen": rich.prompt_chosen,
                "top_ids": rich.prompt_top_ids,
                "top_logprobs": rich.prompt_top_logprobs,
            }
        )

    @property
    def num_compilations(self) -> int:
        """Compilations made so far; still after ready."""
        return self.counters.num_compilations

    @property
    def num_captured(self) -> int:
        """Captured graphs, decode pairs and prefill sizes of all variants together; still after
        ready."""
        return self.counters.num_captured

    def prefill(
        self,
        slot: int,
        token_ids: Sequence[int],
        start: int,
        history: tuple[int, int, int],
        block_ids: Sequence[int],
        following: Sequence[int] | None = None,
    ) -> PromptLogprobs | None:
        """Compute the state of positions start .. start + len(token_ids) - 1 of a slot; with the
        tokens that follow them, their log-probabilities too."""
        count = len(token_ids)
        size = next((size for size in self.prefill_chunk_sizes if size >= count), None)
        if size is None or count < 1:
            raise ValueError(
                f"a chunk has {count} tokens; allowed are 1..{self.prefill_chunk_sizes[-1]}"
            )
        self.set_blocks(slot, block_ids)
        self._prompt.array[:count] = token_ids
        self._prompt.array[count:size] = 0
        self._facts.array[:] = (slot, start, count, *history)
        self._prompt.push()
        self._facts.push()
        self._graphs.prefill[size].replay()
        return None if following is None else self._report_prompt(size, following)

    def _report_prompt(self, size: int, following: Sequence[int]) -> PromptLogprobs:
        """Log-probabilities of the chunk that was just prefilled in a graph of that size."""
        count = len(following)
        assert self._following is not None and self._prompt_outputs is not None
        self._following.array[:count] = following
        self._following.array[count:size] = 0
        self._following.push()
        self._graphs.prompt_reports[size].replay()
        found = self._prompt_outputs.take().wait()
        return PromptLogprobs(
            found["chosen"][:count].astype(np.float32),
            found["top_ids"][:count],
            found["top_logprobs"][:count].astype(np.float32),
        )

    def start(self, slot: int, request: SlotRequest, block_ids: Sequence[int]) -> None:
        """Write the slot row; the slot's next decode step verifies no draft."""
        state = self.model.state
        write_slot(state.slots, slot, request, self.vocab_size)
        if request.rich is not None and state.rich is None:
            raise ValueError("the request needs the rich variant of steps, but grid.rich is off")
        self._rich_slots.discard(slot)
        if state.rich is not None:
            write_rich(state.rich, slot, request.rich)
        if request.rich is not None:
            self._rich_slots.add(slot)
        self._max_drafts.pop(slot, None)
        if request.max_drafts is not None:
            self._max_drafts[slot] = request.max_drafts
        self.set_blocks(slot, block_ids)

    def set_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        """Replace a slot's block table."""
        table = self.model.state.slots.block_table[slot]
        table[: len(block_ids)] = torch.tensor(block_ids, dtype=torch.int64)
        table[len(block_ids) :] = 0

    def stop(self, slot: int) -> None:
        """Forget a slot. Its row is rewritten before it is used again."""
        self._max_drafts.pop(slot, None)
        self._rich_slots.discard(slot)
        self.model.state.slots.num_drafts[slot] = 0
        self.model.state.slots.block_table[slot] = 0

    @property
    def num_snapshots(self) -> int:
        """Windows that can be kept."""
        return 0 if self.snapshots is None else self.snapshots.num_snapshots

    @property
    def keep_tokens(self) -> int:
        """Tokens that a bounded replay keeps; 0 where prefill is exact."""
        capacity = self.model.state.capacity
        return 0 if capacity.bounded_replay == "off" else capacity.keep_tokens

    def bound_prefill(self, lower: int) -> None:
        """Where the decoder's layers begin in the chunks to come."""
        self._lower.array[0] = lower
        self._lower.push()

    def save_window(self, slot: int, snapshot: int, position: int) -> None:
        """Keep the window before `position`, the slot's last block boundary, as a snapshot."""
        assert self.snapshots is not None
        self.snapshots.save(slot, snapshot, position)

    def load_window(self, slot: int, snapshot: int, position: int) -> None:
        """Begin a text in a slot at `position`, behind blocks and a window that are there."""
        assert self.snapshots is not None
        self.snapshots.load(slot, snapshot, position)

    def write_step(self, key: GraphKey, slots: Sequence[int], num_query_tokens: int) -> None:
        """Fill the static inputs of a pair's next replay."""
        rows, num_rows = self._slots.array, len(slots)
        rows[:num_rows] = slots
        rows[num_rows : max(key.num_reqs, MIN_ROWS)] = 0
        self._total.array[0] = num_query_tokens
        self._slots.push()
        self._total.push()

    def _limit_drafts(self, slots: Sequence[int]) -> None:
        """Take back what the drafter offers to slots beyond their limits; the next step splits its
        query tokens by what is left. Reads nothing from the device."""
        if self._max_drafts:
            for slot in slots:
                if slot in self._max_drafts:
                    num_drafts = self.model.state.slots.num_drafts[slot]
                    num_drafts.clamp_(max=self._max_drafts[slot])

    def launch(self, slots: Sequence[int], num_query_tokens: int) -> LaunchedStep:
        """Start one fused step over started slots that are not rich."""
        assert self._rich_slots.isdisjoint(slots), "a rich slot in a fused step"
        step = self._new_step(slots, num_query_tokens, StepVariant.FUSED)
        step.graph_times.append(self._timer.run(self._graphs.fused[step.key].replay))
        self._limit_drafts(slots)
        step.copies = self._outputs.take()
        return step

    def launch_forward(self, slots: Sequence[int], num_query_tokens: int) -> LaunchedStep:
        """Start the first half of a rich step."""
        step = self._new_step(slots, num_query_tokens, StepVariant.RICH)
        step.graph_times.append(self._timer.run(self._graphs.rich[step.key].first.replay))
        self._half_step = step
        return step

    def launch_choice(self, step: LaunchedStep, masks: NDArray[np.int32] | None) -> None:
        """Start the second half of the step whose first half was launched last."""
        assert step is self._half_step and self._masks is not None
        assert isinstance(step, DeviceStep) and self._rich_outputs is not None
        num_rows = len(step.slots)
        if masks is not None:
            self._masks.array[:num_rows] = masks.view(np.int32)
            self._masks.push()
        elif self._has_masks:
            self._masks.array[...] = -1
            self._masks.push()
        self._has_masks = masks is not None
        step.graph_times.append(self._timer.run(self._graphs.rich[step.key].second.replay))
        self._half_step = None
        self._limit_drafts(step.slots)
        step.copies = self._rich_outputs.take()

    def _new_step(
        self, slots: Sequence[int], num_query_tokens: int, variant: StepVariant
    ) -> DeviceStep:
        assert self._half_step is None, "the step before lacks its second half"
        key = self.grid.select(len(slots), num_query_tokens)
        self.write_step(key, slots, num_query_tokens)
        return DeviceStep(tuple(slots), key, variant, num_query_tokens)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait for a launched step and return what it did."""
        assert isinstance(step, DeviceStep) and step.copies is not None
        found, slots, num_rows = step.copies.wait(), list(step.slots), len(step.slots)
        query_lens = found["query_lens"][:num_rows]
        logprobs = None
        if step.variant is StepVariant.RICH:
            logprobs = StepLogprobs(
                found["chosen"][:num_rows].astype(np.float32),
                found["top_ids"][:num_rows],
                found["top_logprobs"][:num_rows].astype(np.float32),
            )
        return StepResult(
            token_ids=found["token_ids"][:num_rows],
            num_emitted=found["num_emitted"][:num_rows],
            num_verified=query_lens - 1,
            confidence=found["confidence"][slots, : self.num_draft_tokens].astype(np.float32),
            num_query_tokens=int(query_lens.sum()),
            key=step.key,
            drafts=found["drafts"][slots, : self.num_draft_tokens],
            logprobs=logprobs,
            graph_s=sum(time.seconds() for time in step.graph_times),
        )

    def decode(self, slots: Sequence[int], num_query_tokens: int) -> StepResult:
        """Launch and collect one step without masks, rich if one of the slots is."""
        if self._rich_slots.isdisjoint(slots):
            return self.collect(self.launch(slots, num_query_tokens))
        step = self.launch_forward(slots, num_query_tokens)
        self.launch_choice(step, None)
        return self.collect(step)
