"""Grouped matrix product of routed experts whose weights stay MXFP4.

Owns one kernel. Rows are sorted by expert; a block of threads takes `outputs` of an expert's output
channels, expands their codes to bfloat16 in shared memory (exact: two significant bits times a
power of two) and multiplies on tensor cores, weights on the side with the larger tile. The grid is
fixed, (channels, experts); a block whose expert has no row ends at once, so that work and weight
traffic follow the experts that are visited.

Source: DeepSeek-V4.1-Flash `inference/kernel.py` (fp4 GEMM); OCP Microscaling Formats v1.0.
"""

from typing import Any

import tilelang.language as T

from decodegrid.kernels.tile.formats import e2m1_value, e8m0_value


def grouped_fp4(
    experts: int, outputs_of: int, inputs: int, out_dtype: str = "bfloat16", rows: int = 16,
    outputs: int = 64, chunk: int = 128,
) -> Any:
    """x (m, inputs) bfloat16 sorted by expert; ends (experts,) int32 exclusive row ends; codes
    (experts, outputs_of, inputs / 2) and scales (experts, outputs_of, inputs / 32) uint8; y
    (m, outputs_of) `out_dtype`, written for rows below ends[-1]. Accumulates in float32.

    `rows` of an expert are multiplied at a time: 16 for decode, 64 for prefill."""
    m = T.dynamic("m")

    @T.prim_func
    def grouped_fp4_kernel(
        x: T.Tensor((m, inputs), T.bfloat16),
        ends: T.Tensor((experts,), T.int32),
        codes: T.Tensor((experts, outputs_of, inputs // 2), T.uint8),
        scales: T.Tensor((experts, outputs_of, inputs // 32), T.uint8),
        y: T.Tensor((m, outputs_of), out_dtype),
    ):
        with T.Kernel(T.ceildiv(outputs_of, outputs), experts, threads=128) as (bx, by):
            weights = T.alloc_shared((outputs, chunk), T.bfloat16)
            tokens = T.alloc_shared((rows, chunk), T.bfloat16)
            sums = T.alloc_fragment((outputs, rows), T.float32)
            start = T.alloc_var(T.int32)
            start = T.if_then_else(by == 0, 0, ends[T.max(by - 1, 0)])
            end = ends[by]
            for tile in T.serial(T.ceildiv(end - start, rows)):
                first = start + tile * rows
                T.clear(sums)
                for step in T.serial(inputs // chunk):
                    for o, c in T.Parallel(outputs, chunk // 2):
                        out = T.min(bx * outputs + o, outputs_of - 1)
                        pair = T.cast(codes[by, out, step * (chunk // 2) + c], T.int32)
                        byte = T.cast(scales[by, out, step * (chunk // 32) + c // 16], T.int32)
                        scale = e8m0_value(byte)
                        low, high = e2m1_value(pair & 15), e2m1_value(pair >> 4)
                        weights[o, c * 2] = T.cast(low * scale, T.bfloat16)
                        weights[o, c * 2 + 1] = T.cast(high * scale, T.bfloat16)
                    for i, c in T.Parallel(rows, chunk):
                        tokens[i, c] = T.if_then_else(
                            first + i < end,
                            x[T.min(first + i, m - 1), step * chunk + c],
                            T.cast(T.float32(0.0), T.bfloat16),
                        )
                    T.gemm(weights, tokens, sums, transpose_B=True)
                for o, i in T.Parallel(outputs, rows):
                    if (first + i < end) & (bx * outputs + o < outputs_of):
                        y[first + i, bx * outputs + o] = T.cast(sums[o, i], out_dtype)

    return grouped_fp4_kernel
