"""The whole decode step of a CUDA device, traced with fake CUDA tensors and the chosen kernels.

Nothing here has a card: fake tensors have shapes, dtypes and a device, and no memory. What a trace
proves is which ops a step calls, with which shapes and dtypes (our ops check theirs), that nothing
in it needs a value on the host, and that nothing is made on the CPU on the way.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decodegrid.graphs.decode_step import decode_step
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.library_weights import lay_out_weights
from decodegrid.graphs.model_config import ModelConfig, parse_model_config
from decodegrid.graphs.packed_modules import use_packed_modules
from decodegrid.graphs.prefill_step import prefill_step
from decodegrid.graphs.regions import build_regions, plain_regions
from decodegrid.graphs.state import Capacity, allocate_state
from decodegrid.graphs.step_buffers import allocate_buffers
from decodegrid.graphs.target_step import StepModel
from decodegrid.graphs.weight_packing import pack_weights
from decodegrid.kernels.engram import table_primes
from decodegrid.kernels.native import DEFINED_BY
from decodegrid.kernels.providers import cuda_step
from decodegrid.kernels.providers.cubins import KernelFacts, TensorFact, bind_sizes
from decodegrid.kernels.providers.implementations import IMPLEMENTATIONS
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import Target
from decodegrid.kernels.providers.registry import (
    KernelTable,
    Kind,
    NativeState,
    StepShape,
    as_if_installed,
    choose,
)
from decodegrid.kernels.providers.tile_ops import LIBRARY as TILES
from decodegrid.kernels.tile.table import BLACKWELL, HOPPER, kernels

pytestmark = pytest.mark.kernels

assert DEFINED_BY and TILES, "imported for their ops"

DEVICE = "cuda"
ROWS, DRAFTS, BLOCK = 4, 5, 128
SIZES = (
    "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank",
    "o_lora_rank", "o_groups", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
    "dspark_n_routed_experts", "dspark_num_experts_per_tok", "index_n_heads", "index_head_dim",
    "index_topk", "sliding_window", "candidate_block_size", "candidate_topk_blocks",
    "max_position_embeddings", "vocab_size", "engram_max_ngram_size", "engram_n_heads",
    "engram_head_dim", "hc_sinkhorn_iters", "rms_norm_eps", "hc_eps",
)  # fmt: skip
"""Fields that the trace takes from the released config; its layers are few."""


class Recorder(TorchDispatchMode):
    """Counts every op below it and notes what touches the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.kernels: dict[str, tuple[Tensor, ...]] = {}
        """Tensors of the last launch of each kernel of ours."""
        self.on_cpu: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        self.ops[name] += 1
        if name.startswith("decodegrid_tile."):
            self.kernels[args[0]] = args[1:]
        for leaf in tree_leaves((args, kwargs or {}, result)):
            if isinstance(leaf, Tensor) and leaf.device.type != DEVICE:
                self.on_cpu.append(f"{name} {tuple(leaf.shape)} {leaf.dtype}")
        return result


def test_indexing_is_as_torch_does_it(indexing: Any) -> None:
    """The stand-in for [] against torch's own, on real tensors."""
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        compare_indexing(indexing)


def compare_indexing(indexing: Any) -> None:
    x, where = torch.arange(60).reshape(3, 4, 5), torch.tensor([2, 0])
    for index in (
        1, slice(1, 3), (..., 2), (slice(None), None), (..., slice(1, -1), 3), where,
        (slice(None), where), (where, where), (..., None, slice(None)), (0, slice(2), where),
    ):  # fmt: skip
        assert torch.equal(indexing.take(x, index), x[index]), index
        ours, theirs = x.clone(), x.clone()
        indexing.put(ours, index, -x[index])
        theirs[index] = -x[index]
        assert torch.equal(ours, theirs), index


