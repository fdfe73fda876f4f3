"""The step times that a plan of a deployment works on: kept ones, or measured now.

Owns which kept surface fits a deployment that is not loaded. What depends on the weights' values
cannot be compared then: how they are stored, and a pool that is a share of the free memory.
"""

import time

import torch

from decodegrid.capture.grid import Grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.surface import Surface, SurfaceError
from decodegrid.capture.surface_search import SurfaceWish, find_surface
from decodegrid.capture.surface_store import SurfaceStore
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.build import build_runner
from decodegrid.engine.compute_dtypes import DTYPES
from decodegrid.engine.cuda_kernels import plan_kernels
from decodegrid.engine.deployment_check import capacity_of, check_settings
from decodegrid.engine.pool_size import resolve_num_blocks
from decodegrid.engine.region_facts import region_facts
from decodegrid.engine.surface_run import context_for, machine_facts, measure


def known_facts(loaded: LoadedConfig) -> dict[str, str]:
    """The facts of a deployment's surface that are known before its weights are read.

    Raises ValueError for settings or a checkpoint that cannot be used.
    """
    config, model = loaded.config, check_settings(loaded)
    kernels = plan_kernels(loaded, model)
    facts = region_facts(
        model,
        capacity_of(config, resolve_num_blocks(config, model, None)),
        CompileOptions(config.compile.backend, loaded.cache_dir, config.model.num_threads),
        DTYPES[config.model.dtype],
        config.model.device,
        storage="",
        kernels=None if kernels is None else kernels.facts(),
    )
    del facts["storage"]
    if config.cache.memory_fraction:
        del facts["capacity.num_blocks"]
    return {**facts, **machine_facts(torch.device(config.model.device))}


def kept_surface(loaded: LoadedConfig, grid: Grid) -> tuple[Surface, str]:
    """The kept surface of a deployment and its file.

    Raises SurfaceError, which says how to get one, where none fits.
    """
    config = loaded.config
    room = config.scheduler.max_model_len - config.speculation.num_draft_tokens - 1
    wish = SurfaceWish(
        grid.largest_key,
        min(config.surface.context_len, room),
        known_facts(loaded),
        config.surface.max_age_s,
    )
    surface, place = find_surface(loaded.cache_dir, wish, time.time())
    if surface is None:
        raise SurfaceError(
            f"no step times of this deployment are kept ({place}); measure them with decodegrid "
            "profile and the same --config and --set, or give --measure or --surface FILE"
        )
    return surface, place


def measured_surface(loaded: LoadedConfig) -> tuple[Surface, str]:
    """Start the deployment, measure its captured pairs, and keep the result."""
    runner = build_runner(loaded)
    surface = measure(runner, context_for(runner, loaded), loaded.config.surface.repeats or 1)
    return surface, str(SurfaceStore(loaded.cache_dir).save(surface))
