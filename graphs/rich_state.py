"""State and buffers of the rich variant: what adjusts and reports the logits of single requests.

Owns the per-slot rows that only rich requests use, and the static buffers of their steps. A
deployment that does not capture the variant allocates none of them. The host writes a slot's rows
when a rich request starts; steps count what they emit. Rows of other requests hold whatever an
earlier request left, so everything that reads them looks at `enabled` first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_TOP_LOGPROBS = 20
"""Most probable tokens that a step reports."""

MASK_WORD_BITS = 32
"""Token ids in one int32 word of a mask."""


@dataclass(frozen=True, slots=True)
class RichState:
    """Rows of each slot, first dimension num_slots."""

    enabled: Tensor
    """(S,) bool: the slot's request is rich."""
    wants_logprobs: Tensor
    """(S,) bool."""
    bias: Tensor
    """(S, vocab) island dtype, added to the logits."""
    counts: Tensor
    """(S, vocab) int32: how often each id is in the committed output."""
    in_prompt: Tensor
    """(S, vocab) bool."""
    banned: Tensor
    """(S, vocab) bool: ids that cannot be chosen below min_seq_len."""
    min_seq_len: Tensor
    """(S,) int64 committed length."""
    repetition: Tensor
    """(S,) island dtype, 1 is neutral."""
    frequency: Tensor
    """(S,) island dtype, 0 is neutral."""
    presence: Tensor
    """(S,) island dtype, 0 is neutral."""

    def adjusting(self) -> tuple[Tensor, ...]:
        """What the adjusting regions read, in their argument order."""
        return (
            self.enabled, self.bias, self.counts, self.in_prompt, self.banned, self.min_seq_len,
            self.repetition, self.frequency, self.presence,
        )


@dataclass(frozen=True, slots=True)
class RichBuffers:
    """Between the regions of rich steps, and between them and the host."""

    adjusted: Tensor
    """(T, vocab): logits that tokens are chosen from."""
    masks: Tensor
    """(B, K + 1, words) int32 input: allowed ids after each query token of a row."""
    chosen: Tensor
    """(B, K + 1) output: log-probability of each entry of token_ids."""
    top_ids: Tensor
    """(B, K + 1, NUM_TOP_LOGPROBS) int64 output."""
    top_logprobs: Tensor
    """(B, K + 1, NUM_TOP_LOGPROBS) output."""
    following: Tensor
    """(T,) int64 input: the token after each position of a prefill chunk."""
    prompt_chosen: Tensor
    """(T,) output."""
    prompt_top_ids: Tensor
    """(T, NUM_TOP_LOGPROBS) int64 output."""
    prompt_top_logprobs: Tensor
    """(T, NUM_TOP_LOGPROBS) output."""


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask over the vocabulary."""
    return -(-vocab_size // MASK_WORD_BITS)


def allocate_rich_state(
    num_slots: int, vocab_size: int, wide: torch.dtype, device: torch.device | str
) -> RichState:
    """Rows that adjust nothing; `wide` is the dtype of logits."""

    def floats(*shape: int) -> Tensor:
        return torch.zeros((num_slots, *shape), dtype=wide, device=device)

    def flags(*shape: int) -> Tensor:
        return torch.zeros((num_slots, *shape), dtype=torch.bool, device=device)

    return RichState(
        enabled=flags(),
        wants_logprobs=flags(),
        bias=floats(vocab_size),
        counts=torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device),
        in_prompt=flags(vocab_size),
        banned=flags(vocab_size),
        min_seq_len=torch.zeros(num_slots, dtype=torch.int64, device=device),
        repetition=floats().fill_(1.0),
        frequency=floats(),
        presence=floats(),
    )


def allocate_rich_buffers(
    num_rows: int,
    num_drafts: int,
    max_chunk: int,
    vocab_size: int,
    wide: torch.dtype,
    device: torch.device | str,
) -> RichBuffers:
    """Buffers for `num_rows` rows and chunks of `max_chunk` tokens; all masks allow everything."""
    row = (num_rows, num_drafts + 1)

    def floats(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=wide, device=device)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    words = num_mask_words(vocab_size)
    return RichBuffers(
        adjusted=floats(num_rows * (num_drafts + 1), vocab_size),
        masks=torch.full((*row, words), -1, dtype=torch.int32, device=device),
        chosen=floats(*row),
        top_ids=ints(*row, NUM_TOP_LOGPROBS),
        top_logprobs=floats(*row, NUM_TOP_LOGPROBS),
        following=ints(max_chunk),
        prompt_chosen=floats(max_chunk),
        prompt_top_ids=ints(max_chunk, NUM_TOP_LOGPROBS),
        prompt_top_logprobs=floats(max_chunk, NUM_TOP_LOGPROBS),
    )
