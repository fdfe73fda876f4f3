"""Per-token casts: rows to FP8 or FP4 codes with the scale layouts that matrix products read.

Owns three kernels, all over rows x (m, dim) and one scale per block of the last axis:

* `cast_fp8`: E4M3 codes and E8M0 scale bytes per 32, row by row. Viewed as int32, four bytes of
  consecutive blocks little-endian, the scales are also the row-major packed form.
* `cast_fp8_columns`: the same codes with the scales as columns. `block` 32: int32 words of four
  bytes, (dim / 128, stride); `block` 128: float32 powers of two, (dim / 128, stride). `stride` is
  m rounded up to 4, so that a column is a multiple of 16 bytes (what a TMA descriptor needs), and
  `scales[:, :m].t()` is the (m, dim / 128) tensor with a dense first axis that DeepGEMM takes.
* `cast_fp4`: E2M1 codes, two a byte, even channel low, with E8M0 bytes per 32 or E4M3 bytes per 16.

Values are finite; codes and scales are bit for bit those of `quantise_q8`, `quantise_q4x` and
`quantise_q4n` in kernels/quant.py. Columns past m in a column layout are not written.

Source: DeepSeek-V4.1-Flash `inference/kernel.py`; DeepGEMM's scale layouts.
"""

from typing import Any

import tilelang.language as T

from decodegrid.kernels.tile.formats import (
    E2M1_RECIPROCAL,
    E4M3_RECIPROCAL,
    Q4N_FLOOR,
    Q4X_FLOOR,
    Q8_FLOOR,
    e2m1_code,
    e4m3_byte,
    e4m3_value,
    e8m0_inverse,
    power_of_two_scale,
)

SPAN = 128
"""Channels of a row that one block of threads casts."""


