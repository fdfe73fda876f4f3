"""What the numbers were measured on and in: processor, versions, and this process's memory.

Owns the reading of Linux's /proc and of package versions. Measures no time.
"""

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from decodegrid import __version__

_STATUS = Path("/proc/self/status")
_CPU_INFO = Path("/proc/cpuinfo")
_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "deepseek-recipe")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident memory of this process without its children, MiB."""

    rss_mib: float
    """Now: VmRSS."""
    peak_rss_mib: float
    """Greatest since the process started: VmHWM, start-up's own peak included."""


def parse_memory(status: str) -> ProcessMemory:
    """Read VmRSS and VmHWM from the text of /proc/PID/status.

    Raises ValueError naming the line that is missing.
    """
    found: dict[str, float] = {}
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) / 1024
    for name in ("VmRSS", "VmHWM"):
        if name not in found:
            raise ValueError(f"no {name} line in the process status")
    return ProcessMemory(found["VmRSS"], found["VmHWM"])


def read_memory() -> ProcessMemory:
    """This process's memory; Linux only."""
    return parse_memory(_STATUS.read_text())


def cpu_model() -> str:
    """The processor's name, or the machine type where /proc/cpuinfo does not tell."""
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def describe_machine() -> dict[str, object]:
    """Processor, threads and versions, for the JSON file."""
    versions = {name: version(name) for name in _PACKAGES}
    return {
        "cpu_model": cpu_model(),
        "torch_threads": torch.get_num_threads(),
        "versions": {
            "decodegrid": __version__,
            "python": platform.python_version(),
            **versions,
        },
    }
