"""The kernel table of a deployment: what `decodegrid doctor` says of ops and libraries.

Owns the words about the native kernels of the CPU, and about what was shown of the others. Does not
own the choice (`decodegrid.kernels.providers.registry`), nor what a CUDA start makes of it
(`decodegrid.engine.cuda_kernels`).
Builds, loads and starts nothing; imports a library only where its probe says that it can run.
"""

from collections.abc import Iterator
from pathlib import Path

from decodegrid.capture.package import NATIVE
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cuda_kernels import NOT_NATIVE, plan_kernels, step_shape
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.kernels import native
from decodegrid.kernels.providers.implementations import IMPLEMENTATIONS
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import Target, probe_all, read_device
from decodegrid.kernels.providers.registry import (
    KernelTable,
    NativeState,
    as_if_installed,
    choose,
    lines_of,
)

OTHER_TARGETS = ("cpu", "sm90", "sm100")
"""Devices that a table can be asked for without being there."""


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
    every library with kernels for it were installed and every kernel of ours built.

    target: one of OTHER_TARGETS; None for the deployment's own device. Raises ValueError for a
    folder of cubins that the deployment names and that cannot be used.
    """
    shape = step_shape(loaded.config, model)
    if target is None:
        plan = plan_kernels(loaded, model)
        if plan is not None:
            return plan.table
        device = read_device(loaded.config.model.device)
        probes = probe_all(PACKAGES, device)
        return choose(IMPLEMENTATIONS, device, probes, shape, native_state(loaded))
    device, shown = as_if_installed(PACKAGES, Target(target))
    state = NativeState(True, "for the CPU") if device.target is Target.CPU else NOT_NATIVE
    return choose(IMPLEMENTATIONS, device, shown, shape, state)


def in_steps(table: KernelTable) -> str:
    """What the engine's own steps call, and what is known of that."""
    if table.device.target is Target.CPU:
        return "the implementations below"
    return "the implementations below, traced: no step has run on a card"


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
