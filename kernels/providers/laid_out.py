"""Packed weights in a device's form, and plain torch that reads them there.

Owns both directions: what a form makes of a checkpoint's [codes, scales] when a model is loaded,
and the way back, bit for bit, by which the plain step computes with the very weights that a
captured step reads. The way back costs a copy of the weight at each use: it is for proofs and
replays, not for serving. The layouts themselves are `layouts.py`'s.

Data flow: [codes, scales] -> form -> the device's weight -> `stored` -> [codes, scales].
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from decodegrid.kernels.packed import SCALE_BLOCK, num_scales
from decodegrid.kernels.products import Matrix
from decodegrid.kernels.providers import layouts
from decodegrid.kernels.step_kernels import PLAIN

Form = Callable[[list[Tensor]], Matrix]
"""A packed matrix, or a stack of them, as a kernel reads it."""

_SCALE_ROWS, _SCALE_PARTS = 128, 4
"""Of `layouts.utccp_scales`."""


def keep(weight: list[Tensor]) -> Matrix:
    """As the checkpoint has it."""
    return weight


def keep_experts(w13: list[Tensor], w2: list[Tensor]) -> tuple[Matrix, Matrix]:
    """As the checkpoint has them."""
    return w13, w2


def widen(weight: list[Tensor]) -> Matrix:
    """bfloat16."""
    return layouts.widen_tiles(weight[0], weight[1])


def pack(weight: list[Tensor]) -> Matrix:
    """FP8 codes, a packed scale for each row."""
    return layouts.pack_matrix(weight[0], weight[1])


def fuse_experts(w13: list[Tensor], w2: list[Tensor]) -> tuple[Matrix, Matrix]:
    """For the fused expert kernel."""
    packed = [layouts.pack_experts(codes, scales) for codes, scales in (w13, w2)]
    return layouts.mega_moe_weights(packed[0], packed[1])


def _is_laid_out(weight: Matrix) -> bool:
    return not isinstance(weight, Tensor) and weight[1].dtype == torch.int32


def _scale_bytes(words: Tensor, columns: int) -> Tensor:
    """The E8M0 bytes of packed scales, one row for each: (..., rows, words) -> (..., rows, K)."""
    # Not contiguous(), which leaves the strides of a single column as they are.
    dense = words.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8)[..., :columns]


def stored(weight: Matrix) -> Matrix:
    """A matrix as a checkpoint stores it, whatever `pack` made of it; any other as it is."""
    if isinstance(weight, Tensor) or not _is_laid_out(weight):
        return weight
    codes, words = weight
    scales = _scale_bytes(words, num_scales(codes.shape[-1]))
    return [codes.view(torch.uint8), scales[..., ::SCALE_BLOCK, :]]


def stored_experts(w13: Matrix, w2: Matrix) -> tuple[Matrix, Matrix]:
    """Experts as a checkpoint stores them, whatever `fuse_experts` made of them."""
    if isinstance(w13, Tensor) or isinstance(w2, Tensor) or not _is_laid_out(w13):
        return w13, w2
    first = [_apart(w13[0]), _apart(_in_order(w13[1]))]
    return _expert_bytes(first), _expert_bytes([w2[0], _in_order(w2[1])])


def _expert_bytes(weight: list[Tensor]) -> Matrix:
    codes, words = weight
    return [codes.view(torch.uint8), _scale_bytes(words, num_scales(2 * codes.shape[-1]))]


def _apart(weights: Tensor) -> Tensor:
    """Gate rows, then up rows: undoes `layouts.interleave_gate_up`."""
    experts, rows, *rest = weights.shape
    parts = weights.reshape(experts, -1, 2, layouts.GATE_UP_ROWS, *rest)
    return parts.transpose(1, 2).reshape(experts, rows, *rest)


def _in_order(scales: Tensor) -> Tensor:
    """Scales in the order of their rows: undoes `layouts.utccp_scales`."""
    experts, rows, words = scales.shape
    parts = scales.reshape(experts, -1, _SCALE_ROWS // _SCALE_PARTS, _SCALE_PARTS, words)
    return parts.transpose(2, 3).reshape(experts, rows, words)


def _project(x: Tensor, weight: Matrix) -> Tensor:
    return PLAIN.project(x, stored(weight))


def _project_groups(x: Tensor, weight: Matrix) -> Tensor:
    return PLAIN.project_groups(x, stored(weight))


def _run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Matrix, w2: Matrix, limit: float
) -> Tensor:
    return PLAIN.run_experts(x, ids, weights, *stored_experts(w13, w2), limit)


PLAIN_OF_ANY = replace(
    PLAIN, project=_project, project_groups=_project_groups, run_experts=_run_experts
)
"""`decodegrid.kernels.step_kernels.PLAIN` for weights in any device's form."""
