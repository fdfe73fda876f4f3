"""`decodegrid config check`: findings and plans of one deployment, put together.

Owns the order, what fits into how much memory, and when a plan can be made at all. Allocates
nothing and loads no weights. Data flow: a loaded deployment and what the command was told ->
findings -> plans -> the report (engine/config_report.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decodegrid.configs.load import FROM_DEFAULT, LoadedConfig
from decodegrid.engine.capture_plan import capture_plan, count_regions, grid_of
from decodegrid.engine.compute_dtypes import DTYPES
from decodegrid.engine.config_format import empty_report
from decodegrid.engine.config_report import (
    coverage_report,
    findings_report,
    graphs_report,
    memory_report,
    plan_report,
)
from decodegrid.engine.deployment_check import capacity_of, weight_form
from decodegrid.engine.deployment_findings import Findings, find_all
from decodegrid.engine.free_memory import free_bytes
from decodegrid.engine.memory_plan import WEIGHTS, MemoryPlan, WeightSettings, make_plan
from decodegrid.engine.pool_size import pool_key, size_pool
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import Capacity


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What the command was told beside the deployment."""

    model_config: Path | None = None
    """A config.json to take for the checkpoint's."""
    is_elsewhere: bool = False
    """The deployment is for another machine."""
    device_memory: int | None = None
    """Bytes of one device that all of it must fit into."""


def check_deployment(loaded: LoadedConfig, options: CheckOptions) -> dict[str, Any]:
    """The whole report, as JSON values. Raises nothing that a deployment can cause."""
    found = find_all(loaded, options.model_config, is_elsewhere=options.is_elsewhere)
    report = empty_report(str(loaded.path))
    if not found.refused:
        _add_plans(report, found, loaded, options)
    return report | findings_report(found, found.problems)


def _add_plans(
    report: dict[str, Any], found: Findings, loaded: LoadedConfig, options: CheckOptions
) -> None:
    config, model = loaded.config, found.model
    grid = found.result(lambda: grid_of(config), found.refused)
    if grid is None:
        return
    plan = capture_plan(config, grid)
    if plan.coverage.problem is not None:
        found.refused.append(plan.coverage.problem)
    regions = None
    if model is not None:
        most = capacity_of(config, size_pool(config, model, None).num_blocks)
        regions = count_regions(model, most)
        report["model"] = {
            "source": found.model_source,
            "weights": f"{'quantised' if model.quantized else 'float'} weights, "
            f"{weight_form(config, model)} in memory",
        }
    report["plan"], report["coverage"] = plan_report(plan, regions), coverage_report(plan)
    _warn_about_chunks(found, loaded)
    if model is None:
        _warn_about_pool(found, loaded, capacity_of(config, config.num_blocks))
        return
    planned = found.result(lambda: _plan_memory(loaded, model, found, options), found.refused)
    if planned is None:
        return
    capacity, memory, notes = planned
    _warn_about_pool(found, loaded, capacity)
    _check_room(found, loaded, memory, options)
    report["memory"] = memory_report(loaded, model, capacity, memory, notes)
    report["graphs"] = graphs_report(plan, memory, capacity)


def _plan_memory(
    loaded: LoadedConfig, model: ModelConfig, found: Findings, options: CheckOptions
) -> tuple[Capacity, MemoryPlan, list[str]]:
    """The plan, and what has to be said about it."""
    config = loaded.config
    settings, notes = _weight_settings(loaded, model, found)
    num_snapshots = config.cache.prefix_snapshots if config.cache.prefix_cache == "on" else 0
    chunk = max(config.scheduler.prefill_chunk_sizes)

    def plan(num_blocks: int) -> tuple[Capacity, MemoryPlan]:
        capacity = capacity_of(config, num_blocks)
        return capacity, make_plan(model, capacity, settings, chunk, num_snapshots)

    pool = size_pool(config, model, None)
    capacity, memory = plan(pool.num_blocks)
    if config.cache.memory_fraction:
        fraction = f"cache.memory_fraction = {config.cache.memory_fraction:g}"
        if options.device_memory is None:
            notes.append(
                f"{fraction}: the pool is sized at start, by the memory that is free then; shown "
                "is the most that it can be"
            )
        else:
            free = max(0, options.device_memory - memory.pool_bytes(WEIGHTS))
            pool = size_pool(config, model, free)
            capacity, memory = plan(pool.num_blocks)
            notes.append(f"{fraction}: of {free:,} bytes beside the weights")
    return capacity, memory, notes + ([pool.note] if pool.note else [])


