"""Regions with a CUDA step's kernels, traced by Dynamo and AOTAutograd: our ops stay whole.

Tensors are the CPU's, because the code generator for a card needs one. What is shown is what it
would be given: one graph a region, with each kernel as one opaque call, and every write inside it.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from decodegrid.capture.lowering import (
    CompileOptions,
    compile_settings,
    graph_outputs,
    marked_dynamic,
    written_inputs,
)
from decodegrid.configs.load import load_config
from decodegrid.engine.cuda_kernels import NOT_NATIVE, step_shape
from decodegrid.engine.deployment_check import capacity_of
from decodegrid.graphs.checkpoint import read_checkpoint_config
from decodegrid.graphs.decode_step import decode_step
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.library_weights import lay_out_weights
from decodegrid.graphs.packed_modules import use_packed_modules
from decodegrid.graphs.regions import RegionTable, build_regions
from decodegrid.graphs.regions_layer import RegionSpec
from decodegrid.graphs.state import allocate_state
from decodegrid.graphs.step_buffers import allocate_buffers
from decodegrid.graphs.target_step import StepModel
from decodegrid.graphs.weight_packing import pack_weights
from decodegrid.kernels.providers import cuda_step
from decodegrid.kernels.providers.implementations import IMPLEMENTATIONS
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import Target
from decodegrid.kernels.providers.registry import as_if_installed, choose

pytestmark = pytest.mark.kernels

SETTINGS = (
    "model.checkpoint=tiny-v41", "model.device=cuda", "model.dtype=bfloat16",
    "model.weights=packed", "cache.kv_cache=v41", "scheduler.max_num_reqs=4",
    "scheduler.max_model_len=256",
)  # fmt: skip
Call = tuple[RegionSpec, tuple[Any, ...]]


def region_calls(target: Target) -> dict[str, Call]:
    """Each region of a decode step with the arguments of its first call, without memory."""
    loaded = load_config(None, SETTINGS)
    config = read_checkpoint_config(loaded.checkpoint_dir)
    device, probes = as_if_installed(PACKAGES, target)
    shape = step_shape(loaded.config, config)
    table = choose(IMPLEMENTATIONS, device, probes, shape, NOT_NATIVE)
    capacity = capacity_of(loaded.config, 33)
    specs = build_regions(config, capacity, as_ops=True, kernels=cuda_step.make_kernels(table))
    found: dict[str, Call] = {}

    def noted(name: str) -> Callable[..., None]:
        return lambda *args: found.setdefault(name, (specs[name], args)) and None

    with torch.device("meta"):
        model = DraftModel(config)
        model.cast(torch.bfloat16)
        use_packed_modules(model, "packed")
        weights = pack_weights(model, with_drafter=True)
        weights = lay_out_weights(weights, cuda_step.weight_forms(table))
        state = allocate_state(config, capacity, torch.bfloat16, "meta")
        buffers = allocate_buffers(config, capacity, 16, torch.bfloat16, "meta")
        regions = RegionTable({name: noted(name) for name in specs})
        divisors = torch.ones(5)
        decode_step(regions, StepModel(config, weights, state), buffers, divisors, 4, 24)
    return found


@pytest.fixture(scope="module")
def calls() -> Callable[[Target], dict[str, Call]]:
    made: dict[Target, dict[str, Call]] = {}

    def get(target: Target) -> dict[str, Call]:
        if target not in made:
            made[target] = region_calls(target)
        return made[target]

    return get


def with_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return type(value)(map(with_memory, value)) if isinstance(value, list | tuple) else value


def traced(name: str, spec: RegionSpec, args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """What the code generator would get of a region; it is not called."""
    from torch._inductor.compile_fx import compile_fx

    found: list[torch.fx.GraphModule] = []

    def inner(module: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        found.append(module)

        def run(args: list[Any]) -> tuple[()]:
            return ()

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def lower(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(module, inputs, inner_compile=inner)

    given = dict(zip(inspect.signature(spec.function).parameters, args, strict=True))
    options = CompileOptions("inductor", None, 1)
    with torch.no_grad(), compile_settings(options), marked_dynamic(name, spec.dynamic, given):
        torch.compile(spec.function, backend=lower, fullgraph=True)(*args)
    (module,) = found
    return module


def our_ops(module: torch.fx.GraphModule) -> Iterator[str]:
    """Ops of ours, those that write in the form that says so."""
    for node in module.graph.nodes:
        wrapped = "auto_functionalized" in str(node.target)
        target = str(node.args[0] if wrapped else node.target)
        if node.op == "call_function" and target.startswith("decodegrid"):
            yield target.removesuffix(".default")


GEMM, TILE = "decodegrid_gemm", "decodegrid_tile"
WANTED = {
    (Target.SM90, "attn_in"): {f"{GEMM}.bf16_gemm": 2, f"{TILE}.store_records": 1},
    (Target.SM90, "source_one"): {f"{GEMM}.bf16_gemm": 2, f"{TILE}.store_records": 2},
    (Target.SM90, "attend_both"): {f"{TILE}.sparse_mla": 1},
    (Target.SM90, "moe"): {f"{TILE}.grouped_fp4": 2, f"{GEMM}.bf16_gemm": 2},
    (Target.SM100, "attn_in"): {
        f"{TILE}.cast_fp8_columns": 2, f"{GEMM}.fp8_gemm": 2, f"{TILE}.store_records": 1,
    },
    (Target.SM100, "moe"): {
        f"{TILE}.cast_fp8": 1, "decodegrid_experts.mega_moe": 1, f"{TILE}.cast_fp8_columns": 2,
        f"{GEMM}.fp8_gemm": 2,
    },
}  # fmt: skip
WRITTEN = {"attn_in": 3, "source_one": 2, "attend_both": 1, "moe": 1}
"""Arguments that a region writes: low rank, query and window; both pools; the result; the stream.
"""


@pytest.mark.parametrize(("target", "name"), list(WANTED))
def test_kernels_are_opaque_to_the_compiler(
    calls: Callable[[Target], dict[str, Call]], target: Target, name: str
) -> None:
    spec, args = calls(target)[name]
    module = traced(name, spec, with_memory(args))
    assert Counter(our_ops(module)) == WANTED[target, name]
    assert len(graph_outputs(module)) == 0, "nothing is written outside of the compiled code"
    assert len(written_inputs(module)) == WRITTEN[name]
