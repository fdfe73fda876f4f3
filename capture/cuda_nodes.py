"""The nodes of a CUDA graph: how many of each kind, and which kernels they launch.

Owns the calls into cuda-python on the raw graph; needs a graph that was captured with
keep_graph=True and the package cuda-bindings, which torch's CUDA builds bring. The calls are tested
against a stand-in; nothing here has run on a card.

Source: CUDA runtime and driver API, Graph Management.
"""

import importlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_KIND_PREFIX = "cudaGraphNodeType"


class CudaCallError(RuntimeError):
    """A call into CUDA failed; names the call and its status."""


@dataclass(slots=True)
class NodeCounts:
    """What a replay runs."""

    kinds: Counter[str] = field(default_factory=Counter)
    """Nodes by kind."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Launches by kernel name."""

    def add(self, other: "NodeCounts") -> None:
        """Count another graph's nodes, too."""
        self.kinds.update(other.kinds)
        self.kernels.update(other.kernels)


@dataclass(frozen=True, slots=True)
class CudaBindings:
    """cuda-python's two modules; Any, for the package is not there on a machine without a card."""

    runtime: Any
    driver: Any

    @classmethod
    def load(cls) -> "CudaBindings":
        """Import them. Raises ValueError where the package is missing."""
        try:
            return cls(
                importlib.import_module("cuda.bindings.runtime"),
                importlib.import_module("cuda.bindings.driver"),
            )
        except ImportError as error:
            raise ValueError(
                f"the nodes of CUDA graphs are read through the package cuda-bindings: {error}"
            ) from error


def read_nodes(raw_graph: int, bindings: CudaBindings) -> NodeCounts:
    """Nodes of a graph, those of its child graphs included.

    Args:
        raw_graph: the cudaGraph_t, as torch.cuda.CUDAGraph.raw_cuda_graph() gives it.

    Raises:
        CudaCallError: a call failed.
    """
    return _read(bindings.runtime.cudaGraph_t(init_value=raw_graph), bindings)


def _read(graph: Any, bindings: CudaBindings) -> NodeCounts:
    runtime, found = bindings.runtime, NodeCounts()
    # Called twice, as the API wants it: for the number, then for as many.
    _, count = _call(runtime, "cudaGraphGetNodes", graph)
    if not count:
        return found
    nodes, count = _call(runtime, "cudaGraphGetNodes", graph, count)
    for node in nodes[:count]:
        (node_type,) = _call(runtime, "cudaGraphNodeGetType", node)
        kind = node_type.name.removeprefix(_KIND_PREFIX).lower()
        found.kinds[kind] += 1
        if kind == "kernel":
            found.kernels[_kernel_name(node, bindings.driver)] += 1
        elif kind == "graph":
            (child,) = _call(runtime, "cudaGraphChildGraphNodeGetGraph", node)
            found.add(_read(child, bindings))
    return found


def _kernel_name(node: Any, driver: Any) -> str:
    """Name of a kernel node's function, as the compiler mangled it."""
    (params,) = _call(
        driver, "cuGraphKernelNodeGetParams", driver.CUgraphNode(init_value=int(node))
    )
    # Kernels of a library have no function of a module.
    if int(params.func):
        (name,) = _call(driver, "cuFuncGetName", params.func)
    else:
        (name,) = _call(driver, "cuKernelGetName", params.kern)
    return str(name.decode("utf-8", errors="replace"))


def _call(module: Any, name: str, *args: Any) -> tuple[Any, ...]:
    """Results of a call behind its status."""
    status, *results = getattr(module, name)(*args)
    if int(status):
        raise CudaCallError(f"{name} returned {status}")
    return tuple(results)
