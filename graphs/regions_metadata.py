"""Regions that turn slot state into what every token needs: positions, rows, lengths.

Owns the integer part of a step, for decode (all facts on the device) and for prefill (facts of one
chunk from the host). Pads and surplus tokens get slot 0, `valid` False, lengths 0, and store to the
null rows; indices are clamped before they index, so poisoned pad state cannot reach memory.

Source: DeepInfer's input metadata kernels; DeepSeek-V4.1 specification of ring and entry addresses.
"""

import torch
from torch import Tensor

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions_layer import RegionSpec, spec
from decodegrid.graphs.state import Capacity, compressor_ring_len, window_ring_len
from decodegrid.kernels.verify import split_verify_lengths, survival

TOKEN_OUTS = (
    "input_ids", "positions", "token_slot", "valid", "lookback", "window_store", "window_index",
    "ring_store", "compressor_store", "compressor_previous", "compressor_ring",
    "entry_store_one", "entry_store_two", "length_one", "length_two",
)
"""Arguments of both metadata regions, fields of TokenBuffers, in this order."""


def entry_store(
    positions: Tensor, valid: Tensor, table: Tensor, ratio: int, block_size: int
) -> Tensor:
    """Pool row of the entry that each position completes; row 0, in the null block, for none.

    positions, valid: (T,); table: (T, max_blocks) block table rows.
    """
    per_block = block_size // ratio
    entry = positions // ratio
    block = (entry // per_block).clamp(0, table.shape[1] - 1)
    row = table.gather(1, block.unsqueeze(1)).squeeze(1) * per_block + entry % per_block
    complete = valid & ((positions + 1) % ratio == 0)
    return row.where(complete, torch.zeros_like(row))


def visible_entries(positions: Tensor, valid: Tensor, ratio: int) -> Tensor:
    """Entries that the query at each position sees, 0 for pads."""
    return ((positions + 1) // ratio).where(valid, torch.zeros_like(positions))


def compressed_lookback(raw: Tensor, compressed_ids: Tensor, pad_id: int) -> Tensor:
    """Classes of raw ids (T, N), -1 becoming the pad's class; ids are clamped to the vocabulary."""
    mapped = compressed_ids[raw.clamp(0, compressed_ids.shape[0] - 1)]
    return mapped.where(raw >= 0, compressed_ids[pad_id])


def metadata_regions(config: ModelConfig, capacity: Capacity) -> dict[str, RegionSpec]:
    """`decode_metadata` and `prefill_metadata`."""
    window = config.sliding_window
    drafts = capacity.num_draft_tokens
    ring = window_ring_len(config, drafts, capacity.window_slack)
    compressor = compressor_ring_len(drafts)
    block_size, ngram = capacity.block_size, max(config.engram_max_ngram_size, 1)
    pad_id, vocab = config.engram_pad_token_id, config.vocab_size

    def decode_metadata(
        slots: Tensor, total: Tensor, last_token: Tensor, seq_len: Tensor, history: Tensor,
        max_seq_len: Tensor, drafts_in: Tensor, num_drafts: Tensor, confidence: Tensor,
        block_table: Tensor, compressed_ids: Tensor, query_lens: Tensor, query_starts: Tensor,
        input_ids: Tensor, positions: Tensor, token_slot: Tensor, valid: Tensor,
        lookback: Tensor, window_store: Tensor, window_index: Tensor, ring_store: Tensor,
        compressor_store: Tensor, compressor_previous: Tensor, compressor_ring: Tensor,
        entry_store_one: Tensor, entry_store_two: Tensor, length_one: Tensor, length_two: Tensor,
    ) -> None:
        live = slots > 0
        room = torch.minimum(num_drafts[slots], max_seq_len[slots] - seq_len[slots] - 1)
        lens = split_verify_lengths(
            survival(confidence[slots]), room.clamp(0, drafts), live, total
        )
        ends = lens.cumsum(0)
        query_lens.copy_(lens)
        query_starts.copy_(ends - lens)
        index = torch.arange(positions.shape[0], device=slots.device)
        row = (ends.unsqueeze(0) <= index.unsqueeze(1)).sum(1)
        is_live = row < slots.shape[0]
        row = row.clamp(max=slots.shape[0] - 1)
        offset = (index - (ends - lens)[row]).clamp(0, drafts)
        slot = slots[row].where(is_live, torch.zeros_like(row))
        zero = torch.zeros_like(slot)
        position = (seq_len[slot] - 1 + offset).where(is_live, zero).clamp(min=0)

        # Raw ids around each row's golden token: three of history, the token itself, the drafts.
        known = torch.cat(
            (history[slot], last_token[slot].unsqueeze(1), drafts_in[slot]), 1
        )
        back = 3 + offset.unsqueeze(1) - torch.arange(ngram, device=slots.device)
        raw = known.gather(1, back.clamp(min=0)).where(back >= 0, -torch.ones_like(back))
        input_ids.copy_(raw[:, 0].clamp(0, vocab - 1).where(is_live, zero))
        lookback.copy_(compressed_lookback(raw, compressed_ids, pad_id))
        positions.copy_(position)
        token_slot.copy_(slot)
        valid.copy_(is_live)
        store = (slot * ring + position % ring).where(is_live, zero)
        window_store.copy_(store)
        ring_store.copy_(store)
        reach = torch.arange(window, device=slots.device)
        seen = position.unsqueeze(1) - (window - 1) + reach
        reads = slot.unsqueeze(1) * ring + seen.clamp(min=0) % ring
        window_index.copy_(
            reads.where((seen >= 0) & is_live.unsqueeze(1), -torch.ones_like(reads))
        )
        spot = (slot * compressor + position % compressor).where(is_live, zero)
        before = slot * compressor + (position - 1).clamp(min=0) % compressor
        compressor_store.copy_(spot)
        compressor_ring.copy_(spot)
        compressor_previous.copy_(before.where(is_live, zero))
        table = block_table[slot]
        entry_store_one.copy_(entry_store(position, is_live, table, 1, block_size))
        entry_store_two.copy_(entry_store(position, is_live, table, 2, block_size))
        length_one.copy_(visible_entries(position, is_live, 1))
        length_two.copy_(visible_entries(position, is_live, 2))

    def prefill_metadata(
        token_ids: Tensor, facts: Tensor, block_table: Tensor, compressed_ids: Tensor,
        history_index: Tensor, compressor_history: Tensor,
        input_ids: Tensor, positions: Tensor, token_slot: Tensor, valid: Tensor,
        lookback: Tensor, window_store: Tensor, window_index: Tensor, ring_store: Tensor,
        compressor_store: Tensor, compressor_previous: Tensor, compressor_ring: Tensor,
        entry_store_one: Tensor, entry_store_two: Tensor, length_one: Tensor, length_two: Tensor,
    ) -> None:
        slot, start, count = facts[0], facts[1], facts[2]
        index = torch.arange(token_ids.shape[0], device=facts.device)
        is_live = index < count
        zero = torch.zeros_like(index)
        position = (start + index).where(is_live, zero)
        known = torch.cat((facts[3:6], token_ids))
        back = 3 + index.unsqueeze(1) - torch.arange(ngram, device=facts.device)
        raw = known[back.clamp(min=0)].where(back >= 0, -torch.ones_like(back))
        input_ids.copy_(token_ids.clamp(0, vocab - 1).where(is_live, zero))
        lookback.copy_(compressed_lookback(raw, compressed_ids, pad_id))
        positions.copy_(position)
        token_slot.copy_(slot.expand_as(index).where(is_live, zero))
        valid.copy_(is_live)
        # The workspace holds `window` rows of history, then the chunk.
        window_store.copy_(window + index)
        offset = torch.arange(window, device=facts.device)
        seen = (start + index).unsqueeze(1) - (window - 1) + offset
        reads = index.unsqueeze(1) + 1 + offset
        window_index.copy_(
            reads.where((seen >= 0) & is_live.unsqueeze(1), -torch.ones_like(reads))
        )
        history = (start - window + offset).clamp(min=0) % ring
        history_index.copy_(slot * ring + history)
        kept = is_live & (index >= count - ring)
        ring_store.copy_((slot * ring + position % ring).where(kept, zero))
        compressor_store.copy_(1 + index)
        compressor_previous.copy_(index)
        before = slot * compressor + (start - 1).clamp(min=0) % compressor
        compressor_history.copy_(before.expand_as(compressor_history))
        kept = is_live & (index >= count - compressor)
        compressor_ring.copy_((slot * compressor + position % compressor).where(kept, zero))
        table = block_table[slot.expand_as(index).where(is_live, zero)]
        entry_store_one.copy_(entry_store(position, is_live, table, 1, block_size))
        entry_store_two.copy_(entry_store(position, is_live, table, 2, block_size))
        length_one.copy_(visible_entries(position, is_live, 1))
        length_two.copy_(visible_entries(position, is_live, 2))

    return {
        "decode_metadata": spec(
            decode_metadata, "slots", "query_lens", "query_starts", *TOKEN_OUTS
        ),
        "prefill_metadata": spec(prefill_metadata, "token_ids", *TOKEN_OUTS),
    }
