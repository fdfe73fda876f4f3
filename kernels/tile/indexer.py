"""Which compressed entries a query attends to: scores, candidate blocks, exact top-k.

Owns the kernels that together equal `select_entries` of kernels/select_entries.py, with
`convert_index` of index.py last. Scores are (t, capacity) float32; what lies past a token's length
is never read and, but for the rest of the last tile, never written.

* `index_logits`: sum over heads of weight * relu(query . key), keys expanded from Q4X or Q8 records
  of a paged pool into bfloat16, the product on tensor cores. The grid is fixed; blocks of a token
  share its tiles out, so that work follows the length.
* `block_scores`: the largest score of each block of entries, the newest block +inf.
* `select_threshold`: the lowest of the k largest and the bound of indices among its ties.
* `mark_blocks`: entries of the blocks that a threshold keeps, as the bool candidates.
* `mask_scores`: -inf outside the candidates, in place.
* `select_top_k`: the k largest as ascending ids, -1 where fewer are visible; ties go to the lower
  index. No sort: threshold and tie bound bit by bit, then one ordered compaction.

Source: DeepSeek-V4.1-Flash `inference/model.py` (Indexer, select_candidate_blocks).
"""

from typing import Any

import tilelang.language as T

from decodegrid.kernels.records import RecordFormat, record_bytes
from decodegrid.kernels.tile.filters import LOWEST, count_row, key_value, next_key
from decodegrid.kernels.tile.records import record_value


