"""What one captured graph is proven on: its inputs, and what it makes of them.

Owns the static inputs of a decode step and of a prefill chunk over the requests of a scene, and the
list of everything that is looked at afterwards: each output that the host or a later step may read,
and all state of the requests. Records in rings and pools are looked at as numbers.

Data flow: Scene, captured key -> `start` (state, inputs, poison) -> a run -> `view`.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from decodegrid.capture.grid import StepVariant
from decodegrid.engine.proof_compare import Part
from decodegrid.engine.proof_scene import Scene
from decodegrid.engine.proof_state import LiveState, buffer_tensors, poison
from decodegrid.engine.runner_protocol import MASK_WORD_BITS
from decodegrid.engine.step_graphs import PrefillKey, StepKey
from decodegrid.graphs.step_buffers import TokenBuffers
from decodegrid.kernels.records import RecordFormat, decode_records

_TOKEN_FIELDS = (
    "input_ids", "positions", "token_slot", "window_store", "ring_store", "compressor_store",
    "entry_store_one", "entry_store_two", "length_one", "length_two",
)  # fmt: skip
"""Whole numbers of each token that decide what it reads and writes."""


class ProofCase(ABC):
    """Inputs of one graph.

    Args:
        scene: whose requests take part.
        rows: places of the requests in the scene, in the order of the step's rows.
    """

    def __init__(self, scene: Scene, rows: Sequence[int]) -> None:
        self.scene, self.rows = scene, list(rows)
        self.slots = [scene.slots[row] for row in rows]
        self.runner = scene.runner
        self.live = LiveState(self.runner.model, self.slots, [scene.blocks[row] for row in rows])

    @property
    def num_requests(self) -> int:
        """Requests that take part."""
        return len(self.rows)

    def start(self, poison_value: int | None = None) -> None:
        """Put the state back, write the inputs, and fill all buffers with zeros; or, for a number
        to poison with, fill buffers and all state that no request owns with it."""
        self.scene.restore()
        if poison_value is not None:
            self.live.poison(poison_value)
        for _, tensor in buffer_tensors(self.runner.buffers):
            if poison_value is None:
                tensor.zero_()
            else:
                poison(tensor, poison_value)
        self._write_inputs()

    def view(self) -> dict[str, Part]:
        """Copies of all that the run made, by name."""
        found = self._outputs()
        for part, rows in zip(self.live.parts, self.live.save(), strict=True):
            found[part.name] = Part(self._as_numbers(part.name, rows), part.owner)
        return found

    @abstractmethod
    def _write_inputs(self) -> None:
        """Fill the static inputs, pads included where a host would."""

    @abstractmethod
    def _outputs(self) -> dict[str, Part]:
        """Copies of outputs, live entries only."""

    def _as_numbers(self, name: str, rows: Tensor) -> Tensor:
        """Rows of a state tensor; records decoded."""
        config = self.runner.model.config
        if rows.dtype != torch.uint8:
            return rows
        if name.startswith("window_rings"):
            return decode_records(rows, RecordFormat.Q8, config.head_dim)
        if name.endswith("index_keys"):
            return decode_records(rows, RecordFormat.Q4X, config.index_head_dim)
        return decode_records(rows, RecordFormat.Q4N, config.head_dim)


def _token_parts(tokens: TokenBuffers, count: int, owner: Tensor) -> dict[str, Part]:
    return {name: Part(getattr(tokens, name)[:count].clone(), owner) for name in _TOKEN_FIELDS}


class DecodeCase(ProofCase):
    """A decode step of some requests.

    Args:
        key: the pair and the variant; a rich case has masks for its rows.
        total: query tokens to hand out.
    """

    def __init__(self, scene: Scene, rows: Sequence[int], key: StepKey, total: int) -> None:
        super().__init__(scene, rows)
        self.key, self.total = key, total
        self._masks: Tensor | None = None
        rich = self.runner.buffers.rich
        if key.variant is StepVariant.RICH and rich is not None:
            # Each row of a mask bars one token in about eight.
            shape = (len(rows), *rich.masks.shape[1:])
            draw = torch.Generator().manual_seed(len(rows) * 1000 + total)
            words = torch.full(shape, -1, dtype=torch.int32)
            for _ in range(MASK_WORD_BITS // 8):
                bit = torch.randint(MASK_WORD_BITS, shape, generator=draw, dtype=torch.int32)
                words &= ~(torch.ones_like(bit) << bit)
            self._masks = words.to(rich.masks.device)

    def _write_inputs(self) -> None:
        buffers, count = self.runner.buffers, self.num_requests
        buffers.rows.slots.zero_()
        buffers.rows.slots[:count] = torch.tensor(self.slots)
        buffers.total.fill_(self.total)
        if self._masks is not None and buffers.rich is not None:
            buffers.rich.masks[:count] = self._masks

    def _outputs(self) -> dict[str, Part]:
        buffers, count = self.runner.buffers, self.num_requests
        rows, owner = buffers.rows, torch.arange(count)
        lens = rows.query_lens[:count].cpu().clamp(0, self.runner.num_draft_tokens + 1)
        emitted = rows.num_emitted[:count].unsqueeze(1)
        is_emitted = torch.arange(rows.token_ids.shape[1], device=emitted.device) < emitted
        found = {
            name: Part(getattr(rows, name)[:count].clone(), owner)
            for name in ("query_lens", "query_starts", "num_emitted", "stopped")
        }
        tokens = rows.token_ids[:count]
        found["token_ids"] = Part(tokens.where(is_emitted, -torch.ones_like(tokens)), owner)
        num_tokens, token_owner = int(lens.sum()), owner.repeat_interleave(lens)
        found |= _token_parts(buffers.target, num_tokens, token_owner)
        found["logits"] = Part(buffers.output.logits[:num_tokens].clone(), token_owner)
        if not self.runner.model.state.capacity.keeps_draft_distributions:
            found["chosen"] = Part(buffers.output.chosen[:num_tokens].clone(), token_owner)
        if self._masks is not None:
            found |= self._reports(is_emitted)
        return found

    def _reports(self, is_emitted: Tensor) -> dict[str, Part]:
        """Log-probabilities of what was emitted, of the rows that asked for them."""
        buffers, state = self.runner.buffers.rich, self.runner.model.state.rich
        assert buffers is not None and state is not None
        count, owner = self.num_requests, torch.arange(self.num_requests)
        wanted = (state.enabled & state.wants_logprobs)[self.slots].unsqueeze(1) & is_emitted
        found = {}
        for name in ("chosen", "top_ids", "top_logprobs"):
            values = getattr(buffers, name)[:count]
            mask = wanted if values.dim() == 2 else wanted.unsqueeze(2)
            found[f"reported {name}"] = Part(values.where(mask, torch.zeros_like(values)), owner)
        return found


class PrefillCase(ProofCase):
    """A prefill chunk of the scene's first request, and for a rich key the report behind it.

    Args:
        key: the captured size.
        count: tokens of the chunk, at most the size; as many as fit the request's blocks.
        seed: draws where the chunk starts.
    """

    def __init__(self, scene: Scene, key: PrefillKey, count: int, seed: int) -> None:
        super().__init__(scene, (0,))
        self.key = key
        self.count = min(count, scene.room(0))
        # What stands before the start is the request's own text.
        last = min(scene.lengths[0] - 1, scene.room(0) - self.count)
        draw = random.Random(seed)
        self.start_position = draw.randint(0, max(last, 0))
        vocab = self.runner.vocab_size
        self._ids = [draw.randrange(vocab) for _ in range(self.count)]
        self._following = [*self._ids[1:], draw.randrange(vocab)]

    @property
    def num_kept(self) -> int:
        """Tokens that the decoder's layers run over."""
        capacity = self.runner.model.state.capacity
        return min(self.count, capacity.keep_tokens) if self._is_bounded else self.count

    @property
    def _is_bounded(self) -> bool:
        return self.runner.buffers.late is not None

    def _write_inputs(self) -> None:
        buffers, count = self.runner.buffers, self.count
        inputs, history = buffers.prefill, self.scene.history(0, self.start_position)
        inputs.token_ids[:count] = torch.tensor(self._ids)
        inputs.facts.copy_(torch.tensor((self.slots[0], self.start_position, count, *history)))
        inputs.lower.fill_(self.start_position + count - self.num_kept)
        if buffers.rich is not None:
            buffers.rich.following[:count] = torch.tensor(self._following)

    def _outputs(self) -> dict[str, Part]:
        buffers, count = self.runner.buffers, self.count
        owner = torch.zeros(count, dtype=torch.int64)
        found = _token_parts(buffers.target, count, owner)
        stream, kept = buffers.target.stream, count
        if buffers.late is not None:
            # "mask" runs all rows, "compact" those that are kept.
            compact = self.runner.model.state.capacity.bounded_replay == "compact"
            stream, kept = buffers.late.stream, self.num_kept if compact else count
        found["hidden states"] = Part(stream[:kept].clone(), owner[:kept])
        if self.key.variant is StepVariant.RICH and buffers.rich is not None:
            for name in ("prompt_chosen", "prompt_top_ids", "prompt_top_logprobs"):
                found[name] = Part(getattr(buffers.rich, name)[:count].clone(), owner)
        return found
