"""Cache records by row: quantise and store, gather and dequantise.

Owns two kernels for each of the formats of kernels/records.py, Q8 (528 bytes at 512 channels), Q4N
(288) and Q4X (68 at 128 channels). A pool is (rows, record_bytes) uint8, data then scales in each
row; rings and paged pools are the same to it, because a row number is block * block_size + offset.

* `store_records`: x (m, dim) and slots (m,) int64. Row slots[i] of the pool gets the record of
  x[i]; a slot of -1 stores nothing, no other row is touched.
* `take_records`: index (t, n) int64. out (t, n, dim) gets the values of those rows, zeros where the
  index is -1; a row that no index names is never read.

Row numbers are int64, so that a pool may exceed 2 GiB. Values are finite; bytes and values are bit
for bit those of kernels/records.py.

Source: record layout of DeepInfer's cache engine.
"""

from typing import Any

import tilelang.language as T

from decodegrid.kernels.records import RecordFormat, data_bytes, record_bytes
from decodegrid.kernels.tile.formats import (
    E2M1_RECIPROCAL,
    E4M3_RECIPROCAL,
    Q4N_FLOOR,
    Q4X_FLOOR,
    Q8_FLOOR,
    e2m1_code,
    e2m1_value,
    e4m3_byte,
    e4m3_value,
    e8m0_value,
    power_of_two_scale,
)

BLOCK = {RecordFormat.Q8: 32, RecordFormat.Q4N: 16, RecordFormat.Q4X: 32}
"""Channels that share a scale."""


@T.macro
def scale_of(form, amax):
    """Scale byte (int32) and scale (float32) of a block; `form` is a RecordFormat."""
    if form == RecordFormat.Q4N:
        byte = e4m3_byte(T.max(amax, T.float32(Q4N_FLOOR)) / T.float32(6.0))
        scale = e4m3_value(byte)
        return byte, scale
    floor = Q8_FLOOR if form == RecordFormat.Q8 else Q4X_FLOOR
    reciprocal = E4M3_RECIPROCAL if form == RecordFormat.Q8 else E2M1_RECIPROCAL
    byte = power_of_two_scale(amax, floor, reciprocal)
    scale = T.reinterpret(byte << 23, T.float32)
    return byte, scale


@T.macro
def record_value(form, pool, row, channel, dim):
    """float32 value of one channel of a record; `form` is a RecordFormat."""
    scale_byte = T.cast(pool[row, data_bytes(form, dim) + channel // BLOCK[form]], T.int32)
    if form == RecordFormat.Q8:
        value = e4m3_value(T.cast(pool[row, channel], T.int32)) * e8m0_value(scale_byte)
        return value
    pair = T.cast(pool[row, channel // 2], T.int32)
    number = e2m1_value((pair >> ((channel % 2) * 4)) & 15)
    if form == RecordFormat.Q4N:
        value = number * e4m3_value(scale_byte)
        return value
    value = number * e8m0_value(scale_byte)
    return value


def store_records(form: int, dim: int, dtype: str = "bfloat16", rows: int = 4) -> Any:
    """x (m, dim), slots (m,) int64, pool (pool_rows, record_bytes) uint8, written."""
    m, pool_rows = T.dynamic("m"), T.dynamic("pool_rows")
    kind, block = RecordFormat(form), BLOCK[RecordFormat(form)]
    groups, data, width = dim // block, data_bytes(form, dim), record_bytes(form, dim)

    @T.prim_func
    def store_records_kernel(
        x: T.Tensor((m, dim), dtype),
        slots: T.Tensor((m,), T.int64),
        pool: T.Tensor((pool_rows, width), T.uint8),
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as by:
            values = T.alloc_fragment((rows, groups, block), T.float32)
            amax = T.alloc_fragment((rows, groups), T.float32)
            divisor = T.alloc_shared((rows, groups), T.float32)
            codes = T.alloc_shared((rows, dim), T.uint8)
            target = T.alloc_shared((rows,), T.int64)
            for i in T.Parallel(rows):
                target[i] = T.if_then_else(by * rows + i < m, slots[by * rows + i], T.int64(-1))
            for i, g, c in T.Parallel(rows, groups, block):
                values[i, g, c] = T.if_then_else(
                    by * rows + i < m,
                    T.cast(x[by * rows + i, g * block + c], T.float32),
                    T.float32(0),
                )
            T.reduce_absmax(values, amax, dim=2)
            for i, g in T.Parallel(rows, groups):
                byte, scale = scale_of(kind, amax[i, g])
                divisor[i, g] = scale
                if target[i] >= 0:
                    pool[target[i], data + g] = T.cast(byte, T.uint8)
            for i, g, c in T.Parallel(rows, groups, block):
                scaled = values[i, g, c] / divisor[i, g]
                if kind == RecordFormat.Q8:
                    codes[i, g * block + c] = T.cast(e4m3_byte(scaled), T.uint8)
                else:
                    codes[i, g * block + c] = T.cast(e2m1_code(scaled), T.uint8)
            for i, c in T.Parallel(rows, data):
                if target[i] >= 0:
                    if kind == RecordFormat.Q8:
                        pool[target[i], c] = codes[i, c]
                    else:
                        pool[target[i], c] = codes[i, c * 2] | (codes[i, c * 2 + 1] << T.uint8(4))

    return store_records_kernel


def take_records(form: int, dim: int, dtype: str = "bfloat16", rows: int = 4) -> Any:
    """pool (pool_rows, record_bytes) uint8, index (t, n) int64, out (t, n, dim), written."""
    t, n, pool_rows = T.dynamic("t"), T.dynamic("n"), T.dynamic("pool_rows")
    kind, width = RecordFormat(form), record_bytes(form, dim)

    @T.prim_func
    def take_records_kernel(
        pool: T.Tensor((pool_rows, width), T.uint8),
        index: T.Tensor((t, n), T.int64),
        out: T.Tensor((t, n, dim), dtype),
    ):
        with T.Kernel(t, T.ceildiv(n, rows), threads=128) as (by, bx):
            source = T.alloc_shared((rows,), T.int64)
            for i in T.Parallel(rows):
                source[i] = T.if_then_else(bx * rows + i < n, index[by, bx * rows + i], T.int64(-1))
            for i, c in T.Parallel(rows, dim):
                if bx * rows + i < n:
                    if source[i] >= 0:
                        value = record_value(kind, pool, source[i], c, dim)
                        out[by, bx * rows + i, c] = T.cast(value, dtype)
                    else:
                        out[by, bx * rows + i, c] = T.cast(T.float32(0), dtype)

    return take_records_kernel
