"""Index rows and step metadata: what each query token reads and where it stores.

Owns the integer kernels between a step's slot state and its attention. Absent places are -1 and
stay so. Row numbers are int64 in the project's buffers and int32 where FlashMLA reads them
(`kind`).

* `convert_index`: entries of a request, ids (t, k) int32, to pool rows through its block table.
* `expand_ranges`: two (offset, length) segments per row to one dense row of `width` places.
* `window_index`: ring rows that the query at a position sees, oldest first.
* `decode_tokens`: rows' query lengths to every token's position, slot and store rows; equals the
  integer part of the region `decode_metadata`, whose other parts are `split_lengths`
  (verify.py) before and `window_index` after.

Pads and surplus tokens get slot 0, valid 0, lengths 0, and store to row 0.

Source: DeepInfer's index and input metadata kernels.
"""

from typing import Any

import tilelang.language as T


def convert_index(
    top_k: int, block_size: int, ratio: int, kind: str = "int64", threads: int = 128
) -> Any:
    """ids (t, top_k) int32, block_table (slots, blocks) int64, token_slot (t,) int64, lengths (t,)
    int64 entries that exist, rows (t, top_k) `kind`, written: -1 where the id is negative or not
    below the length. `block_size` tokens are `block_size / ratio` entries."""
    t, slots, blocks = T.dynamic("t"), T.dynamic("slots"), T.dynamic("blocks")
    per_block = block_size // ratio

    @T.prim_func
    def convert_index_kernel(
        ids: T.Tensor((t, top_k), T.int32),
        block_table: T.Tensor((slots, blocks), T.int64),
        token_slot: T.Tensor((t,), T.int64),
        lengths: T.Tensor((t,), T.int64),
        rows: T.Tensor((t, top_k), kind),
    ):
        with T.Kernel(t, threads=threads) as by:
            for j in T.Parallel(top_k):
                entry = ids[by, j]
                if (entry >= 0) & (T.cast(entry, T.int64) < lengths[by]):
                    block = block_table[token_slot[by], entry // per_block]
                    rows[by, j] = T.cast(block * per_block + entry % per_block, kind)
                else:
                    rows[by, j] = T.cast(-1, kind)

    return convert_index_kernel


def expand_ranges(width: int, kind: str = "int64", threads: int = 128) -> Any:
    """ranges (t, 4) int64: offset, length, offset, length. rows (t, width) `kind`, written: the
    first segment, then the second, then -1."""
    t = T.dynamic("t")

    @T.prim_func
    def expand_ranges_kernel(
        ranges: T.Tensor((t, 4), T.int64), rows: T.Tensor((t, width), kind)
    ):
        with T.Kernel(t, threads=threads) as by:
            for j in T.Parallel(width):
                first, second = ranges[by, 1], ranges[by, 3]
                rows[by, j] = T.cast(
                    T.if_then_else(
                        j < first,
                        ranges[by, 0] + j,
                        T.if_then_else(
                            j < first + second, ranges[by, 2] + j - first, T.int64(-1)
                        ),
                    ),
                    kind,
                )

    return expand_ranges_kernel


def window_index(
    reach: int, after: int, ring: int, kind: str = "int64", threads: int = 128
) -> Any:
    """positions, token_slot (t,) int64, valid (t,) bool, rows (t, reach + after) `kind`, written.

    Place j is the ring row of position - reach + 1 + j, -1 before position 0 and for pads. `after`
    places follow the position itself: the drafter's block."""
    t = T.dynamic("t")

    @T.prim_func
    def window_index_kernel(
        positions: T.Tensor((t,), T.int64),
        token_slot: T.Tensor((t,), T.int64),
        valid: T.Tensor((t,), T.bool),
        rows: T.Tensor((t, reach + after), kind),
    ):
        with T.Kernel(t, threads=threads) as by:
            for j in T.Parallel(reach + after):
                seen = positions[by] - (reach - 1) + j
                if valid[by] & (seen >= 0):
                    rows[by, j] = T.cast(token_slot[by] * ring + seen % ring, kind)
                else:
                    rows[by, j] = T.cast(-1, kind)

    return window_index_kernel


@T.macro
def entry_row(table, slot, position, live, ratio, block_size, blocks):
    """Pool row of the entry that a position completes; 0, in the null block, for none."""
    per_block = block_size // ratio
    entry = position // ratio
    block = T.min(entry // per_block, T.cast(blocks - 1, T.int64))
    complete = live & ((position + 1) % ratio == 0)
    row = T.if_then_else(complete, table[slot, block] * per_block + entry % per_block, T.int64(0))
    return row


def decode_tokens(
    num_drafts: int, ring: int, compressor_ring: int, block_size: int, vocab: int, ngram: int,
    pad_id: int, max_rows: int, tokens: int = 32,
) -> Any:
    """Everything of a token that follows from its row's slot.

    Reads slots, query_lens (b,) int64; last_token, seq_len (s,) int64; history (s, 3) and drafts
    (s, num_drafts) int64; block_table (s, blocks) int64; compressed_ids (ids,) int64. Writes
    query_starts (b,); lookback (t, ngram); and per token int64 input_ids, positions, token_slot,
    ring_store, compressor_store, compressor_previous, entry_store_one, entry_store_two,
    length_one, length_two, and bool valid. At most `max_rows` rows."""
    b, t, s = T.dynamic("b"), T.dynamic("t"), T.dynamic("s")
    blocks, ids = T.dynamic("blocks"), T.dynamic("ids")

    @T.prim_func
    def decode_tokens_kernel(
        slots: T.Tensor((b,), T.int64), query_lens: T.Tensor((b,), T.int64),
        last_token: T.Tensor((s,), T.int64), seq_len: T.Tensor((s,), T.int64),
        history: T.Tensor((s, 3), T.int64), drafts: T.Tensor((s, num_drafts), T.int64),
        block_table: T.Tensor((s, blocks), T.int64), compressed_ids: T.Tensor((ids,), T.int64),
        query_starts: T.Tensor((b,), T.int64), input_ids: T.Tensor((t,), T.int64),
        positions: T.Tensor((t,), T.int64), token_slot: T.Tensor((t,), T.int64),
        valid: T.Tensor((t,), T.bool), lookback: T.Tensor((t, ngram), T.int64),
        ring_store: T.Tensor((t,), T.int64), compressor_store: T.Tensor((t,), T.int64),
        compressor_previous: T.Tensor((t,), T.int64), entry_store_one: T.Tensor((t,), T.int64),
        entry_store_two: T.Tensor((t,), T.int64), length_one: T.Tensor((t,), T.int64),
        length_two: T.Tensor((t,), T.int64),
    ):
        with T.Kernel(T.ceildiv(t, tokens), threads=128) as bx:
            lens = T.alloc_shared((max_rows,), T.int32)
            for i in T.Parallel(max_rows):
                lens[i] = T.if_then_else(i < b, T.cast(query_lens[i], T.int32), 0)
            if bx == 0:
                for i in T.Parallel(max_rows):
                    before = T.alloc_var(T.int32, init=0)
                    for j in T.serial(i):
                        before += lens[j]
                    if i < b:
                        query_starts[i] = T.cast(before, T.int64)
            for k in T.Parallel(tokens):
                token = bx * tokens + k
                row = T.alloc_var(T.int32, init=0)
                end = T.alloc_var(T.int32, init=0)
                start = T.alloc_var(T.int32, init=0)
                for j in T.serial(b):
                    end = end + lens[j]
                    if end <= token:
                        row = j + 1
                        # A surplus token counts from the last row, whose pad it is.
                        if j + 1 < b:
                            start = end
                if token < t:
                    live = row < b
                    row = T.min(row, T.cast(b, T.int32) - 1)
                    offset = T.max(T.min(token - start, num_drafts), 0)
                    slot = T.if_then_else(live, slots[row], T.int64(0))
                    position = T.max(
                        T.if_then_else(live, seq_len[slot] - 1 + offset, T.int64(0)), T.int64(0)
                    )
                    positions[token] = position
                    token_slot[token] = slot
                    valid[token] = live
                    for n in T.serial(ngram):
                        back = 3 + offset - n
                        raw = T.if_then_else(
                            back < 0,
                            T.int64(-1),
                            T.if_then_else(
                                back < 3,
                                history[slot, T.max(back, 0)],
                                T.if_then_else(
                                    back == 3,
                                    last_token[slot],
                                    drafts[slot, T.max(back - 4, 0)],
                                ),
                            ),
                        )
                        known = T.max(T.min(raw, T.cast(ids - 1, T.int64)), T.int64(0))
                        lookback[token, n] = T.if_then_else(
                            raw >= 0, compressed_ids[known], compressed_ids[pad_id]
                        )
                        if n == 0:
                            bounded = T.max(T.min(raw, T.int64(vocab - 1)), T.int64(0))
                            input_ids[token] = T.if_then_else(live, bounded, T.int64(0))
                    zero = T.int64(0)
                    before_it = T.max(position - 1, zero)
                    ring_store[token] = T.if_then_else(live, slot * ring + position % ring, zero)
                    spot = slot * compressor_ring + position % compressor_ring
                    previous = slot * compressor_ring + before_it % compressor_ring
                    compressor_store[token] = T.if_then_else(live, spot, zero)
                    compressor_previous[token] = T.if_then_else(live, previous, zero)
                    entry_store_one[token] = entry_row(
                        block_table, slot, position, live, 1, block_size, blocks
                    )
                    entry_store_two[token] = entry_row(
                        block_table, slot, position, live, 2, block_size, blocks
                    )
                    length_one[token] = T.if_then_else(live, position + 1, zero)
                    length_two[token] = T.if_then_else(live, (position + 1) // 2, zero)

    return decode_tokens_kernel
