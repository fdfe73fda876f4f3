"""Temperature, min-p, top-p and top-k of logits without a sort.

Owns one kernel; one block of threads takes a row. The order is descending by scaled logit, ties by
token id. Every filter keeps a prefix of it, so the row needs the lowest kept key and, among its
ties, the number that is kept. The key is found bit by bit over passes of the row; rows without a
filter stop after the division.

A token's mass is a float32 exponential; sums of masses are float64. Equals `filter_logits` of
kernels/filters.py but for sums that meet the bound within float32 rounding.

Source: kernels/filters.py.
"""

from typing import Any

import tilelang.language as T

from decodegrid.kernels.sampling import MIN_TEMPERATURE

LOWEST = -(2**31)


@T.macro
def next_key(key, bit):
    """The search's next trial at step `bit` of 32, in the order of `key_value`."""
    following = T.if_then_else(bit == 0, T.int32(0), key | (T.int32(1) << T.min(31 - bit, 30)))
    return following


@T.macro
def key_value(key):
    """float32 whose order among all is that of an int32 key; NaN for keys beyond infinity.

    A search that starts at LOWEST and keeps a trial only where comparisons hold never ends in a
    NaN: below minus infinity it stays at LOWEST."""
    value = T.reinterpret(key ^ ((key >> 31) & 0x7FFFFFFF), T.float32)
    return value


def filter_logits(vocab: int, columns: int = 1024, threads: int = 512) -> Any:
    """logits (n, vocab) float32; temperature, top_p, min_p (n,) float32; top_k (n,) int64; out
    (n, vocab) float32, written: scaled logits, -inf for the tokens that are removed."""
    n, tiles = T.dynamic("n"), -(-vocab // columns)

    @T.prim_func
    def filter_logits_kernel(
        logits: T.Tensor((n, vocab), T.float32),
        temperature: T.Tensor((n,), T.float32),
        top_p: T.Tensor((n,), T.float32),
        top_k: T.Tensor((n,), T.int64),
        min_p: T.Tensor((n,), T.float32),
        out: T.Tensor((n, vocab), T.float32),
    ):
        with T.Kernel(n, threads=threads) as by:
            largest = T.alloc_fragment((columns,), T.float32)
            mass = T.alloc_fragment((columns,), T.float64)
            count = T.alloc_fragment((columns,), T.int32)
            peak = T.alloc_fragment((1,), T.float32)
            sum_of = T.alloc_fragment((1,), T.float64)
            number = T.alloc_fragment((1,), T.int32)
            level = T.alloc_var(T.int32)
            trial = T.alloc_var(T.int32)
            cut = T.alloc_var(T.float32)
            is_found = T.alloc_var(T.int32, init=0)
            bound = T.alloc_var(T.int32)
            allowed = T.alloc_var(T.float64)
            limit = T.alloc_var(T.int32)
            lowest = T.alloc_var(T.float32)
            room = T.alloc_var(T.int32)
            heat = temperature[by]
            divisor = T.Select(
                heat > T.float32(0.0), T.max(heat, T.float32(MIN_TEMPERATURE)), T.float32(1.0)
            )
            by_mass = top_p[by] < T.float32(1.0)
            by_count = (top_k[by] > 0) & (top_k[by] < vocab)
            by_peak = min_p[by] > T.float32(0.0)
            T.fill(largest, -T.infinity(T.float32))
            for tile in T.serial(tiles):
                for j in T.Parallel(columns):
                    if tile * columns + j < vocab:
                        scaled = logits[by, tile * columns + j] / divisor
                        out[by, tile * columns + j] = scaled
                        largest[j] = T.max(largest[j], scaled)
            if (heat > T.float32(0.0)) & (by_mass | by_count | by_peak):
                # Other threads read what these wrote.
                T.sync_threads()
                T.reduce_max(largest, peak, dim=0)
                limit = T.if_then_else(by_count, T.cast(top_k[by], T.int32), vocab + 1)
                lowest = T.if_then_else(
                    by_peak, T.log(T.min(min_p[by], T.float32(1.0))), -T.infinity(T.float32)
                )
                allowed = T.infinity(T.float64)
                if by_mass:
                    T.fill(mass, T.float64(0.0))
                    for tile in T.serial(tiles):
                        for j in T.Parallel(columns):
                            if tile * columns + j < vocab:
                                below = out[by, tile * columns + j] - peak[0]
                                if below >= lowest:
                                    mass[j] = mass[j] + T.cast(T.exp(below), T.float64)
                    T.reduce_sum(mass, sum_of, dim=0)
                    allowed = T.cast(top_p[by], T.float64) * sum_of[0]
                # The largest key at which the prefix is already too long.
                level = LOWEST
                cut = -T.infinity(T.float32)
                if by_mass | by_count:
                    for bit in T.serial(32):
                        trial = next_key(level, bit)
                        cut = key_value(trial)
                        T.fill(mass, T.float64(0.0))
                        T.fill(count, 0)
                        for tile in T.serial(tiles):
                            for j in T.Parallel(columns):
                                if tile * columns + j < vocab:
                                    value = out[by, tile * columns + j]
                                    if value >= cut:
                                        count[j] = count[j] + 1
                                        if by_mass:
                                            mass[j] = mass[j] + T.cast(
                                                T.exp(value - peak[0]), T.float64
                                            )
                        T.reduce_sum(mass, sum_of, dim=0)
                        T.reduce_sum(count, number, dim=0)
                        if (number[0] >= limit) | (sum_of[0] > allowed):
                            level = trial
                            is_found = 1
                    cut = T.if_then_else(
                        is_found == 1, key_value(level), -T.infinity(T.float32)
                    )
                    # Ties of that key that still fit.
                    T.fill(mass, T.float64(0.0))
                    T.fill(count, 0)
                    for tile in T.serial(tiles):
                        for j in T.Parallel(columns):
                            if tile * columns + j < vocab:
                                value = out[by, tile * columns + j]
                                if value > cut:
                                    count[j] = count[j] + 1
                                    if by_mass:
                                        mass[j] = mass[j] + T.cast(
                                            T.exp(value - peak[0]), T.float64
                                        )
                    T.reduce_sum(mass, sum_of, dim=0)
                    T.reduce_sum(count, number, dim=0)
                    room = limit - number[0]
                    if by_mass:
                        each = T.cast(T.exp(cut - peak[0]), T.float64)
                        fits = (allowed - sum_of[0]) / T.max(each, T.float64(1e-300))
                        room = T.min(
                            room, T.cast(T.min(fits, T.float64(vocab)), T.int32) + 1
                        )
                # The largest bound below which no more than `room` token ids have that key.
                bound = 0
                if by_mass | by_count:
                    for bit in T.serial(vocab.bit_length()):
                        trial = bound + (T.int32(1) << (vocab.bit_length() - 1 - bit))
                        T.fill(count, 0)
                        for tile in T.serial(tiles):
                            for j in T.Parallel(columns):
                                token = tile * columns + j
                                if (token < vocab) & (token < trial):
                                    if out[by, token] == cut:
                                        count[j] = count[j] + 1
                        T.reduce_sum(count, number, dim=0)
                        if number[0] <= room:
                            bound = trial
                T.sync_threads()
                for tile in T.serial(tiles):
                    for j in T.Parallel(columns):
                        token = tile * columns + j
                        if token < vocab:
                            value = out[by, token]
                            tied = (value == cut) & (token < bound)
                            near = value - peak[0] >= lowest
                            if ((value > cut) | tied) & near:
                                out[by, token] = value
                            else:
                                out[by, token] = -T.infinity(T.float32)

    return filter_logits_kernel
