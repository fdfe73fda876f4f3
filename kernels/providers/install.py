"""Chosen implementations put into place, once per process, before a CUDA step is captured.

Owns the binding of probed libraries and of the TileLang launcher to our ops, and the CUDA place of
ops whose schema a kernel of ours serves. Does not choose. As with the CPU's native kernels, what is
installed holds for the process; a second call with the same table changes nothing.
"""

import torch

from decodegrid.kernels.providers import (
    deep_gemm,
    deep_gemm_experts,
    deep_gemm_index,
    deep_select,
    flash_mla,
    tile_kernels,
)
from decodegrid.kernels.providers.cuda_step import SAME_SCHEMA
from decodegrid.kernels.providers.probe import Target
from decodegrid.kernels.providers.registry import KernelTable, Kind
from decodegrid.kernels.providers.tile_ops import Launch, bind_launcher

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")


def served_by_tiles(table: KernelTable) -> tuple[str, ...]:
    """Ops of a step whose CUDA implementation is to be a kernel of ours."""
    return tuple(op for op in SAME_SCHEMA if op in table.choices and table.uses(op, Kind.TILELANG))


def install(table: KernelTable, launch: Launch | None) -> None:
    """Bind everything that the table chose.

    launch: starts a kernel of ours; None where the table chose none. Raises ValueError where it
    chose some.
    """
    if table.device.target is Target.CPU:
        return
    chosen = {choice.chosen.kind for choice in table.choices.values()}
    if Kind.TILELANG in chosen and launch is None:
        raise ValueError("kernels of ours were chosen, but nothing launches them")
    for probe in table.probes:
        if probe.module is None:
            continue
        if probe.package.name == "deep_gemm":
            deep_gemm.bind_library(probe.module)
            deep_gemm_index.bind_library(probe.module)
            blackwell = table.device.target is Target.SM100
            deep_gemm_experts.bind_library(probe.module, with_gate=blackwell)
        elif probe.package.name == "flash_mla":
            flash_mla.bind_library(probe.module)
        elif probe.package.name == "deep_select":
            deep_select.bind_library(probe.module)
        elif probe.package.name == "tile_kernels":
            tile_kernels.bind_library(probe.module)
    if launch is None:
        return
    bind_launcher(launch)
    for op in served_by_tiles(table):
        name = f"decodegrid::{op}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            LIBRARY.impl(op, SAME_SCHEMA[op], "CUDA")
