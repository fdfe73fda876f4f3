"""Products with a weight that may be stored narrower than it is computed in.

Owns the dtype rule of a projection: bfloat16 weights hold exactly the values that they have in a
wider dtype, so they are stored in half the bytes and widened on use. Work is T x N x K; every
weight is read once for all rows.

Source: torch.nn.functional.linear without a bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define("linear(Tensor x, Tensor weight) -> Tensor")
LIBRARY.define("grouped_linear(Tensor x, Tensor weight) -> Tensor")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in the dtype of `x`.

    x: (T, K) any float; weight: (N, K) of the same dtype, or bfloat16 and widened. Returns (T, N),
    accumulated in at least float32.
    """
    return F.linear(x, weight.to(x.dtype))


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x[:, g] @ weight[g].T for every group g, in the dtype of `x`.

    x: (T, G, K) any float; weight: (G, N, K) of the same dtype, or bfloat16 and widened. Returns
    (T, G, N), accumulated in at least float32.
    """
    wide = weight.to(x.dtype)
    return torch.bmm(x.transpose(0, 1), wide.transpose(1, 2)).transpose(0, 1)


def _contiguous_grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    return grouped_linear(x, weight).contiguous()


def _fake_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], weight.shape[1])


# Not the CPU key: that one is for the native kernel, which then wins.
LIBRARY.impl("linear", linear, "CompositeExplicitAutograd")
LIBRARY.impl("grouped_linear", _contiguous_grouped_linear, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::linear", _fake_linear, lib=LIBRARY)
torch.library.register_fake("decodegrid::grouped_linear", _fake_grouped_linear, lib=LIBRARY)

linear_op = torch.ops.decodegrid.linear.default
grouped_linear_op = torch.ops.decodegrid.grouped_linear.default
"""The op forms, for traced code: a compiler would widen the whole weight into memory first."""
