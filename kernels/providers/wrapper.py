"""An op of ours around a call of an optional library.

Owns how such an op is made: its schema and its fake exist as soon as its module is imported, so
that a step can be traced on any machine; its CUDA implementation comes when the probed library is
bound, for the whole process. The checks of shapes and dtypes run at both, which is when a step is
traced and when it is captured; a replay runs neither.

Data flow: `Wrapper` list -> `define` at import -> `bind` with the library's module.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class KernelArgumentError(ValueError):
    """A tensor that a library's kernel does not take; names the op, the argument and both sides."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """One op: what it is called with, what it accepts, and the call behind it."""

    schema: str
    """"name(Tensor a, Tensor(a!) out) -> ()", without a namespace."""
    check: Callable[..., None]
    """Takes the op's arguments; raises KernelArgumentError."""
    call: Callable[..., Any]
    """Takes the library's module, then the op's arguments."""
    fake: Callable[..., Any] | None = None
    """Makes empty results; None for an op that writes into its arguments."""

    @property
    def name(self) -> str:
        """The op's name without a namespace."""
        return self.schema.partition("(")[0]


def define(library: torch.library.Library, wrappers: Sequence[Wrapper]) -> None:
    """Give the ops their schemas and fakes."""
    for item in wrappers:
        library.define(item.schema)
        torch.library.register_fake(
            f"{library.ns}::{item.name}", _checked(item.check, item.fake), lib=library
        )


def bind(library: torch.library.Library, wrappers: Sequence[Wrapper], module: ModuleType) -> None:
    """Make the library's calls the CUDA implementations; a second call changes nothing."""
    for item in wrappers:
        if not is_bound(library, item):
            library.impl(item.name, _bound(item, module), "CUDA")


def is_bound(library: torch.library.Library, wrapper: Wrapper) -> bool:
    """Whether an op has its CUDA implementation in this process."""
    name = f"{library.ns}::{wrapper.name}"
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    return found


def _checked(check: Callable[..., None], fake: Callable[..., Any] | None) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        check(*args)
        return None if fake is None else fake(*args)

    return run


def _bound(item: Wrapper, module: ModuleType) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        item.check(*args)
        return item.call(module, *args)

    return run


def expect(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: Sequence[int | None],
) -> None:
    """Raise KernelArgumentError unless a tensor has one of the dtypes and the shape.

    shape: sizes, None where any is allowed.
    """
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    fits = tensor.dim() == len(shape) and all(
        want is None or size == want for size, want in zip(tensor.shape, shape, strict=True)
    )
    if fits and tensor.dtype in allowed:
        return
    sizes = ", ".join("any" if want is None else str(want) for want in shape)
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    raise KernelArgumentError(
        f"{op}: {name} is {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}; "
        f"needed {kinds} ({sizes})"
    )


def expect_dense_rows(op: str, name: str, tensor: Tensor, row_bytes: int = 16) -> None:
    """Raise KernelArgumentError unless the last axis is dense and the one before it starts rows
    at multiples of `row_bytes`."""
    stride = tensor.stride()
    step = stride[-2] * tensor.element_size()
    if stride[-1] != 1 or step % row_bytes:
        raise KernelArgumentError(
            f"{op}: {name} has strides {tuple(stride)} of {tensor.element_size()} bytes; needed: "
            f"last axis dense, rows at multiples of {row_bytes} bytes"
        )


def expect_columns(op: str, name: str, tensor: Tensor) -> None:
    """Raise KernelArgumentError unless scales are MN-major with columns at multiples of 16 bytes
    (`decodegrid.kernels.providers.layouts.mn_major`)."""
    stride = tensor.stride()
    is_dense = tensor.shape[-2] == 1 or stride[-2] == 1
    step = stride[-1] * tensor.element_size()
    if not is_dense or (tensor.shape[-1] > 1 and step % 16):
        raise KernelArgumentError(
            f"{op}: {name} has strides {tuple(stride)}; needed: rows dense, columns at multiples "
            "of 16 bytes"
        )


def expect_that(condition: bool, op: str, message: str) -> None:
    """Raise KernelArgumentError with the message unless the condition holds."""
    if not condition:
        raise KernelArgumentError(f"{op}: {message}")
