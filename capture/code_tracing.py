"""Calls through Dynamo: how they begin, and what their errors mean for a region.

Owns the translation of Dynamo's errors. Does not decide whether a region may be compiled
(`decodegrid.capture.compile`). Everything of Dynamo is imported when the first call needs it: a
start from stored regions does without.
"""

from collections.abc import Callable
from typing import Any

import torch

from decodegrid.capture.lowering import RegionError
from decodegrid.capture.region import UnplannedCompilationError

Lower = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
"""From a traced graph and its inputs to what runs it."""


def trace(function: Callable[..., object], lower: Lower) -> Callable[..., object]:
    """A callable that traces the function whole and hands each graph to `lower`."""
    traced: Callable[..., object] = torch.compile(function, backend=lower, fullgraph=True)
    return traced


def call_traced(name: str, traced: Callable[..., object], args: tuple[Any, ...]) -> object:
    """Call a region that is compiled when a call needs it.

    Raises:
        UnplannedCompilationError: `lower` refused another compilation; says which guard failed.
        RegionError: `lower` raised it.
    """
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    try:
        return traced(*args)
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        error.add_note(f"while compiling region {name!r}")
        if isinstance(inner, UnplannedCompilationError):
            reason = _guard_failure(traced, args)
            raise UnplannedCompilationError(f"{inner}: {reason}") from None
        if isinstance(inner, RegionError):
            raise inner from None
        raise
    except TorchDynamoException as error:
        error.add_note(f"while tracing region {name!r}")
        raise


def _guard_failure(traced: Callable[..., object], args: tuple[Any, ...]) -> str:
    """Why the compiled variants do not fit a call: the same call again, made to fail with a
    reason."""
    import torch._dynamo.config as dynamo_config
    from torch._dynamo.exc import BackendCompilerFailed, RecompileError

    try:
        with dynamo_config.patch(error_on_recompile=True):
            traced(*args)
    except RecompileError as error:
        return str(error)
    except BackendCompilerFailed:
        pass
    return "it was never compiled before"
