"""Regions of the rich variant: logits as single requests want them, and what is reported of them.

Owns bias, penalties, bans and masks at every verify position, the counts of what was emitted, and
log-probabilities. Choice and acceptance themselves are the fused variant's, on adjusted logits.
Rows of requests that are not rich keep their logits bit for bit.

Source: vLLM's sampler (what penalties, bans and raw log-probabilities mean).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions_layer import RegionSpec, spec
from decodegrid.graphs.rich_state import MASK_WORD_BITS, NUM_TOP_LOGPROBS
from decodegrid.graphs.state import Capacity
from decodegrid.kernels.top_logits import top_logits_op


class Adjustment(NamedTuple):
    """What adjusts N rows of logits: (N, vocab) or (N, 1) each."""

    bias: Tensor
    counts: Tensor
    """How often an id stands in the output before this place."""
    in_prompt: Tensor
    banned: Tensor
    """Bool: ids that cannot be chosen here."""
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def adjust_logits(logits: Tensor, how: Adjustment) -> Tensor:
    """Bias, penalties and bans: (N, vocab) -> (N, vocab), banned ids at -inf."""
    seen = how.counts > 0
    biased = logits + how.bias
    weakened = torch.where(biased > 0, biased / how.repetition, biased * how.repetition)
    result = weakened.where(seen | how.in_prompt, biased)
    result = result - how.frequency * how.counts.to(logits.dtype)
    result = result - how.presence * seen.to(logits.dtype)
    return result.masked_fill(how.banned, float("-inf"))


def mask_bits(words: Tensor, vocab_size: int) -> Tensor:
    """Bool mask from words of 32 bits, lowest bit first: (N, words) int32 -> (N, vocab)."""
    ids = torch.arange(vocab_size, device=words.device)
    return ((words[:, ids // MASK_WORD_BITS] >> (ids % MASK_WORD_BITS)) & 1) > 0


def rich_regions(config: ModelConfig, capacity: Capacity) -> dict[str, RegionSpec]:
    """Every region that only the rich variant and prompt log-probabilities call."""
    if not capacity.rich:
        return {}
    specs = {**_choice_regions(config, capacity), **_report_regions(config, capacity)}
    if capacity.num_draft_tokens > 0:
        specs["adjust_drafts"] = _draft_region(config)
    return specs


def _choice_regions(config: ModelConfig, capacity: Capacity) -> dict[str, RegionSpec]:
    vocab, num_drafts = config.vocab_size, capacity.num_draft_tokens

    def adjust(
        logits: Tensor, token_slot: Tensor, positions: Tensor, slots: Tensor, seq_len: Tensor,
        drafts: Tensor, masks: Tensor, enabled: Tensor, bias: Tensor, counts: Tensor,
        in_prompt: Tensor, banned: Tensor, min_seq_len: Tensor, repetition: Tensor,
        frequency: Tensor, presence: Tensor, adjusted_out: Tensor,
    ) -> None:
        """Logits at every query token, as if the row's drafts before it were emitted."""
        # Of pads and surplus tokens anything may come out, but no index may leave its tensor.
        offset = (positions - seq_len[token_slot] + 1).clamp(0, num_drafts)
        row = (token_slot.unsqueeze(1) == slots).to(torch.int64).argmax(1)
        ids = torch.arange(vocab, device=logits.device)
        count = counts[token_slot]
        for place in range(num_drafts):
            draft = drafts[token_slot, place].where(offset > place, -torch.ones_like(offset))
            count = count + (draft.unsqueeze(1) == ids).to(count.dtype)
        early = (positions + 1 < min_seq_len[token_slot]).unsqueeze(1)
        how = Adjustment(
            bias[token_slot], count, in_prompt[token_slot], banned[token_slot] & early,
            repetition[token_slot].unsqueeze(1), frequency[token_slot].unsqueeze(1),
            presence[token_slot].unsqueeze(1),
        )
        allowed = mask_bits(masks[row, offset], vocab)
        result = adjust_logits(logits, how).masked_fill(~allowed, float("-inf"))
        adjusted_out.copy_(result.where(enabled[token_slot].unsqueeze(1), logits))

    def count_tokens(
        slots: Tensor, token_ids: Tensor, num_emitted: Tensor, enabled: Tensor, counts_out: Tensor
    ) -> None:
        """Count what the step emitted; pads add nothing to the null row."""
        column = torch.arange(num_drafts + 1, device=slots.device)
        emitted = (column < num_emitted.unsqueeze(1)) & (enabled[slots] & (slots > 0)).unsqueeze(1)
        index = slots.unsqueeze(1).expand_as(token_ids), token_ids.clamp(0, vocab - 1)
        counts_out.index_put_(index, emitted.to(counts_out.dtype), accumulate=True)

    return {
        "adjust": spec(adjust, "logits", "token_slot", "positions", "slots", "masks",
                       "adjusted_out"),
        "count_tokens": spec(count_tokens, "slots", "token_ids", "num_emitted"),
    }


