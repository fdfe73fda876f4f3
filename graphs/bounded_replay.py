"""Bounded replay: a prefill whose decoder layers see, or run, the last tokens of a text only.

The layers from the first of ratio 1 on are the decoder. With `keep` tokens of a text of length L,
no query of theirs sees window keys below L - keep. "mask" computes every row with such windows;
"compact" leaves the rows below L - keep out, with the same result for the others. Before that the
decoder's kv source has written its entries for all rows, so global attention sees the whole text.
What is kept differs from an exact prefill, because windows are cut at L - keep; decoding behind it
is exact given that state.

Owns the row selection and the order of layers of such a chunk. A decoder row that is left out
writes nothing: its ring slots are never read, since keep covers the window and what drafts may roll
back.
Source: DeepInfer's truncated prefill (mask and compact), DeepSeek-V4.1 tech report 3.2.2.
"""

import torch
from torch import Tensor

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions_layer import RegionSpec, spec
from decodegrid.graphs.state import BoundedReplay

KEPT_FIELDS = (
    "positions", "token_slot", "valid", "window_store", "window_index", "ring_store",
    "length_one", "length_two", "x", "stream", "pre_b", "post_a", "comb_a",
)
"""Token fields that the decoder's rows take over, in the order of the region's arguments."""


def least_keep_tokens(config: ModelConfig, num_draft_tokens: int) -> int:
    """Tokens that must be kept so that decoding never reads what was left out."""
    return config.sliding_window + num_draft_tokens + 1


def num_kept_rows(mode: BoundedReplay, keep_tokens: int, chunk_size: int) -> int:
    """Rows of a chunk that the decoder layers run over, pads included."""
    return min(keep_tokens, chunk_size) if mode == "compact" else chunk_size


def check_bounded_replay(
    config: ModelConfig, mode: BoundedReplay, keep_tokens: int, num_draft_tokens: int
) -> None:
    """Refuse a model or a number of tokens for which the rule does not hold.

    Raises ValueError naming both sides.
    """
    if mode == "off":
        return
    split, where = config.num_prefill_layers, f"prefill.bounded_replay = {mode}"
    least = least_keep_tokens(config, num_draft_tokens)
    if keep_tokens < least:
        raise ValueError(
            f"prefill.keep_tokens is {keep_tokens}; {where} needs at least {least} (sliding_window "
            f"{config.sliding_window} + speculation.num_draft_tokens {num_draft_tokens} + 1)"
        )
    if split == config.num_hidden_layers or config.kv_source_layer_ids[-1] != split:
        raise ValueError(
            f"{where} needs a model whose last kv source is its first layer of ratio 1; this one "
            f"has kv_source_layer_ids {list(config.kv_source_layer_ids)} and "
            f"compress_ratios {list(config.compress_ratios)}"
        )
    if any(layer >= split for layer in config.engram_layer_ids):
        raise ValueError(
            f"{where} needs Engram layers below {split}, got {list(config.engram_layer_ids)}"
        )
    if num_draft_tokens and min(config.dspark_target_layer_ids) < split:
        raise ValueError(
            f"{where} needs the drafter's taps from layer {split} on, got "
            f"dspark_target_layer_ids {list(config.dspark_target_layer_ids)}"
        )


def bounded_regions(config: ModelConfig, mode: BoundedReplay) -> dict[str, RegionSpec]:
    """`keep_rows`, where chunks are bounded."""
    if mode == "off":
        return {}
    window, leaves_out = config.sliding_window, mode == "compact"

    def keep_rows(
        lower: Tensor,
        positions: Tensor, token_slot: Tensor, valid: Tensor, window_store: Tensor,
        window_index: Tensor, ring_store: Tensor, length_one: Tensor, length_two: Tensor,
        x: Tensor, stream: Tensor, pre: Tensor, post: Tensor, comb: Tensor,
        positions_out: Tensor, token_slot_out: Tensor, valid_out: Tensor,
        window_store_out: Tensor, window_index_out: Tensor, ring_store_out: Tensor,
        length_one_out: Tensor, length_two_out: Tensor, x_out: Tensor, stream_out: Tensor,
        pre_out: Tensor, post_out: Tensor, comb_out: Tensor,
    ) -> None:
        index = torch.arange(positions_out.shape[0], device=positions.device)
        if leaves_out:
            index = index + (valid & (positions < lower)).sum()
        inside = index < positions.shape[0]
        index = index.clamp(max=positions.shape[0] - 1)
        live = inside & valid[index]
        position = positions[index]
        zero = torch.zeros_like(position)
        positions_out.copy_(position.where(live, zero))
        token_slot_out.copy_(token_slot[index].where(live, zero))
        valid_out.copy_(live)
        # Row 0 of the workspace is never read; the null row of the ring neither.
        window_store_out.copy_(window_store[index].where(live, zero))
        ring_store_out.copy_(ring_store[index].where(live & (position >= lower), zero))
        seen = position.unsqueeze(1) - (window - 1) + torch.arange(window, device=position.device)
        rows = window_index[index]
        window_index_out.copy_(
            rows.where((seen >= lower) & live.unsqueeze(1), -torch.ones_like(rows))
        )
        length_one_out.copy_(length_one[index].where(live, zero))
        length_two_out.copy_(length_two[index].where(live, zero))
        for source, target in (
            (x, x_out), (stream, stream_out), (pre, pre_out), (post, post_out), (comb, comb_out)
        ):
            target.copy_(source[index])

    names = (*KEPT_FIELDS[:-3], "pre", "post", "comb")
    return {"keep_rows": spec(keep_rows, *names, *(f"{name}_out" for name in names))}
