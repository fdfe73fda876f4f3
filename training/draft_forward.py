"""Draft rounds at random anchors of training rows, and the drafter's loss.

Owns the choice of anchors, what each round may see, and the three losses. Owns no formula of the
drafter: the parameters and pieces are `DraftModel`'s, and a test holds `draft_hidden` against it.

A round's anchor is the token at position a; it sees context keys at positions a - window .. a - 1
and drafts tokens a + 1 .. a + block. Only an assistant's tokens are ever drafted, so anchors stand
before these, and a round ends where the answer ends.

Source: DSpark paper section 3.3.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decodegrid.graphs.drafter import DraftBlock, DraftModel
from decodegrid.kernels.hyper_connection import hc_pre, initial_pre
from decodegrid.kernels.norm_rope import rope_angles
from training.batches import IGNORED
from training.fast_forward import FastForward
from training.quantised import round_q8, round_record

LOSS_WEIGHTS = (0.1, 0.9, 1.0)
"""Cross entropy, total variation (as L1) or divergence, confidence."""
SLOT_DECAY = 4.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """N draft rounds over (B, S) rows."""

    anchors: Tensor
    """(N,) tokens."""
    positions: Tensor
    """(N,) their positions, at least 1."""
    rows: Tensor
    """(N,) batch row of each."""
    previous: Tensor
    """(N, block) token before each slot, teacher-forced."""
    drafted: Tensor
    """(N, block) true token of each slot."""
    live: Tensor
    """(N, block) bool: no answer ends before the slot."""


def pick_rounds(
    ids: Tensor,
    targets: Tensor,
    answers: Tensor,
    block: int,
    count: int,
    generator: torch.Generator,
) -> Rounds:
    """`count` distinct anchors in each row of (B, S) ids; targets and answers as `Rows` gives them.

    Where a row has fewer answer targets, rounds without any live slot fill up.
    """
    batch, length = ids.shape
    span = length - block - 1
    wanted = answers & (targets != IGNORED)
    draw = torch.rand(batch, span, generator=generator) + ~wanted[:, 1 : span + 1]
    order = draw.argsort(-1)[:, :count] + 1
    rows = torch.arange(batch).repeat_interleave(order.shape[1])
    positions = order.flatten()
    slots = positions[:, None] + torch.arange(block)
    truth = targets[rows[:, None], slots]
    return Rounds(
        anchors=ids[rows, positions],
        positions=positions,
        rows=rows,
        previous=ids[rows[:, None], slots],
        drafted=truth.clamp(min=0),
        live=wanted[rows[:, None], slots].cumprod(-1).bool(),
    )


def context_of(
    model: DraftModel, taps: Tensor, rounds: Rounds, *, records: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Context keys of each drafter layer (N, window, d) and which are live (N, window); `records`
    rounds them as a V4.1 cache does."""
    window, length = model.config.sliding_window, taps.shape[1]
    keys = model.context_keys(model.draft_context(taps), torch.arange(length))
    if records:
        keys = [round_record(layer, round_q8) for layer in keys]
    seen = rounds.positions[:, None] - window + torch.arange(window)
    place = rounds.rows[:, None] * length + seen.clamp(min=0)
    # The gradient of an index_select is much cheaper than that of an indexed read.
    chosen = [layer.flatten(0, 1).index_select(0, place.flatten()) for layer in keys]
    return [layer.view(*seen.shape, -1) for layer in chosen], seen >= 0


def draft_hidden(
    fast: FastForward,
    rounds: Rounds,
    keys: list[Tensor],
    live: Tensor,
    *,
    records: bool = False,
) -> Tensor:
    """As `DraftModel.draft_hidden`, in the pieces of `FastForward`: (N, block, D); `records` rounds
    the block's own keys."""
    model, config = fast.model, fast.config
    assert isinstance(model, DraftModel)
    size = config.dspark_block_size
    ids = rounds.anchors.unsqueeze(1).repeat(1, size)
    ids[:, 1:] = config.dspark_noise_token_id
    slots = rounds.positions.unsqueeze(1) + torch.arange(size)
    stream = model.embed(ids).unsqueeze(2).repeat(1, 1, config.hc_mult, 1)
    pre = initial_pre(stream)
    for block, layer_keys in zip(model.mtp, keys, strict=True):
        assert isinstance(block, DraftBlock)
        next_pre, post, comb, x = fast.open_sublayer(block, "attn", stream, pre)
        cos, sin = rope_angles(slots, block.attn.frequencies)
        _, query, own = fast.project(block.attn, x, cos, sin)
        if records:
            own = round_record(own, round_q8)
        attended = fast.draft_attend(query, layer_keys, own, live, block.attn.attn_sink)
        update = fast.output(block.attn, attended, cos, sin)
        stream = fast.post(update, stream, post, comb)
        pre, post, comb, x = fast.open_sublayer(block, "ffn", stream, next_pre)
        stream = fast.post(fast.experts(block.ffn, x), stream, post, comb)
    return hc_pre(stream, pre)


def draft_logits(model: DraftModel, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (N, block, vocab) with the Markov bias, and confidence logits (N, block)."""
    embedded, bias = model.markov(previous)
    return model.draft_base_logits(hidden) + bias, model.confidence_logit(hidden, embedded)


def slot_losses(
    logits: Tensor,
    confidence: Tensor,
    target_probs: Tensor,
    drafted: Tensor,
    divergence: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weighted loss of each slot (N, block), without the slot weights, and the acceptance
    probability 1 - TV (N, block), without gradient.

    `divergence` puts the cross entropy to the target's distribution in the place of the total
    variation, whose gradient vanishes with the probability of the token that should rise.
    """
    log_probs = logits.log_softmax(-1)
    entropy = -log_probs.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    distance = (log_probs.exp() - target_probs).abs().sum(-1)
    accepted = (1.0 - 0.5 * distance).detach().clamp(0.0, 1.0)
    calibration = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    apart = -(target_probs * log_probs).sum(-1) if divergence else distance
    first, second, third = LOSS_WEIGHTS
    return first * entropy + second * apart + third * calibration, accepted


def draft_loss(losses: Tensor, live: Tensor) -> Tensor:
    """Mean over live slots, slot i weighing exp(-i / SLOT_DECAY); 0 where none is live."""
    weights = torch.exp(-torch.arange(losses.shape[1]) / SLOT_DECAY) * live
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)
