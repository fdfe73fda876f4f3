"""Regions of a decode step that turn logits into emitted tokens: choice, acceptance, slot state.

Owns both ways to verify drafts. "coupled": one choice per query token with the noise that drafted,
then the longest equal prefix. "rejection": acceptance against what each draft was drawn from. Rows
that are pads compute on slot 0 and write zeros there.

Source: DeepInfer's sampler and draft metadata.
"""

import torch
from torch import Tensor

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions_layer import RegionSpec, spec
from decodegrid.graphs.state import Capacity
from decodegrid.kernels.filters import filter_logits_op
from decodegrid.kernels.rejection import TokenSampling, verify_rejection
from decodegrid.kernels.sampling import choose_scaled
from decodegrid.kernels.verify import accept_prefix


def verify_regions(config: ModelConfig, capacity: Capacity) -> dict[str, RegionSpec]:
    """`choose` and `accept`, or `verify` where drafts are verified by rejection."""
    num_drafts = capacity.num_draft_tokens

    def commit(
        tokens: Tensor, accepted: Tensor, row_drafts: Tensor, slots: Tensor, last_token: Tensor,
        seq_len: Tensor, history: Tensor, num_drafts_out: Tensor, stop_token_ids: Tensor,
        token_ids_out: Tensor, num_emitted_out: Tensor, stopped_out: Tensor,
    ) -> None:
        """Emit the accepted drafts and the token after them; install both in the slots.

        tokens: (B, K + 1); accepted: (B,); row_drafts: (B, K).
        """
        live = slots > 0
        column = torch.arange(num_drafts + 1, device=slots.device)
        emitted = (accepted + 1).where(live, torch.zeros_like(accepted))
        token_ids_out.copy_(tokens)
        num_emitted_out.copy_(emitted)
        known = torch.cat((history[slots], last_token[slots].unsqueeze(1), row_drafts), 1)
        following = accepted.unsqueeze(1) + 1 + torch.arange(3, device=slots.device)
        later = known.gather(1, following)
        final = tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
        zero = torch.zeros_like(final)
        stops = stop_token_ids[slots].unsqueeze(1) == tokens.unsqueeze(2)
        counted = (column < emitted.unsqueeze(1)).unsqueeze(2)
        stopped_out.copy_((stops & counted).flatten(1).any(1))
        new_len = (seq_len[slots] + emitted).where(live, torch.ones_like(zero))
        last_token[slots] = final.where(live, zero)
        history[slots] = later.where(live.unsqueeze(1), -torch.ones_like(later))
        seq_len[slots] = new_len
        # Drafts of this step are spent; a step with a drafter installs new ones afterwards.
        num_drafts_out[slots] = zero

    def choose(
        logits: Tensor, token_slot: Tensor, positions: Tensor, temperature: Tensor,
        top_p: Tensor, top_k: Tensor, min_p: Tensor, seed: Tensor, chosen_out: Tensor,
    ) -> None:
        heat = temperature[token_slot]
        scaled = filter_logits_op(
            logits, heat, top_p[token_slot], top_k[token_slot], min_p[token_slot]
        )
        chosen_out.copy_(choose_scaled(scaled, heat, seed[token_slot], positions + 1))

    def accept(
        chosen: Tensor, slots: Tensor, query_lens: Tensor, query_starts: Tensor,
        last_token: Tensor, seq_len: Tensor, history: Tensor, drafts: Tensor,
        num_drafts_out: Tensor, stop_token_ids: Tensor, token_ids_out: Tensor,
        num_emitted_out: Tensor, stopped_out: Tensor,
    ) -> None:
        column = torch.arange(num_drafts + 1, device=slots.device)
        index = (query_starts.unsqueeze(1) + column).clamp(max=chosen.shape[0] - 1)
        tokens = chosen[index]
        row_drafts = drafts[slots][:, :num_drafts]
        accepted = accept_prefix(tokens, row_drafts, query_lens)
        commit(
            tokens, accepted, row_drafts, slots, last_token, seq_len, history, num_drafts_out,
            stop_token_ids, token_ids_out, num_emitted_out, stopped_out,
        )

    def verify(
        logits: Tensor, token_slot: Tensor, positions: Tensor, temperature: Tensor,
        top_p: Tensor, top_k: Tensor, min_p: Tensor, seed: Tensor, draft_log_probs: Tensor,
        slots: Tensor, query_lens: Tensor, query_starts: Tensor, last_token: Tensor,
        seq_len: Tensor, history: Tensor, drafts: Tensor, num_drafts_out: Tensor,
        stop_token_ids: Tensor, token_ids_out: Tensor, num_emitted_out: Tensor,
        stopped_out: Tensor,
    ) -> None:
        # The draft after each query token; the last one has none, and its length says so.
        offset = (positions - seq_len[token_slot] + 1).clamp(0, num_drafts - 1)
        sampling = TokenSampling(
            temperature[token_slot], top_p[token_slot], top_k[token_slot], min_p[token_slot],
            seed[token_slot],
        )
        verified = verify_rejection(
            logits, draft_log_probs[token_slot, offset], drafts[token_slot, offset], positions,
            sampling, query_starts, query_lens, num_drafts,
        )
        commit(
            verified.token_ids, verified.accepted, drafts[slots], slots, last_token, seq_len,
            history, num_drafts_out, stop_token_ids, token_ids_out, num_emitted_out, stopped_out,
        )

    rows = (
        "slots", "query_lens", "query_starts", "token_ids_out", "num_emitted_out", "stopped_out",
    )
    if capacity.keeps_draft_distributions:
        return {"verify": spec(verify, "logits", "token_slot", "positions", *rows)}
    return {
        "choose": spec(choose, "logits", "token_slot", "positions", "chosen_out"),
        "accept": spec(accept, "chosen", *rows),
    }
