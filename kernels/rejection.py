"""Verification by rejection sampling: what is emitted follows the target's distribution exactly.

Owns the acceptance test, the residual, and which noise each draw takes. Drafts come with the full
log-probabilities that they were drawn from; a draft is kept with probability min(1, target /
proposal), the first rejected one is replaced by a draw from what the proposal left over, and after
a fully accepted prefix the target itself is drawn from. Temperature 0 is the noise-free case: a
draft is kept if it is the target's first choice. Data flow: logits of the query tokens, drafts and
their log-probabilities -> token ids and the accepted count of each row. No host decision.

Noise is a pure function of (seed, text position, purpose), and nothing is drawn twice. A text
position is accepted or drawn once in a request's life, so acceptance and final token take the
position alone. Drafts need more: position P may be drafted by several rounds, because the first of
them ended before it. Those drafts already shaped confidences, and the budget of a later round may
follow from confidences of an earlier one. With equal noise the new draft at P would be correlated
with the budget that decides whether it is verified, which biases what is emitted; so the place
within the block is part of the draft's counter, and (position, place) names one round.

Source: Leviathan et al. 2023; DeepInfer's verifier (strict comparison, the residual's penalty).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from decodegrid.kernels.filters import filter_logits_op
from decodegrid.kernels.sampling import (
    Purpose,
    choose_scaled,
    gumbel_noise_op,
    stream_counter,
    uniform_noise_op,
)

RESIDUAL_PENALTY = 5e-5
"""Taken from the proposal's log-probabilities in the residual, which is then never empty; a
token's probability moves by less than this share."""


class TokenSampling(NamedTuple):
    """How the request of each query token samples; all (N,)."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor

    def filter(self, logits: Tensor) -> Tensor:
        """Scaled and filtered logits, (N, vocab) -> (N, vocab)."""
        return filter_logits_op(logits, self.temperature, self.top_p, self.top_k, self.min_p)

    def at(self, index: Tensor) -> "TokenSampling":
        """The entries at `index`."""
        return TokenSampling(*(value[index] for value in self))


class Verified(NamedTuple):
    """What one round decided."""

    token_ids: Tensor
    """(B, K + 1) int64: the accepted drafts, then the final token in every column left."""
    accepted: Tensor
    """(B,) int64, 0 to the verified drafts."""
    estimate: Tensor
    """(N,) probability that the draft after a query token is accepted: one minus the residual's
    sum, at least 0; 1 where there is no draft."""


def draw_draft(
    logits: Tensor, sampling: TokenSampling, position: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """A draft per row and the log-probabilities it was drawn from.

    logits: (N, vocab) at least fp32; position: (N,) int64 text position of the draft; index: (1,)
    int64 place in the block. Returns (N,) int64 and (N, vocab).
    """
    scaled = sampling.filter(logits)
    counter = stream_counter(position, Purpose.DRAFT, index)
    token = choose_scaled(scaled, sampling.temperature, sampling.seed, counter)
    return token, scaled.log_softmax(-1)


def residual(log_target: Tensor, log_draft: Tensor, offered: Tensor) -> Tensor:
    """Unnormalised mass that the proposal leaves to the target: (N, vocab).

    offered: (N,) bool; a row without a draft keeps the whole target.
    """
    proposal = (log_draft - RESIDUAL_PENALTY).exp()
    proposal = proposal.where(offered.unsqueeze(-1), torch.zeros_like(proposal))
    return (log_target.exp() - proposal).clamp(min=0.0)


def accept_drafts(
    log_target: Tensor, log_draft: Tensor, drafts: Tensor, uniform: Tensor
) -> Tensor:
    """Whether each draft passes its test: exp(min(log ratio, 0)) > uniform.

    log_target, log_draft: (N, vocab); drafts: (N,) int64, -1 never passes; uniform: (N,).
    Returns (N,) bool.
    """
    token = drafts.clamp(0, log_target.shape[-1] - 1).unsqueeze(-1)
    ratio = (log_target.gather(-1, token) - log_draft.gather(-1, token)).squeeze(-1)
    return (drafts >= 0) & (ratio.clamp(max=0.0).exp() > uniform)


def draw_final(
    scaled: Tensor, log_target: Tensor, mass: Tensor, temperature: Tensor, noise: Tensor
) -> Tensor:
    """The token that ends a round: drawn from `mass`, the first choice at temperature 0.

    scaled, log_target, mass (unnormalised), noise: (B, vocab); temperature: (B,). A mass of zeros,
    which only rounding could make, draws from the target. Returns (B,) int64.
    """
    some = (mass.sum(-1) > 0).unsqueeze(-1)
    drawn = mass.log().where(some, log_target)
    return (drawn.where(temperature.unsqueeze(-1) > 0, scaled) + noise).argmax(-1)


def verify_rejection(
    logits: Tensor,
    log_drafts: Tensor,
    drafts: Tensor,
    positions: Tensor,
    sampling: TokenSampling,
    query_starts: Tensor,
    query_lens: Tensor,
    num_drafts: int,
) -> Verified:
    """One round over N query tokens of B rows.

    logits: (N, vocab) raw, at least fp32; log_drafts: (N, vocab) what the draft after each query
    token was drawn from; drafts: (N,) int64 that draft, -1 for one that offers nothing and is
    rejected in favour of the whole target; positions: (N,) int64 text positions of the query
    tokens; query_starts, query_lens: (B,) int64. Only the first query_lens - 1 drafts of a row
    count. Rows of length 0 accept none and get an arbitrary token.
    """
    count, vocab = logits.shape
    scaled = sampling.filter(logits)
    log_target = scaled.log_softmax(-1)
    follows = positions + 1
    uniform = uniform_noise_op(sampling.seed, stream_counter(follows, Purpose.ACCEPTANCE))
    passes = accept_drafts(log_target, log_drafts, drafts, uniform)
    passes = torch.where(sampling.temperature > 0, passes, drafts == scaled.argmax(-1))
    mass = residual(log_target, log_drafts, drafts >= 0)
    estimate = (1.0 - mass.sum(-1)).clamp(min=0.0).where(drafts >= 0, torch.ones_like(mass[:, 0]))

    column = torch.arange(num_drafts + 1, device=logits.device)
    index = (query_starts.unsqueeze(1) + column).clamp(max=count - 1)
    kept = passes[index] & (column < query_lens.unsqueeze(1) - 1)
    accepted = kept[:, :num_drafts].to(torch.int64).cumprod(-1).sum(-1)
    final = index.gather(1, accepted.unsqueeze(1)).squeeze(1)
    # After the last verified draft the target stands alone, whether or not more was drafted.
    rejected = accepted < query_lens - 1
    chosen, target = sampling.at(final), log_target[final]
    left = residual(target, log_drafts[final], rejected & (drafts[final] >= 0))
    counter = stream_counter(follows[final], Purpose.FINAL)
    noise = gumbel_noise_op(chosen.seed, counter, chosen.temperature, vocab).to(scaled.dtype)
    token = draw_final(scaled[final], target, left, chosen.temperature, noise).unsqueeze(1)
    token_ids = torch.where(column < accepted.unsqueeze(1), drafts[index], token)
    return Verified(token_ids, accepted, estimate)
