"""Attention with one shared key-value head, a window, selected compressed entries and sinks.

Two forms of one formula: `dense_attention` sees a whole sequence and masks, `gathered_attention`
sees flat tokens and reads key rows by index. Keys are values; a per-head sink takes part in the
denominator only; one softmax runs over window and compressed keys together.

Source: DeepSeek-V4.1-Flash `inference/model.py` (sparse_attn), tech report section on CSA2.
"""

import torch
from torch import Tensor

from decodegrid.kernels.norm_rope import island


def sink_softmax(scores: Tensor, sink: Tensor) -> Tensor:
    """Probabilities over the last axis with `sink` added to the denominator.

    scores: (..., H, N), -inf where masked; sink: broadcastable to scores[..., 0]. Rows without a
    key give zeros, not NaN.
    """
    sink = sink.to(scores.dtype)
    # The shift cancels, so it needs no gradient.
    top = torch.maximum(scores.detach().amax(-1), sink.detach()).unsqueeze(-1)
    weights = (scores - top).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sink.unsqueeze(-1) - top).exp())


def window_mask(num_tokens: int, window: int, device: torch.device | None = None) -> Tensor:
    """(S, S) bool: query t sees keys max(0, t - window + 1) .. t."""
    position = torch.arange(num_tokens, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def dense_attention(
    query: Tensor,
    window_keys: Tensor,
    sink: Tensor,
    window: int,
    compressed_keys: Tensor | None = None,
    selected: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Whole-sequence form.

    query: (B, S, H, d); window_keys: (B, S, d); sink: (H,); compressed_keys: (B, J, d);
    selected: (B, S, J) bool. Returns the output (B, S, H, d) in the query's dtype and the
    attention mass on compressed entries summed over heads, (B, S, J), or None without them.
    """
    scale = query.shape[-1] ** -0.5
    wide = island(query) * scale
    near = torch.einsum("bshd,bkd->bhsk", wide, island(window_keys))
    near = near.masked_fill(~window_mask(query.shape[1], window, query.device), float("-inf"))
    if compressed_keys is None or selected is None:
        weights = sink_softmax(near, sink[:, None])
        return torch.einsum("bhsk,bkd->bshd", weights, island(window_keys)).to(query.dtype), None
    far = torch.einsum("bshd,bkd->bhsk", wide, island(compressed_keys))
    far = far.masked_fill(~selected.unsqueeze(1), float("-inf"))
    weights = sink_softmax(torch.cat((near, far), -1), sink[:, None])
    keys = island(torch.cat((window_keys, compressed_keys), 1))
    out = torch.einsum("bhsk,bkd->bshd", weights, keys).to(query.dtype)
    return out, weights[..., near.shape[-1] :].sum(1)


def gathered_attention(query: Tensor, keys: Tensor, live: Tensor, sink: Tensor) -> Tensor:
    """Flat form over keys that were already gathered.

    query: (T, H, d); keys: (T, N, d); live: (T, N) bool; sink: (H,). Keys that are not live may
    hold anything finite. Returns (T, H, d) in the query's dtype.
    """
    scale = query.shape[-1] ** -0.5
    wide_keys = island(keys)
    scores = torch.bmm(island(query) * scale, wide_keys.transpose(1, 2))
    scores = scores.masked_fill(~live.unsqueeze(1), float("-inf"))
    return torch.bmm(sink_softmax(scores, sink), wide_keys).to(query.dtype)
