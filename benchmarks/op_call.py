"""What one op call costs inside a compiled region on the CPU: `python -m benchmarks.op_call`.

Every contender is a captured graph of one region that calls one op NUM_CALLS times on tensors of a
few elements, made by an engine's own compiler and loaded as a start from a package loads it; the
same without a call is taken off. Contenders take turns in each repeat, and what is reported are
medians and ratios to an empty native op that writes, in the same repeat. The ops of a step on the
CPU are native and made as these are: a schema and a fake from Python, the implementation from a
library. Beside them: the same op as the compiler writes its call, which looks the op up each time;
an empty op in Python, one by torch.library.custom_op, and an op of a step on one row. Each call
takes what the one before it made, so that no compiler leaves one out.

The first run builds the native kernels and the empty ops; a run of --repeats 1 --loops 1 does that
beforehand.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from benchmarks.results import save_json
from benchmarks.timing import interleave, paired_ratio, spread
from decodegrid.capture.compile import RegionCompiler
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.cpu import CpuBackend, CpuGraph
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.region_store import RegionStore
from decodegrid.kernels.hyper_connection import sinkhorn_op
from decodegrid.kernels.native import install_native_kernels

NUM_CALLS = 64
LIMIT_US = 3.0
EMPTY, EMPTY_RETURNS = "empty op, native, writes", "empty op, native, returns a tensor"
LOOKED_UP = "empty op, native, looked up at each call"
JUDGED = (EMPTY, EMPTY_RETURNS)
"""The forms in which steps call ops."""
SPACE = "decodegrid_bench"
SOURCE = """
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

void write_native(const at::Tensor& x, at::Tensor& out) {}
at::Tensor return_native(const at::Tensor& x) { return at::empty_like(x); }

TORCH_LIBRARY_IMPL(decodegrid_bench, CPU, m) {
  m.impl("write_native", write_native);
  m.impl("return_native", return_native);
}
"""

Call = Callable[[Tensor, Tensor], Tensor]
"""Input and output of a call -> the next call's input."""


def build_ops(cache_dir: Path) -> Path:
    """The library of the native empty ops, compiled unless it is there.

    Raises ValueError where the compiler refuses.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils.cpp_extension import include_paths, library_paths

    target = cache_dir / f"empty-ops-{torch.__version__}.so"
    if target.exists():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    source, made = target.with_suffix(".cpp"), target.with_suffix(".part")
    source.write_text(SOURCE)
    command = [
        str(get_cpp_compiler()), "-O2", "-std=c++20", "-shared", "-fPIC", str(source), "-o",
        str(made), *(f"-I{path}" for path in include_paths()),
        *(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the empty ops do not compile: {done.stderr[:2000]}")
    made.rename(target)
    return target


def define_ops(library: torch.library.Library) -> None:
    """Schemas and fakes of the empty ops, and what is Python; `library` must outlive them."""
    for name in ("write_native", "write_python"):
        library.define(f"{name}(Tensor x, Tensor(a!) out) -> ()")
        torch.library.register_fake(f"{SPACE}::{name}", lambda x, out: None, lib=library)
    library.define("return_native(Tensor x) -> Tensor")
    torch.library.register_fake(f"{SPACE}::return_native", torch.empty_like, lib=library)
    library.impl("write_python", lambda x, out: None, "CPU")


def writing(op: Callable[[Tensor, Tensor], object]) -> Call:
    """An op that writes, as a call."""

    def call(x: Tensor, out: Tensor) -> Tensor:
        op(x, out)
        return x

    return call


def make_calls() -> dict[str, Call]:
    """The forms that are compared."""

    @torch.library.custom_op(f"{SPACE}::custom", mutates_args=("out",))
    def custom(x: Tensor, out: Tensor) -> None:
        pass

    custom.register_fake(lambda x, out: None)
    ops = getattr(torch.ops, SPACE)
    returned = ops.return_native.default
    return {
        EMPTY: writing(ops.write_native.default),
        EMPTY_RETURNS: lambda x, out: returned(x),
        "empty op, Python, writes": writing(ops.write_python.default),
        "torch.library.custom_op, Python": writing(custom),
        "sinkhorn of one 4 x 4 matrix, native": lambda x, out: sinkhorn_op(x, 1, 1e-6),
    }


def make_region(call: Call | None) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A region that makes the call NUM_CALLS times; None makes none."""

    def region(x: Tensor, out: Tensor, result: Tensor) -> None:
        if call is not None:
            for _ in range(NUM_CALLS):
                x = call(x, out)
        result.copy_(x + 1)

    return region


