"""Our TileLang kernels as ops: a schema and a fake each, and a launcher for CUDA.

Owns the ops `decodegrid_tile::*`, made from the table of kernels/tile. The first argument names the
kernel: an op at fixed sizes, one CUDA function, built beforehand or at the first call. Everything
that is written is preallocated and passed in. Imports no TileLang: what launches is bound later.
"""

from collections.abc import Callable
from typing import Any

import torch

from decodegrid.kernels.tile.table import OPS, Size, TileKernel, find_op

LIBRARY = torch.library.Library("decodegrid_tile", "FRAGMENT")

Launch = Callable[..., None]
"""Takes the kernel's name, then its tensors; enqueues it on the current stream."""


def kernel_name(op: str, **sizes: Size) -> str:
    """The name of an op's kernel at these sizes, given in the factory's order. Raises ValueError
    for an op that is none."""
    return TileKernel(find_op(op).name, "", sizes).name


def _nothing(kernel: str, *tensors: torch.Tensor) -> None:
    """The fake: what is written has its shape already."""


for _op in OPS:
    LIBRARY.define(f"{_op.name}(str kernel, {_op.schema}) -> ()")
    torch.library.register_fake(f"decodegrid_tile::{_op.name}", _nothing, lib=LIBRARY)


def tile_op(name: str) -> Any:
    """The op of a name, to be called with a kernel's name and tensors."""
    return getattr(torch.ops.decodegrid_tile, find_op(name).name).default


def bind_launcher(launch: Launch) -> None:
    """Make `launch` the CUDA implementation of every op, for the process."""
    for op in OPS:
        name = f"decodegrid_tile::{op.name}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            LIBRARY.impl(op.name, launch, "CUDA")
