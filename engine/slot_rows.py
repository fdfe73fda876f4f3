"""Writes what the device has to know of a request into the rows of its slot.

Owns the way from a SlotRequest to slot state; reads nothing from the device. Data flow: the runner
calls it when a request starts; steps read and advance the rows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from decodegrid.engine.runner_protocol import RichRequest, SlotRequest
from decodegrid.graphs.rich_state import RichState
from decodegrid.graphs.state import MAX_STOP_TOKEN_IDS, SlotState


def write_slot(slots: SlotState, slot: int, request: SlotRequest, vocab_size: int) -> None:
    """The rows that every request has; drafts and confidences of an earlier one are dropped."""
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
    slots.top_k[slot] = min(request.top_k, vocab_size)
    slots.min_p[slot] = request.min_p
    slots.seed[slot] = request.seed
    slots.stop_token_ids[slot] = torch.tensor(stops)


def write_rich(rich: RichState, slot: int, request: RichRequest | None) -> None:
    """The rows of the rich variant; a request without them is only marked, because steps read
    nothing else of it."""
    rich.enabled[slot] = request is not None
    if request is None:
        return
    vocab = rich.counts.shape[1]
    bias = torch.zeros(vocab, dtype=rich.bias.dtype)
    bias[_ids(request.logit_bias)] = torch.tensor(
        list(request.logit_bias.values()), dtype=bias.dtype
    )
    rich.bias[slot] = bias
    counts = torch.bincount(_ids(request.output_token_ids), minlength=vocab)
    rich.counts[slot] = counts.to(rich.counts.dtype)
    rich.in_prompt[slot] = _marks(request.prompt_token_ids, vocab)
    rich.banned[slot] = _marks(request.banned_before, vocab)
    rich.min_seq_len[slot] = request.min_seq_len
    rich.repetition[slot] = request.repetition_penalty
    rich.frequency[slot] = request.frequency_penalty
    rich.presence[slot] = request.presence_penalty
    rich.wants_logprobs[slot] = request.num_top_logprobs >= 0


def _ids(token_ids: Iterable[int]) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64)


def _marks(token_ids: Iterable[int], vocab_size: int) -> Tensor:
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[_ids(token_ids)] = True
    return marks
