"""One call for each kind of product, whichever way its weight is stored.

Owns the choice between a float weight (a tensor) and a packed one (its codes and its scales, as a
list of two tensors). Does no arithmetic itself. Each call has two forms: plain torch, which a
compiler can look into, and opaque ops, which are native on the CPU once the kernels are installed.

Data flow: a region picks its forms once, and hands over activations and weights as they are.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from decodegrid.kernels.linear import grouped_linear, grouped_linear_op, linear, linear_op
from decodegrid.kernels.moe import routed_experts, routed_experts_op
from decodegrid.kernels.packed import (
    num_scales,
    packed_experts,
    packed_experts_op,
    packed_grouped_linear,
    packed_grouped_linear_op,
    packed_linear,
    packed_linear_op,
    packed_rows,
    packed_rows_op,
)

Matrix = Tensor | list[Tensor]
"""A float weight, or [codes, scales] of a packed one."""

Projection = Callable[[Tensor, Matrix], Tensor]
Experts = Callable[[Tensor, Tensor, Tensor, Matrix, Matrix, float], Tensor]


def _projection(
    dense: Callable[[Tensor, Tensor], Tensor], packed: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Projection:
    def project(x: Tensor, weight: Matrix) -> Tensor:
        if isinstance(weight, Tensor):
            return dense(x, weight)
        return packed(x, weight[0], weight[1])

    return project


def _experts(dense: Callable[..., Tensor], packed: Callable[..., Tensor]) -> Experts:
    def run(
        x: Tensor, ids: Tensor, weights: Tensor, w13: Matrix, w2: Matrix, limit: float
    ) -> Tensor:
        if isinstance(w13, Tensor):
            return dense(x, ids, weights, w13, w2, limit)
        return packed(x, ids, weights, w13[0], w13[1], w2[0], w2[1], limit)

    return run


project, project_op = (
    _projection(linear, packed_linear),
    _projection(linear_op, packed_linear_op),
)
"""x @ weight.T: (T, K) and (N, K) -> (T, N)."""
project_groups, project_groups_op = (
    _projection(grouped_linear, packed_grouped_linear),
    _projection(grouped_linear_op, packed_grouped_linear_op),
)
"""x[:, g] @ weight[g].T: (T, G, K) and (G, N, K) -> (T, G, N)."""
run_experts, run_experts_op = (
    _experts(routed_experts, packed_experts),
    _experts(routed_experts_op, packed_experts_op),
)
"""x, ids, routing weights, w13, w2, limit: (T, D) -> (T, D) in the island dtype; both matrices are
stored alike."""
table_rows, table_rows_op = (
    _projection(F.embedding, packed_rows),
    _projection(F.embedding, packed_rows_op),
)
"""index (...) and table (R, D) -> (..., D), float32 where the table is packed."""


def last_rows(weight: Matrix, count: int) -> Matrix:
    """The last `count` outputs of a joined matrix whose other outputs end with a tile."""
    if isinstance(weight, Tensor):
        return weight[-count:]
    # A library's layout has scales for every row, not for every tile of rows.
    scales = count if weight[1].dtype == torch.int32 else num_scales(count)
    return [weight[0][-count:], weight[1][-scales:]]


def as_flat_list(weights: list[Matrix]) -> list[Tensor]:
    """The tensors of several matrices that are stored alike, for a call that takes one list."""
    parts: list[Tensor] = []
    for weight in weights:
        parts += [weight] if isinstance(weight, Tensor) else weight
    return parts


def from_flat_list(parts: list[Tensor], count: int) -> list[Matrix]:
    """Inverse of `as_flat_list` for `count` matrices."""
    if len(parts) == count:
        return list(parts)
    return [[codes, scales] for codes, scales in zip(parts[::2], parts[1::2], strict=True)]
