"""Attention for training: queries in blocks, causal work skipped, gradients written by hand.

Owns the same formula as `decodegrid.kernels.sparse_attention.dense_attention` for sequences whose
length is a multiple of the window: one softmax with a sink over a window and compressed keys, keys
as values. Probabilities are kept for the gradient, which costs memory and saves a product. The
drafter's few rows have no such form; autograd does them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decodegrid.kernels.norm_rope import island
from decodegrid.kernels.sparse_attention import sink_softmax

Piece = Callable[..., Any]

_MOST_BLOCKS = 4
"""Blocks of query windows that share one cut of the compressed keys."""


def near_bias(num_tokens: int, window: int) -> Tensor:
    """(S / window, window, 2 * window): 0 where a query sees a key of its own or the previous
    window, -inf elsewhere."""
    query = torch.arange(window)[:, None]
    key = torch.arange(2 * window)[None, :]
    seen = (key > query) & (key <= query + window)
    first = seen & (key >= window)
    count = num_tokens // window
    mask = torch.cat((first[None], seen[None].expand(count - 1, -1, -1)))
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


def _block_ends(num_tokens: int, window: int, num_keys: int, ratio: int) -> list[tuple[int, int]]:
    """(query windows, compressed keys) up to the end of each block."""
    count = num_tokens // window
    ends = []
    size = -(-count // _MOST_BLOCKS)
    for start in range(0, count, size):
        stop = min(start + size, count)
        ends.append((stop, min(stop * window // ratio, num_keys)))
    return ends


def _near_keys(keys: Tensor, window: int) -> Tensor:
    """(B, S, d) -> (B, S / window, 2 * window, d): previous window, then own."""
    own = keys.unflatten(1, (-1, window))
    previous = torch.cat((torch.zeros_like(own[:, :1]), own[:, :-1]), 1)
    return torch.cat((previous, own), 2)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched product over all leading axes."""
    lead = left.shape[:-2]
    return torch.bmm(left.flatten(0, -3), right.flatten(0, -3)).view(
        *lead, left.shape[-2], right.shape[-1]
    )


def forward_window(query: Tensor, keys: Tensor, sink: Tensor, near: Tensor) -> tuple[Tensor, ...]:
    """Without compressed keys: output (B, S, H, d), probabilities (B, n, W, H, 2 W), sink's."""
    batch, length, heads, dim = query.shape
    count, window, width = near.shape
    pairs = _near_keys(keys, window)
    rows = (query * dim**-0.5).view(batch, count, window * heads, dim)
    scores = _product(rows, pairs.transpose(-1, -2)).view(batch, count, window, heads, width)
    scores = scores + near[:, :, None, :]
    top = torch.maximum(scores.amax(-1), sink)
    weights = (scores - top.unsqueeze(-1)).exp()
    alone = (sink - top).exp()
    total = weights.sum(-1) + alone
    weights = weights / total.unsqueeze(-1)
    out = _product(weights.view(batch, count, window * heads, width), pairs)
    return out.view(batch, length, heads, dim), weights, alone / total


def _mean_slope(grad: Tensor, out: Tensor, pull: Tensor | None) -> Tensor:
    """(B, S, H) what a softmax takes off every slope; `pull` as in `backward_window`."""
    delta = (grad * out).sum(-1)
    return delta if pull is None else delta + pull