@pytest.fixture(autouse=True)
def fake(fake_cuda: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Every tensor that is made is a fake one, unless a test is about real ones."""
    with fake_cuda():
        yield


def table_for(target: Target, config: ModelConfig) -> KernelTable:
    shape = StepShape(
        dtype="bfloat16", hidden_size=config.hidden_size, num_heads=config.num_attention_heads,
        head_dim=config.head_dim, index_heads=config.index_n_heads,
        index_dim=config.index_head_dim, index_topk=config.index_topk,
        window=config.sliding_window, moe_inner=config.moe_intermediate_size,
        num_experts=config.n_routed_experts, vocab_size=config.vocab_size, block_size=BLOCK,
        hc_mult=config.hc_mult, hc_iters=config.hc_sinkhorn_iters, hc_eps=config.hc_eps,
        kv_records=True, packed_matrices=True, packed_experts=True,
    )  # fmt: skip
    device, probes = as_if_installed(PACKAGES, target)
    return choose(IMPLEMENTATIONS, device, probes, shape, NativeState(False, "for the CPU"))


def on_device(part: Any) -> Any:
    """The same dataclass with fake CUDA tensors for all tensors."""
    if isinstance(part, Tensor):
        return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=DEVICE)
    if isinstance(part, (list, tuple)):
        return type(part)(on_device(item) for item in part)
    if dataclasses.is_dataclass(part):
        values = {f.name: on_device(getattr(part, f.name)) for f in dataclasses.fields(part)}
        return dataclasses.replace(part, **values)  # type: ignore[type-var]
    return part


@dataclasses.dataclass
class Scene:
    """A step and what it runs on, all fake."""

    table: KernelTable
    step: Callable[[], None]
    prefill: Callable[[], None]


@pytest.fixture(scope="module")
def config(make_raw: Callable[..., dict[str, Any]], layer_changes: dict[int, Any]) -> ModelConfig:
    """The released model's sizes in four layers of every kind and one drafter layer."""
    path = Path(__file__).resolve().parents[2] / "released_config.json"
    released = json.loads(path.read_text())["text_config"]
    sizes = {name: released[name] for name in SIZES}
    columns = (released["engram_max_ngram_size"] - 1) * released["engram_n_heads"]
    # The released tables have hundreds of gigabytes; these have the same columns.
    sizes["engram_num_embeddings"] = [sum(table_primes(1, columns, 41)[0])]
    taps = {"dspark_target_layer_ids": [1, 2, 3]}
    return parse_model_config(make_raw(**{**layer_changes[4], **sizes, **taps}))


def make_scene(config: ModelConfig, target: Target, packed: bool = True) -> Scene:
    """Inside a FakeTensorMode."""
    table = table_for(target, config)
    capacity = Capacity(
        num_slots=ROWS + 1, num_blocks=64, block_size=BLOCK, max_model_len=1024,
        num_draft_tokens=DRAFTS, kv_cache="v41",
    )  # fmt: skip
    with torch.device("meta"):
        model = DraftModel(config)
        model.cast(torch.bfloat16)
        if packed:
            use_packed_modules(model, "packed")
        weights = pack_weights(model, with_drafter=True, storage=None)
    weights = lay_out_weights(on_device(weights), cuda_step.weight_forms(table))
    state = allocate_state(config, capacity, torch.bfloat16, DEVICE)
    buffers = allocate_buffers(config, capacity, 16, torch.bfloat16, DEVICE)
    step_model = StepModel(config, weights, state)
    kernels = cuda_step.make_kernels(table)
    regions = plain_regions(build_regions(config, capacity, as_ops=True, kernels=kernels))
    divisors = torch.ones(DRAFTS, dtype=torch.float32, device=DEVICE)
    return Scene(
        table,
        lambda: decode_step(regions, step_model, buffers, divisors, ROWS, ROWS * (DRAFTS + 1)),
        lambda: prefill_step(regions, step_model, buffers, 16),
    )


def record(call: Callable[[], None]) -> Recorder:
    with torch.no_grad(), Recorder() as recorder:
        call()
    return recorder


@dataclasses.dataclass
class Trace:
    """What was recorded of one device's steps."""

    table: KernelTable
    decode: Recorder
    prefill: Recorder

    def names(self) -> set[str]:
        """Ops of the decode step without ".default"."""
        return {name.removesuffix(".default") for name in self.decode.ops}


@pytest.fixture(scope="module")
def trace_of(config: ModelConfig) -> Callable[[Target, bool], Trace]:
    """trace_of(target, packed): each is recorded once."""
    made: dict[tuple[Target, bool], Trace] = {}

    def get(target: Target, packed: bool = True) -> Trace:
        if (target, packed) not in made:
            scene = make_scene(config, target, packed)
            made[target, packed] = Trace(scene.table, record(scene.step), record(scene.prefill))
        return made[target, packed]

    return get


@pytest.mark.parametrize(
    ("target", "packed"), [(Target.SM90, True), (Target.SM100, True), (Target.SM90, False)]
)
def test_the_step_is_traced_for_cuda(
    trace_of: Callable[..., Trace], target: Target, packed: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Values that the host would need are refused by fake tensors; so are shapes that depend on
    values. What is left is one sequence of ops on the device."""
    trace = trace_of(target, packed)
    for recorder in (trace.decode, trace.prefill) if packed else (trace.decode,):
        assert recorder.on_cpu == []
        assert not {name for name in recorder.ops if "_local_scalar_dense" in name}
        assert sum(recorder.ops.values()) > 200
    ours = {n: c for n, c in trace.decode.ops.items() if n.startswith("decodegrid")}
    with capsys.disabled():
        print(f"\n{target}, {'packed' if packed else 'bfloat16'} weights:", end=" ")
        print(
            ", ".join(f"{name.removesuffix('.default')} x{n}" for name, n in sorted(ours.items()))
        )


def test_hopper_runs_what_was_chosen_for_it(trace_of: Callable[..., Trace]) -> None:
    found = trace_of(Target.SM90).names()
    assert {
        "decodegrid_gemm.bf16_gemm", "decodegrid_gemm.grouped_bf16_gemm",
        "decodegrid_tile.grouped_fp4", "decodegrid_tile.sparse_mla",
        "decodegrid_tile.sparse_mla_window", "decodegrid_tile.store_records",
    } <= found  # fmt: skip
    # FP8 and FP4 products of the libraries, and FlashMLA's records, are Blackwell's alone.
    assert not {name for name in found if name.startswith(("decodegrid_mla", "decodegrid_experts"))}
    assert "decodegrid_gemm.fp8_gemm" not in found
    assert "decodegrid.packed_linear" not in found and "decodegrid.packed_experts" not in found


def test_blackwell_runs_what_was_chosen_for_it(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of(Target.SM100)
    found = trace.names()
    assert {
        "decodegrid_gemm.fp8_gemm", "decodegrid_gemm.grouped_fp8_gemm",
        "decodegrid_experts.mega_moe", "decodegrid_mla.sparse_decode",
        "decodegrid_tile.cast_fp8_columns", "decodegrid_tile.cast_fp8",
        "decodegrid_tile.store_records",
    } <= found  # fmt: skip
    assert not {name for name in found if "sparse_mla" in name or "grouped_fp4" in name}
    assert "decodegrid.packed_linear" not in found and "decodegrid.packed_experts" not in found
    # One fused launch a layer: four of the target, one of the drafter.
    assert trace.decode.ops["decodegrid_experts.mega_moe.default"] == 5


def test_weights_in_bfloat16_take_the_grouped_products(trace_of: Callable[..., Trace]) -> None:
    found = trace_of(Target.SM90, False).names()
    assert {"decodegrid_gemm.bf16_gemm", "decodegrid_experts.grouped_bf16"} <= found
    assert not {name for name in found if "packed" in name and name != "decodegrid.packed_rows"}


def test_ops_with_our_kernels_behind_them(trace_of: Callable[..., Trace]) -> None:
    """These the step calls by their own names; the dispatcher has our kernels for them."""
    trace = trace_of(Target.SM90)
    behind = {f"decodegrid.{op}" for op in cuda_step.SAME_SCHEMA}
    assert behind & trace.names() == behind - {"decodegrid.take_records"}
    for op in cuda_step.SAME_SCHEMA:
        assert trace.table.uses(op, Kind.TILELANG), op


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def same_schema_args(rows: int, vocab: int) -> dict[str, tuple[Any, ...]]:
    """Arguments of the ops with our kernels behind them, except the selection."""
    return {
        "sinkhorn": (floats(rows, 4, 4), 20, 1e-6),
        "gumbel_noise": (ints(rows), ints(rows), floats(rows), vocab),
        "filter_logits": (
            floats(rows, vocab), floats(rows), floats(rows), ints(rows), floats(rows),
        ),
        "take_records": (ints(64, 528, dtype=torch.uint8), ints(rows, 3), 0, 512, torch.bfloat16),
    }  # fmt: skip


def selection_args(tokens: int, mode: int, ratio: int) -> tuple[Any, ...]:
    bfloat16 = torch.bfloat16
    return (
        floats(tokens, 32, 128, dtype=bfloat16), floats(tokens, 32, dtype=bfloat16),
        ints(8 * 128, 68, dtype=torch.uint8), ints(5, 8), ints(tokens), ints(tokens), ratio, 128,
        mode, 8, 2048, ints(tokens, 1024, dtype=torch.bool), ints(tokens, 512),
    )  # fmt: skip


def same_schema_calls(config: ModelConfig) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = [
        partial(cuda_step.SAME_SCHEMA[op], *args)
        for op, args in same_schema_args(4, config.vocab_size).items()
    ]
    for mode in (0, 1, 2):
        for ratio in (1, 2):
            calls.append(partial(cuda_step.select_entries, *selection_args(4, mode, ratio)))
    return calls


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_selection_is_one_run_of_kernels(tokens: int, mode: int) -> None:
    """Candidate blocks are scored only where they are written, and read only where they are."""
    recorder = record(partial(cuda_step.select_entries, *selection_args(tokens, mode, 1)))
    between = [[], ["block_scores", "select_threshold", "mark_blocks"], ["mask_scores"]][mode]
    want = ["index_logits", *between, "select_top_k", "convert_index"]
    tiles = [n for n in recorder.ops if n.startswith("decodegrid_tile.")]
    assert tiles == [f"decodegrid_tile.{name}.default" for name in want]
    assert recorder.on_cpu == []


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_ops_keep_their_schema(rows: int) -> None:
    """Shape, dtype and strides as the op's fake says."""
    for op, args in same_schema_args(rows, 2048).items():
        want = getattr(torch.ops.decodegrid, op).default(*args)
        got = cuda_step.SAME_SCHEMA[op](*args)
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


def facts_of(name: str) -> KernelFacts:
    """What TileLang says of a kernel's arguments; nothing is lowered."""
    from decodegrid.kernels.tile.lower import prim_func

    (kernel,) = [item for item in kernels() if item.name == name]
    function = prim_func(kernel)
    tensors = []
    for handle in function.params:
        buffer = function.buffer_map[handle]
        shape = tuple(
            int(axis) if type(axis).__name__ == "IntImm" else str(axis.name)
            for axis in buffer.shape
        )
        tensors.append(TensorFact(str(buffer.name), getattr(torch, str(buffer.dtype)), shape))
    return KernelFacts(name, Path(), "", tuple(tensors), (), (), (), 0)


@pytest.mark.parametrize("target", [Target.SM90, Target.SM100])
def test_kernels_that_a_step_names_are_built_and_take_its_tensors(
    config: ModelConfig, trace_of: Callable[..., Trace], target: Target
) -> None:
    """For the released model's sizes there is a cubin for every kernel that a step launches, and
    the tensors have the shapes and dtypes that its source says."""
    arch = HOPPER if target is Target.SM90 else BLACKWELL
    built = {kernel.name for kernel in kernels() if arch in kernel.archs}
    seen = dict(trace_of(target).decode.kernels)
    for call in same_schema_calls(config):
        seen.update(record(call).kernels)
    assert len(seen) >= 10
    assert set(seen) <= built, sorted(set(seen) - built)
    for name, tensors in seen.items():
        bind_sizes(facts_of(name), tensors)