def cast_fp8(dim: int, dtype: str = "bfloat16", rows: int = 16) -> Any:
    """x (m, dim), codes (m, dim) uint8, scales (m, dim / 32) uint8; `rows` of them a block."""
    m, span = T.dynamic("m"), min(SPAN, dim)
    groups = span // 32

    @T.prim_func
    def cast_fp8_kernel(
        x: T.Tensor((m, dim), dtype),
        codes: T.Tensor((m, dim), T.uint8),
        scales: T.Tensor((m, dim // 32), T.uint8),
    ):
        with T.Kernel(T.ceildiv(m, rows), dim // span, threads=128) as (by, bx):
            values = T.alloc_fragment((rows, groups, 32), T.float32)
            amax = T.alloc_fragment((rows, groups), T.float32)
            inverse = T.alloc_fragment((rows, groups), T.float32)
            for i, g, c in T.Parallel(rows, groups, 32):
                values[i, g, c] = T.if_then_else(
                    by * rows + i < m,
                    T.cast(x[by * rows + i, bx * span + g * 32 + c], T.float32),
                    T.float32(0),
                )
            T.reduce_absmax(values, amax, dim=2)
            for i, g in T.Parallel(rows, groups):
                byte = power_of_two_scale(amax[i, g], Q8_FLOOR, E4M3_RECIPROCAL)
                inverse[i, g] = e8m0_inverse(byte)
                if by * rows + i < m:
                    scales[by * rows + i, bx * groups + g] = T.cast(byte, T.uint8)
            for i, g, c in T.Parallel(rows, groups, 32):
                code = e4m3_byte(values[i, g, c] * inverse[i, g])
                if by * rows + i < m:
                    codes[by * rows + i, bx * span + g * 32 + c] = T.cast(code, T.uint8)

    return cast_fp8_kernel


def cast_fp8_columns(dim: int, block: int, dtype: str = "bfloat16", rows: int = 16) -> Any:
    """x (m, dim), codes (m, dim) uint8, scales (dim / 128, stride) int32 or float32."""
    m, stride = T.dynamic("m"), T.dynamic("stride")
    groups = SPAN // block
    kind = T.int32 if block == 32 else T.float32

    @T.prim_func
    def cast_fp8_columns_kernel(
        x: T.Tensor((m, dim), dtype),
        codes: T.Tensor((m, dim), T.uint8),
        scales: T.Tensor((dim // SPAN, stride), kind),
    ):
        with T.Kernel(T.ceildiv(m, rows), dim // SPAN, threads=128) as (by, bx):
            values = T.alloc_fragment((rows, groups, block), T.float32)
            amax = T.alloc_fragment((rows, groups), T.float32)
            bytes_of = T.alloc_shared((rows, groups), T.int32)
            for i, g, c in T.Parallel(rows, groups, block):
                values[i, g, c] = T.if_then_else(
                    by * rows + i < m,
                    T.cast(x[by * rows + i, bx * SPAN + g * block + c], T.float32),
                    T.float32(0),
                )
            T.reduce_absmax(values, amax, dim=2)
            for i, g in T.Parallel(rows, groups):
                bytes_of[i, g] = power_of_two_scale(amax[i, g], Q8_FLOOR, E4M3_RECIPROCAL)
            for i in T.Parallel(rows):
                if by * rows + i < m:
                    if block == 32:
                        scales[bx, by * rows + i] = (
                            bytes_of[i, 0]
                            | (bytes_of[i, 1] << 8)
                            | (bytes_of[i, 2] << 16)
                            | (bytes_of[i, 3] << 24)
                        )
                    else:
                        scales[bx, by * rows + i] = T.reinterpret(bytes_of[i, 0] << 23, T.float32)
            for i, g, c in T.Parallel(rows, groups, block):
                inverse = e8m0_inverse(bytes_of[i, g])
                code = e4m3_byte(values[i, g, c] * inverse)
                if by * rows + i < m:
                    codes[by * rows + i, bx * SPAN + g * block + c] = T.cast(code, T.uint8)

    return cast_fp8_columns_kernel


def cast_fp4(dim: int, block: int, dtype: str = "bfloat16", rows: int = 16) -> Any:
    """x (m, dim), codes (m, dim / 2) uint8, scales (m, dim / block) uint8; `block` 32 or 16."""
    m, span = T.dynamic("m"), min(SPAN, dim)
    groups = span // block

    @T.prim_func
    def cast_fp4_kernel(
        x: T.Tensor((m, dim), dtype),
        codes: T.Tensor((m, dim // 2), T.uint8),
        scales: T.Tensor((m, dim // block), T.uint8),
    ):
        with T.Kernel(T.ceildiv(m, rows), dim // span, threads=128) as (by, bx):
            values = T.alloc_fragment((rows, groups, block), T.float32)
            amax = T.alloc_fragment((rows, groups), T.float32)
            halves = T.alloc_shared((rows, span), T.uint8)
            divisor = T.alloc_shared((rows, groups), T.float32)
            for i, g, c in T.Parallel(rows, groups, block):
                values[i, g, c] = T.if_then_else(
                    by * rows + i < m,
                    T.cast(x[by * rows + i, bx * span + g * block + c], T.float32),
                    T.float32(0),
                )
            T.reduce_absmax(values, amax, dim=2)
            for i, g in T.Parallel(rows, groups):
                if block == 32:
                    byte = power_of_two_scale(amax[i, g], Q4X_FLOOR, E2M1_RECIPROCAL)
                    divisor[i, g] = T.reinterpret(byte << 23, T.float32)
                    if by * rows + i < m:
                        scales[by * rows + i, bx * groups + g] = T.cast(byte, T.uint8)
                else:
                    sixth = T.max(amax[i, g], T.float32(Q4N_FLOOR)) / T.float32(6.0)
                    rounded = e4m3_byte(sixth)
                    divisor[i, g] = e4m3_value(rounded)
                    if by * rows + i < m:
                        scales[by * rows + i, bx * groups + g] = T.cast(rounded, T.uint8)
            for i, g, c in T.Parallel(rows, groups, block):
                code = e2m1_code(values[i, g, c] / divisor[i, g])
                halves[i, g * block + c] = T.cast(code, T.uint8)
            for i, c in T.Parallel(rows, span // 2):
                if by * rows + i < m:
                    codes[by * rows + i, bx * (span // 2) + c] = halves[i, c * 2] | (
                        halves[i, c * 2 + 1] << T.uint8(4)
                    )

    return cast_fp4_kernel
