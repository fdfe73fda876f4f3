"""What a measured figure is of: machine, versions, deployment and command, as plain JSON values.

Owns their names. Nothing here names a user, a home directory or a host.
"""

import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from decodegrid import __version__
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.surface_run import machine_facts

PACKAGES = ("torch", "numpy", "xgrammar", "cuda-python")
"""Packages whose versions a figure depends on."""


def machine(device: torch.device) -> dict[str, str]:
    """Processor, cores, threads, vector instructions, system."""
    return {
        **machine_facts(device),
        "threads": str(torch.get_num_threads()),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of decodegrid, Python and PACKAGES; a package that is not there is left out."""
    found = {"decodegrid": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def config_hash(loaded: LoadedConfig) -> str:
    """SHA-256 of the deployment's effective values, wherever they came from."""
    values = loaded.config.model_dump(mode="json")
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def command(argv: Sequence[str] | None = None) -> list[str]:
    """The command line without the program's place; argv None is the process's own."""
    words = sys.argv[1:] if argv is None else list(argv)
    return ["decodegrid", *words]


def shown_command(words: Sequence[str]) -> str:
    """A command as a shell reads it."""
    return shlex.join(words)


def load_average() -> list[float]:
    """The system's load over 1, 5 and 15 minutes; empty where it is not told."""
    try:
        return list(os.getloadavg())
    except OSError:
        return []
