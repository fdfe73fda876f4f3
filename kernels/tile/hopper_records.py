"""The 584-byte record that Hopper's attention kernels read: FP8 without the rotated channels.

Owns its two kernels. A page holds `page` tokens: first every token's 448 E4M3 bytes and 64 bfloat16
(576 bytes), then every token's 8 scale bytes: 7 E8M0, one per 64 channels, and a zero. The page's
size in bytes is rounded up to a multiple of 576; what lies past the scales is not touched. A slot
is page number * page + place.

* `store_hopper`: x (m, 512) and slots (m,) int64, -1 storing nothing.
* `take_hopper`: index (t, n) int64 to values (t, n, 512), zeros where it is -1.

Channels 0 .. 447 are rounded as Q8 is (floor 1e-4, power-of-two scales), with blocks of 64; the
last 64 are kept. The released V4.1 rounds all 512 channels per 32: this record is another numeric
contract, for cards whose attention kernels have no other.

Source: FlashMLA's FP8 cache of DeepSeek-V4.
"""

from typing import Any

import tilelang.language as T

from decodegrid.kernels.tile.formats import (
    E4M3_RECIPROCAL,
    Q8_FLOOR,
    e4m3_byte,
    e4m3_value,
    e8m0_inverse,
    e8m0_value,
    power_of_two_scale,
)

DIM, PLAIN, ROTATED, BLOCK = 512, 448, 64, 64
DATA_BYTES, SCALE_BYTES = PLAIN + 2 * ROTATED, 8


def page_bytes(page: int) -> int:
    """Bytes of a page of `page` tokens, a multiple of DATA_BYTES."""
    return -(-page * (DATA_BYTES + SCALE_BYTES) // DATA_BYTES) * DATA_BYTES


@T.macro
def hopper_value(pool, block, place, channel, page):
    """float32 value of one channel of a record."""
    base = place * DATA_BYTES
    result = T.alloc_var(T.float32)
    if channel < PLAIN:
        scale_at = page * DATA_BYTES + place * SCALE_BYTES + channel // BLOCK
        scale = T.cast(pool[block, scale_at], T.int32)
        result = e4m3_value(T.cast(pool[block, base + channel], T.int32)) * e8m0_value(scale)
    else:
        at = base + PLAIN + (channel - PLAIN) * 2
        low, high = T.cast(pool[block, at], T.int32), T.cast(pool[block, at + 1], T.int32)
        result = T.reinterpret((low << 16) | (high << 24), T.float32)
    return result


def store_hopper(page: int, dtype: str = "bfloat16", rows: int = 4) -> Any:
    """x (m, 512), slots (m,) int64, pool (pages, page_bytes) uint8, written."""
    m, pages = T.dynamic("m"), T.dynamic("pages")
    # The rotated channels make an eighth block, whose codes are not stored.
    groups = DIM // BLOCK

    @T.prim_func
    def store_hopper_kernel(
        x: T.Tensor((m, DIM), dtype),
        slots: T.Tensor((m,), T.int64),
        pool: T.Tensor((pages, page_bytes(page)), T.uint8),
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as by:
            values = T.alloc_fragment((rows, groups, BLOCK), T.float32)
            amax = T.alloc_fragment((rows, groups), T.float32)
            scale_bytes = T.alloc_shared((rows, groups), T.int32)
            target = T.alloc_shared((rows,), T.int64)
            for i in T.Parallel(rows):
                target[i] = T.if_then_else(by * rows + i < m, slots[by * rows + i], T.int64(-1))
            for i, g, c in T.Parallel(rows, groups, BLOCK):
                values[i, g, c] = T.if_then_else(
                    by * rows + i < m,
                    T.cast(x[by * rows + i, g * BLOCK + c], T.float32),
                    T.float32(0),
                )
            T.reduce_absmax(values, amax, dim=2)
            for i, g in T.Parallel(rows, groups):
                scale_bytes[i, g] = power_of_two_scale(amax[i, g], Q8_FLOOR, E4M3_RECIPROCAL)
            for i, g in T.Parallel(rows, SCALE_BYTES):
                if target[i] >= 0:
                    at = page * DATA_BYTES + T.cast(target[i] % page, T.int32) * SCALE_BYTES + g
                    kept = T.Select(g < PLAIN // BLOCK, scale_bytes[i, g], 0)
                    pool[target[i] // page, at] = T.cast(kept, T.uint8)
            for i, g, c in T.Parallel(rows, groups, BLOCK):
                inverse = e8m0_inverse(scale_bytes[i, g])
                code = e4m3_byte(values[i, g, c] * inverse)
                if (target[i] >= 0) & (g < PLAIN // BLOCK):
                    at = T.cast(target[i] % page, T.int32) * DATA_BYTES + g * BLOCK + c
                    pool[target[i] // page, at] = T.cast(code, T.uint8)
            for i, c in T.Parallel(rows, ROTATED):
                if target[i] >= 0:
                    kept = T.cast(x[by * rows + i, PLAIN + c], T.bfloat16)
                    bits = T.reinterpret(T.cast(kept, T.float32), T.int32)
                    at = T.cast(target[i] % page, T.int32) * DATA_BYTES + PLAIN + c * 2
                    pool[target[i] // page, at] = T.cast((bits >> 16) & 255, T.uint8)
                    pool[target[i] // page, at + 1] = T.cast((bits >> 24) & 255, T.uint8)

    return store_hopper_kernel


def take_hopper(page: int, dtype: str = "bfloat16", rows: int = 4) -> Any:
    """pool (pages, page_bytes) uint8, index (t, n) int64, out (t, n, 512), written."""
    t, n, pages = T.dynamic("t"), T.dynamic("n"), T.dynamic("pages")

    @T.prim_func
    def take_hopper_kernel(
        pool: T.Tensor((pages, page_bytes(page)), T.uint8),
        index: T.Tensor((t, n), T.int64),
        out: T.Tensor((t, n, DIM), dtype),
    ):
        with T.Kernel(t, T.ceildiv(n, rows), threads=128) as (by, bx):
            source = T.alloc_shared((rows,), T.int64)
            for i in T.Parallel(rows):
                source[i] = T.if_then_else(bx * rows + i < n, index[by, bx * rows + i], T.int64(-1))
            for i, c in T.Parallel(rows, DIM):
                if bx * rows + i < n:
                    if source[i] >= 0:
                        place = T.cast(source[i] % page, T.int32)
                        value = hopper_value(pool, source[i] // page, place, c, page)
                        out[by, bx * rows + i, c] = T.cast(value, dtype)
                    else:
                        out[by, bx * rows + i, c] = T.cast(T.float32(0), dtype)

    return take_hopper_kernel
