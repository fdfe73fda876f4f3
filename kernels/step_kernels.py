"""The kernels that the regions of a step close over.

Owns the bundle alone: one callable per kind of work that has more than one form. `PLAIN` is what a
compiler can look into, `OPS` the opaque ops, native on the CPU once these kernels are installed.
Another device's bundle is made from its kernel table (kernels/providers/cuda_step.py). Regions get
a bundle as an argument; there is no current one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decodegrid.kernels.hyper_connection import sinkhorn, sinkhorn_op
from decodegrid.kernels.products import (
    Experts,
    Matrix,
    Projection,
    project,
    project_groups,
    project_groups_op,
    project_op,
    run_experts,
    run_experts_op,
    table_rows,
    table_rows_op,
)
from decodegrid.kernels.records import (
    encode_records,
    encode_records_op,
    round_records,
    round_records_op,
    take_records,
    take_records_op,
)

Store = Callable[[Tensor, Tensor, Tensor, int], None]
"""Rows written, index (T,), keys (T, dim), RecordFormat: rows[index] = the keys' records."""

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", Tensor], Tensor]
"""Query (T, H, d), window records, window index (T, N), compressed records and their index or None,
sink (H,) -> (T, H, d). An index of -1 is no key."""


@dataclass(frozen=True, slots=True)
class StepKernels:
    """One form of everything that a step calls."""

    project: Projection
    project_groups: Projection
    run_experts: Experts
    table_rows: Projection
    sinkhorn: Callable[[Tensor, int, float], Tensor]
    encode: Callable[[Tensor, int], Tensor]
    take: Callable[[Tensor, Tensor, int, int, torch.dtype], Tensor]
    round: Callable[[Tensor, int], Tensor]
    store: Store | None = None
    """None stores what `encode` makes."""
    attend: Attend | None = None
    """None gathers keys, then multiplies: a compiler fuses the parts. Only for cache records."""


@dataclass(frozen=True, slots=True)
class WeightForms:
    """What a device's kernels make of packed weights when a model is loaded."""

    matrix: Callable[[list[Tensor]], Matrix]
    """[codes, scales] of FP8 tiles, one matrix or a stack."""
    experts: Callable[[list[Tensor], list[Tensor]], tuple[Matrix, Matrix]]
    """w13 and w2 of MXFP4 experts, each [codes, scales]."""


PLAIN = StepKernels(
    project, project_groups, run_experts, table_rows, sinkhorn,
    encode_records, take_records, round_records,
)  # fmt: skip
OPS = StepKernels(
    project_op, project_groups_op, run_experts_op, table_rows_op, sinkhorn_op,
    encode_records_op, take_records_op, round_records_op,
)  # fmt: skip
