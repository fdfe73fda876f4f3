"""Sparse attention of a decode step over cache records, with one softmax over both pools.

Owns one kernel in forms: window keys alone, or with compressed keys (records of 528 and 288 bytes),
and either with Hopper's 584-byte pages for both pools. A block of threads takes one
query token and all of its heads: keys are gathered by row, expanded to bfloat16 in shared memory
and used twice, as keys and as values. Online softmax in float32; the sink takes part in the
denominator only; rows without a key give zeros.

The probabilities are rounded to bfloat16 for the second product, while the denominator sums the
float32 ones. That is what the released kernel does.

Source: DeepSeek-V4.1-Flash `inference/kernel.py` (sparse_attn).
"""

from typing import Any

import tilelang.language as T

from decodegrid.kernels.records import RecordFormat, record_bytes
from decodegrid.kernels.tile.hopper_records import hopper_value, page_bytes
from decodegrid.kernels.tile.records import record_value

BLOCK_HEADS = 64
"""Rows of the products; fewer heads leave the rest zero."""
MASKED = -(2.0**30)


@T.macro
def expand_keys(form, page, pool, source, keys, tile, dim):
    """Values of the records at `source` in `keys`, zeros where it is -1."""
    for i, c in T.Parallel(tile, dim):
        if source[i] >= 0:
            if page > 0:
                place = T.cast(source[i] % page, T.int32)
                value = hopper_value(pool, source[i] // page, place, c, page)
                keys[i, c] = T.cast(value, T.bfloat16)
            else:
                value = record_value(form, pool, source[i], c, dim)
                keys[i, c] = T.cast(value, T.bfloat16)
        else:
            keys[i, c] = T.cast(T.float32(0.0), T.bfloat16)


@T.macro
def softmax_step(
    queries, keys, source, scores, rounded, top, last, factor, part, total, sums, tile, dim, scale
):
    """Fold one tile of keys into the running maximum, sum and output."""
    T.gemm(queries, keys, scores, transpose_B=True, clear_accum=True)
    for h, i in T.Parallel(BLOCK_HEADS, tile):
        scores[h, i] = T.if_then_else(
            source[i] >= 0, scores[h, i] * T.float32(scale), T.float32(MASKED)
        )
    T.copy(top, last)
    T.reduce_max(scores, top, dim=1, clear=False)
    for h in T.Parallel(BLOCK_HEADS):
        factor[h] = T.exp(last[h] - top[h])
    for h, i in T.Parallel(BLOCK_HEADS, tile):
        scores[h, i] = T.if_then_else(
            source[i] >= 0, T.exp(scores[h, i] - top[h]), T.float32(0.0)
        )
    T.reduce_sum(scores, part, dim=1)
    for h in T.Parallel(BLOCK_HEADS):
        total[h] = total[h] * factor[h] + part[h]
    T.copy(scores, rounded)
    for h, c in T.Parallel(BLOCK_HEADS, dim):
        sums[h, c] = sums[h, c] * factor[h]
    T.gemm(rounded, keys, sums)


def sparse_mla(
    heads: int, dim: int, page: int = 0, has_far: bool = True, tile: int = 64, threads: int = 256
) -> Any:
    """query (t, heads, dim) bfloat16; sink (heads,) float32; near_pool, near_index (t, n) int64;
    far_pool, far_index (t, f) int64; out (t, heads, dim) bfloat16, written. Indices of -1 are
    absent.

    page 0: near records are Q8, far ones Q4N, pools (rows, record_bytes) uint8. page > 0: both
    pools are (pages, page_bytes) uint8 of 584-byte records and an index is a slot. Without
    `has_far` the two far arguments are absent. At most BLOCK_HEADS heads."""
    t, n, f = T.dynamic("t"), T.dynamic("n"), T.dynamic("f")
    near_rows, far_rows = T.dynamic("near_rows"), T.dynamic("far_rows")
    near, far = RecordFormat.Q8, RecordFormat.Q4N
    near_width = page_bytes(page) if page else record_bytes(near, dim)
    far_width = page_bytes(page) if page else record_bytes(far, dim)
    scale = dim**-0.5

    @T.macro
    def attend(query, sink, near_pool, near_index, far_pool, far_index, out):
        with T.Kernel(t, threads=threads) as by:
            queries = T.alloc_shared((BLOCK_HEADS, dim), T.bfloat16)
            keys = T.alloc_shared((tile, dim), T.bfloat16)
            source = T.alloc_shared((tile,), T.int64)
            rounded = T.alloc_shared((BLOCK_HEADS, tile), T.bfloat16)
            scores = T.alloc_fragment((BLOCK_HEADS, tile), T.float32)
            sums = T.alloc_fragment((BLOCK_HEADS, dim), T.float32)
            top = T.alloc_fragment((BLOCK_HEADS,), T.float32)
            last = T.alloc_fragment((BLOCK_HEADS,), T.float32)
            factor = T.alloc_fragment((BLOCK_HEADS,), T.float32)
            part = T.alloc_fragment((BLOCK_HEADS,), T.float32)
            total = T.alloc_fragment((BLOCK_HEADS,), T.float32)
            for h, c in T.Parallel(BLOCK_HEADS, dim):
                queries[h, c] = T.if_then_else(
                    h < heads, query[by, T.min(h, heads - 1), c], T.cast(T.float32(0), T.bfloat16)
                )
            T.clear(sums)
            T.clear(total)
            T.fill(top, T.float32(MASKED))
            for step in T.serial(T.ceildiv(n, tile)):
                for i in T.Parallel(tile):
                    source[i] = T.if_then_else(
                        step * tile + i < n, near_index[by, step * tile + i], T.int64(-1)
                    )
                expand_keys(near, page, near_pool, source, keys, tile, dim)
                softmax_step(
                    queries, keys, source, scores, rounded, top, last, factor, part, total, sums,
                    tile, dim, scale,
                )
            if has_far:
                for step in T.serial(T.ceildiv(f, tile)):
                    for i in T.Parallel(tile):
                        source[i] = T.if_then_else(
                            step * tile + i < f, far_index[by, step * tile + i], T.int64(-1)
                        )
                    expand_keys(far, page, far_pool, source, keys, tile, dim)
                    softmax_step(
                        queries, keys, source, scores, rounded, top, last, factor, part, total,
                        sums, tile, dim, scale,
                    )
            for h in T.Parallel(BLOCK_HEADS):
                # Without a key the top is so low that the sink's share is infinite, the output 0.
                total[h] = total[h] + T.exp(sink[T.min(h, heads - 1)] - top[h])
            for h, c in T.Parallel(BLOCK_HEADS, dim):
                if h < heads:
                    out[by, h, c] = T.cast(sums[h, c] / total[h], T.bfloat16)

    if has_far:

        @T.prim_func
        def sparse_mla_kernel(
            query: T.Tensor((t, heads, dim), T.bfloat16),
            sink: T.Tensor((heads,), T.float32),
            near_pool: T.Tensor((near_rows, near_width), T.uint8),
            near_index: T.Tensor((t, n), T.int64),
            far_pool: T.Tensor((far_rows, far_width), T.uint8),
            far_index: T.Tensor((t, f), T.int64),
            out: T.Tensor((t, heads, dim), T.bfloat16),
        ):
            attend(query, sink, near_pool, near_index, far_pool, far_index, out)

        return sparse_mla_kernel

    @T.prim_func
    def sparse_mla_window_kernel(
        query: T.Tensor((t, heads, dim), T.bfloat16),
        sink: T.Tensor((heads,), T.float32),
        near_pool: T.Tensor((near_rows, near_width), T.uint8),
        near_index: T.Tensor((t, n), T.int64),
        out: T.Tensor((t, heads, dim), T.bfloat16),
    ):
        attend(query, sink, near_pool, near_index, near_pool, near_index, out)

    return sparse_mla_window_kernel