def backward_window(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    out: Tensor,
    weights: Tensor,
    alone: Tensor,
    pull: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, keys and sink; `pull` (B, S, H): what a loss on far probabilities adds
    to the mean slope of a softmax."""
    batch, _, heads, dim = query.shape
    _, count, window, _, width = weights.shape
    rows = (batch, count, window * heads, dim)
    delta = _mean_slope(grad, out, pull)
    pairs = _near_keys(keys, window)
    slope = _product(grad.reshape(rows), pairs.transpose(-1, -2)).view(weights.shape)
    slope = weights * (slope - delta.view(batch, count, window, heads, 1))
    flat = slope.view(batch, count, window * heads, width)
    d_query = _product(flat, pairs).view(query.shape) * dim**-0.5
    scaled = (query * dim**-0.5).view(rows)
    d_pairs = _product(flat.transpose(-1, -2), scaled)
    d_pairs = d_pairs + _product(weights.view(flat.shape).transpose(-1, -2), grad.reshape(rows))
    d_sink = -(alone.view(delta.shape) * delta).sum((0, 1))
    return d_query, _fold_pairs(d_pairs, window), d_sink


def _fold_pairs(d_pairs: Tensor, window: int) -> Tensor:
    """Gradient of keys from that of `_near_keys`."""
    previous, own = d_pairs[:, :, :window], d_pairs[:, :, window:]
    moved = torch.cat((previous[:, 1:], torch.zeros_like(previous[:, :1])), 1)
    return (own + moved).flatten(1, 2)


def forward_joint(
    query: Tensor,
    keys: Tensor,
    sink: Tensor,
    near: Tensor,
    far_keys: Tensor,
    far: Tensor,
    ratio: int,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """With compressed keys: output, near probabilities, the sink's, far ones per block.

    Far probabilities of a block are (B, queries, H, keys up to the block's end).
    """
    batch, length, heads, dim = query.shape
    count, window, width = near.shape
    pairs = _near_keys(keys, window)
    scaled = query * dim**-0.5
    rows = scaled.view(batch, count, window * heads, dim)
    near_scores = _product(rows, pairs.transpose(-1, -2))
    near_scores = near_scores.view(batch, count, window, heads, width) + near[:, :, None, :]
    near_all, alone_all, far_all, far_out = [], [], [], []
    start = 0
    for stop, end in _block_ends(length, window, far_keys.shape[1], ratio):
        first, last = start * window, stop * window
        own = near_scores[:, start:stop].reshape(batch, last - first, heads, width)
        block = scaled[:, first:last].reshape(batch, -1, dim)
        scores = torch.bmm(block, far_keys[:, :end].transpose(1, 2))
        scores = scores.view(batch, -1, heads, end) + far[:, first:last, None, :end]
        top = torch.maximum(torch.maximum(own.amax(-1), scores.amax(-1)), sink)
        own = (own - top.unsqueeze(-1)).exp()
        scores = (scores - top.unsqueeze(-1)).exp()
        alone = (sink - top).exp()
        total = own.sum(-1) + scores.sum(-1) + alone
        near_all.append(own / total.unsqueeze(-1))
        far_all.append(scores / total.unsqueeze(-1))
        alone_all.append(alone / total)
        far_out.append(torch.bmm(far_all[-1].view(batch, -1, end), far_keys[:, :end]))
        start = stop
    near_weights = torch.cat(near_all, 1).view(batch, count, window * heads, width)
    out = _product(near_weights, pairs).view(query.shape)
    out = out + torch.cat(far_out, 1).view(query.shape)
    return (
        out,
        near_weights.view(batch, count, window, heads, width),
        torch.cat(alone_all, 1),
        far_all,
    )


def spread_of(weights: list[Tensor], outside: Tensor) -> Tensor:
    """Mean over rows, queries and heads of the far mass where `outside` (B, S, J) is 1."""
    total, first = torch.zeros(()), 0
    for block in weights:
        last = first + block.shape[1]
        total = total + (block.sum(2) * outside[:, first:last, : block.shape[-1]]).sum()
        first = last
    return total / (outside.shape[0] * outside.shape[1] * weights[0].shape[2])


def spread_pull(weights: list[Tensor], push: Tensor) -> Tensor:
    """(B, S, H) mean slope of each softmax for the slopes `push` (B, S, J) of all its heads."""
    parts, first = [], 0
    for block in weights:
        last = first + block.shape[1]
        parts.append((block * push[:, first:last, None, : block.shape[-1]]).sum(-1))
        first = last
    return torch.cat(parts, 1)


def backward_far(
    grad: Tensor,
    query: Tensor,
    far_keys: Tensor,
    out: Tensor,
    weights: list[Tensor],
    push: Tensor | None = None,
    pull: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compressed keys' share of the query gradient, and their own gradient; `push` (B, S, J) and
    `pull`: slopes of a loss on the far probabilities, and their mean (`spread_pull`)."""
    batch, dim = query.shape[0], query.shape[-1]
    delta = _mean_slope(grad, out, pull)
    d_query, d_keys = [], torch.zeros_like(far_keys)
    first = 0
    for block in weights:
        last, end = first + block.shape[1], block.shape[-1]
        rows = grad[:, first:last].reshape(batch, -1, dim)
        slope = torch.bmm(rows, far_keys[:, :end].transpose(1, 2)).view(block.shape)
        if push is not None:
            slope = slope + push[:, first:last, None, :end]
        slope = block * (slope - delta[:, first:last].unsqueeze(-1))
        flat = slope.view(batch, -1, end)
        d_query.append(torch.bmm(flat, far_keys[:, :end]))
        scaled = (query[:, first:last] * dim**-0.5).reshape(batch, -1, dim)
        part = torch.bmm(flat.transpose(1, 2), scaled)
        part = part + torch.bmm(block.view(batch, -1, end).transpose(1, 2), rows)
        d_keys = d_keys + torch.nn.functional.pad(part, (0, 0, 0, far_keys.shape[1] - end))
        first = last
    return torch.cat(d_query, 1).view(query.shape) * dim**-0.5, d_keys


def draft_attend(query: Tensor, context: Tensor, own: Tensor, live: Tensor, sink: Tensor) -> Tensor:
    """A drafter block's attention: query (N, G, H, d), context (N, C, d) with live (N, C) bool,
    own (N, G, d), all of which every row sees. Returns (N, G, H, d) of the query's dtype."""
    keys = island(torch.cat((context, own), 1))
    seen = torch.cat((live, live.new_ones(own.shape[:2])), 1)
    scores = torch.einsum("nghd,nkd->nghk", island(query) * query.shape[-1] ** -0.5, keys)
    scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
    return torch.einsum("nghk,nkd->nghd", sink_softmax(scores, sink), keys).to(query.dtype)


class BlockAttention:
    """Attention core with gradients; `wrap` compiles its pieces."""

    def __init__(self, window: int, wrap: Callable[[Piece], Piece]) -> None:
        self.window = window
        self.forward_window, self.backward_window = wrap(forward_window), wrap(backward_window)
        self.forward_joint, self.backward_far = wrap(forward_joint), wrap(backward_far)
        self.spread_of, self.spread_pull = wrap(spread_of), wrap(spread_pull)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        sink: Tensor,
        near: Tensor,
        far_keys: Tensor | None,
        far: Tensor | None,
        ratio: int,
        with_mass: bool,
        outside: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """query: (B, S, H, d); keys: (B, S, d); near: from `near_bias`; far_keys: (B, J, d);
        far: (B, S, J) bias, 0 or -inf. Returns the output; `with_mass`, the detached (B, S, J) mass
        on compressed keys; and with `outside` (B, S, J), 0 or 1, the mean of a head's mass there,
        which has gradients."""
        if far_keys is None or far is None:
            return _Window.apply(query, keys, sink, near, self), None, None
        out, spread, *weights = _Joint.apply(
            query, keys, sink, near, far_keys, far, ratio, outside, self
        )
        spread = None if outside is None else spread
        if not with_mass:
            return out, None, spread
        with torch.no_grad():
            mass = [
                torch.nn.functional.pad(block.sum(2), (0, far_keys.shape[1] - block.shape[-1]))
                for block in weights
            ]
        return out, torch.cat(mass, 1), spread


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, sink: Tensor, near: Tensor, owner: BlockAttention
    ) -> Tensor:
        out, weights, alone = owner.forward_window(query, keys, sink, near)
        ctx.save_for_backward(query, keys, out, weights, alone)
        ctx.owner = owner
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_query, d_keys, d_sink = ctx.owner.backward_window(grad.contiguous(), *ctx.saved_tensors)
        return d_query, d_keys, d_sink, None, None


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        sink: Tensor,
        near: Tensor,
        far_keys: Tensor,
        far: Tensor,
        ratio: int,
        outside: Tensor | None,
        owner: BlockAttention,
    ) -> tuple[Tensor, ...]:
        out, near_weights, alone, blocks = owner.forward_joint(
            query, keys, sink, near, far_keys, far, ratio
        )
        spread = torch.zeros(()) if outside is None else owner.spread_of(blocks, outside)
        ctx.save_for_backward(query, keys, far_keys, out, near_weights, alone, outside, *blocks)
        ctx.owner = owner
        ctx.mark_non_differentiable(*blocks)
        return (out, spread, *blocks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, d_spread: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, far_keys, out, near_weights, alone, outside, *blocks = ctx.saved_tensors
        grad, owner = grad.contiguous(), ctx.owner
        push = pull = None
        if outside is not None:
            push = outside * (d_spread / query[..., 0].numel())
            pull = owner.spread_pull(blocks, push)
        d_query, d_keys, d_sink = owner.backward_window(
            grad, query, keys, out, near_weights, alone, pull
        )
        far_query, d_far = owner.backward_far(grad, query, far_keys, out, blocks, push, pull)
        return d_query + far_query, d_keys, d_sink, None, d_far, None, None, None, None
