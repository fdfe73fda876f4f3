"""What a captured graph is made of: its nodes by kind, and the kernels that a replay calls.

Owns the reading of inductor's generated modules. Runs nothing. On the CPU a node is a region or an
opaque call, and its kernels are what the generated `call` function calls; on CUDA both come from
the raw graph (`decodegrid.capture.cuda_nodes`).
"""

import ast
from collections import Counter

from decodegrid.capture.backend import CapturedGraph
from decodegrid.capture.cpu import CpuGraph
from decodegrid.capture.cuda import CudaGraph
from decodegrid.capture.cuda_nodes import CudaBindings, NodeCounts, read_nodes

REGION, OPAQUE = "region", "opaque"


class NodeReader:
    """Reads graphs; a module that many graphs share is parsed once."""

    def __init__(self) -> None:
        self._kernels: dict[str, Counter[str]] = {}
        self._bindings: CudaBindings | None = None
        self.by_region: dict[str, Counter[str]] = {}
        """Of the graphs read so far: kernels of a region, all its variants together."""

    def read(self, *graphs: CapturedGraph) -> NodeCounts:
        """Nodes and kernels of graphs that are replayed one after another.

        Raises ValueError for a graph of CUDA without the package cuda-bindings, and CudaCallError.
        """
        counts = NodeCounts()
        for graph in graphs:
            if isinstance(graph, CpuGraph):
                self._read_program(graph, counts)
            elif isinstance(graph, CudaGraph):
                if self._bindings is None:
                    self._bindings = CudaBindings.load()
                counts.add(read_nodes(graph.raw_graph, self._bindings))
            else:
                raise TypeError(f"{type(graph).__name__} is no captured graph of a known device")
        return counts

    def _read_program(self, graph: CpuGraph, counts: NodeCounts) -> None:
        for node in graph.nodes:
            if not node.is_region:
                counts.kinds[OPAQUE] += 1
                counts.kernels[_op_name(node.name.split("."))] += 1
                continue
            counts.kinds[REGION] += 1
            kernels = self._kernels.get(node.code)
            if kernels is None:
                kernels = self._kernels[node.code] = code_kernels(node.code)
            counts.kernels.update(kernels)
            # The union, not the sum: a region is called many times.
            self.by_region[node.name] = self.by_region.get(node.name, Counter()) | kernels


def code_kernels(code: str) -> Counter[str]:
    """Calls of a generated module's `call` function: its own kernels by their names, calls into
    torch as extern_kernels.mm or aten::sort. Empty for an empty module."""
    tree = ast.parse(code)
    own = {
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign) and _is_compiled(statement.value)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    found: Counter[str] = Counter()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name != "call":
            continue
        for node in ast.walk(function):
            name = _kernel(_dotted(node.func), own) if isinstance(node, ast.Call) else None
            if name is not None:
                found[name] += 1
    return found


def _is_compiled(value: ast.expr) -> bool:
    """Whether a module-level value is a kernel: async_compile.cpp_pybinding(...) and the like."""
    return isinstance(value, ast.Call) and _dotted(value.func)[:1] == ["async_compile"]


def _dotted(node: ast.expr) -> list[str]:
    """The parts of a name such as torch.ops.aten.sort; empty for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return []
    return [node.id, *reversed(parts)]


def _kernel(parts: list[str], own: set[str]) -> str | None:
    """The kernel that a call of that name runs; None for what only handles memory."""
    if parts and parts[0] in own:
        return parts[0]
    match parts:
        case ["extern_kernels", _]:
            return ".".join(parts)
        case ["torch", "ops", *rest] if len(rest) >= 2:
            return _op_name(rest)
        case ["aten", _, *_]:
            return _op_name(parts)
    return None


def _op_name(parts: list[str]) -> str:
    """namespace::op of an operator with or without its overload; other names as they are."""
    return "::".join(parts[:2]) if 2 <= len(parts) <= 3 else ".".join(parts)
