"""Launches kernels of ours that were built beforehand, through CUDA's driver.

Owns the reading of a folder of cubins with its manifest, the check of tensors against it, and the
launch. Launching needs cuda-python and a card; neither TileLang nor a compiler. Cubins are loaded
at the first call of each, or all named ones at once: loading is not allowed during a capture, so
each must have run, or been loaded, before one.

Data flow: manifest of `decodegrid.kernels.tile.build` -> `CubinLauncher` -> launches on the current
stream.
"""

import ast
import ctypes
import hashlib
import importlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

MANIFEST = "manifest.json"
STATIC_SHARED_BYTES = 48 * 1024
"""Shared memory that a kernel may have without asking for it."""

_OPERATORS: Mapping[type, Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.LShift: operator.lshift,
        ast.RShift: operator.rshift,
    }
)
_FUNCTIONS: Mapping[str, Callable[..., int]] = MappingProxyType({"min": min, "max": max})


class CubinError(ValueError):
    """A manifest or a tensor that does not fit; names the kernel."""


class DriverError(RuntimeError):
    """A call into the driver failed; names the call and its status."""


@dataclass(frozen=True, slots=True)
class TensorFact:
    """One tensor argument."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    """Sizes; a name stands for one that is read at the call."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What a launch of one kernel needs."""

    name: str
    cubin: Path
    entry: str
    tensors: tuple[TensorFact, ...]
    arguments: tuple[str, ...]
    """What the function takes: a tensor's pointer or a size as int32, by name."""
    grid: tuple[ast.expr, ...]
    block: tuple[int, ...]
    shared_bytes: int


