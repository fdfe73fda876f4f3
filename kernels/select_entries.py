"""Index selection over a paged pool: which compressed entries each query token attends to.

Owns the op `decodegrid::select_entries`. It stays one opaque op, never traced into: its work
follows the live length of each request, not the capacity of the pool. The implementation here is
plain torch for the CPU; a CUDA device needs a library or TileLang implementation of the schema.

Source: DeepSeek-V4.1-Flash `inference/model.py` (Indexer, select_candidate_blocks).
"""

from enum import IntEnum

import torch
from torch import Tensor

from decodegrid.kernels.indexer import candidate_mask, mask_to_indices, top_k_mask
from decodegrid.kernels.norm_rope import island
from decodegrid.kernels.records import RecordFormat, decode_records

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define(
    "select_entries(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, "
    "Tensor token_slot, Tensor lengths, int ratio, int block_size, int candidate_mode, "
    "int candidate_block, int candidate_count, Tensor(a!) candidates, Tensor(b!) entry_out) -> ()"
)


class CandidateMode(IntEnum):
    """What a layer does with the candidate blocks."""

    IGNORE = 0
    WRITE = 1
    READ = 2


def entry_rows(block_table: Tensor, num_entries: int, ratio: int, block_size: int) -> Tensor:
    """Pool rows of entries 0 .. num_entries - 1 of one request.

    block_table: (max_blocks,) int64. Returns (num_entries,) int64.
    """
    per_block = block_size // ratio
    entry = torch.arange(num_entries, device=block_table.device)
    return block_table[entry // per_block] * per_block + entry % per_block


def select_entries(
    query: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    token_slot: Tensor,
    lengths: Tensor,
    ratio: int,
    block_size: int,
    candidate_mode: int,
    candidate_block: int,
    candidate_count: int,
    candidates: Tensor,
    entry_out: Tensor,
) -> None:
    """Write the pool rows of the selected entries of every token, ascending by entry.

    query: (T, Hi, di); weights: (T, Hi); index_keys: (rows, di) paged, or the uint8 Q4X records of
    such keys, decoded where they are scored; block_table: (S, blocks);
    token_slot: (T,) int64, tokens of one request adjacent; lengths: (T,) visible entries;
    candidates: (T, entries) bool, written or read as `candidate_mode` says, only up to the
    longest visible length; entry_out: (T, k) int64 pool rows, -1 where fewer are visible.
    """
    top_k = entry_out.shape[1]
    entry_out.fill_(-1)
    if lengths.numel() == 0 or int(lengths.max()) == 0:
        return
    slots, counts = torch.unique_consecutive(token_slot, return_counts=True)
    start = 0
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        part = slice(start, start + count)
        start += count
        row_lengths = lengths[part]
        num_entries = int(row_lengths.max())
        if num_entries == 0:
            continue
        rows = entry_rows(block_table[slot], num_entries, ratio, block_size)
        entry = torch.arange(num_entries, device=lengths.device)
        mask = entry < row_lengths.unsqueeze(1)
        if num_entries > top_k or candidate_mode != CandidateMode.IGNORE:
            keys = _values(index_keys[rows], query)
            dots = (island(query[part]).flatten(0, 1) @ keys.t()).relu_()
            dots = dots.unflatten(0, (count, -1))
            scores = torch.bmm(island(weights[part]).unsqueeze(1), dots).squeeze(1)
            scores = scores.masked_fill_(~mask, float("-inf"))
            if candidate_mode == CandidateMode.WRITE:
                candidates[part, :num_entries] = candidate_mask(
                    scores, row_lengths, candidate_block, candidate_count
                )
            elif candidate_mode == CandidateMode.READ:
                scores.masked_fill_(~candidates[part, :num_entries], float("-inf"))
            mask = top_k_mask(scores, top_k)
        picked = mask_to_indices(mask, top_k)
        entry_out[part] = torch.where(picked >= 0, rows[picked.clamp(min=0)], picked)


def _values(keys: Tensor, query: Tensor) -> Tensor:
    """Keys or records of some rows as the island values that the query is multiplied with."""
    if keys.dtype == torch.uint8:
        keys = decode_records(keys, RecordFormat.Q4X, query.shape[-1]).to(query.dtype)
    return island(keys)


def _fake(
    query: Tensor, weights: Tensor, index_keys: Tensor, block_table: Tensor, token_slot: Tensor,
    lengths: Tensor, ratio: int, block_size: int, candidate_mode: int, candidate_block: int,
    candidate_count: int, candidates: Tensor, entry_out: Tensor,
) -> None:
    """Shapes only: everything is written in place."""


# Not the CPU key: that one is for the native kernel, which then wins.
LIBRARY.impl("select_entries", select_entries, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::select_entries", _fake, lib=LIBRARY)


select_entries_op = torch.ops.decodegrid.select_entries.default
"""The op as steps call it."""