def index_logits(
    heads: int, dim: int, form: int, block_size: int, ratio: int, splits: int = 32, tile: int = 64
) -> Any:
    """query (t, heads, dim) bfloat16, as rounded by its record format; weights (t, heads) bfloat16;
    pool (rows, record_bytes) uint8 of format `form`; block_table (slots, blocks) int64;
    token_slot, lengths (t,) int64; scores (t, capacity) float32, written up to the end of each
    token's last tile of `tile` entries (a multiple of 64), -inf from its length on."""
    t, rows, slots = T.dynamic("t"), T.dynamic("rows"), T.dynamic("slots")
    blocks, capacity = T.dynamic("blocks"), T.dynamic("capacity")
    kind, width, per_block = RecordFormat(form), record_bytes(form, dim), block_size // ratio

    @T.prim_func
    def index_logits_kernel(
        query: T.Tensor((t, heads, dim), T.bfloat16),
        weights: T.Tensor((t, heads), T.bfloat16),
        pool: T.Tensor((rows, width), T.uint8),
        block_table: T.Tensor((slots, blocks), T.int64),
        token_slot: T.Tensor((t,), T.int64),
        lengths: T.Tensor((t,), T.int64),
        scores: T.Tensor((t, capacity), T.float32),
    ):
        with T.Kernel(splits, t, threads=128) as (bx, by):
            keys = T.alloc_shared((tile, dim), T.bfloat16)
            heads_of = T.alloc_shared((heads, dim), T.bfloat16)
            row_of = T.alloc_shared((tile,), T.int64)
            dots = T.alloc_fragment((tile, heads), T.float32)
            total = T.alloc_fragment((tile,), T.float32)
            length = T.cast(lengths[by], T.int32)
            for h, c in T.Parallel(heads, dim):
                heads_of[h, c] = query[by, h, c]
            for step in T.serial(T.ceildiv(T.max(T.ceildiv(length, tile) - bx, 0), splits)):
                first = (bx + step * splits) * tile
                for i in T.Parallel(tile):
                    entry = T.min(first + i, length - 1)
                    block = block_table[token_slot[by], entry // per_block]
                    row_of[i] = block * per_block + entry % per_block
                for i, c in T.Parallel(tile, dim):
                    value = record_value(kind, pool, row_of[i], c, dim)
                    keys[i, c] = T.cast(value, T.bfloat16)
                T.gemm(keys, heads_of, dots, transpose_B=True, clear_accum=True)
                for i, h in T.Parallel(tile, heads):
                    dots[i, h] = T.max(dots[i, h], T.float32(0.0)) * T.cast(
                        weights[by, h], T.float32
                    )
                T.reduce_sum(dots, total, dim=1)
                for i in T.Parallel(tile):
                    if first + i < capacity:
                        scores[by, first + i] = T.Select(
                            first + i < length, total[i], -T.infinity(T.float32)
                        )

    return index_logits_kernel


def block_scores(block: int, splits: int = 8, threads: int = 128) -> Any:
    """scores (t, capacity) float32, lengths (t,) int64, best (t, capacity / block) float32,
    written for blocks with a visible entry: their largest score, +inf for the newest."""
    t, capacity, blocks = T.dynamic("t"), T.dynamic("capacity"), T.dynamic("blocks")

    @T.prim_func
    def block_scores_kernel(
        scores: T.Tensor((t, capacity), T.float32),
        lengths: T.Tensor((t,), T.int64),
        best: T.Tensor((t, blocks), T.float32),
    ):
        with T.Kernel(splits, t, threads=threads) as (bx, by):
            length = T.cast(lengths[by], T.int32)
            count = T.ceildiv(length, block)
            for step in T.serial(T.ceildiv(T.max(count - bx * threads, 0), splits * threads)):
                for i in T.Parallel(threads):
                    at = (step * splits + bx) * threads + i
                    if at < count:
                        largest = T.alloc_var(T.float32, init=-T.infinity(T.float32))
                        for j in T.serial(block):
                            if at * block + j < length:
                                largest = T.max(largest, scores[by, at * block + j])
                        best[by, at] = T.Select(at == count - 1, T.infinity(T.float32), largest)

    return block_scores_kernel


@T.macro
def find_threshold(scores, row, length, k, columns, level, bound, index_bits):
    """Set level[0] to the lowest kept score, and bound[0], below which its indices are kept.

    If fewer than k scores are above -inf, all of these are kept. level: (1,) float32 and bound:
    (1,) int32, one thread's own."""
    count = T.alloc_local((1,), T.int32)
    key = T.alloc_var(T.int32)
    trial = T.alloc_var(T.int32)
    room = T.alloc_var(T.int32)
    is_found = T.alloc_var(T.int32, init=0)
    key = LOWEST
    bound[0] = 0
    for bit in T.serial(32):
        trial = next_key(key, bit)
        level[0] = key_value(trial)
        count_row(scores, row, length, columns, "from", level, count)
        if count[0] >= k:
            key = trial
            is_found = 1
    level[0] = T.if_then_else(is_found == 1, key_value(key), -T.infinity(T.float32))
    if is_found == 1:
        count_row(scores, row, length, columns, "above", level, count)
        room = k - count[0]
        for bit in T.serial(index_bits):
            trial = bound[0] + (T.int32(1) << (index_bits - 1 - bit))
            count_row(scores, row, T.min(length, trial), columns, "equal", level, count)
            if count[0] <= room:
                bound[0] = trial


def select_threshold(k: int, unit: int = 1, threads: int = 256, index_bits: int = 20) -> Any:
    """scores (t, capacity) float32, lengths (t,) int64 in units: ceil(lengths / unit) scores count;
    level (t,) float32 and bound (t,) int32, written. Indices stay below 2 ** index_bits."""
    t, capacity = T.dynamic("t"), T.dynamic("capacity")

    @T.prim_func
    def select_threshold_kernel(
        scores: T.Tensor((t, capacity), T.float32),
        lengths: T.Tensor((t,), T.int64),
        level: T.Tensor((t,), T.float32),
        bound: T.Tensor((t,), T.int32),
    ):
        with T.Kernel(t, threads=threads) as by:
            lowest = T.alloc_local((1,), T.float32)
            ties = T.alloc_local((1,), T.int32)
            length = T.alloc_var(T.int32)
            length = T.cast(T.ceildiv(lengths[by], T.int64(unit)), T.int32)
            find_threshold(scores, by, length, k, threads, lowest, ties, index_bits)
            level[by] = lowest[0]
            bound[by] = ties[0]

    return select_threshold_kernel


def mark_blocks(block: int, splits: int = 8, threads: int = 128) -> Any:
    """best (t, blocks) float32; level (t,) float32 and bound (t,) int32, as `select_threshold`
    gives them; lengths (t,) int64 entries; candidates (t, capacity) bool, written below the length:
    whether the entry's block is kept."""
    t, capacity, blocks = T.dynamic("t"), T.dynamic("capacity"), T.dynamic("blocks")

    @T.prim_func
    def mark_blocks_kernel(
        best: T.Tensor((t, blocks), T.float32),
        level: T.Tensor((t,), T.float32),
        bound: T.Tensor((t,), T.int32),
        lengths: T.Tensor((t,), T.int64),
        candidates: T.Tensor((t, capacity), T.bool),
    ):
        with T.Kernel(splits, t, threads=threads) as (bx, by):
            length = T.cast(lengths[by], T.int32)
            for step in T.serial(T.ceildiv(T.max(length - bx * threads, 0), splits * threads)):
                for i in T.Parallel(threads):
                    at = (step * splits + bx) * threads + i
                    if at < length:
                        score = best[by, at // block]
                        tied = (score == level[by]) & (at // block < bound[by])
                        candidates[by, at] = (score > level[by]) | tied

    return mark_blocks_kernel


def mask_scores(splits: int = 8, threads: int = 128) -> Any:
    """candidates (t, capacity) bool, lengths (t,) int64, scores (t, capacity) float32, set to -inf
    outside the candidates, below the length."""
    t, capacity = T.dynamic("t"), T.dynamic("capacity")

    @T.prim_func
    def mask_scores_kernel(
        candidates: T.Tensor((t, capacity), T.bool),
        lengths: T.Tensor((t,), T.int64),
        scores: T.Tensor((t, capacity), T.float32),
    ):
        with T.Kernel(splits, t, threads=threads) as (bx, by):
            length = T.cast(lengths[by], T.int32)
            for step in T.serial(T.ceildiv(T.max(length - bx * threads, 0), splits * threads)):
                for i in T.Parallel(threads):
                    at = (step * splits + bx) * threads + i
                    if at < length:
                        if candidates[by, at] == False:  # noqa: E712
                            scores[by, at] = -T.infinity(T.float32)

    return mask_scores_kernel


def select_top_k(k: int, threads: int = 256, index_bits: int = 20) -> Any:
    """scores (t, capacity) float32, lengths (t,) int64, ids (t, k) int32, written."""
    t, capacity = T.dynamic("t"), T.dynamic("capacity")

    @T.prim_func
    def select_top_k_kernel(
        scores: T.Tensor((t, capacity), T.float32),
        lengths: T.Tensor((t,), T.int64),
        ids: T.Tensor((t, k), T.int32),
    ):
        with T.Kernel(t, threads=threads) as by:
            tally = T.alloc_fragment((threads,), T.int32)
            number = T.alloc_fragment((1,), T.int32)
            lowest = T.alloc_local((1,), T.float32)
            ties = T.alloc_local((1,), T.int32)
            counts = T.alloc_shared((threads,), T.int32)
            length = T.alloc_var(T.int32)
            length = T.cast(lengths[by], T.int32)
            find_threshold(scores, by, length, k, threads, lowest, ties, index_bits)
            # Each thread compacts a run of the row; its place follows from the runs before.
            run = T.alloc_var(T.int32)
            run = T.ceildiv(length, threads)
            for i in T.Parallel(threads):
                found = T.alloc_var(T.int32, init=0)
                for j in T.serial(run):
                    at = i * run + j
                    if at < length:
                        tied = (scores[by, at] == lowest[0]) & (at < ties[0])
                        if (scores[by, at] > lowest[0]) | tied:
                            found = found + 1
                counts[i] = found
                tally[i] = found
            T.reduce_sum(tally, number, dim=0)
            for i in T.Parallel(threads):
                place = T.alloc_var(T.int32, init=0)
                for j in T.serial(i):
                    place = place + counts[j]
                for j in T.serial(run):
                    at = i * run + j
                    if at < length:
                        tied = (scores[by, at] == lowest[0]) & (at < ties[0])
                        if (scores[by, at] > lowest[0]) | tied:
                            ids[by, place] = at
                            place = place + 1
            for j in T.Parallel(k):
                if j >= number[0]:
                    ids[by, j] = -1

    return select_top_k_kernel