def evaluate(expression: ast.expr, sizes: Mapping[str, int]) -> int:
    """Integer arithmetic over size names. Raises CubinError for anything else."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, int):
        return expression.value
    if isinstance(expression, ast.Name) and expression.id in sizes:
        return sizes[expression.id]
    if isinstance(expression, ast.BinOp) and type(expression.op) in _OPERATORS:
        left, right = evaluate(expression.left, sizes), evaluate(expression.right, sizes)
        return _OPERATORS[type(expression.op)](left, right)
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        return -evaluate(expression.operand, sizes)
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name):
        function = _FUNCTIONS.get(expression.func.id)
        if function is not None:
            return function(*(evaluate(item, sizes) for item in expression.args))
    raise CubinError(f"a grid of {ast.unparse(expression)} with sizes {dict(sizes)}")


def read_manifest(folder: Path) -> dict[str, KernelFacts]:
    """Kernels of a folder by name. Raises CubinError for a manifest that is none, or a cubin that
    is not there."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        found = {name: _facts(name, folder, item) for name, item in raw["kernels"].items()}
    except OSError as error:
        raise CubinError(f"{path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        raise CubinError(f"{path} is no manifest of kernels: {error}") from error
    for facts in found.values():
        if not facts.cubin.is_file():
            raise CubinError(f"{path} names {facts.cubin.name}, which is not there")
    return found


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """What a folder of cubins has."""

    arch: str
    """What it was built for: sm_90a, sm_100a."""
    names: frozenset[str]
    digest: str
    """Hash of the manifest and of every cubin that it names."""


def describe_folder(folder: Path) -> FolderFacts:
    """Read a folder without loading anything. Raises CubinError as `read_manifest` does."""
    kernels = read_manifest(folder)
    try:
        text = (folder / MANIFEST).read_bytes()
        arch = json.loads(text)["arch"]
        digest = hashlib.sha256(text)
        for path in sorted({facts.cubin for facts in kernels.values()}):
            digest.update(path.read_bytes())
    except OSError as error:
        raise CubinError(f"{error.filename}: {error.strerror or error}") from error
    except KeyError as error:
        raise CubinError(f"{folder / MANIFEST} does not say what it was built for") from error
    return FolderFacts(str(arch), frozenset(kernels), digest.hexdigest()[:16])


def _facts(name: str, folder: Path, item: Mapping[str, Any]) -> KernelFacts:
    tensors = tuple(
        TensorFact(part["name"], getattr(torch, part["dtype"]), tuple(part["shape"]))
        for part in item["tensors"]
    )
    grid = tuple(ast.parse(text, mode="eval").body for text in item["grid"])
    return KernelFacts(
        name,
        folder / item["cubin"],
        item["entry"],
        tensors,
        tuple(item["arguments"]),
        grid,
        tuple(item["block"]),
        item["shared_bytes"],
    )


def bind_sizes(facts: KernelFacts, tensors: Sequence[Tensor]) -> dict[str, int]:
    """Sizes that the manifest names, read from the tensors.

    Raises CubinError for another number, dtype or shape of tensors, or one that is not dense.
    """
    if len(tensors) != len(facts.tensors):
        raise CubinError(f"{facts.name}: {len(tensors)} tensors; it takes {len(facts.tensors)}")
    sizes: dict[str, int] = {}
    for fact, tensor in zip(facts.tensors, tensors, strict=True):
        shape = tuple(tensor.shape)
        fits = tensor.dtype == fact.dtype and len(shape) == len(fact.shape)
        for want, size in zip(fact.shape, shape, strict=False):
            known = sizes.setdefault(want, size) if isinstance(want, str) else want
            fits = fits and known == size
        if not fits or not tensor.is_contiguous():
            raise CubinError(
                f"{facts.name}: {fact.name} is {tensor.dtype} {shape} with strides "
                f"{tensor.stride()}; needed {fact.dtype} {fact.shape}, dense, with sizes {sizes}"
            )
    return sizes


class CubinLauncher:
    """Kernels of one architecture; call it with a kernel's name and its tensors.

    Args:
        folder: with a manifest and its cubins, for the architecture of the current device.
        driver: cuda-python's driver module; None imports it.

    Raises:
        CubinError: the folder does not fit.
        ImportError: cuda-python is not installed.
    """

    __slots__ = ("_driver", "_functions", "_modules", "kernels")

    def __init__(self, folder: Path, driver: Any = None) -> None:
        self.kernels = MappingProxyType(read_manifest(folder))
        self._driver = importlib.import_module("cuda.bindings.driver") if driver is None else driver
        self._modules: dict[Path, Any] = {}
        self._functions: dict[str, Any] = {}

    def load(self, names: Sequence[str]) -> None:
        """Load kernels, which a capture may not do. Raises CubinError for a name that is none."""
        for name in names:
            self._function(name)

    def __call__(self, name: str, *tensors: Tensor) -> None:
        """Enqueue a kernel on the current stream. Raises CubinError for what does not fit."""
        function = self._function(name)
        facts = self.kernels[name]
        sizes = bind_sizes(facts, tensors)
        grid = [evaluate(part, sizes) for part in facts.grid]
        if min(grid) == 0:
            return  # no row: nothing to do, and the driver refuses an empty grid
        pointers = {
            fact.name: tensor.data_ptr()
            for fact, tensor in zip(facts.tensors, tensors, strict=True)
        }
        values = tuple(
            pointers[item] if item in pointers else sizes[item] for item in facts.arguments
        )
        kinds = tuple(
            ctypes.c_void_p if item in pointers else ctypes.c_int32 for item in facts.arguments
        )
        stream = torch.cuda.current_stream().cuda_stream
        self._call(
            "cuLaunchKernel", function, *grid, *facts.block, facts.shared_bytes, stream,
            (values, kinds), 0,
        )  # fmt: skip

    def _function(self, name: str) -> Any:
        found = self._functions.get(name)
        if found is not None:
            return found
        facts = self.kernels.get(name)
        if facts is None:
            raise CubinError(f"no kernel {name} was built for this card")
        if facts.cubin not in self._modules:
            (self._modules[facts.cubin],) = self._call("cuModuleLoadData", facts.cubin.read_bytes())
        (found,) = self._call(
            "cuModuleGetFunction", self._modules[facts.cubin], facts.entry.encode()
        )
        if facts.shared_bytes > STATIC_SHARED_BYTES:
            attribute = self._driver.CUfunction_attribute
            most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", found, most, facts.shared_bytes)
        self._functions[name] = found
        return found

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        status, *results = getattr(self._driver, name)(*args)
        if int(status):
            raise DriverError(f"{name} returned {status}")
        return tuple(results)
