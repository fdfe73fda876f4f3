"""One speculative round's bookkeeping: verify lengths, and acceptance with the slots' next state.

Owns two kernels that are one block of threads each: what they touch is a few kilobytes, and every
row needs to know of all others.

* `split_lengths`: the `total` query tokens of a step to its rows. One per live row; the rest to the
  largest survival rates, ties to the lower flat index. No sort: the threshold is found bit by bit,
  then the index bound among its ties.
* `accept`: the longest prefix of drafts that equals the target's choices, the emitted tokens, and
  the slot state that the next step starts from; equals the region `accept`.

Source: DeepInfer's redistribution of verify lengths and its acceptance bookkeeping.
"""

from typing import Any

import tilelang.language as T


def split_lengths(num_drafts: int, max_rows: int, threads: int = 256) -> Any:
    """rates (b, num_drafts) float32, non-increasing along a row; limits (b,) int64 drafts that a
    row can verify; live (b,) bool; total (1,) int64; query_lens (b,) int64, written. At most
    `max_rows` rows. Equals `split_verify_lengths` of kernels/verify.py for rates that are not
    negative zero."""
    b, size = T.dynamic("b"), max_rows * num_drafts
    index_bits = max(size - 1, 1).bit_length()

    @T.prim_func
    def split_lengths_kernel(
        rates: T.Tensor((b, num_drafts), T.float32),
        limits: T.Tensor((b,), T.int64),
        live: T.Tensor((b,), T.bool),
        total: T.Tensor((1,), T.int64),
        query_lens: T.Tensor((b,), T.int64),
    ):
        with T.Kernel(1, threads=threads):
            key = T.alloc_fragment((size,), T.int32)
            flag = T.alloc_fragment((size,), T.int32)
            alive = T.alloc_fragment((max_rows,), T.int32)
            count = T.alloc_fragment((1,), T.int32)
            wins = T.alloc_shared((max_rows, num_drafts), T.int32)
            budget = T.alloc_var(T.int32)
            level = T.alloc_var(T.int32)
            bound = T.alloc_var(T.int32)
            room = T.alloc_var(T.int32)
            for i in T.Parallel(max_rows):
                alive[i] = T.if_then_else(i < b, T.Select(live[i], 1, 0), 0)
            T.reduce_sum(alive, count, dim=0)
            budget = T.cast(total[0], T.int32) - count[0]
            for i in T.Parallel(size):
                # Rates are not negative, so their order is that of their bits; -1 never wins.
                usable = i // num_drafts < b
                key[i] = -1
                if usable:
                    if live[i // num_drafts] & (i % num_drafts < limits[i // num_drafts]):
                        key[i] = T.reinterpret(rates[i // num_drafts, i % num_drafts], T.int32)
            # The largest value that at least `budget` rates reach; 0 if there are fewer.
            level = 0
            for bit in T.serial(31):
                trial = level | (T.int32(1) << (30 - bit))
                for i in T.Parallel(size):
                    flag[i] = T.Select(key[i] >= trial, 1, 0)
                T.reduce_sum(flag, count, dim=0)
                if count[0] >= budget:
                    level = trial
            for i in T.Parallel(size):
                flag[i] = T.Select(key[i] > level, 1, 0)
            T.reduce_sum(flag, count, dim=0)
            room = budget - count[0]
            # The largest bound below which no more than `room` rates equal the value.
            bound = 0
            for bit in T.serial(index_bits + 1):
                limit = bound + (T.int32(1) << (index_bits - bit))
                for i in T.Parallel(size):
                    flag[i] = T.Select((key[i] == level) & (i < limit), 1, 0)
                T.reduce_sum(flag, count, dim=0)
                if count[0] <= room:
                    bound = limit
            for i in T.Parallel(size):
                chosen = (key[i] > level) | ((key[i] == level) & (i < bound))
                wins[i // num_drafts, i % num_drafts] = T.Select(chosen & (budget > 0), 1, 0)
            for i in T.Parallel(max_rows):
                if i < b:
                    lens = T.alloc_var(T.int32, init=0)
                    for j in T.serial(num_drafts):
                        lens = lens + wins[i, j]
                    query_lens[i] = T.if_then_else(live[i], T.cast(lens + 1, T.int64), T.int64(0))

    return split_lengths_kernel


def accept(num_drafts: int, stop_ids: int, threads: int = 128) -> Any:
    """chosen (t,) int64 the target's token after each query token; slots, query_lens, query_starts
    (b,) int64; drafts (s, num_drafts) and stop_token_ids (s, stop_ids) int64, read. last_token,
    seq_len, num_drafts_out (s,) and history (s, 3) int64, read and written at the rows' slots.
    token_ids (b, num_drafts + 1) and num_emitted (b,) int64, stopped (b,) bool, written.

    Rows of slot 0 are pads: they emit nothing and leave what an empty slot holds."""
    t, b, s = T.dynamic("t"), T.dynamic("b"), T.dynamic("s")
    known = 3 + 1 + num_drafts

    @T.prim_func
    def accept_kernel(
        chosen: T.Tensor((t,), T.int64), slots: T.Tensor((b,), T.int64),
        query_lens: T.Tensor((b,), T.int64), query_starts: T.Tensor((b,), T.int64),
        last_token: T.Tensor((s,), T.int64), seq_len: T.Tensor((s,), T.int64),
        history: T.Tensor((s, 3), T.int64), drafts: T.Tensor((s, num_drafts), T.int64),
        num_drafts_out: T.Tensor((s,), T.int64),
        stop_token_ids: T.Tensor((s, stop_ids), T.int64),
        token_ids: T.Tensor((b, num_drafts + 1), T.int64),
        num_emitted: T.Tensor((b,), T.int64), stopped: T.Tensor((b,), T.bool),
    ):
        with T.Kernel(T.ceildiv(b, threads), threads=threads) as bx:
            for k in T.Parallel(threads):
                row = bx * threads + k
                if row < b:
                    slot = slots[row]
                    recent = T.alloc_local((known,), T.int64)
                    tokens = T.alloc_local((num_drafts + 1,), T.int64)
                    accepted = T.alloc_var(T.int32, init=0)
                    ended = T.alloc_var(T.int32, init=0)
                    for j in T.serial(3):
                        recent[j] = history[slot, j]
                    recent[3] = last_token[slot]
                    for j in T.serial(num_drafts):
                        recent[4 + j] = drafts[slot, j]
                    for j in T.serial(num_drafts + 1):
                        place = T.min(query_starts[row] + j, T.cast(t - 1, T.int64))
                        tokens[j] = chosen[place]
                        token_ids[row, j] = tokens[j]
                    for j in T.serial(num_drafts):
                        if accepted == j:
                            if (tokens[j] == recent[4 + j]) & (j < query_lens[row] - 1):
                                accepted = j + 1
                    live = slot > 0
                    for j in T.serial(num_drafts + 1):
                        for n in T.serial(stop_ids):
                            if live & (j <= accepted) & (stop_token_ids[slot, n] == tokens[j]):
                                ended = 1
                    stopped[row] = ended == 1
                    count = T.if_then_else(live, T.cast(accepted + 1, T.int64), T.int64(0))
                    num_emitted[row] = count
                    for j in T.serial(3):
                        history[slot, j] = T.if_then_else(
                            live, recent[accepted + 1 + j], T.int64(-1)
                        )
                    last_token[slot] = T.if_then_else(live, tokens[accepted], T.int64(0))
                    seq_len[slot] = T.if_then_else(live, seq_len[slot] + count, T.int64(1))
                    num_drafts_out[slot] = 0

    return accept_kernel
