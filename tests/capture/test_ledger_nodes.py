"""What a graph is made of: kernels of generated code, nodes of programs, nodes of CUDA graphs."""

from collections import Counter
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decodegrid.capture.compile import RegionCompiler
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.cpu import CpuBackend, CpuGraph
from decodegrid.capture.cuda import CudaGraph
from decodegrid.capture.cuda_nodes import CudaBindings, CudaCallError, NodeCounts, read_nodes
from decodegrid.capture.ledger_nodes import NodeReader, code_kernels
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.program import ProgramNode

MODULE = '''
import torch
from torch._inductor.async_compile import AsyncCompile
aten = torch.ops.aten
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()
cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*'], r"""
extern "C" void kernel(const float* in_ptr0) { cpp_fused_never_called(in_ptr0); }
""")
triton_poi_mul_1 = async_compile.triton('triton_poi_mul_1', "source", device_str='cuda')
cpp_fused_unused_2 = async_compile.cpp_pybinding([], r"")
async_compile.wait(globals())

class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        buf0 = empty_strided_cpu((4, 5), (5, 1), torch.float32)
        cpp_fused_add_0(arg0_1, buf0)
        extern_kernels.mm(buf0, reinterpret_tensor(arg1_1, (5, 6), (1, 5), 0), out=buf0)
        buf1 = torch.ops.decodegrid.linear.default(buf0, arg1_1)
        cpp_fused_add_0(buf1, buf0)
        buf2 = torch.ops.aten.sort.stable(buf1, stable=True)
        buf3 = aten.cumsum.default(buf1, 0)
        triton_poi_mul_1.run(buf3, 20, stream=stream0)
        size = buf3.size()
        return ()

def benchmark_compiled_module(args):
    fn = lambda: call(list(args))
    return cpp_fused_unused_2(fn)
'''


def test_kernels_of_a_generated_module() -> None:
    assert code_kernels(MODULE) == {
        "cpp_fused_add_0": 2,
        "extern_kernels.mm": 1,
        "decodegrid::linear": 1,
        "aten::sort": 1,
        "aten::cumsum": 1,
        "triton_poi_mul_1": 1,
    }
    assert code_kernels("") == Counter()


def test_program_nodes_are_counted_by_kind() -> None:
    def ignore(args: list[Any]) -> None:
        return None

    def node(name: str, is_region: bool, code: str = "") -> ProgramNode:
        return ProgramNode(name, is_region, ignore, [], code)

    graph = CpuGraph(
        "k",
        [
            node("moe", True, MODULE),
            node("moe", True, MODULE),
            node("tap", True),
            node("decodegrid.select_entries.default", False),
        ],
    )
    reader = NodeReader()
    counts = reader.read(graph, graph)
    assert counts.kinds == {"region": 6, "opaque": 2}
    assert counts.kernels["cpp_fused_add_0"] == 8 and counts.kernels["aten::sort"] == 4
    assert counts.kernels["decodegrid::select_entries"] == 2
    assert reader.by_region["tap"] == Counter()
    # Of a region it is what its code calls, however often the graphs call the region.
    assert reader.by_region["moe"] == code_kernels(MODULE)
    with pytest.raises(TypeError, match="SimpleNamespace is no captured graph"):
        reader.read(SimpleNamespace())  # type: ignore[arg-type]


def test_nodes_of_a_captured_program() -> None:
    """Through a real compiler: one entry for each call that the step makes."""
    compiler = RegionCompiler(CompileOptions("none"), CaptureCounters())

    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    region = compiler.region(double, {})
    buffer = torch.ones(3)

    def step() -> None:
        region(buffer)
        region(buffer)

    graph = CpuBackend(compiler).capture("k", step)
    assert NodeReader().read(graph).kinds == {"region": 2}


class Kind(IntEnum):
    """Node types as the runtime names them."""

    cudaGraphNodeTypeKernel = 0
    cudaGraphNodeTypeMemcpy = 1
    cudaGraphNodeTypeMemset = 2
    cudaGraphNodeTypeGraph = 4


class Node(int):
    """A node's address."""


class Cuda:
    """A stand-in for cuda-python: graphs are lists of (type, what) pairs by their address."""

    def __init__(self, graphs: dict[int, list[tuple[Kind, Any]]]) -> None:
        self.graphs = graphs
        self.status = 0
        self.nodes = {
            Node(1000 * graph + index): entry
            for graph, entries in graphs.items()
            for index, entry in enumerate(entries)
        }
        self.cudaGraph_t = lambda init_value: init_value
        self.CUgraphNode = lambda init_value: init_value

    def cudaGraphGetNodes(self, graph: int, num_nodes: int = 0) -> tuple[Any, ...]:
        found = [node for node in self.nodes if int(node) // 1000 == graph]
        return self.status, found[:num_nodes], len(found)

    def cudaGraphNodeGetType(self, node: Node) -> tuple[int, Kind]:
        return 0, self.nodes[node][0]

    def cudaGraphChildGraphNodeGetGraph(self, node: Node) -> tuple[int, int]:
        return 0, self.nodes[node][1]

    def cuGraphKernelNodeGetParams(self, node: Node) -> tuple[int, Any]:
        name: str = self.nodes[node][1]
        is_library = name.startswith("library")
        return 0, SimpleNamespace(
            func=0 if is_library else int(node), kern=int(node) if is_library else 0
        )

    def cuFuncGetName(self, function: int) -> tuple[int, bytes]:
        return 0, self.nodes[Node(function)][1].encode()

    def cuKernelGetName(self, kernel: int) -> tuple[int, bytes]:
        return 0, self.nodes[Node(kernel)][1].encode()


@pytest.fixture
def cuda() -> Cuda:
    kernel = Kind.cudaGraphNodeTypeKernel
    return Cuda(
        {
            7: [
                (kernel, "gemm"),
                (Kind.cudaGraphNodeTypeMemcpy, None),
                (kernel, "gemm"),
                (Kind.cudaGraphNodeTypeGraph, 8),
                (Kind.cudaGraphNodeTypeMemset, None),
            ],
            8: [(kernel, "library_sort"), (kernel, "gemm")],
            9: [],
        }
    )


def test_nodes_of_a_cuda_graph(cuda: Cuda) -> None:
    """Kinds and kernel names, child graphs included, against a stand-in for cuda-python."""
    found = read_nodes(7, CudaBindings(cuda, cuda))
    assert found.kinds == {"kernel": 4, "memcpy": 1, "memset": 1, "graph": 1}
    assert found.kernels == {"gemm": 3, "library_sort": 1}
    assert read_nodes(9, CudaBindings(cuda, cuda)) == NodeCounts()
    cuda.status = 700
    with pytest.raises(CudaCallError, match="cudaGraphGetNodes returned 700"):
        read_nodes(7, CudaBindings(cuda, cuda))


def test_the_reader_loads_cuda_python_once(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def load(name: str) -> Cuda:
        names.append(name)
        return cuda

    monkeypatch.setattr("importlib.import_module", load)
    raw: Any = SimpleNamespace(raw_cuda_graph=lambda: 7)
    reader, graph = NodeReader(), CudaGraph("k", raw)
    assert reader.read(graph, graph).kernels == {"gemm": 6, "library_sort": 2}
    assert names == ["cuda.bindings.runtime", "cuda.bindings.driver"]


def test_missing_cuda_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", load)
    with pytest.raises(ValueError, match=r"the package cuda-bindings: No module named 'cuda\."):
        CudaBindings.load()
