"""The memory that `config check` counts is that of the tensors of a real start, to the byte."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodegrid.capture.grid import GraphKey, Grid, StepVariant, build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.configs.load import load_config
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.capture_plan import Coverage, capture_plan, check_grid, graph_bytes, grid_of
from decodegrid.engine.deployment_check import capacity_of
from decodegrid.engine.memory_plan import (
    BUFFERS,
    COMPRESSORS,
    KV_POOL,
    RICH,
    RINGS,
    SLOTS,
    SNAPSHOTS,
    WEIGHTS,
    WeightSettings,
    make_plan,
)
from decodegrid.engine.pool_size import resolve_num_blocks
from decodegrid.engine.runner import Runner
from decodegrid.engine.step_graphs import PrefillKey, StepKey
from decodegrid.graphs.checkpoint import load_model, read_checkpoint_config
from decodegrid.graphs.decode_step import choice_half, decode_step, forward_half
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config import ModelConfig, parse_model_config
from decodegrid.graphs.prefill_step import prefill_step, report_prompt
from decodegrid.graphs.regions import RegionTable, build_regions, plain_regions
from decodegrid.graphs.state import Capacity
from decodegrid.graphs.weight_packing import pack_weights

MakeModel = Callable[..., DraftModel]
MakeRunner = Callable[..., Runner]


def tensors_in(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from tensors_in(item)
    elif isinstance(part, dict):
        yield from tensors_in(list(part.values()))
    elif is_dataclass(part):
        for item in fields(part):
            yield from tensors_in(getattr(part, item.name))


def memory_of(tensors: Any) -> dict[int, int]:
    """Bytes of the memory behind tensors, by its address; memory that several view counts once."""
    found = {}
    for tensor in tensors_in(list(tensors)):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def plan_of(runner: Runner, num_snapshots: int) -> Any:
    model, state = runner.model.config, runner.model.state
    dtype = runner.buffers.target.stream.dtype
    settings = WeightSettings(dtype, "expanded", None, False)
    chunk = max(runner.prefill_chunk_sizes)
    return make_plan(model, state.capacity, settings, chunk, num_snapshots)


@pytest.mark.parametrize(
    ("capacity", "dtype"),
    [
        ({}, torch.float64),
        ({"rich": True, "verify": "rejection", "window_slack": 30}, torch.float32),
        ({"num_draft_tokens": 0, "rich": True}, torch.float32),
        ({"num_slots": 2, "num_blocks": 3}, torch.float32),
    ],
)
def test_state_and_buffers_of_a_runner(
    make_model: MakeModel,
    make_eager_runner: MakeRunner,
    capacity: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    model = make_model(dtype=dtype, hc_sinkhorn_iters=2)
    num_snapshots = 4 if capacity.get("window_slack", 0) else 0
    runner = runner_of(model, make_eager_runner, num_snapshots, capacity)
    plan = plan_of(runner, num_snapshots)
    state, buffers = runner.model.state, runner.buffers
    real = {name: tensor.numel() * tensor.element_size() for name, tensor in state.tensors()}

    def sum_of(*starts: str) -> int:
        return sum(size for name, size in real.items() if name.startswith(starts))

    assert plan.pool_bytes(SLOTS) == sum_of("slots.")
    assert plan.pool_bytes(RINGS) == sum_of("window_rings.")
    pools = {name: size for name, size in real.items() if name.startswith("pools.")}
    compressors = sum(size for name, size in pools.items() if name.endswith(".compressor"))
    assert plan.pool_bytes(COMPRESSORS) == compressors > 0
    assert plan.pool_bytes(KV_POOL) == sum(pools.values()) - compressors > 0
    rich = sum(t.nbytes for t in tensors_in(buffers.rich))
    assert plan.pool_bytes(RICH) == sum_of("rich.") + rich
    assert (rich > 0) is bool(capacity.get("rich"))
    everything = sum(t.nbytes for t in tensors_in(buffers))
    assert plan.pool_bytes(BUFFERS) == everything - rich
    snapshots = 0 if runner.snapshots is None else runner.snapshots.num_bytes
    assert plan.pool_bytes(SNAPSHOTS) == snapshots and (snapshots > 0) is bool(num_snapshots)
    assert plan.pool_bytes(WEIGHTS) == sum(memory_of([runner.model.weights]).values())
    assert plan.total_bytes == (
        state.num_bytes() + everything + snapshots + plan.pool_bytes(WEIGHTS)
    )


def runner_of(
    model: DraftModel, make: MakeRunner, num_snapshots: int, capacity: dict[str, Any]
) -> Runner:
    changed = dict(capacity)
    num_reqs = changed.pop("num_slots", 4) - 1
    if changed.get("num_draft_tokens") == 0:
        return make_without_drafts(model, num_reqs, changed)
    return make(model, num_reqs=num_reqs, num_snapshots=num_snapshots, **changed)


def make_without_drafts(model: DraftModel, num_reqs: int, capacity: dict[str, Any]) -> Runner:
    sizes = {"num_slots": num_reqs + 1, "num_blocks": 25, "block_size": 8, "max_model_len": 64}
    options = RunnerOptions(
        capacity=Capacity(**{**sizes, **capacity}),
        grid=build_grid(num_reqs, 0),
        prefill_chunk_sizes=(8, 16),
        dtype=model.embed.weight.dtype,
        device="cpu",
        compile_options=CompileOptions("none", None, 1),
        draft_temperatures=(1.0,),
        show_progress=False,
    )
    return make_runner(model, options, PhaseClock())


@pytest.mark.parametrize(
    ("checkpoint", "form", "tables", "drafts"),
    [
        ("tiny", "expanded", "memory", 5),
        ("tiny", "expanded", "memory", 0),
        ("tiny-v41", "expanded", "mapped", 5),
        ("tiny-v41", "packed_experts", "memory", 5),
        ("tiny-v41", "packed", "memory", 5),
        ("tiny-v41", "packed", "mapped", 0),
    ],
)
def test_weights_of_the_embedded_checkpoints(
    checkpoint: str, form: Any, tables: Any, drafts: int
) -> None:
    """As a start on the CPU packs them: matrices in bfloat16, which is exact for both."""
    config = load_config(None, [f"model.checkpoint={checkpoint}"]).config
    directory = load_config(None, [f"model.checkpoint={checkpoint}"]).checkpoint_dir
    model_config = read_checkpoint_config(directory)
    capacity = capacity_of(config, resolve_num_blocks(config, model_config, None))
    if not drafts:
        capacity = replace(capacity, num_draft_tokens=0)
    settings = WeightSettings(torch.float32, form, torch.bfloat16, tables == "mapped")
    plan = make_plan(model_config, capacity, settings, 64, 0)

    model = load_model(checkpoint, weights=form, engram_tables=tables)
    weights = pack_weights(model, with_drafter=drafts > 0, storage=torch.bfloat16)
    assert weights.head.dtype == torch.bfloat16
    memories = [layer.engram for layer in weights.layers if layer.engram]
    in_tables = [t for memory in memories for t in tensors_in(memory.table)]
    mapped = sum(t.nbytes for t in in_tables) if tables == "mapped" else 0
    by_tensor = {t.data_ptr(): t.nbytes for t in tensors_in(weights)}
    assert plan.pool_bytes(WEIGHTS) == sum(by_tensor.values()) - mapped
    in_files = sum(part.num_bytes for part in plan.parts if part.place == "files")
    assert in_files == mapped
    parts = {part.what: part.num_bytes for part in plan.parts if part.pool == WEIGHTS}
    experts = [t for layer in weights.layers for t in tensors_in([layer.moe.w13, layer.moe.w2])]
    assert parts["routed experts"] == sum(t.nbytes for t in experts)
    assert ("drafter" in parts, "drafter's experts" in parts) == (drafts > 0, drafts > 0)

    # What the model holds beside the steps' weights is given back after the start.
    own = memory_of([*model.parameters(), *model.buffers()])
    kept = memory_of([weights])
    maps = memory_of(in_tables) if mapped else {}
    copied = sum(size for place, size in own.items() if place not in kept and place not in maps)
    assert plan.start_up_bytes == pytest.approx(copied, rel=1e-3)


def test_processes_share_experts_and_tables(released_config: ModelConfig) -> None:
    config = load_config(None, ["model.device=cuda", "model.dtype=bfloat16"]).config
    capacity = capacity_of(config, 10)

    def weights(num_processes: int) -> Any:
        settings = WeightSettings(torch.bfloat16, "packed", None, False, num_processes)
        return make_plan(released_config, capacity, settings, 64, 0)

    one, eight = weights(1), weights(8)
    shared = {"routed experts", "drafter's experts", "engram tables"}
    for whole, part in zip(one.parts, eight.parts, strict=True):
        assert whole.what == part.what
        parts = 8 if part.what in shared else 1
        assert part.each == -(-whole.each // parts)
    # Without the image path, the published size of the checkpoint's tensors: 510,286,023,000.
    assert 509.0e9 < one.pool_bytes(WEIGHTS) < 510.0e9


def test_sizes_that_no_memory_holds(make_raw: Callable[..., dict[str, Any]]) -> None:
    model = parse_model_config(make_raw())
    capacity = Capacity(2**20, 2**24, 1024, 2**62, 2)
    settings = WeightSettings(torch.float64, "expanded", None, False)
    with pytest.raises(ValueError, match="sizes that no memory holds: "):
        make_plan(model, capacity, settings, 16, 0)


def test_static_buffers_of_a_graph_are_those_that_its_step_touches(
    make_model: MakeModel, make_eager_runner: MakeRunner
) -> None:
    """Every region call of a step is watched. What it is given of the buffers is counted; beside it
    only fields of the same rows that this step has no use for, as the drafter has for an index."""
    model = make_model(dtype=torch.float32, hc_sinkhorn_iters=2)
    runner = make_eager_runner(model, rich=True)
    buffers, step_model = runner.buffers, runner.model
    capacity = step_model.state.capacity
    homes = {t.untyped_storage().data_ptr() for t in tensors_in(buffers)}
    plain = plain_regions(build_regions(model.config, capacity, as_ops=False))
    extent: dict[int, int] = {}

    def watch(call: Callable[..., None]) -> Callable[..., None]:
        def watched(*args: Any) -> None:
            for tensor in tensors_in(list(args)):
                home = tensor.untyped_storage().data_ptr()
                if home in homes and tensor.dim():
                    extent[home] = max(extent.get(home, 0), rows_bytes(tensor))
            call(*args)

        return watched

    regions = RegionTable({name: watch(call) for name, call in plain.calls.items()})
    temperatures = torch.ones(2)

    def touched(run: Callable[[], None]) -> int:
        extent.clear()
        with torch.no_grad():
            run()
        return sum(extent.values())

    for pair in (GraphKey(1, 1), GraphKey(1, 3), GraphKey(3, 3), GraphKey(3, 9)):
        sizes = (pair.num_reqs, pair.num_query_tokens)
        args = (regions, step_model, buffers)
        fused = touched(lambda args=args, sizes=sizes: decode_step(*args, temperatures, *sizes))
        counted = graph_bytes(StepKey(pair, StepVariant.FUSED), buffers, capacity)
        assert 0.5 * counted <= fused <= counted, (pair, fused, counted)

        def both(args: Any = args, sizes: Any = sizes) -> None:
            forward_half(*args, *sizes)
            choice_half(*args, temperatures, *sizes)

        counted_rich = graph_bytes(StepKey(pair, StepVariant.RICH), buffers, capacity)
        rich = touched(both)
        assert 0.5 * counted_rich <= rich <= counted_rich, (pair, rich, counted_rich)
        assert counted_rich > counted
    for size in (8, 16):
        chunk = touched(lambda size=size: prefill_step(regions, step_model, buffers, size))
        counted = graph_bytes(PrefillKey(size), buffers, capacity)
        assert 0.5 * counted <= chunk <= counted, (size, chunk, counted)
        report = touched(lambda size=size: report_prompt(regions, step_model, buffers, size))
        counted = graph_bytes(PrefillKey(size, StepVariant.RICH), buffers, capacity)
        assert 0.5 * counted <= report <= counted, (size, report, counted)


def rows_bytes(tensor: Tensor) -> int:
    """Bytes from the start of a buffer to the end of the rows that a view of it has."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return (tensor.storage_offset() + last + 1) * tensor.element_size()


def test_the_plan_of_captures() -> None:
    config = load_config(None, ["scheduler.max_num_reqs=3"]).config
    plan = capture_plan(config, grid_of(config))
    keys = [str(key) for key in plan.graph_keys()]
    # Three numbers of requests with one to six query tokens each, and three prefill sizes, twice.
    assert plan.num_graphs == len(keys) == len(set(keys)) == 2 * (3 * 6 + 3)
    assert keys[:4] == ["prefill 256", "prefill 64", "prefill 16", "(3, 18) fused"]
    assert keys[21] == "prompt logprobs 256" and keys[-1] == "(1, 1) rich"
    plain = load_config(None, ["scheduler.max_num_reqs=3", "grid.rich=false"]).config
    assert capture_plan(plain, grid_of(plain)).num_graphs == 21
    # One request has 1..6 query tokens, two 2..12, three 3..18.
    assert plan.coverage == Coverage(6 + 11 + 16, None)


def test_a_hole_in_the_grid_is_named() -> None:
    holed = Grid([GraphKey(1, 3), GraphKey(3, 4)], 3, 2)
    found = check_grid(holed)
    assert found.problem is not None and found.num_batches == 3 + 5 + 7
    assert "no captured pair covers 2 requests with 5 query tokens" in found.problem
