"""A region: one function that is compiled for a planned number of variants.

Owns its name, arguments and symbolic dimensions. Does not own how it is compiled and run
(`decodegrid.capture.compile`, which makes regions and binds them to itself).
"""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decodegrid.capture.region_store import LoadedRegion


class UnplannedCompilationError(RuntimeError):
    """A region call would need a compilation that is not planned, or comes after `freeze`."""


class NotStoredError(RuntimeError):
    """A call that was only to be bound needs a compilation; names the region."""


class Region:
    """One function of tensors that writes into its arguments; made by `RegionCompiler.region`."""

    __slots__ = ("_run", "dynamic", "function", "loaded", "name", "parameters", "variants")

    def __init__(
        self,
        name: str,
        function: types.FunctionType,
        dynamic: Mapping[str, tuple[int, ...]],
        variants: int,
        loaded: Sequence[LoadedRegion],
    ) -> None:
        self.name = name
        self.function = function
        self.parameters = tuple(inspect.signature(function).parameters)
        self.dynamic = dict(dynamic)
        self.variants = variants
        self.loaded = tuple(loaded)
        """Variants of an earlier process."""
        self._run: Callable[..., None] | None = None

    def bind_to(self, run: Callable[..., None]) -> None:
        """Set what a call does; once, by the compiler."""
        self._run = run

    def __call__(self, *args: Any) -> None:
        """Run the region, compiling it if this is one of its planned variants.

        Raises:
            RegionError: the region returns something, or while recording what it writes shares
                memory with another argument.
            UnplannedCompilationError: the call needs a compilation that is not planned, or comes
                after `freeze`; says which guard failed.
        """
        assert self._run is not None
        self._run(*args)

    def describe_argument(self, tensor: object, args: Sequence[Any]) -> str:
        """The name under which a tensor came in, for messages."""
        for name, value in zip(self.parameters, args, strict=False):
            if value is tensor:
                return name
            if isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    if item is tensor:
                        return f"{name}[{index}]"
        return "a tensor that is not among its arguments"

    def dynamic_leaves(self, args: Sequence[Any]) -> dict[int, tuple[int, ...]]:
        """Symbolic dimensions by the index of a tensor among all tensors of a call."""
        found: dict[int, tuple[int, ...]] = {}
        for name, value in zip(self.parameters, args, strict=True):
            first, count = len(found), len(value) if isinstance(value, (list, tuple)) else 1
            dims = self.dynamic.get(name, ())
            found.update(dict.fromkeys(range(first, first + count), dims))
        return found
