"""Functions with gradients written by hand: expert order of tokens, and Sinkhorn rounds.

Owns forms that autograd would do with more memory traffic. The forward values are those of
`decodegrid.kernels.moe` and `decodegrid.kernels.hyper_connection`.
"""

from typing import Any

import torch
from torch import Tensor


class Dispatch(torch.autograd.Function):
    """Rows of tokens in expert order; the gradient gathers by the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.count = x.shape[0]
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back).view(ctx.count, -1, grad.shape[-1]).sum(1), None, None


class Combine(torch.autograd.Function):
    """Sum of the rows of each token; the gradient is `Dispatch`'s forward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, back: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(token)
        return rows.index_select(0, back).view(-1, top_k, rows.shape[-1]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (token,) = ctx.saved_tensors
        return grad.index_select(0, token), None, None, None


class Sinkhorn(torch.autograd.Function):
    """`kernels.hyper_connection.sinkhorn` with the small axes first; every half round is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int, eps: float) -> Tensor:
        soft = logits.movedim((-2, -1), (0, 1)).contiguous().softmax(1)
        matrix, kept, sums = soft + eps, [], []
        for half in range(2 * iters - 1):
            total = matrix.sum(half % 2, keepdim=True).add_(eps)
            matrix = matrix / total
            kept.append(matrix)
            sums.append(total)
        ctx.save_for_backward(soft, *kept, *sums)
        return matrix.movedim((0, 1), (-2, -1)).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        soft, *saved = ctx.saved_tensors
        rounds = len(saved) // 2
        grad = grad.movedim((-2, -1), (0, 1)).contiguous()
        for half in reversed(range(rounds)):
            matrix, total = saved[half], saved[rounds + half]
            grad = (grad - (grad * matrix).sum(half % 2, keepdim=True)).div_(total)
        grad = soft * (grad - (grad * soft).sum(1, keepdim=True))
        return grad.movedim((0, 1), (-2, -1)).contiguous(), None, None
