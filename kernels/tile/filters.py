"""Temperature, min-p, top-p and top-k of logits without a sort.

Owns one kernel; one block of threads takes a row. The order is descending by scaled logit, ties by
token id. min-p takes tokens out first. Of the rest a token is kept while those before it are fewer
than top-k and no heavier than top-p, so the kept ones are a prefix: its last score is found bit by
bit over passes of the row, then its last id on that score. Rows without a filter stop after the
division.

A token's mass is a float32 exponential; sums of masses are float64. Equals `filter_logits` of
kernels/filters.py but for sums that meet the bound within float32 rounding.

Source: kernels/filters.py.
"""

from typing import Any

import tilelang.language as T

from decodegrid.kernels.sampling import MIN_TEMPERATURE

LOWEST = -(2**31)
LOWEST_FINITE = LOWEST + 2**23
"""Keys, in the order of `key_value`: the first of all, and that of the lowest finite float32."""


def one_each(threads: int) -> Any:
    """The layout of a loop in which every thread has one turn.

    Said, not inferred: TileLang's search for wider turns asks its prover about every guard, for
    minutes. Loops that share it need no barrier for what they leave in global memory: a thread
    finds there what it wrote itself."""
    return T.Fragment((threads,), forward_fn=lambda turn: (turn, 0))


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


@T.macro
def count_row(scores, row, length, columns, which, level, count):
    """Set count[0] to how many of a row's first `length` float32 are `which` level[0]: "from" it
    up, "above" it, "equal" to it. `level` and `count` are one thread's own; `length` is int32.

    Fragments are its own, and what bounds a loop is a variable: TileLang infers the layouts of
    loops that share a fragment together, and its prover spends most of a build on a bound that is
    an expression of what was loaded."""
    tally = T.alloc_fragment((columns,), T.int32)
    number = T.alloc_fragment((1,), T.int32)
    tiles = T.alloc_var(T.int32)
    left = T.alloc_var(T.int32)
    tiles = T.ceildiv(length, columns)
    T.fill(tally, 0)
    for tile in T.serial(tiles):
        left = length - tile * columns
        for j in T.Parallel(columns):
            if j < left:
                score = scores[row, tile * columns + j]
                if which == "from":
                    if score >= level[0]:
                        tally[j] = tally[j] + 1
                elif which == "above":
                    if score > level[0]:
                        tally[j] = tally[j] + 1
                else:
                    if score == level[0]:
                        tally[j] = tally[j] + 1
    T.reduce_sum(tally, number, dim=0)
    count[0] = number[0]


@T.macro
def measure_prefix(scores, row, vocab, columns, level, bound, peak, count, mass):
    """Set count[0] and mass[0] to the number and the mass of the tokens before (level[0], bound[0])
    in the order: those above the level, and those on it whose id is below the bound."""
    tally = T.alloc_fragment((columns,), T.int32)
    weight = T.alloc_fragment((columns,), T.float64)
    number = T.alloc_fragment((1,), T.int32)
    total = T.alloc_fragment((1,), T.float64)
    left = T.alloc_var(T.int32)
    ties = T.alloc_var(T.int32)
    T.fill(tally, 0)
    T.fill(weight, T.float64(0.0))
    for tile in T.serial(T.ceildiv(vocab, columns)):
        left = vocab - tile * columns
        ties = bound[0] - tile * columns
        for j in T.Parallel(columns, loop_layout=one_each(columns)):
            if j < left:
                score = scores[row, tile * columns + j]
                if (score > level[0]) | ((score == level[0]) & (j < ties)):
                    tally[j] = tally[j] + 1
                    weight[j] = weight[j] + T.cast(T.exp(score - peak[0]), T.float64)
    T.reduce_sum(tally, number, dim=0)
    T.reduce_sum(weight, total, dim=0)
    count[0] = number[0]
    mass[0] = total[0]


@T.macro
def scale_row(logits, out, row, vocab, columns, divisor, peak):
    """Write a row over its divisor[0] and set peak[0] to the largest of it."""
    largest = T.alloc_fragment((columns,), T.float32)
    number = T.alloc_fragment((1,), T.float32)
    left = T.alloc_var(T.int32)
    T.fill(largest, -T.infinity(T.float32))
    for tile in T.serial(T.ceildiv(vocab, columns)):
        left = vocab - tile * columns
        for j in T.Parallel(columns, loop_layout=one_each(columns)):
            if j < left:
                scaled = logits[row, tile * columns + j] / divisor[0]
                out[row, tile * columns + j] = scaled
                largest[j] = T.max(largest[j], scaled)
    T.reduce_max(largest, number, dim=0)
    peak[0] = number[0]


