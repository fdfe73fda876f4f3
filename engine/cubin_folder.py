"""The folder of CUDA kernels that a deployment takes: what is in it for a device.

Owns the difference between a folder that was named, which must be right, and the one that is looked
for in the cache directory, which need not be there: kernels without a cubin then count as not
available, and the kernel table says which and how they are built. Loads nothing.

Data flow: deployment, device -> `BuiltKernels` for the choice of kernels.
"""

import shlex
from pathlib import Path

from decodegrid.configs.load import LoadedConfig
from decodegrid.kernels.providers.cubins import CubinError, describe_folder
from decodegrid.kernels.providers.probe import read_device
from decodegrid.kernels.providers.registry import ARCH_OF, BuiltKernels


def cubin_folder(loaded: LoadedConfig, arch: str) -> Path:
    """Of one architecture, absolute."""
    return loaded.cubins_dir / arch


def build_command(loaded: LoadedConfig, arch: str) -> str:
    """What a user types to fill the folder."""
    out = shlex.quote(str(loaded.cubins_dir))
    return f"python -m decodegrid.kernels.tile.build --arch {arch} --out {out}"


def find_cubins(loaded: LoadedConfig, arch: str) -> BuiltKernels:
    """The cubins of an architecture.

    Raises ValueError for a folder that the deployment names and that cannot be used, with the
    command that fills it.
    """
    folder, command = cubin_folder(loaded, arch), build_command(loaded, arch)
    try:
        found = describe_folder(folder)
        if found.arch != arch:
            raise CubinError(f"{folder} has kernels for {found.arch}, not {arch}")
    except CubinError as error:
        if loaded.config.compile.cubins_dir:
            raise ValueError(
                f"compile.cubins_dir is {loaded.cubins_dir}: {error}; {command}"
            ) from error
        return BuiltKernels(frozenset(), f"is there: {error}", command)
    return BuiltKernels(found.names, f"in {folder}", command, found.digest)


def check_cubins(loaded: LoadedConfig) -> None:
    """Refuse a folder that was named and cannot be used on this machine's card. Raises ValueError.

    Without a card nothing is said: what it would need is not known.
    """
    config = loaded.config
    if config.model.device != "cuda" or not config.compile.cubins_dir:
        return
    arch = ARCH_OF.get(read_device(config.model.device).target)
    if arch is not None:
        find_cubins(loaded, arch)
