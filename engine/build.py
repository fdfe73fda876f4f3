"""From a deployment to a ready runner: load, allocate, compile, capture, check.

Owns the order of start-up and its phase table. Data flow: config -> model -> packed weights (on
CUDA in the form of the chosen kernels) -> state and buffers -> regions -> one captured graph per
pair and prefill size -> Runner.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from decodegrid.capture.backend import CaptureBackend
from decodegrid.capture.compile import RegionCompiler
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.cpu import CpuBackend
from decodegrid.capture.cuda import CudaBackend
from decodegrid.capture.grid import Grid, StepVariant, build_grid
from decodegrid.capture.ledger_backend import MeasuringBackend, RegionClock, memory_use
from decodegrid.capture.lowering import Backend, CompileOptions
from decodegrid.capture.package import PackageLabel
from decodegrid.capture.phases import PhaseClock
from decodegrid.configs.load import LoadedConfig
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.cache_leftovers import remove_leftovers
from decodegrid.engine.compute_dtypes import DTYPES
from decodegrid.engine.cuda_kernels import KernelPlan, lay_out_model, plan_kernels, put_in_place
from decodegrid.engine.deployment_check import (
    capacity_of,
    check_model,
    check_settings,
    weight_form,
)
from decodegrid.engine.ledger_start import StartUp
from decodegrid.engine.memory_errors import named_allocation, state_words
from decodegrid.engine.native_start import start_native_kernels
from decodegrid.engine.package_start import StartSource, open_source
from decodegrid.engine.plain_progress import make_progress
from decodegrid.engine.pool_size import (
    cache_line,
    measure_free_bytes,
    resolve_num_blocks,
    size_pool,
)
from decodegrid.engine.region_facts import region_facts
from decodegrid.engine.run_facts import versions
from decodegrid.engine.runner import Runner
from decodegrid.engine.step_graphs import StepGraphs, StepParts, capture_graphs, num_graphs
from decodegrid.engine.window_snapshots import WindowSnapshots
from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions import RegionTable, build_regions
from decodegrid.graphs.state import Capacity, allocate_state
from decodegrid.graphs.step_buffers import StepBuffers, allocate_buffers
from decodegrid.graphs.step_weights import storage_form
from decodegrid.graphs.target_step import StepModel
from decodegrid.graphs.weight_packing import pack_weights
from decodegrid.kernels.step_kernels import StepKernels


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What start-up needs beside the model."""

    capacity: Capacity
    grid: Grid
    prefill_chunk_sizes: tuple[int, ...]
    dtype: torch.dtype
    device: str
    compile_options: CompileOptions
    draft_temperatures: tuple[float, ...]
    """Divisors of the confidence logits, one per draft."""
    show_progress: bool
    native_cache_dir: Path | None = None
    """Where the native CPU kernels are built; None leaves plain torch behind the ops."""
    deployment: DeploymentConfig | None = None
    """Decides the blocks of the pool once the weights are in memory; None takes the capacity's."""
    package_dir: Path | None = None
    """A package to start from; None looks in the compile options' cache directory."""
    kernels: KernelPlan | None = None
    """What a CUDA step calls; None takes the CPU's, and on CUDA plain torch."""
    num_snapshots: int = 0
    """Windows to keep for a prefix cache; the capacity has the slack that they need."""


def make_regions(
    config: ModelConfig,
    capacity: Capacity,
    compiler: RegionCompiler,
    backend: Backend,
    kernels: StepKernels | None = None,
) -> RegionTable:
    """Every region of the deployment through the compiler; kernels None takes the CPU's."""
    specs = build_regions(config, capacity, as_ops=backend != "none", kernels=kernels)
    return RegionTable(
        {
            name: compiler.opaque(item.function)
            if item.opaque
            else compiler.region(item.function, item.dynamic, name=name, variants=item.variants)
            for name, item in specs.items()
        }
    )


def start_source(options: RunnerOptions, facts: Mapping[str, str]) -> StartSource | None:
    """What to take compiled code from; None where none is kept. Raises PackageError for the
    package, ValueError for one that a back end without code would start from."""
    cache_dir, backend = options.compile_options.cache_dir, options.compile_options.backend
    if options.package_dir is not None and backend != "inductor":
        raise ValueError(
            f"compile.backend is {backend}; only inductor makes the code that a package holds "
            f"({options.package_dir})"
        )
    if cache_dir is None or backend != "inductor":
        return None
    return open_source(options.package_dir, cache_dir, facts)


def package_label(runner: Runner) -> PackageLabel:
    """What the manifest of this runner's compiled code says."""
    return PackageLabel(
        runner.facts,
        [(key.num_reqs, key.num_query_tokens) for key in runner.grid.keys],
        runner.prefill_chunk_sizes,
        [str(StepVariant.FUSED), *([str(StepVariant.RICH)] if runner.has_rich else [])],
        versions(),
    )


