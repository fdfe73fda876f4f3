"""Mixture of experts: routing, the clamped SwiGLU and the grouped expert product.

Owns the arithmetic of one MoE block. Work is (tokens x experts per token); rows sent to the
expert id `num_experts` ("no expert") cost nothing and yield zero.

Source: DeepSeek-V4.1-Flash `inference/model.py` (Gate, Expert, MoE).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from decodegrid.kernels.norm_rope import island

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define(
    "routed_experts(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, float limit) "
    "-> Tensor"
)


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    scaling: float,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    """Pick `top_k` experts by sqrt(softplus(logit)) + bias; ties go to the lower expert.

    x: (..., D); weight: (E, D); bias: (E,). Returns ids (..., top_k) int64 and their weights
    (..., top_k) in the island dtype: scores without the bias, normalised to sum to `scaling`.
    """
    wide = island(x)
    scores = F.softplus(wide @ weight.to(wide.dtype).t()).sqrt()
    ranked = (scores + bias.to(wide.dtype)).sort(dim=-1, descending=True, stable=True)
    ids = ranked.indices[..., :top_k]
    weights = scores.gather(-1, ids)
    if normalise and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, +-limit) in an fp32 island, result in the island dtype."""
    gate = island(gate).clamp(max=limit)
    up = island(up).clamp(-limit, limit)
    return F.silu(gate) * up


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows[start_e:ends[e]] @ weights[e] for every expert e.

    rows: (N, K) sorted by expert; weights: (E, K, M); ends: (E,) int32 exclusive ends. Rows
    from ends[-1] on belong to no expert; what they hold in the result is unspecified.
    """
    if rows.dtype == torch.float64:
        # The grouped kernel has no float64; proofs run here, where speed does not matter.
        row = torch.arange(rows.shape[0], device=rows.device)
        expert = torch.searchsorted(ends, row, right=True)
        expert = expert.clamp(max=weights.shape[0] - 1)
        return torch.bmm(rows.unsqueeze(1), weights[expert]).squeeze(1)
    if rows.shape[0] == 0:
        return rows.new_empty(0, weights.shape[2])
    # The kernel wants dense rows; weights may be stored either way round.
    return torch._grouped_mm(rows.contiguous(), weights, offs=ends)


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
) -> Tensor:
    """Sum of the routed experts' outputs; the routing weight multiplies before `w2`.

    x: (T, D); ids, weights: (T, k), an id of E meaning "no expert"; w13: (E, D, 2 * I) with the
    gate half first; w2: (E, I, D); both in the dtype of `x`, or bfloat16 and widened (fastest with
    each output's weights side by side, so a transpose of dense (E, 2 * I, D) and (E, D, I)).
    Returns (T, D) in the island dtype.
    """
    num_experts = w13.shape[0]
    w13, w2 = w13.to(x.dtype), w2.to(x.dtype)
    top_k = ids.shape[-1]
    flat = ids.reshape(-1)
    order = flat.sort(stable=True).indices
    experts = torch.arange(num_experts, device=ids.device)
    ends = (flat.unsqueeze(-1) <= experts).sum(0, dtype=torch.int32)
    gate, up = grouped_product(x[order // top_k], w13, ends).chunk(2, -1)
    hidden = swiglu(gate, up, limit) * weights.reshape(-1)[order].unsqueeze(-1)
    rows = grouped_product(hidden.to(x.dtype), w2, ends)
    live = (flat[order] < num_experts).unsqueeze(-1)
    rows = island(rows).where(live, torch.zeros((), dtype=hidden.dtype, device=x.device))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
    return rows[back].unflatten(0, (-1, top_k)).sum(1)


def _fake_routed_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


# Not the CPU key: that one is for the native kernel, which then wins.
LIBRARY.impl("routed_experts", routed_experts, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::routed_experts", _fake_routed_experts, lib=LIBRARY)

routed_experts_op = torch.ops.decodegrid.routed_experts.default
"""The op form, for traced code: torch's own grouped product traces in bfloat16 only."""
