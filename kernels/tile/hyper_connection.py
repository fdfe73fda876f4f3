"""mHC mixer: coefficients of a sublayer from the stream of copies, Sinkhorn rounds included.

Owns two kernels. `sinkhorn` is the rounds alone, a thread a matrix; `hc_mix` is all of `hc_mix` of
kernels/hyper_connection.py: the norm's statistic and the (n * (n + 2))-row product over the
flattened stream in float32, then the sigmoids and the rounds. Its tokens stand side by side in a
block of threads so that the mixer's weights are read once for all of them.

Source: DeepSeek-V4.1-Flash `inference/model.py` (hc_split_sinkhorn).
"""

from typing import Any

import tilelang.language as T


@T.macro
def scale_lines(matrix, copies, eps, across, down):
    """Divide each line by its sum + eps; element j of line i stands at i * across + j * down."""
    for i in T.unroll(copies):
        divisor = T.alloc_var(T.float32, init=0.0)
        for j in T.unroll(copies):
            divisor = divisor + matrix[i * across + j * down]
        for j in T.unroll(copies):
            at = i * across + j * down
            matrix[at] = matrix[at] / (divisor + T.float32(eps))


@T.macro
def run_rounds(matrix, copies, iters, eps):
    """Sinkhorn in place on (copies * copies,) float32 of one thread: softmax along the rows and a
    column step, then iters - 1 times a row and a column step. Unrolled but for the rounds, so that
    the matrix stays in registers."""
    for i in T.unroll(copies):
        top = T.alloc_var(T.float32)
        total = T.alloc_var(T.float32, init=0.0)
        top = matrix[i * copies]
        for j in T.unroll(copies):
            top = T.max(top, matrix[i * copies + j])
        for j in T.unroll(copies):
            matrix[i * copies + j] = T.exp(matrix[i * copies + j] - top)
            total = total + matrix[i * copies + j]
        for j in T.unroll(copies):
            matrix[i * copies + j] = matrix[i * copies + j] / total + T.float32(eps)
    scale_lines(matrix, copies, eps, 1, copies)
    for _ in T.serial(iters - 1):
        scale_lines(matrix, copies, eps, copies, 1)
        scale_lines(matrix, copies, eps, 1, copies)


def sinkhorn(copies: int, iters: int, eps: float, threads: int = 64) -> Any:
    """logits (m, copies * copies) float32, matrix (m, copies * copies) float32, written."""
    m, size = T.dynamic("m"), copies * copies

    @T.prim_func
    def sinkhorn_kernel(
        logits: T.Tensor((m, size), T.float32), matrix: T.Tensor((m, size), T.float32)
    ):
        with T.Kernel(T.ceildiv(m, threads), threads=threads) as bx:
            for k in T.Parallel(threads):
                own = T.alloc_local((size,), T.float32)
                if bx * threads + k < m:
                    for c in T.serial(size):
                        own[c] = logits[bx * threads + k, c]
                    run_rounds(own, copies, iters, eps)
                    for c in T.serial(size):
                        matrix[bx * threads + k, c] = own[c]

    return sinkhorn_kernel


def hc_mix(
    dim: int, copies: int, iters: int, norm_eps: float, hc_eps: float, dtype: str = "bfloat16",
    tokens: int = 4, chunk: int = 256,
) -> Any:
    """stream (m, copies * dim) `dtype`; fn (copies * (copies + 2), copies * dim), scale (3,), base
    (copies * (copies + 2),) float32; pre, post (m, copies) and comb (m, copies * copies) float32,
    written."""
    m, width, rows = T.dynamic("m"), copies * dim, copies * (copies + 2)
    size = copies * copies
    # Layouts over threads want a power of two; the rows that this adds repeat the last one.
    padded = 1 << (rows - 1).bit_length()

    @T.prim_func
    def hc_mix_kernel(
        stream: T.Tensor((m, width), dtype),
        fn: T.Tensor((rows, width), T.float32),
        scale: T.Tensor((3,), T.float32),
        base: T.Tensor((rows,), T.float32),
        pre: T.Tensor((m, copies), T.float32),
        post: T.Tensor((m, copies), T.float32),
        comb: T.Tensor((m, size), T.float32),
    ):
        with T.Kernel(T.ceildiv(m, tokens), threads=256) as bx:
            values = T.alloc_shared((tokens, chunk), T.float32)
            part = T.alloc_fragment((tokens, padded, 32), T.float32)
            squares = T.alloc_fragment((tokens, chunk), T.float32)
            dots = T.alloc_fragment((tokens, padded), T.float32)
            square = T.alloc_fragment((tokens,), T.float32)
            mixed = T.alloc_shared((tokens, padded), T.float32)
            norm = T.alloc_shared((tokens,), T.float32)
            T.fill(part, T.float32(0.0))
            T.fill(squares, T.float32(0.0))
            for step in T.serial(width // chunk):
                for i, c in T.Parallel(tokens, chunk):
                    values[i, c] = T.if_then_else(
                        bx * tokens + i < m,
                        T.cast(stream[bx * tokens + i, step * chunk + c], T.float32),
                        T.float32(0.0),
                    )
                for i, c in T.Parallel(tokens, chunk):
                    squares[i, c] = squares[i, c] + values[i, c] * values[i, c]
                for lane in T.serial(chunk // 32):
                    for i, r, c in T.Parallel(tokens, padded, 32):
                        weight = fn[T.min(r, rows - 1), step * chunk + lane * 32 + c]
                        part[i, r, c] = part[i, r, c] + values[i, lane * 32 + c] * weight
            T.reduce_sum(part, dots, dim=2)
            T.reduce_sum(squares, square, dim=1)
            for i in T.Parallel(tokens):
                mean = square[i] / T.float32(width) + T.float32(norm_eps)
                norm[i] = T.float32(1.0) / T.sqrt(mean)
            for i, r in T.Parallel(tokens, padded):
                mixed[i, r] = dots[i, r]
            for i, r in T.Parallel(tokens, 2 * copies):
                if bx * tokens + i < m:
                    raw = mixed[i, r] * norm[i] * scale[r // copies] + base[r]
                    gate = T.float32(1.0) / (T.float32(1.0) + T.exp(-raw))
                    if r < copies:
                        pre[bx * tokens + i, r] = gate + T.float32(hc_eps)
                    else:
                        post[bx * tokens + i, r - copies] = T.float32(2.0) * gate
            for i in T.Parallel(tokens):
                own = T.alloc_local((size,), T.float32)
                if bx * tokens + i < m:
                    for c in T.serial(size):
                        raw = mixed[i, 2 * copies + c] * norm[i]
                        own[c] = raw * scale[2] + base[2 * copies + c]
                    run_rounds(own, copies, iters, hc_eps)
                    for c in T.serial(size):
                        comb[bx * tokens + i, c] = own[c]

    return hc_mix_kernel
