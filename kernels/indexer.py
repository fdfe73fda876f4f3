"""Index scores, exact top-k with the lower-index tie rule, and candidate blocks.

Owns which compressed entries a query attends to. Ties are real (a score is exactly 0 when every
index head is negative), and library top-k breaks them differently from shape to shape, so the
selection here is a threshold plus a count, never a library's order.

Source: DeepSeek-V4.1-Flash `inference/model.py` (Indexer, select_candidate_blocks).
"""

import torch
from torch import Tensor

from decodegrid.kernels.norm_rope import island


def index_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """sum over heads of weight * relu(query . key), in an fp32 island, not rounded.

    query: (B, S, Hi, di); weights: (B, S, Hi), the constant factor included; keys: (B, J, di).
    Returns (B, S, J). Nothing is masked here.
    """
    dots = torch.einsum("bshd,bjd->bshj", island(query), island(keys)).relu()
    return (dots * island(weights).unsqueeze(-1)).sum(2)


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """Bool mask of the `k` largest entries of the last axis; ties go to the lower index.

    scores: (..., J) with -inf for entries that must not be chosen; these never are, so a row may
    have fewer than `k` chosen entries.
    """
    visible = scores > float("-inf")
    if k >= scores.shape[-1]:
        return visible
    cut = scores.topk(k, dim=-1).values[..., -1:]
    above = scores > cut
    level = scores == cut
    room = k - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1) <= room))) & visible


def mask_to_indices(mask: Tensor, k: int) -> Tensor:
    """Indices of the set entries in ascending order, padded with -1: (..., J) -> (..., k) int64.

    At most `k` entries of a row may be set.
    """
    place = mask.cumsum(-1) - 1
    place = place.where(mask, torch.full_like(place, k))
    entry = torch.arange(mask.shape[-1], device=mask.device).expand_as(place)
    out = torch.full((*mask.shape[:-1], k + 1), -1, dtype=torch.int64, device=mask.device)
    return out.scatter_(-1, place, entry)[..., :k]


def candidate_mask(scores: Tensor, lengths: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """Entries in the `num_blocks` best blocks of `block_size`, the newest block always kept.

    scores: (..., J), -inf where not visible; lengths: (...) visible entries of each query. A
    block's score is its largest entry's; ties go to the lower block; blocks without a visible
    entry are dropped. Returns (..., J) bool.
    """
    num_entries = scores.shape[-1]
    pad = -num_entries % block_size
    padded = torch.nn.functional.pad(scores, (0, pad), value=float("-inf"))
    best = padded.unflatten(-1, (-1, block_size)).amax(-1)
    block = torch.arange(best.shape[-1], device=scores.device)
    newest = (lengths.unsqueeze(-1) - 1).div(block_size, rounding_mode="floor")
    best = best.masked_fill((block == newest) & (lengths.unsqueeze(-1) > 0), float("inf"))
    kept = top_k_mask(best, num_blocks)
    return kept.repeat_interleave(block_size, -1)[..., :num_entries]
