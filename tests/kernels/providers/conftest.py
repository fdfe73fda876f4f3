"""Fake CUDA tensors on a build of torch that has no CUDA; tile kernels as the CPU runs them."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from decodegrid.kernels.tile.table import TileKernel, find_op

AS_OPS = {
    Tensor.copy_: torch.ops.aten.copy_,
    Tensor.__invert__: torch.ops.aten.bitwise_not,
    Tensor.contiguous: torch.ops.aten.contiguous,
}
"""Methods that ask for the device themselves, and the ops that they call."""


class Indexing(TorchFunctionMode):
    """Python's [], ~ and copy_ on fake CUDA tensors: torch's own ask for a CUDA device, before any
    op, which a build without CUDA does not have. The ops are those that they would have called."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return take(args[0], args[1])
        if func is Tensor.__setitem__:
            return put(*args)
        func = AS_OPS.get(func, func)
        return func(*args, **(kwargs or {}))


def view_parts(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view that all but the tensors of an index make, and tensors by axis of that view."""
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (x.dim() - used)
    axis, tensors = 0, []
    for part in parts:
        if isinstance(part, Tensor):
            tensors.append(part)
        elif part is None:
            x = x.unsqueeze(axis)
            tensors.append(None)
        elif isinstance(part, int):
            x = x.select(axis, part)
            continue
        else:
            x = torch.ops.aten.slice(x, axis, part.start, part.stop, part.step or 1)
            tensors.append(None)
        axis += 1
    return x, tensors


def take(x: Tensor, index: Any) -> Tensor:
    view, tensors = view_parts(x, index)
    if all(item is None for item in tensors):
        return view
    return torch.ops.aten.index(view, tensors)


def put(x: Tensor, index: Any, value: Any) -> None:
    view, tensors = view_parts(x, index)
    if all(item is None for item in tensors):
        if isinstance(value, Tensor):
            torch.ops.aten.copy_(view, value)
        else:
            view.fill_(value)
        return
    assert isinstance(value, Tensor)
    torch.ops.aten.index_put_(view, tensors, value)


@contextmanager
def _fake_cuda() -> Iterator[None]:
    with FakeTensorMode(), Indexing():
        yield


@pytest.fixture(scope="session")
def fake_cuda() -> Callable[[], AbstractContextManager[None]]:
    """fake_cuda(): inside it every tensor that is made is a fake one, of any device."""
    return _fake_cuda


@pytest.fixture(scope="session")
def indexing() -> Any:
    """The stand-in for [] on fake tensors: take(x, index) and put(x, index, value)."""
    return SimpleNamespace(take=take, put=put)


@pytest.fixture(scope="session")
def tile_route() -> Callable[[TileKernel], Callable[..., None]]:
    """tile_route(kernel): the kernel as the CPU runs it, a call with all of its tensors."""
    path = Path(__file__).resolve().parents[1] / "tile" / "cpu_route.py"
    spec = importlib.util.spec_from_file_location("tile_cpu_route", path)
    assert spec is not None and spec.loader is not None
    # Once a process: TileLang takes the rules of one such module alone.
    if spec.name not in sys.modules:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    route = sys.modules[spec.name]
    folder = path.parents[3] / "build" / "tile-cpu"

    def make(kernel: TileKernel) -> Callable[..., None]:
        call: Callable[..., None] = route.compile_kernel(
            find_op(kernel.op).factory, kernel.sizes, folder
        )
        return call

    return make