def _weight_settings(
    loaded: LoadedConfig, model: ModelConfig, found: Findings
) -> tuple[WeightSettings, list[str]]:
    """How the weights lie in memory, and what of it only the values can tell."""
    config, notes = loaded.config, []
    dtype = DTYPES[config.model.dtype]
    storage = None
    if config.model.device == "cpu" and dtype == torch.float32:
        if found.has_narrow_floats:
            storage = torch.bfloat16
        else:
            notes.append(
                "matrices are counted in float32; a start keeps them in bfloat16 if that changes "
                "no value"
            )
    settings = WeightSettings(
        dtype,
        weight_form(config, model),
        storage,
        config.model.engram_tables == "mapped",
        config.parallel.expert,
    )
    return settings, notes


def _warn_about_pool(found: Findings, loaded: LoadedConfig, capacity: Capacity) -> None:
    """A pool that start-up takes, and that cannot serve what the other settings promise."""
    usable, block = capacity.num_blocks - 1, capacity.block_size
    needed, longest = capacity.max_blocks_per_slot, capacity.max_model_len
    config = loaded.config
    if usable < needed:
        key = pool_key(config, capacity.num_blocks)
        found.warnings.append(
            f"{key}: the pool has {usable} usable blocks of {block} tokens, {usable * block} "
            f"tokens; a request of scheduler.max_model_len = {longest} needs {needed}, and one "
            f"that may grow beyond {usable * block} is refused when it comes"
        )
    elif usable < config.scheduler.max_num_reqs:
        found.warnings.append(
            f"{pool_key(config, capacity.num_blocks)}: the pool has {usable} usable blocks, fewer "
            f"than scheduler.max_num_reqs = {config.scheduler.max_num_reqs}; so many never run"
        )


def _warn_about_chunks(found: Findings, loaded: LoadedConfig) -> None:
    """Prefill sizes that are captured and never run: a smaller one holds every prompt."""
    scheduler = loaded.config.scheduler
    longest, key = scheduler.max_model_len - 1, "scheduler.prefill_chunk_sizes"
    enough = next((size for size in scheduler.prefill_chunk_sizes if size >= longest), None)
    idle = [size for size in scheduler.prefill_chunk_sizes if enough and size > enough]
    if idle and loaded.origins[key] != FROM_DEFAULT:
        found.warnings.append(
            f"{key}: {idle} are never used; with scheduler.max_model_len = "
            f"{scheduler.max_model_len} a chunk has at most {longest} tokens, which {enough} holds"
        )


def _check_room(
    found: Findings, loaded: LoadedConfig, memory: MemoryPlan, options: CheckOptions
) -> None:
    """Compare the total with the device that was named, or else with this machine's."""
    device, total = loaded.config.model.device, memory.total_bytes
    if options.device_memory is not None:
        if total > options.device_memory:
            found.refused_here.append(
                f"{total:,} bytes are needed on a device of {options.device_memory:,} "
                "(--device-memory)"
            )
        return
    if options.is_elsewhere or options.model_config is not None:
        return
    if device == "cuda" and not torch.cuda.is_available():
        return
    free = found.result(lambda: free_bytes(device), found.not_checked)
    if free is not None and total > free and not loaded.config.cache.memory_fraction:
        found.warnings.append(
            f"{total:,} bytes are needed, and {free:,} are free on this machine's {device}"
        )
