"""Manifold-constrained hyper-connections (mHC): mixer coefficients, stream collapse and update.

Owns the arithmetic between the residual stream of `hc_mult` copies and a sublayer. The shift of
`pre` by one sublayer is the caller's: `mix` returns the `pre` that the next sublayer uses.

Source: DeepSeek-V4.1-Flash `inference/model.py` (hc_split_sinkhorn, hc_pre, hc_post).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from decodegrid.kernels.norm_rope import island

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define("sinkhorn(Tensor logits, int iters, float eps) -> Tensor")


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrix from `logits`, (..., n, n).

    Softmax over the last axis and a column step count as the first of `iters` rounds; each
    further round is a row step, then a column step. `eps` is added to every entry after the
    softmax and to every divisor.
    """
    # The two small axes go first, so that every elementwise loop runs along the tokens.
    matrix = logits.movedim((-2, -1), (0, 1)).contiguous().softmax(1) + eps
    matrix = matrix / (matrix.sum(0, keepdim=True) + eps)
    for _ in range(iters - 1):
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(0, keepdim=True) + eps)
    return matrix.movedim((0, 1), (-2, -1))


def _fake_sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    return logits.new_empty(logits.shape)


def _contiguous_sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    return sinkhorn(logits, iters, eps).contiguous()


# Not the CPU key: that one is for the native kernel, which then wins.
LIBRARY.impl("sinkhorn", _contiguous_sinkhorn, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::sinkhorn", _fake_sinkhorn, lib=LIBRARY)

sinkhorn_op = torch.ops.decodegrid.sinkhorn.default
"""The op form, for traced code: unrolled, the rounds take a compiler half a minute a region."""


def hc_mix(
    stream: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    rounds: Callable[[Tensor, int, float], Tensor] = sinkhorn,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one sublayer from the stream before it, all in an fp32 island.

    stream: (..., n, D); fn: (n * (n + 2), n * D); scale: (3,); base: (n * (n + 2),).
    Returns `pre` (..., n) for the *next* sublayer, `post` (..., n) and `comb` (..., n, n) for
    this one. `rounds` is `sinkhorn` or its op form.
    """
    n = stream.shape[-2]
    flat = island(stream).flatten(-2)
    wide = flat.dtype
    rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mixed = (flat @ fn.to(wide).t()) * rms
    scale, base = scale.to(wide), base.to(wide)
    pre = torch.sigmoid(mixed[..., :n] * scale[0] + base[:n]) + hc_eps
    post = 2.0 * torch.sigmoid(mixed[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixed[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return pre, post, rounds(logits, iters, hc_eps)


def hc_pre(stream: Tensor, pre: Tensor) -> Tensor:
    """Collapse the copies: sum over c of pre[c] * stream[c]; (..., n, D) -> (..., D)."""
    wide = island(stream)
    total = pre[..., 0, None] * wide[..., 0, :]
    for copy in range(1, stream.shape[-2]):
        total = total + pre[..., copy, None] * wide[..., copy, :]
    return total.to(stream.dtype)


def hc_post(update: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Stream after a sublayer: out[k] = post[k] * update + sum over j of comb[j, k] * stream[j].

    update: (..., D); stream: (..., n, D); post: (..., n); comb: (..., n, n), used transposed.
    """
    wide, up = island(stream), island(update)
    n = stream.shape[-2]
    copies = []
    for k in range(n):
        total = post[..., k, None] * up
        for j in range(n):
            total = total + comb[..., j, k, None] * wide[..., j, :]
        copies.append(total)
    return torch.stack(copies, -2).to(stream.dtype)


def initial_pre(stream: Tensor) -> Tensor:
    """`pre` of the very first sublayer, one-hot on copy 0: (..., n) of the island dtype."""
    wide = torch.promote_types(stream.dtype, torch.float32)
    pre = torch.zeros(stream.shape[:-1], dtype=wide, device=stream.device)
    pre[..., 0] = 1.0
    return pre
