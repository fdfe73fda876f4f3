"""The runner: a model, its state and its captured grid behind the request side's protocol.

Owns the device's tensors and the graphs, and is the only writer of slot rows. Knows slots, blocks
and token counts; knows no requests. Data flow: the engine's loop calls prefill / start / decode;
each fills a few static inputs, replays one captured graph and reads a few static outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decodegrid.capture.backend import CapturedGraph
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.engine.runner_protocol import SlotRequest, StepResult
from decodegrid.graphs.state import MAX_STOP_TOKEN_IDS
from decodegrid.graphs.step_buffers import MIN_ROWS, StepBuffers
from decodegrid.graphs.target_step import StepModel


@dataclass(frozen=True, slots=True)
class PrefillKey:
    """A captured prefill chunk of up to `num_tokens` tokens."""

    num_tokens: int

    def __str__(self) -> str:
        return f"prefill {self.num_tokens}"


class HostMirror:
    """A small tensor that the host writes before or reads after a step.

    On the CPU the host works on the tensor's own memory; on another device through a pinned copy.
    """

    __slots__ = ("_device_tensor", "_staging", "array")

    def __init__(self, tensor: Tensor) -> None:
        self._device_tensor = tensor
        on_host = tensor.device.type == "cpu"
        self._staging = None if on_host else torch.zeros_like(tensor, device="cpu").pin_memory()
        source = tensor if self._staging is None else self._staging
        self.array: NDArray[Any] = source.numpy()

    def push(self) -> None:
        """Make what the host wrote visible to the device."""
        if self._staging is not None:
            self._device_tensor.copy_(self._staging, non_blocking=True)

    def pull(self) -> None:
        """Make what the device wrote visible to the host; waits for it."""
        if self._staging is not None:
            self._staging.copy_(self._device_tensor)


class Runner:
    """See decodegrid.engine.runner_protocol.StepRunner for the contract of the public methods."""

    def __init__(
        self,
        model: StepModel,
        buffers: StepBuffers,
        grid: Grid,
        decode_graphs: dict[GraphKey, CapturedGraph],
        prefill_graphs: dict[int, CapturedGraph],
        counters: CaptureCounters,
        start_up_report: str = "",
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """facts: what the captured code and its speed depend on, by name."""
        capacity = model.state.capacity
        self.model, self.buffers, self.grid, self.counters = model, buffers, grid, counters
        self.decode_graphs: Mapping[GraphKey, CapturedGraph] = decode_graphs
        self._prefill_graphs = prefill_graphs
        self.facts = dict(facts or {})
        self.num_draft_tokens = capacity.num_draft_tokens
        self.max_num_reqs = capacity.num_slots - 1
        self.max_model_len = capacity.max_model_len
        self.block_size, self.num_blocks = capacity.block_size, capacity.num_blocks
        self.vocab_size = model.config.vocab_size
        self.start_up_report = start_up_report
        self.prefill_chunk_sizes = tuple(sorted(prefill_graphs))
        rows = buffers.rows
        self._slots, self._total = HostMirror(rows.slots), HostMirror(buffers.total)
        self._token_ids = HostMirror(rows.token_ids)
        self._num_emitted = HostMirror(rows.num_emitted)
        self._query_lens = HostMirror(rows.query_lens)
        self._confidence = HostMirror(model.state.slots.confidence)
        self._max_drafts: dict[int, int] = {}
        """Started slots that may not have every draft verified."""
        self._prompt, self._facts = (
            HostMirror(buffers.prefill.token_ids),
            HostMirror(buffers.prefill.facts),
        )

    @property
    def num_compilations(self) -> int:
        """Compilations made so far; still after ready."""
        return self.counters.num_compilations

    @property
    def num_captured(self) -> int:
        """Captured graphs, decode pairs and prefill sizes together; still after ready."""
        return self.counters.num_captured

    def prefill(
        self,
        slot: int,
        token_ids: Sequence[int],
        start: int,
        history: tuple[int, int, int],
        block_ids: Sequence[int],
    ) -> None:
        """Compute the state of positions start .. start + len(token_ids) - 1 of a slot."""
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
        self._prefill_graphs[size].replay()

    def start(self, slot: int, request: SlotRequest, block_ids: Sequence[int]) -> None:
        """Write the slot row; the slot's next decode step verifies no draft."""
        slots = self.model.state.slots
        stops = [*request.stop_token_ids, *([-1] * MAX_STOP_TOKEN_IDS)][:MAX_STOP_TOKEN_IDS]
        slots.last_token[slot] = request.last_token
        slots.seq_len[slot] = request.seq_len
        slots.history[slot] = torch.tensor(request.history)
        slots.max_seq_len[slot] = request.max_seq_len
        slots.num_drafts[slot] = 0
        slots.confidence[slot] = 0.0
        slots.temperature[slot] = request.temperature
        slots.top_p[slot] = request.top_p
        # A count past the vocabulary keeps every token, and may be past int64.
        slots.top_k[slot] = min(request.top_k, self.vocab_size)
        slots.seed[slot] = request.seed
        slots.stop_token_ids[slot] = torch.tensor(stops)
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
        self.model.state.slots.num_drafts[slot] = 0
        self.model.state.slots.block_table[slot] = 0

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

    def decode(self, slots: Sequence[int], num_query_tokens: int) -> StepResult:
        """Run one step over started slots."""
        num_rows = len(slots)
        key = self.grid.select(num_rows, num_query_tokens)
        self.write_step(key, slots, num_query_tokens)
        self.decode_graphs[key].replay()
        self._limit_drafts(slots)
        for mirror in (self._token_ids, self._num_emitted, self._query_lens, self._confidence):
            mirror.pull()
        query_lens = self._query_lens.array[:num_rows]
        return StepResult(
            token_ids=self._token_ids.array[:num_rows].copy(),
            num_emitted=self._num_emitted.array[:num_rows].copy(),
            num_verified=query_lens - 1,
            confidence=self._confidence.array[list(slots), : self.num_draft_tokens].astype(
                np.float32
            ),
            num_query_tokens=int(query_lens.sum()),
            key=key,
        )
