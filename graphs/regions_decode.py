"""Regions of a decode step outside the layers: the head, the drafter's ends, copies.

Owns what turns hidden states into logits, and into the next drafts; what turns logits into emitted
tokens is in regions_verify.py. Rows that are pads compute on slot 0 and write zeros there.

Source: DeepInfer's draft metadata; DeepSeek-V4.1-Flash `forward_spec`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from decodegrid.graphs.kv_cache import step_codec
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions_layer import RegionSpec, spec
from decodegrid.graphs.state import Capacity, window_ring_len
from decodegrid.kernels.filters import filter_logits_op
from decodegrid.kernels.hyper_connection import hc_pre
from decodegrid.kernels.norm_rope import apply_rope, island, rms_norm, rope_angles
from decodegrid.kernels.products import Matrix, from_flat_list, last_rows
from decodegrid.kernels.records import RecordFormat
from decodegrid.kernels.rejection import TokenSampling, draw_draft
from decodegrid.kernels.sampling import choose_scaled
from decodegrid.kernels.step_kernels import StepKernels


def output_regions(config: ModelConfig, kernels: StepKernels) -> dict[str, RegionSpec]:
    """Head and row copies."""
    eps, product = config.rms_norm_eps, kernels.project

    def head(
        stream: Tensor, pre: Tensor, norm: Tensor, weight: Tensor, logits_out: Tensor
    ) -> None:
        normed = island(rms_norm(hc_pre(stream, pre), norm, eps))
        logits_out.copy_(product(normed, weight))

    def copy_rows(
        source: Tensor, source_index: Tensor, target_out: Tensor, target_index: Tensor
    ) -> None:
        target_out[target_index] = source[source_index]

    def load_rows(source: Tensor, source_index: Tensor, target_out: Tensor) -> None:
        target_out.copy_(source[source_index])

    specs = {
        "head": spec(head, "stream", "pre", "logits_out"),
        "load_window": spec(load_rows),
        "copy_window": spec(copy_rows, "source", "source_index", "target_out", "target_index"),
    }
    if any(config.compress_ratios[layer] == 2 for layer in config.kv_source_layer_ids):
        # One more variant of each: compressor rows are wider and always at least fp32.
        specs["load_compressor"] = spec(load_rows)
        specs["copy_compressor"] = spec(
            copy_rows, "source", "source_index", "target_out", "target_index"
        )
    return specs


def draft_regions(
    config: ModelConfig, capacity: Capacity, kernels: StepKernels
) -> dict[str, RegionSpec]:
    """Taps, context keys, the drafter's metadata and its heads."""
    if capacity.num_draft_tokens == 0:
        return {}
    eps, window, block = config.rms_norm_eps, config.sliding_window, config.dspark_block_size
    ring = window_ring_len(config, capacity.num_draft_tokens, capacity.window_slack)
    offered, noise = capacity.num_draft_tokens, config.dspark_noise_token_id
    vocab = config.vocab_size
    keep, q8 = step_codec(capacity.kv_cache, kernels).store, int(RecordFormat.Q8)
    product = kernels.project

    def tap(stream: Tensor, tap_out: Tensor) -> None:
        tap_out.copy_(island(stream).mean(1))

    def draft_context(
        taps: list[Tensor], positions: Tensor, store: Tensor, main_proj: Matrix,
        main_norm: Tensor, w_in: list[Tensor], kv_norm: list[Tensor], frequencies: list[Tensor],
        rings_out: list[Tensor],
    ) -> None:
        context = rms_norm(product(torch.cat(taps, 1), main_proj), main_norm, eps)
        weights = from_flat_list(w_in, len(kv_norm))
        for weight, norm, frequency, ring_out in zip(
            weights, kv_norm, frequencies, rings_out, strict=True
        ):
            cos, sin = rope_angles(positions, frequency)
            keys = rms_norm(product(context, last_rows(weight, norm.shape[0])), norm, eps)
            keep(ring_out, store, apply_rope(keys, cos, sin), q8)

    def draft_metadata(
        slots: Tensor, last_token: Tensor, seq_len: Tensor, input_ids: Tensor, positions: Tensor,
        token_slot: Tensor, valid: Tensor, window_store: Tensor, window_index: Tensor,
    ) -> None:
        index = torch.arange(positions.shape[0], device=slots.device)
        row, offset = index // block, index % block
        slot = slots[row]
        is_live = slot > 0
        zero = torch.zeros_like(slot)
        anchor = (seq_len[slot] - 1).where(is_live, zero).clamp(min=0)
        token = last_token[slot].clamp(0, config.vocab_size - 1)
        token = token.where(offset == 0, torch.full_like(token, noise))
        input_ids.copy_(token.where(is_live, zero))
        positions.copy_(anchor + offset)
        token_slot.copy_(slot)
        valid.copy_(is_live)
        window_store.copy_((slot * ring + (anchor + offset) % ring).where(is_live, zero))
        # Context at positions anchor - window .. anchor - 1, then the block itself.
        reach = torch.arange(window + block, device=slots.device)
        seen = (anchor - window).unsqueeze(1) + reach
        reads = slot.unsqueeze(1) * ring + seen.clamp(min=0) % ring
        window_index.copy_(
            reads.where((seen >= 0) & is_live.unsqueeze(1), -torch.ones_like(reads))
        )

    def draft_base(
        stream: Tensor,
        pre: Tensor,
        norm: Tensor,
        weight: Tensor,
        slots: Tensor,
        stopped: Tensor,
        last_token: Tensor,
        num_drafts_out: Tensor,
        hidden_out: Tensor,
        logits_out: Tensor,
        previous_out: Tensor,
    ) -> None:
        hidden = hc_pre(stream, pre)
        normed = island(rms_norm(hidden, norm, eps))
        logits_out.copy_(product(normed, weight).unflatten(0, (-1, block)))
        hidden_out.copy_(hidden.unflatten(0, (-1, block)))
        previous_out.copy_(last_token[slots].clamp(0, vocab - 1))
        count = torch.full_like(slots, offered)
        # A step launched before anyone knew that a request stopped spends one query token on it.
        num_drafts_out[slots] = count.where((slots > 0) & ~stopped, torch.zeros_like(count))

    def draft_heads(
        hidden: Tensor, previous: Tensor, markov_embed: Tensor, markov_head: Tensor,
        confidence_proj: Tensor, draft_temperature: Tensor, logits: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Logits with the Markov bias, and the acceptance estimate: (B, vocab), (B,)."""
        embedded = island(F.embedding(previous, markov_embed))
        biased = logits + product(embedded, markov_head)
        # One output feature: two sums, without the joined input that a product would need.
        split = confidence_proj.to(embedded.dtype)
        seen = (island(hidden) * split[:, : hidden.shape[1]]).sum(-1)
        raw = seen + (embedded * split[:, hidden.shape[1] :]).sum(-1)
        return biased, torch.sigmoid((raw / draft_temperature).clamp(-60.0, 60.0))

    def install(
        token: Tensor, rate: Tensor, slots: Tensor, stopped: Tensor, previous: Tensor,
        drafts_out: Tensor, confidence_out: Tensor,
    ) -> None:
        live = slots > 0
        previous.copy_(token)
        drafts_out[slots] = token.where(live, torch.zeros_like(token))
        confidence_out[slots] = rate.where(live & ~stopped, torch.zeros_like(rate))

    def draft_choose(
        hidden: Tensor, previous: Tensor, markov_embed: Tensor, markov_head: Tensor,
        confidence_proj: Tensor, slots: Tensor, stopped: Tensor, seq_len: Tensor,
        temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, seed: Tensor,
        step: Tensor, draft_temperature: Tensor, logits: Tensor, drafts_out: Tensor,
        confidence_out: Tensor,
    ) -> None:
        """The draft by the noise with which the target will choose at its position."""
        biased, rate = draft_heads(
            hidden, previous, markov_embed, markov_head, confidence_proj, draft_temperature, logits
        )
        heat = temperature[slots]
        scaled = filter_logits_op(biased, heat, top_p[slots], top_k[slots], min_p[slots])
        token = choose_scaled(scaled, heat, seed[slots], seq_len[slots] + step)
        logits.copy_(biased)
        install(token, rate, slots, stopped, previous, drafts_out, confidence_out)

    def draft_sample(
        hidden: Tensor, previous: Tensor, markov_embed: Tensor, markov_head: Tensor,
        confidence_proj: Tensor, slots: Tensor, stopped: Tensor, seq_len: Tensor,
        temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, seed: Tensor,
        step: Tensor, draft_temperature: Tensor, logits: Tensor, drafts_out: Tensor,
        confidence_out: Tensor, log_probs_out: Tensor,
    ) -> None:
        """The draft by noise of its own; keeps what it was drawn from."""
        biased, rate = draft_heads(
            hidden, previous, markov_embed, markov_head, confidence_proj, draft_temperature, logits
        )
        sampling = TokenSampling(
            temperature[slots], top_p[slots], top_k[slots], min_p[slots], seed[slots]
        )
        token, log_probs = draw_draft(biased, sampling, seq_len[slots] + step, step)
        logits.copy_(biased)
        live = (slots > 0).unsqueeze(1)
        log_probs_out[slots] = log_probs.where(live, torch.zeros_like(log_probs))
        install(token, rate, slots, stopped, previous, drafts_out, confidence_out)

    heads = ("hidden", "previous", "slots", "stopped", "logits")
    if capacity.keeps_draft_distributions:
        drawing = {"draft_sample": spec(draft_sample, *heads)}
    else:
        drawing = {"draft_choose": spec(draft_choose, *heads)}
    return {
        "tap": spec(tap, "stream", "tap_out"),
        "draft_context": spec(
            draft_context, "taps", "positions", "store", "rings_out"
        ),
        "draft_metadata": spec(
            draft_metadata, "slots", "input_ids", "positions", "token_slot", "valid",
            "window_store", "window_index",
        ),
        "draft_base": spec(
            draft_base, "stream", "pre", "slots", "stopped", "hidden_out", "logits_out",
            "previous_out",
        ),
        **drawing,
    }