def divisors_of(config: DeploymentConfig, model: ModelConfig) -> tuple[float, ...]:
    """Divisors of the confidence logits, one a draft: the deployment's, else those that the
    checkpoint was calibrated to; one where nothing is drafted."""
    speculation, kept = config.speculation, model.dspark_confidence_temperatures
    calibrated = () if kept is None else getattr(kept, speculation.verify)
    return speculation.draft_temperatures(calibrated) or (1.0,)


def draft_divisors(options: RunnerOptions) -> torch.Tensor:
    """(K,) divisors of the confidence logits, on the device in their dtype."""
    wide = torch.promote_types(options.dtype, torch.float32)
    return torch.tensor(options.draft_temperatures, dtype=wide, device=options.device)


def storage_dtype(options: RunnerOptions) -> torch.dtype | None:
    """What float matrices are stored in beside the model's dtype; None for that dtype itself."""
    # The native kernel reads bfloat16 under float32; plain regions would widen at every call.
    native = options.device == "cpu" and options.compile_options.backend != "none"
    return torch.bfloat16 if native and options.dtype == torch.float32 else None


def start_up_report(clock: PhaseClock, counters: CaptureCounters, notes: Sequence[str]) -> str:
    """Phases, notes (the cache's size, what the region store could not do), the two counters."""
    ready = (
        f"ready: {counters.num_compilations} compilations, {counters.num_loaded} regions from the "
        f"cache, {counters.num_captured} captured graphs"
    )
    return "\n".join([clock.format(), *notes, ready])


def with_pool(options: RunnerOptions, config: ModelConfig) -> tuple[Capacity, list[str]]:
    """The capacity with its pool sized by the memory that is free now, and lines for the report."""
    capacity, notes = options.capacity, []
    if options.deployment is not None:
        free = measure_free_bytes(options.deployment)
        pool = size_pool(options.deployment, config, free)
        capacity = replace(capacity, num_blocks=pool.num_blocks)
        notes = [pool.note] if pool.note else []
    return capacity, [cache_line(config, capacity, options.dtype), *notes]


@dataclass(frozen=True, slots=True)
class _Memory:
    """What steps run on, allocated."""

    capacity: Capacity
    """With the blocks that the pool really has."""
    step_model: StepModel
    buffers: StepBuffers
    kernels: StepKernels | None
    snapshots: WindowSnapshots | None
    notes: list[str]
    """Lines for the report."""


def _allocate(model: DraftModel, options: RunnerOptions, clock: PhaseClock) -> _Memory:
    """Weights, state, buffers and snapshots, in this order: the pool takes what weights leave."""
    config, capacity = model.config, options.capacity
    chunk = max(options.prefill_chunk_sizes)
    words = "the weights as steps read them (model.dtype, model.weights)"
    with clock.phase("allocate"), torch.no_grad(), named_allocation(words):
        storage = storage_dtype(options)
        weights = pack_weights(model, with_drafter=capacity.num_draft_tokens > 0, storage=storage)
    kernels = None
    if options.kernels is not None:
        with clock.phase("kernels"), torch.no_grad(), named_allocation(words):
            kernels, forms = put_in_place(options.kernels, config, capacity, chunk)
            weights = lay_out_model(model, weights, forms)
    capacity, notes = with_pool(options, config)
    words = state_words(capacity, options.deployment)
    with clock.phase("allocate"), torch.no_grad(), named_allocation(words):
        state = allocate_state(config, capacity, options.dtype, options.device)
        buffers = allocate_buffers(config, capacity, chunk, options.dtype, options.device)
        step_model = StepModel(config, weights, state)
    snapshots = None
    if options.num_snapshots:
        words = f"{options.num_snapshots} window snapshots (cache.prefix_snapshots)"
        with clock.phase("allocate"), torch.no_grad(), named_allocation(words):
            snapshots = WindowSnapshots(config, state, options.num_snapshots)
        notes.append(snapshots.note())
    return _Memory(capacity, step_model, buffers, kernels, snapshots, notes)


def _capture(
    parts: StepParts,
    options: RunnerOptions,
    backend: MeasuringBackend,
    compiler: RegionCompiler,
    clock: PhaseClock,
) -> StepGraphs:
    """Every graph of the plan, behind a progress bar where one is wanted."""
    counters, sizes = compiler.counters, options.prefill_chunk_sizes
    progress = None
    if options.show_progress:
        is_rich = parts.model.state.capacity.rich
        planned = num_graphs(options.grid, len(sizes), rich=is_rich)
        progress = make_progress(counters.planned_compilations + planned)
        compiler.progress = progress
    try:
        return capture_graphs(parts, options.grid, sizes, backend, counters, clock, progress)
    finally:
        if progress is not None:
            progress.close()


