"""State of a compressor of ratio 2: store a token's gate and value, pool it with the token before.

Owns one kernel. The ring holds [gate | value] of the last tokens of each slot, one row per token,
float32. A token's predecessor stands in the ring, or is the query token before it in the same step;
the kernel reads it where it is complete, so that one launch does both.

Every token stores and pools; which of the pooled latents complete an entry is the caller's
`entry_store`. The softmax over two gates is a sigmoid of their difference.

Source: DeepSeek-V4.1-Flash `inference/model.py` (Compressor); DeepInfer's compressor state.
"""

from typing import Any

import tilelang.language as T


def compress_pairs(dim: int, dtype: str = "bfloat16", threads: int = 128) -> Any:
    """joined (t, 2 * dim) float32: gate, then value; store, previous (t,) int64 ring rows; ring
    (rows, 2 * dim) float32, written at `store`; pooled (t, dim) `dtype`, written.

    Token i's predecessor is query token i - 1 if that one stores to row previous[i], else ring row
    previous[i]. Pads store to row 0, in any order. No row that is read from the ring may be one
    that another token of the step stores to."""
    t, ring_rows = T.dynamic("t"), T.dynamic("ring_rows")

    @T.prim_func
    def compress_pairs_kernel(
        joined: T.Tensor((t, 2 * dim), T.float32),
        store: T.Tensor((t,), T.int64),
        previous: T.Tensor((t,), T.int64),
        ring: T.Tensor((ring_rows, 2 * dim), T.float32),
        pooled: T.Tensor((t, dim), dtype),
    ):
        with T.Kernel(t, threads=threads) as by:
            for c in T.Parallel(dim):
                before = T.max(by - 1, 0)
                fresh = (by > 0) & (store[before] == previous[by])
                late_gate, late = joined[by, c], joined[by, dim + c]
                early_gate = T.alloc_var(T.float32)
                early = T.alloc_var(T.float32)
                if fresh:
                    early_gate = joined[before, c]
                    early = joined[before, dim + c]
                else:
                    early_gate = ring[previous[by], c]
                    early = ring[previous[by], dim + c]
                weight = T.float32(1.0) / (T.float32(1.0) + T.exp(late_gate - early_gate))
                mixed = weight * early + (T.float32(1.0) - weight) * late
                pooled[by, c] = T.cast(mixed, dtype)
                ring[store[by], c] = late_gate
                ring[store[by], dim + c] = late

    return compress_pairs_kernel
