"""The program of a step on the CPU: what is recorded while a step runs once, and what is refused.

Owns the list of (callable, arguments) entries and the guard against tensor operations that no
entry would repeat. Does not compile and does not replay. Data flow: `RegionCompiler` appends an
entry for each region or opaque call made while a recorder is active; `decodegrid.capture.cpu`
turns the entries into a graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch.utils._python_dispatch import TorchDispatchMode


class ProgramNode(NamedTuple):
    """One call of a program."""

    name: str
    """The region, or the opaque call."""
    is_region: bool
    function: Callable[[list[Any]], object]
    """Takes one list, which it may empty."""
    args: list[Any]
    """The list it is bound to."""
    code: str
    """The generated module whose `call` is the function; empty where there is none."""


class StrayOpError(ValueError):
    """A tensor operation ran outside a region or an opaque call during capture; replay would lose
    it."""


class StrayOpGuard(TorchDispatchMode):
    """Lets views through and refuses every other tensor operation.

    A view made during capture only binds an argument to a part of a static buffer. Anything that
    computes, writes, allocates or reads a value would happen once, at capture, and never again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps the method below so that Dynamo never compiles it; it would import
        all of Dynamo to do so, and Dynamo never runs under this mode (`ProgramRecorder.paused`)."""
        return False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a view, raise StrayOpError for anything else."""
        if not is_view_op(func):
            raise StrayOpError(
                f"operation {func} runs outside a region during capture; a replay would not "
                "repeat it. Move it into a region, or call it through RegionCompiler.opaque"
            )
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=256)
def is_view_op(func: torch._ops.OpOverload) -> bool:
    """Whether an operator only returns views of its arguments and writes nothing."""
    schema = func._schema
    if func is torch.ops.aten.lift_fresh.default:
        # Its input is a tensor built from Python values: a constant frozen at capture, not a view
        # of a buffer.
        return False
    views = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return views and not writes


class ProgramRecorder:
    """Collects the entries of one step while the step runs once."""

    __slots__ = ("_guard", "program")

    def __init__(self) -> None:
        self.program: list[ProgramNode] = []
        self._guard: AbstractContextManager[object] = StrayOpGuard()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Refuse stray operations in the block, except where `paused`."""
        with self._guard:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lift the guard while a region or an opaque call runs; only inside `recording`."""
        # Dynamo refuses to compile under a dispatch mode, so the mode leaves the stack instead of
        # ignoring calls.
        self._guard.__exit__(None, None, None)
        try:
            yield
        finally:
            self._guard.__enter__()

    def add_region(
        self, name: str, function: Callable[[list[Any]], object], args: Sequence[Any], code: str
    ) -> None:
        """Append a region's call; the tensors in `args` are kept alive and bound by identity."""
        self.program.append(ProgramNode(name, True, function, list(args), code))

    def add_opaque(
        self, name: str, function: Callable[[list[Any]], object], args: Sequence[Any]
    ) -> None:
        """Append an uncompiled call."""
        self.program.append(ProgramNode(name, False, function, list(args), ""))


class SpreadCall:
    """Gives a callable of positional arguments the one-list convention of program entries."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, args: list[Any]) -> object:
        """Call the wrapped function with the list's items."""
        return self._function(*args)


def find_overlap(args: Sequence[Any], written: frozenset[int]) -> tuple[int, int] | None:
    """The first pair of arguments that share memory although one of them is written.

    Args:
        args: arguments of a call; anything but a tensor is ignored.
        written: indices of the arguments that the call writes.

    Returns:
        (written index, other index), or None. Adjacent or interleaved views of one storage do not
        overlap.
    """
    if not written:
        return None
    spans = [_span(arg) for arg in args]
    for one in sorted(written):
        start, end = spans[one]
        for other, (other_start, other_end) in enumerate(spans):
            meets = other_start < end and start < other_end and one != other
            if meets and _overlap(args[one], args[other]):
                return one, other
    return None


def _span(arg: object) -> tuple[int, int]:
    """Addresses from a tensor's first byte to behind its last one; empty for anything else."""
    if not isinstance(arg, torch.Tensor) or not arg.numel():
        return 0, 0
    start = arg.data_ptr()
    if arg.is_contiguous():
        return start, start + arg.nbytes
    steps = zip(arg.shape, arg.stride(), strict=True)
    return start, start + (sum((size - 1) * step for size, step in steps) + 1) * arg.itemsize


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(compute_overlapping_tensors([left, right], symbolic=False))