def capture_all(
    calls: Mapping[str, Call | None], directory: Path
) -> tuple[dict[str, CpuGraph], CaptureCounters]:
    """Each form as an engine's captured graph; code comes from the directory, or goes there."""
    counters = CaptureCounters()
    store = RegionStore(directory, {"torch": torch.__version__})
    compiler = RegionCompiler(CompileOptions("inductor", num_threads=1), counters, store=store)
    backend, graphs = CpuBackend(compiler), {}
    for index, (name, call) in enumerate(calls.items()):
        args = torch.rand(1, 4, 4), torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
        region = compiler.region(make_region(call), {}, name=f"form{index}")
        graphs[name] = backend.capture(name, partial(region, *args))
    return graphs, counters


def seconds_a_run(graph: CpuGraph, loops: int) -> float:
    """Seconds that this thread ran for one replay, over `loops` of them: an op call waits for
    nothing, and what other processes take is not its cost."""
    began = thread_time()
    for _ in range(loops):
        graph.replay()
    return (thread_time() - began) / loops


def measure(empty_ops: Path, repeats: int, loops: int) -> dict[str, Any]:
    """Microseconds a call and ratios to the empty op, by form. Raises ValueError where code that
    was kept is not taken."""
    torch.set_num_threads(1)
    with (
        torch.library._scoped_library(SPACE, "DEF") as library,
        tempfile.TemporaryDirectory() as directory,
    ):
        define_ops(library)
        torch.ops.load_library(str(empty_ops))
        calls = {"none": None, **make_calls()}
        compiled, _ = capture_all(calls, Path(directory))
        graphs, counters = capture_all(calls, Path(directory))
        if counters.num_compilations:
            raise ValueError(f"{counters.num_compilations} regions were compiled a second time")
        graphs[LOOKED_UP] = compiled[EMPTY]
        contenders = {name: partial(seconds_a_run, graph, loops) for name, graph in graphs.items()}
        samples = interleave(contenders, repeats)
    base = samples.pop("none")
    costs = {
        name: [max(a - b, 1e-12) / NUM_CALLS for a, b in zip(found, base, strict=True)]
        for name, found in samples.items()
    }
    return {
        "us": {name: spread(found).scaled(1e6).as_json() for name, found in costs.items()},
        "ratio": {
            name: paired_ratio(found, costs[EMPTY]).as_json() for name, found in costs.items()
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a native empty op is over the limit, 2 for arguments or a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.op_call", allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=15, metavar="N")
    parser.add_argument("--loops", type=int, default=300, metavar="N", help="runs of a sample")
    parser.add_argument("--cache-dir", type=Path, default=Path("build/native"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.loops < 1:
        parser.error("--repeats and --loops must be at least 1")
    try:
        install_native_kernels(args.cache_dir)
        result = {
            **describe_machine(),
            **measure(build_ops(args.cache_dir), args.repeats, args.loops),
        }
        save_json(result, args.json)
    except (ValueError, OSError) as error:
        print(f"benchmarks.op_call: error: {error}", file=sys.stderr)
        return 2
    print(f"{'one call inside a compiled region':<40}{'us':>8}{'ratio':>8}")
    for name, found in result["us"].items():
        print(f"{name:<40}{found['median']:>8.2f}{result['ratio'][name]['median']:>8.2f}")
    cost = max(result["us"][name]["median"] for name in JUDGED)
    print(f"limit {LIMIT_US} us for native ops: {'kept' if cost <= LIMIT_US else 'NOT kept'}")
    return 0 if cost <= LIMIT_US else 1


if __name__ == "__main__":
    raise SystemExit(main())