@T.macro
def drop_far(out, row, vocab, columns, lowest, peak, mass):
    """Set to -inf what is further than lowest[0] below the peak; mass[0] is that of the rest."""
    weight = T.alloc_fragment((columns,), T.float64)
    total = T.alloc_fragment((1,), T.float64)
    left = T.alloc_var(T.int32)
    T.fill(weight, T.float64(0.0))
    for tile in T.serial(T.ceildiv(vocab, columns)):
        left = vocab - tile * columns
        for j in T.Parallel(columns, loop_layout=one_each(columns)):
            if j < left:
                below = out[row, tile * columns + j] - peak[0]
                if below >= lowest[0]:
                    weight[j] = weight[j] + T.cast(T.exp(below), T.float64)
                else:
                    out[row, tile * columns + j] = -T.infinity(T.float32)
    T.reduce_sum(weight, total, dim=0)
    mass[0] = total[0]


@T.macro
def drop_after(out, row, vocab, columns, level, bound):
    """Set to -inf the tokens after (level[0], bound[0]) in the order."""
    left = T.alloc_var(T.int32)
    ties = T.alloc_var(T.int32)
    for tile in T.serial(T.ceildiv(vocab, columns)):
        left = vocab - tile * columns
        ties = bound[0] - tile * columns
        for j in T.Parallel(columns, loop_layout=one_each(columns)):
            if j < left:
                score = out[row, tile * columns + j]
                if (score < level[0]) | ((score == level[0]) & (j > ties)):
                    out[row, tile * columns + j] = -T.infinity(T.float32)


def filter_logits(vocab: int, columns: int = 1024) -> Any:
    """logits (n, vocab) float32; temperature, top_p, min_p (n,) float32; top_k (n,) int64; out
    (n, vocab) float32, written: scaled logits, -inf for the tokens that are removed."""
    n, index_bits = T.dynamic("n"), vocab.bit_length()

    @T.prim_func
    def filter_logits_kernel(
        logits: T.Tensor((n, vocab), T.float32),
        temperature: T.Tensor((n,), T.float32),
        top_p: T.Tensor((n,), T.float32),
        top_k: T.Tensor((n,), T.int64),
        min_p: T.Tensor((n,), T.float32),
        out: T.Tensor((n, vocab), T.float32),
    ):
        with T.Kernel(n, threads=columns) as by:
            divisor = T.alloc_local((1,), T.float32)
            peak = T.alloc_local((1,), T.float32)
            lowest = T.alloc_local((1,), T.float32)
            level = T.alloc_local((1,), T.float32)
            bound = T.alloc_local((1,), T.int32)
            count = T.alloc_local((1,), T.int32)
            mass = T.alloc_local((1,), T.float64)
            allowed = T.alloc_var(T.float64)
            limit = T.alloc_var(T.int32)
            key = T.alloc_var(T.int32)
            trial = T.alloc_var(T.int32)
            kept = T.alloc_var(T.int32)
            rules = T.alloc_var(T.int32)
            heat = T.alloc_var(T.float32)
            heat = temperature[by]
            divisor[0] = T.Select(
                heat > T.float32(0.0), T.max(heat, T.float32(MIN_TEMPERATURE)), T.float32(1.0)
            )
            limit = T.Select(
                (top_k[by] > 0) & (top_k[by] < vocab), T.cast(top_k[by], T.int32), vocab + 1
            )
            lowest[0] = T.Select(
                min_p[by] > T.float32(0.0),
                T.log(T.min(min_p[by], T.float32(1.0))),
                -T.infinity(T.float32),
            )
            # 0 without a filter, 1 for min-p alone, 2 where a prefix is looked for.
            rules = T.Select(
                (top_p[by] < T.float32(1.0)) | (limit <= vocab),
                2,
                T.Select(min_p[by] > T.float32(0.0), 1, 0),
            )
            rules = T.Select(heat > T.float32(0.0), rules, 0)
            scale_row(logits, out, by, vocab, columns, divisor, peak)
            if rules > 0:
                drop_far(out, by, vocab, columns, lowest, peak, mass)
            if rules > 1:
                allowed = T.Select(
                    top_p[by] < T.float32(1.0),
                    T.max(T.cast(top_p[by], T.float64) * mass[0], T.float64(0.0)),
                    T.infinity(T.float64),
                )
                # The largest key that leaves too much above it for a token of its own.
                key = LOWEST
                bound[0] = 0
                for bit in T.serial(32):
                    trial = next_key(key, bit)
                    level[0] = key_value(trial)
                    measure_prefix(out, by, vocab, columns, level, bound, peak, count, mass)
                    if (count[0] >= limit) | (mass[0] > allowed):
                        key = trial
                # What is below the finite ones is -inf, kept or not.
                trial = T.max(key + 1, LOWEST_FINITE)
                level[0] = key_value(trial)
                # The last id of that score before which there is not too much.
                kept = 0
                for bit in T.serial(index_bits):
                    bound[0] = kept + (T.int32(1) << (index_bits - 1 - bit))
                    measure_prefix(out, by, vocab, columns, level, bound, peak, count, mass)
                    if (count[0] < limit) & (mass[0] <= allowed):
                        kept = bound[0]
                bound[0] = kept
                drop_after(out, by, vocab, columns, level, bound)

    return filter_logits_kernel
