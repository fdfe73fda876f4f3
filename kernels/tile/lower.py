"""From a tile kernel to CUDA source, and what a launch of it needs to know.

Owns the one set of compiler settings that every kernel is lowered with, and the reading of grid,
block, shared memory and argument order from the lowered function, so that a cubin can be launched
through the driver by whoever has neither TileLang nor this source.

No TMA: a descriptor would be an argument that the host has to encode. No automatic warp
specialisation: it depends on TMA.

Data flow: table entry -> PrimFunc -> `Lowered` (source text and `Launch` facts).
"""

import importlib
import re
from typing import Any

import tilelang
from tilelang import tvm
from tvm.target import Target

from decodegrid.kernels.tile.launch import Launch, Lowered
from decodegrid.kernels.tile.table import TileKernel, find_op

PASS_CONFIGS = {"tl.disable_tma_lower": True, "tl.disable_warp_specialized": True}

_ENTRY = re.compile(r'extern "C" __global__ void[^;{]*?\b(\w+)\s*\(([^)]*)\)\s*\{')
_GRID_TAGS = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
_BLOCK_TAGS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")


def prim_func(kernel: TileKernel) -> Any:
    """The TileLang function of a table entry."""
    module, name = find_op(kernel.op).factory.split(".")
    factory = getattr(importlib.import_module(f"decodegrid.kernels.tile.{module}"), name)
    return factory(**kernel.sizes)


def lower(kernel: TileKernel, arch: str) -> Lowered:
    """CUDA source of a kernel for an architecture such as "sm_90a".

    Raises ValueError where the lowered function is not a single one that the driver can launch.
    """
    function = prim_func(kernel)
    target = Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(opt_level=3, config=PASS_CONFIGS), target:
        artifact = tilelang.lower(function, target=target)
    entries = _ENTRY.findall(artifact.kernel_source)
    device = dict(artifact.device_mod.functions.items())
    if len(entries) != 1 or len(device) != 1:
        raise ValueError(f"{kernel.name} lowers to {len(entries)} CUDA functions; must be one")
    entry, parameters = entries[0]
    (body,) = device.values()
    name = re.sub(r"\W", "_", kernel.name)
    source = re.sub(rf"\b{entry}\b", name, artifact.kernel_source)
    extents = {str(tag): extent for tag, extent in body.attrs["thread_extent"].items()}
    shared = body.attrs.get("dyn_shared_memory_buf", 0)
    launch = Launch(
        name,
        [_tensor(function.buffer_map[handle]) for handle in function.params],
        [_argument_name(text) for text in parameters.split(",")],
        [_expression(extents.get(tag, 1)) for tag in _GRID_TAGS],
        [int(extents.get(tag, 1)) for tag in _BLOCK_TAGS],
        int(shared),
    )
    _check(kernel.name, launch)
    return Lowered(source, launch)


def _tensor(buffer: Any) -> dict[str, Any]:
    shape = [int(axis) if axis.__class__.__name__ == "IntImm" else str(axis.name)
             for axis in buffer.shape]
    return {"name": str(buffer.name), "dtype": str(buffer.dtype), "shape": shape}


def _argument_name(text: str) -> str:
    return text.replace("*", " ").split()[-1]


def _expression(extent: Any) -> str:
    """Python text of a grid extent; TVM prints the same operators."""
    return re.sub(r"T\.(?:int32|int64)\((\d+)\)", r"\1", str(extent))


def _check(name: str, launch: Launch) -> None:
    """Every argument is known, and every grid expression can be evaluated."""
    tensors = {tensor["name"] for tensor in launch.tensors}
    sizes = {axis for tensor in launch.tensors for axis in tensor["shape"] if isinstance(axis, str)}
    unknown = [item for item in launch.arguments if item not in tensors | sizes]
    if unknown:
        raise ValueError(f"{name}: arguments {', '.join(unknown)} are neither tensors nor sizes")
    for text in launch.grid:
        value = eval(text, {"__builtins__": {"min": min, "max": max}}, dict.fromkeys(sizes, 5))
        if not isinstance(value, int):
            raise ValueError(f"{name}: grid extent {text!r} is not an integer expression")
