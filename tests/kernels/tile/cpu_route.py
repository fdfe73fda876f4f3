"""Runs a tile kernel on the CPU: the source that CUDA gets, values only.

Owns lowering a PrimFunc to C++, compiling it, and calling it with torch tensors. Blocks and threads
run one after the other, so it proves values; it cannot see a race, a missing barrier or a layout.
Every on-chip buffer becomes a local array and every parallel loop a serial one; TileLang's CPU
passes do the rest without vectorising. The C printer knows no bfloat16, so the kernel claims to use
half precision, and the `half` that its C++ text finds is a bfloat16 of ours, rounded to nearest
even wherever a value is stored. Compiled
kernels are kept in a folder by the hash of everything that made them; a second run needs no
TileLang.

Data flow: factory and sizes -> (library, argument list) in the cache folder -> call.
"""

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import struct
import subprocess
from pathlib import Path

import torch

ON_CHIP = frozenset({"shared", "shared.dyn", "local.fragment"})
SERIAL, PARALLEL = 0, 1
FUNCTIONS = {"exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "sqrt": "sqrt",
             "fabs": "fabs", "floor": "floor", "ceil": "ceil"}
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", "-fwrapv",
         "-ffp-contract=off")
PRELUDE = """
#include <math.h>
#include <stdint.h>
#include <string.h>
struct half {
  uint16_t bits;
  half() = default;
  half(float value) {
    const uint32_t raw = __builtin_bit_cast(uint32_t, value);
    const bool is_nan = value != value;
    bits = is_nan ? (raw >> 16) | 0x40 : (raw + 0x7fff + ((raw >> 16) & 1)) >> 16;
  }
  operator float() const { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }
};
"""
CONSTANT = """
extern "C" float tile_float(int32_t bits) { return __builtin_bit_cast(float, bits); }
"""
DTYPES = {
    "bool": torch.bool, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64,
    "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16,
}


def _sources(module, found):
    """Paths of a module and of all modules of kernels/ that it imports, added to `found`."""
    path = Path(importlib.util.find_spec(module).origin)
    if path in found:
        return
    found.add(path)
    for name in re.findall(r"^from (decodegrid\.kernels\.\S+) import", path.read_text(), re.M):
        _sources(name, found)


def _source_hash(factory, sizes):
    """Hash of all that decides what a kernel computes."""
    paths = {Path(__file__)}
    _sources(f"decodegrid.kernels.tile.{factory.split('.')[0]}", paths)
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    version = importlib.metadata.version("tilelang")
    digest.update(repr((factory, sorted(sizes.items()), version)).encode())
    return digest.hexdigest()[:24]


def _serial(function, tvm):
    """The function with on-chip buffers as local arrays and parallel loops as serial ones."""
    graph = json.loads(tvm.ir.save_json(function))
    for node in graph["nodes"]:
        if node.get("type") == "ffi.String" and node["data"] in ON_CHIP:
            node["data"] = "local"
        elif node.get("type") == "tirx.For" and node["data"]["kind"] == PARALLEL:
            node["data"]["kind"] = SERIAL
        data = node.get("data")
        if isinstance(data, dict) and data.get("dtype") in ("bfloat16", "float16"):
            assert data["dtype"] == "bfloat16", "a kernel of half precision has no route here"
            data["dtype"] = "float16"
    return tvm.ir.load_json(json.dumps(graph))


@functools.cache
def _register_functions():
    """Lower math calls for the target `c` by the C library's function of the argument's type."""
    from tilelang import tvm
    from tvm import tirx

    def lowering(name):
        def rule(op):
            dtype = str(op.ty.dtype) if hasattr(op, "ty") else str(op.dtype)
            suffix = "" if dtype == "float64" else "f"
            return tirx.call_pure_extern(dtype, name + suffix, *op.args)

        return rule

    for op, name in FUNCTIONS.items():
        tvm.ir.register_intrin_lowering(f"tirx.{op}", target="c", f=lowering(name), level=99)


def _flat_signature(function, tirx):
    """Replace tensor handles by data pointers and the sizes that vary; describe the arguments."""
    pointers, tensors, sizes = [], [], {}
    for handle in function.params:
        buffer = function.buffer_map[handle]
        pointers.append(buffer.data)
        shape = []
        for axis in buffer.shape:
            if isinstance(axis, tirx.Var):
                sizes.setdefault(str(axis.name), axis)
                shape.append(str(axis.name))
            else:
                shape.append(int(axis))
        dtype = str(buffer.dtype).replace("float16", "bfloat16")
        tensors.append({"name": str(buffer.name), "dtype": dtype, "shape": shape})
    flat = tirx.PrimFunc([*pointers, *sizes.values()], function.body, function.ret_type, {},
                         function.attrs)
    kinds = {name: str(axis.dtype) for name, axis in sizes.items()}
    return flat.with_attr("global_symbol", "tile_kernel"), tensors, kinds


