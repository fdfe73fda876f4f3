"""Verify lengths and acceptance: how many drafts each row verifies, and which it keeps.

Owns the integer arithmetic of one speculative round. Works on row tensors, (B,) and (B, K).

Source: DeepInfer's on-device redistribution (verify lengths) and verification bookkeeping.
"""

import torch
from torch import Tensor


def survival(confidence: Tensor) -> Tensor:
    """Estimated probability that a draft and all before it are accepted: (B, K) -> (B, K).

    Confidences are sanitised: NaN counts as 0, values are clamped to 0..1.
    """
    return confidence.nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0).cumprod(-1)


def split_verify_lengths(rates: Tensor, limits: Tensor, live: Tensor, total: Tensor) -> Tensor:
    """Query tokens of each row: one per live row, the rest to the largest survival rates.

    rates: (B, K) non-increasing along K; limits: (B,) drafts a row can verify; live: (B,) bool;
    total: () or (1,) int64 query tokens to hand out. Ties go to the lower flat index. Winners
    form a prefix of each row. Returns (B,) int64, 0 for rows that are not live; the sum is
    `total` unless the limits do not allow it.
    """
    num_rows, num_drafts = rates.shape
    column = torch.arange(num_drafts, device=rates.device)
    usable = (column < limits.unsqueeze(-1)) & live.unsqueeze(-1)
    value = torch.where(usable, rates, torch.full_like(rates, -1.0)).reshape(-1)
    flat = torch.arange(num_rows * num_drafts, device=rates.device)
    ahead = value.unsqueeze(0) > value.unsqueeze(1)
    earlier = flat.unsqueeze(0) < flat.unsqueeze(1)
    tied_ahead = (value.unsqueeze(0) == value.unsqueeze(1)) & earlier
    rank = (ahead | tied_ahead).sum(1)
    wins = ((rank < total - live.sum()) & (value >= 0)).reshape(num_rows, num_drafts)
    return torch.where(live, 1 + wins.sum(-1), torch.zeros_like(limits))


def accept_prefix(chosen: Tensor, drafts: Tensor, query_lens: Tensor) -> Tensor:
    """Number of leading drafts that equal the target's choice: (B,) int64.

    chosen: (B, K + 1) target token after each query token; drafts: (B, K); query_lens: (B,).
    Only the first query_lens - 1 drafts were verified.
    """
    column = torch.arange(drafts.shape[-1], device=drafts.device)
    equal = (chosen[:, : drafts.shape[-1]] == drafts) & (column < query_lens.unsqueeze(-1) - 1)
    return equal.to(torch.int64).cumprod(-1).sum(-1)
