"""What one op call costs inside a compiled region on the CPU: `python -m benchmarks.op_call`.

Every contender is a region that calls one op NUM_CALLS times on tensors of a few elements, compiled
with fullgraph=True; the same region without a call is taken off. Contenders take turns in each
repeat, and what is reported are medians and ratios to an empty op of ours, in the same repeat. The
forms: an op as this project makes them (define, impl, register_fake), the same op with its output
returned, torch.library.custom_op for comparison, and an op of a step on one row, native code. Each
call takes what the one before it made, so that no compiler leaves one out.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from benchmarks.results import save_json
from benchmarks.timing import interleave, paired_ratio, spread
from decodegrid.kernels.hyper_connection import sinkhorn_op
from decodegrid.kernels.native import install_native_kernels

NUM_CALLS = 64
LIMIT_US = 3.0
EMPTY = "empty op, writes into its argument"

Call = Callable[[Tensor, Tensor], Tensor]
"""Input and output of a call -> the next call's input."""


def make_ops(library: torch.library.Library) -> dict[str, Call]:
    """Empty ops in the forms that are compared; `library` must outlive them."""
    library.define("write_nothing(Tensor x, Tensor(a!) out) -> ()")
    library.impl("write_nothing", lambda x, out: None, "CPU")
    torch.library.register_fake(f"{library.ns}::write_nothing", lambda x, out: None, lib=library)
    library.define("return_empty(Tensor x) -> Tensor")
    library.impl("return_empty", torch.empty_like, "CPU")
    torch.library.register_fake(f"{library.ns}::return_empty", torch.empty_like, lib=library)

    @torch.library.custom_op(f"{library.ns}::custom", mutates_args=("out",))
    def custom(x: Tensor, out: Tensor) -> None:
        pass

    custom.register_fake(lambda x, out: None)
    ops = getattr(torch.ops, library.ns)
    write, returned = ops.write_nothing.default, ops.return_empty.default

    def write_call(x: Tensor, out: Tensor) -> Tensor:
        write(x, out)
        return x

    def custom_call(x: Tensor, out: Tensor) -> Tensor:
        custom(x, out)
        return x

    return {
        EMPTY: write_call,
        "empty op, returns a tensor": lambda x, out: returned(x),
        "torch.library.custom_op": custom_call,
        "sinkhorn of one 4 x 4 matrix, native": lambda x, out: sinkhorn_op(x, 1, 1e-6),
    }


Region = Callable[[Tensor, Tensor], Tensor]


def compile_region(call: Call | None) -> Region:
    """A region that makes the call NUM_CALLS times; None makes none."""

    def region(x: Tensor, out: Tensor) -> Tensor:
        if call is not None:
            for _ in range(NUM_CALLS):
                x = call(x, out)
        return x + 1

    return torch.compile(region, fullgraph=True)


def seconds_a_run(region: Region, x: Tensor, loops: int) -> float:
    """Seconds of one run of the region, over `loops` of them."""
    out = torch.zeros_like(x)
    with torch.inference_mode():
        began = perf_counter()
        for _ in range(loops):
            region(x, out)
        return (perf_counter() - began) / loops


def measure(repeats: int, loops: int) -> dict[str, Any]:
    """Microseconds a call and ratios to the empty op, by form."""
    torch.set_num_threads(1)
    x = torch.rand(1, 4, 4)
    with torch.library._scoped_library("decodegrid_bench", "DEF") as library:
        calls: dict[str, Call | None] = {"none": None, **make_ops(library)}
        regions = {}
        for name, call in calls.items():
            # Dynamo keeps one set of guards per function; forms must not count against each other.
            torch.compiler.reset()
            regions[name] = compile_region(call)
            with torch.inference_mode():
                regions[name](x, torch.zeros_like(x))
        contenders = {
            name: partial(seconds_a_run, region, x, loops) for name, region in regions.items()
        }
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
    """Print the table; 1 where the empty op is over the limit, 2 for arguments or a file."""
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
        result = {**describe_machine(), **measure(args.repeats, args.loops)}
        save_json(result, args.json)
    except (ValueError, OSError) as error:
        print(f"benchmarks.op_call: error: {error}", file=sys.stderr)
        return 2
    print(f"{'one call inside a compiled region':<40}{'us':>8}{'ratio':>8}")
    for name, found in result["us"].items():
        print(f"{name:<40}{found['median']:>8.2f}{result['ratio'][name]['median']:>8.2f}")
    cost = result["us"][EMPTY]["median"]
    print(f"limit {LIMIT_US} us: {'kept' if cost <= LIMIT_US else 'NOT kept'}")
    return 0 if cost <= LIMIT_US else 1


if __name__ == "__main__":
    raise SystemExit(main())
