"""What generated code depends on beside its arguments: the key under which regions are kept.

Owns the list of facts. A fact that is missing here would let a start take code that was made for
something else, so whole source folders and whole configurations are hashed. Nothing in it names a
user, a directory or a host, because those change no code.
"""

import hashlib
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from decodegrid.capture.lowering import CompileOptions
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import Capacity

CODE_FOLDERS = ("graphs", "kernels")
"""Sources that decide what is traced."""
COMPILING_FILES = (
    "backend.py", "binding.py", "compile.py", "counters.py", "cpu.py", "lowering.py", "phases.py",
    "program.py", "region.py", "region_store.py",
)  # fmt: skip
"""Of capture/, the files that compile a region, keep it and call it, with all that they import."""


def source_files(root: Path) -> Iterator[Path]:
    """The Python and C++ sources below `root` that decide about generated code, in order."""
    for name in COMPILING_FILES:
        yield root / "capture" / name
    for folder in CODE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                yield path


def code_hash(root: Path) -> str:
    """Hash of names and contents of `source_files`."""
    digest = hashlib.sha256()
    for path in source_files(root):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def region_facts(
    config: ModelConfig,
    capacity: Capacity,
    options: CompileOptions,
    dtype: torch.dtype,
    device: str,
    storage: str,
) -> dict[str, str]:
    """Facts by name, for `decodegrid.capture.region_store.RegionStore`.

    storage: how the weights are stored (`decodegrid.graphs.step_weights.storage_form`), which
    depends on their values too.
    """
    model = hashlib.sha256(repr(config).encode()).hexdigest()[:16]
    return {
        "code": code_hash(Path(__file__).resolve().parent.parent),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "byte order": sys.byteorder,
        "model": model,
        "capacity": repr(capacity),
        "dtype": str(dtype),
        "storage": storage,
        "device": device,
        "threads": str(options.num_threads),
    }
