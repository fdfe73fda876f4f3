"""The kernel table of a deployment: what `decodegrid doctor` says of ops and libraries.

Owns the way from a deployment to the numbers that the choice of kernels needs, and the words about
the native kernels of the CPU. Does not own the choice (`decodegrid.kernels.providers.registry`).
Builds, loads and starts nothing; imports a library only where its probe says that it can run.
"""

from collections.abc import Iterator
from pathlib import Path

from decodegrid.capture.package import NATIVE
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.deployment_check import weight_form
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.kernels import native
from decodegrid.kernels.providers.implementations import IMPLEMENTATIONS
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import Target, probe_all, read_device
from decodegrid.kernels.providers.registry import (
    KernelTable,
    NativeState,
    StepShape,
    as_if_installed,
    choose,
    lines_of,
)

OTHER_TARGETS = ("cpu", "sm90", "sm100")
"""Devices that a table can be asked for without being there."""


def step_shape(loaded: LoadedConfig, model: ModelConfig) -> StepShape:
    """The numbers of a deployment that decide whether a kernel fits."""
    form = weight_form(loaded.config, model)
    return StepShape(
        dtype=loaded.config.model.dtype,
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        index_heads=model.index_n_heads,
        index_dim=model.index_head_dim,
        index_topk=model.index_topk,
        window=model.sliding_window,
        moe_inner=model.moe_intermediate_size,
        num_experts=model.n_routed_experts,
        vocab_size=model.vocab_size,
        block_size=loaded.config.cache.block_size,
        hc_mult=model.hc_mult,
        hc_iters=model.hc_sinkhorn_iters,
        hc_eps=model.hc_eps,
        kv_records=loaded.config.cache.kv_cache == "v41",
        packed_matrices=form == "packed",
        packed_experts=form in ("packed", "packed_experts"),
    )


def native_state(loaded: LoadedConfig) -> NativeState:
    """Whether steps of the deployment run the CPU's native kernels, and where these are.

    Loads and builds none: those that start-up would take are looked for.
    """
    if loaded.config.model.device != "cpu":
        return NativeState(False, "for the CPU")
    name = native.library_path(Path()).name
    places = [("cache directory", loaded.cache_dir / name)]
    if loaded.package_dir is not None:
        places.insert(0, ("package", loaded.package_dir / NATIVE / name))
    place = next((where for where, path in places if path.exists()), None)
    if native.has_native_kernels():
        return NativeState(True, f"{name}, loaded")
    if place is not None:
        return NativeState(True, f"{name} in the {place}")
    return NativeState(True, "built at the first start")


def kernel_table(
    loaded: LoadedConfig, model: ModelConfig, target: str | None = None
) -> KernelTable:
    """The choice of kernels for a deployment on its device, or on another kind of device as if
    every library with kernels for it were installed.

    target: one of OTHER_TARGETS; None for the deployment's own device.
    """
    shape = step_shape(loaded, model)
    if target is None:
        device = read_device(loaded.config.model.device)
        probes = probe_all(PACKAGES, device)
        return choose(IMPLEMENTATIONS, device, probes, shape, native_state(loaded))
    device, shown = as_if_installed(PACKAGES, Target(target))
    state = NativeState(device.target is Target.CPU, "for the CPU")
    return choose(IMPLEMENTATIONS, device, shown, shape, state)


def in_steps(table: KernelTable) -> str:
    """Which of the chosen implementations the engine's own steps call."""
    if table.device.target is Target.CPU:
        return "the implementations below"
    return "plain torch: an engine does not install the kernels below yet"


def table_lines(table: KernelTable) -> Iterator[tuple[str, str]]:
    """(name, words) of the device, the ops with every implementation, and the libraries."""
    yield "kernels for", table.device.words
    yield "in an engine's steps", in_steps(table)
    for op, words in lines_of(table):
        yield (f"op {op}" if op else ""), words
    for probe in table.probes:
        known = " ".join(part for part in (probe.distribution, probe.version) if part)
        parts = [part for part in (known, probe.reason) if part]
        hint = "" if probe.version is not None or probe.is_ready else f"; {probe.package.install}"
        yield f"library {probe.package.name}", f"{', '.join(parts) or 'ready'}{hint}"
