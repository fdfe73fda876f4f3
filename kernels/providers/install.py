"""Chosen implementations put into place, once per process, before a CUDA step is captured.

Owns the binding of probed libraries and of the TileLang launcher to our ops, and the CUDA place of
ops whose schema a kernel of ours serves. Does not choose. As with the CPU's native kernels, what is
installed holds for the process, and the dispatcher itself remembers what it is: installing the same
again changes nothing, and anything else is refused, because half of it would stay what it was.

Two engines of a process may share what is installed. Their steps share the fused experts' buffers
too, which is right as long as they run on one stream, one after the other, as replays do.
"""

import json
from collections.abc import Callable

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
from decodegrid.kernels.providers.deep_gemm_experts import Buffers
from decodegrid.kernels.providers.probe import Probe, Target
from decodegrid.kernels.providers.registry import KernelTable, Kind
from decodegrid.kernels.providers.tile_ops import Launch, bind_launcher

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define("installed_kernels() -> str")

_RECORD = "decodegrid::installed_kernels"
_KEY = "CompositeExplicitAutograd"


def served_by_tiles(table: KernelTable) -> tuple[str, ...]:
    """Ops of a step whose CUDA implementation is to be a kernel of ours."""
    return tuple(op for op in SAME_SCHEMA if op in table.choices and table.uses(op, Kind.TILELANG))


def installed() -> dict[str, str] | None:
    """What this process has installed, by name; None for nothing yet."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_RECORD, _KEY):
        return None
    found: dict[str, str] = json.loads(torch.ops.decodegrid.installed_kernels.default())
    return found


def identity(table: KernelTable, source: str) -> dict[str, str]:
    """What `install` would make the process's own: the choices of single regions are not in it."""
    ready = (probe for probe in table.probes if probe.module is not None)
    return {
        "device": str(table.device.target),
        "kernels": source,
        "ops served by kernels": ", ".join(served_by_tiles(table)),
        "libraries": ", ".join(f"{probe.package.name} {probe.version}" for probe in ready),
    }


def install(
    table: KernelTable,
    launch: Launch | None,
    source: str = "",
    make_buffers: Callable[[], Buffers] | None = None,
) -> None:
    """Bind everything that the table chose.

    launch: starts a kernel of ours; None where nothing that the table chose launches one. source:
    tells this launcher and these buffers from others. make_buffers: makes those of the fused
    experts, if the table chose them; called at most once in a process.

    Raises ValueError where the table chose kernels of ours and nothing launches them, and where
    this process has installed something else.
    """
    if table.device.target is Target.CPU:
        return
    chosen = {choice.chosen.kind for choice in table.choices.values()}
    if Kind.TILELANG in chosen and launch is None:
        raise ValueError("kernels of ours were chosen, but nothing launches them")
    ours, theirs = identity(table, source), installed()
    if theirs == ours:
        return
    if theirs is not None:
        name = next(name for name in ours if theirs.get(name) != ours[name])
        raise ValueError(
            f"this process has CUDA kernels of another deployment installed: {name} "
            f"[{theirs.get(name)}] there, [{ours[name]}] here; start it in a process of its own"
        )
    for probe in table.probes:
        if probe.module is not None:
            _bind_library(probe, table.device.target)
    if make_buffers is not None:
        deep_gemm_experts.bind_mega_moe(table.module("deep_gemm"), make_buffers())
    if launch is not None:
        _bind_tiles(table, launch)
    LIBRARY.impl("installed_kernels", lambda: json.dumps(ours), _KEY)


def _bind_library(probe: Probe, target: Target) -> None:
    assert probe.module is not None
    if probe.package.name == "deep_gemm":
        deep_gemm.bind_library(probe.module)
        deep_gemm_index.bind_library(probe.module)
        deep_gemm_experts.bind_library(probe.module, with_gate=target is Target.SM100)
    elif probe.package.name == "flash_mla":
        flash_mla.bind_library(probe.module)
    elif probe.package.name == "deep_select":
        deep_select.bind_library(probe.module)
    elif probe.package.name == "tile_kernels":
        tile_kernels.bind_library(probe.module)


def _bind_tiles(table: KernelTable, launch: Launch) -> None:
    bind_launcher(launch)
    for op in served_by_tiles(table):
        name = f"decodegrid::{op}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            LIBRARY.impl(op, SAME_SCHEMA[op], "CUDA")