def _exact_constants(function, tirx):
    """The function with float32 constants given by their bits: the C printer keeps seven digits."""

    def by_bits(constant):
        if str(constant.dtype) != "float32":
            return None
        bits = struct.unpack("<i", struct.pack("<f", constant.value))[0]
        return tirx.call_pure_extern("float32", "tile_float", tirx.IntImm("int32", bits))

    body = tirx.stmt_functor.ir_transform(function.body, None, by_bits, ["ir.FloatImm"])
    return function.with_body(body)


def _lower(function):
    """C++ source and argument description of a PrimFunc."""
    import tilelang
    import tilelang.cpu.pipeline as passes
    from tilelang import tvm
    from tvm import tirx
    from tvm.target import Target

    _register_functions()
    target = Target({"kind": "c"})
    config = {"tirx.disable_vectorize": True, "tl.disable_data_race_check": True,
              "tl.disable_buffer_init_check": True, "tirx.disable_storage_rewrite": True}
    function = _serial(function, tvm)
    name = function.attrs["global_symbol"]
    with tvm.transform.PassContext(opt_level=3, config=config), target:
        module = passes.CPUPassPipelineBody(tvm.IRModule({name: function}), target)
        ((symbol, body),) = module.functions.items()
        body, tensors, sizes = _flat_signature(body, tirx)
        module = tvm.IRModule({symbol: body})
        module = tilelang.transform.LowerIntrin()(module)
        module = tirx.transform.Simplify()(module)
        ((symbol, body),) = module.functions.items()
        module = tvm.IRModule({symbol: _exact_constants(body, tirx)})
        build = tvm.get_global_func("target.build.tilelang_c")
        text = build(module, target).inspect_source()
    # TileLang's own header has another `half`.
    text = text.replace("#include <tl_templates/cpp/common.h>", "")
    return PRELUDE + text + CONSTANT, tensors, sizes


def compile_kernel(factory, sizes, folder):
    """Call of the kernel that `factory` ("module.function" of kernels/tile) makes for `sizes`.

    folder: where compiled kernels are kept.
    """
    key = _source_hash(factory, sizes)
    library, facts = folder / f"{key}.so", folder / f"{key}.json"
    if not (library.exists() and facts.exists()):
        module, name = factory.split(".")
        make = getattr(importlib.import_module(f"decodegrid.kernels.tile.{module}"), name)
        source, tensors, kinds = _lower(make(**sizes))
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / f"{key}.cpp"
        text.write_text(source)
        made = folder / f"{key}.{os.getpid()}.so"
        run = subprocess.run(["g++", *FLAGS, text, "-o", made], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[:4000]
        facts.write_text(json.dumps({"tensors": tensors, "sizes": kinds}))
        made.rename(library)
    return CpuKernel(library, json.loads(facts.read_text()))


class CpuKernel:
    """A compiled kernel; call it with all tensors in the order of its signature."""

    def __init__(self, library, facts):
        self.tensors, self.sizes = facts["tensors"], facts["sizes"]
        self.entry = ctypes.CDLL(str(library)).tile_kernel
        self.entry.restype = None
        widths = {"int32": ctypes.c_int32, "int64": ctypes.c_int64}
        self.entry.argtypes = [ctypes.c_void_p] * len(self.tensors) + [
            widths[kind] for kind in self.sizes.values()
        ]

    def __call__(self, *tensors):
        assert len(tensors) == len(self.tensors), [t["name"] for t in self.tensors]
        sizes = {}
        for tensor, declared in zip(tensors, self.tensors, strict=True):
            where = declared["name"]
            assert tensor.dtype == DTYPES[declared["dtype"]], (where, tensor.dtype, declared)
            assert tensor.is_contiguous(), where
            assert tensor.dim() == len(declared["shape"]), (where, tensor.shape, declared)
            for actual, axis in zip(tensor.shape, declared["shape"], strict=True):
                expected = sizes.setdefault(axis, actual) if isinstance(axis, str) else axis
                assert actual == expected, (where, tuple(tensor.shape), declared["shape"])
        pointers = [tensor.data_ptr() for tensor in tensors]
        self.entry(*pointers, *(sizes[name] for name in self.sizes))