def make_runner(model: DraftModel, options: RunnerOptions, clock: PhaseClock) -> Runner:
    """A ready runner for a loaded model; both counters equal their plans when it returns.

    With kernels in the options the model's weights are taken over, and it is left without memory.
    Raises ValueError where the model does not fit the options, the memory, or what this process has
    installed."""
    config, capacity = model.config, options.capacity
    check_model(config, capacity)
    options.grid.check_coverage()
    memory = _allocate(model, options, clock)
    capacity, step_model = memory.capacity, memory.step_model
    counters = CaptureCounters()
    facts = region_facts(
        config,
        capacity,
        options.compile_options,
        options.dtype,
        options.device,
        storage_form(step_model.weights),
        None if options.kernels is None else options.kernels.facts(),
    )
    source = start_source(options, facts)
    if options.native_cache_dir is not None:
        with clock.phase("native kernels"):
            if source is None:
                start_native_kernels(options.native_cache_dir, is_shown=options.show_progress)
            else:
                source.install_native(options.native_cache_dir, is_shown=options.show_progress)
    store = None if source is None else source.store
    region_clock = RegionClock(clock)
    compiler = RegionCompiler(options.compile_options, counters, region_clock, store=store)
    backend_name = options.compile_options.backend
    regions = make_regions(config, capacity, compiler, backend_name, memory.kernels)
    device = torch.device(options.device)
    backend: CaptureBackend = CudaBackend(device) if device.type == "cuda" else CpuBackend(compiler)
    measuring = MeasuringBackend(backend, region_clock, lambda: memory_use(device))
    parts = StepParts(regions, step_model, memory.buffers, draft_divisors(options))
    graphs = _capture(parts, options, measuring, compiler, clock)
    compiler.freeze()
    counters.declare_ready()
    runner = Runner(step_model, memory.buffers, options.grid, graphs, counters, "", facts)
    runner.snapshots, runner.source = memory.snapshots, source
    runner.draft_temperatures = options.draft_temperatures
    if source is not None:
        with clock.phase("keep regions"):
            source.finish(package_label(runner))
    clock.stop()
    notes = [*memory.notes, *(source.notes if source is not None else ())]
    notes += [] if options.kernels is None else options.kernels.lines()
    runner.start_up_report = start_up_report(clock, counters, notes)
    runner.start_up = StartUp(tuple(clock.table()), measuring.costs, graphs)
    return runner


def build_runner(loaded: LoadedConfig, clock: PhaseClock | None = None) -> Runner:
    """A ready runner for a loaded deployment; `clock` is stopped when it is ready.

    Raises ValueError (or a subclass) for a checkpoint or a setting that cannot be used.
    """
    config = loaded.config
    dtype = DTYPES[config.model.dtype]
    clock = PhaseClock() if clock is None else clock
    model_config = check_settings(loaded)
    kernels = plan_kernels(loaded, model_config)
    remove_leftovers(loaded.cache_dir, package_dir=loaded.package_dir)
    torch.set_num_threads(config.model.num_threads)
    form = weight_form(config, model_config)
    words = f"the weights of {loaded.checkpoint_dir} (model.dtype = {config.model.dtype}, {form})"
    with clock.phase("load"), named_allocation(words):
        model = load_model(
            loaded.checkpoint_dir,
            config.model.device,
            dtype,
            weights=form,
            engram_tables=config.model.engram_tables,
            progress=config.compile.progress and sys.stderr.isatty(),
        )
    drafts = config.speculation.num_draft_tokens
    capacity = capacity_of(config, resolve_num_blocks(config, model_config, None))
    grid = build_grid(
        config.scheduler.max_num_reqs,
        drafts,
        config.grid.num_reqs,
        config.grid.num_query_tokens_per_req,
        config.grid.pairs,
    )
    options = RunnerOptions(
        capacity=capacity,
        grid=grid,
        prefill_chunk_sizes=config.scheduler.prefill_chunk_sizes,
        dtype=dtype,
        device=config.model.device,
        compile_options=CompileOptions(
            config.compile.backend, loaded.cache_dir, config.model.num_threads
        ),
        draft_temperatures=divisors_of(config, model_config),
        show_progress=config.compile.progress,
        native_cache_dir=loaded.cache_dir if config.model.device == "cpu" else None,
        deployment=config,
        package_dir=loaded.package_dir,
        kernels=kernels,
        num_snapshots=config.cache.prefix_snapshots if config.cache.prefix_cache == "on" else 0,
    )
    return make_runner(model, options, clock)