def _draft_region(config: ModelConfig) -> RegionSpec:
    vocab = config.vocab_size

    def adjust_drafts(
        slots: Tensor, seq_len: Tensor, enabled: Tensor, bias: Tensor, counts: Tensor,
        in_prompt: Tensor, banned: Tensor, min_seq_len: Tensor, repetition: Tensor,
        frequency: Tensor, presence: Tensor, logits: Tensor,
    ) -> None:
        """Base logits of the drafts by the same rules, so that fewer are rejected.

        Nothing relies on them: drafts of the block itself are not counted, and the Markov bias
        comes later.
        """
        block = logits.shape[1]
        place = seq_len[slots].unsqueeze(1) + torch.arange(block, device=slots.device)
        early = (place < min_seq_len[slots].unsqueeze(1)).flatten().unsqueeze(1)

        def spread(rows: Tensor) -> Tensor:
            return rows[slots].view(slots.shape[0], 1, -1).expand(-1, block, -1).flatten(0, 1)

        how = Adjustment(
            spread(bias), spread(counts), spread(in_prompt), spread(banned) & early,
            spread(repetition), spread(frequency), spread(presence),
        )
        plain = logits.flatten(0, 1)
        result = adjust_logits(plain, how).where(spread(enabled), plain)
        logits.copy_(result.view(-1, block, vocab))

    return spec(adjust_drafts, "slots", "logits")


def _report_regions(config: ModelConfig, capacity: Capacity) -> dict[str, RegionSpec]:
    vocab, num_drafts = config.vocab_size, capacity.num_draft_tokens

    def report(
        logits: Tensor, token_slot: Tensor, query_starts: Tensor, token_ids: Tensor,
        enabled: Tensor, wants_logprobs: Tensor, chosen_out: Tensor, top_ids_out: Tensor,
        top_logprobs_out: Tensor,
    ) -> None:
        """Log-softmax of the unadjusted logits: of the emitted tokens and of the best ones."""
        wanted = enabled[token_slot] & wants_logprobs[token_slot]
        values, ids = top_logits_op(logits, wanted, NUM_TOP_LOGPROBS)
        norm = logits.logsumexp(-1)
        column = torch.arange(num_drafts + 1, device=logits.device)
        index = (query_starts.unsqueeze(1) + column).clamp(0, logits.shape[0] - 1)
        token = token_ids.clamp(0, vocab - 1)
        chosen_out.copy_(logits[index, token] - norm[index])
        top_ids_out.copy_(ids[index])
        top_logprobs_out.copy_((values - norm.unsqueeze(1))[index])

    def report_prompt(
        logits: Tensor, following: Tensor, chosen_out: Tensor, top_ids_out: Tensor,
        top_logprobs_out: Tensor,
    ) -> None:
        """The same of a prompt's positions and the tokens that follow them."""
        values, ids = top_logits_op(
            logits, torch.ones_like(following, dtype=torch.bool), NUM_TOP_LOGPROBS
        )
        norm = logits.logsumexp(-1)
        token = following.clamp(0, vocab - 1).unsqueeze(1)
        chosen_out.copy_(logits.gather(1, token).squeeze(1) - norm)
        top_ids_out.copy_(ids)
        top_logprobs_out.copy_(values - norm.unsqueeze(1))

    outs = ("chosen_out", "top_ids_out", "top_logprobs_out")
    return {
        "report": spec(report, "logits", "token_slot", "query_starts", "token_ids", *outs),
        "report_prompt": spec(report_prompt, "logits", "following", *outs),
    }
