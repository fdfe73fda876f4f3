"""What generated code depends on beside its arguments: the key under which regions are kept.

Owns the list of facts. A fact that is missing here would let a start take code that was made for
something else, so whole source folders and whole configurations are hashed. Nothing in it names a
user, a directory or a host, because those change no code.
"""

import hashlib
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import torch

from decodegrid.capture.lowering import CompileOptions
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import Capacity

CODE_FOLDERS = ("graphs", "kernels")
"""Sources that decide what is traced."""
COMPILING_FILES = (
    "backend.py", "binding.py", "code_module.py", "code_paths.py", "code_sizes.py",
    "code_tracing.py", "compile.py", "counters.py", "cpu.py", "lowering.py", "phases.py",
    "program.py", "region.py", "region_store.py",
)  # fmt: skip
"""Of capture/, the files that compile a region, keep it and call it, with all that they import."""
PROGRAM_FACTS = (
    "code", "torch", "python", "machine", "cpu", "instructions", "byte order"
)  # fmt: skip
"""Facts that no deployment decides: this program, its libraries and the processor."""
KERNEL_FACT = "kernels."
"""What names of facts begin with that say which kernels a CUDA step calls: libraries and cubins of
the machine decide them, as the program's do."""
_INSTRUCTIONS = re.compile(
    r"abm|adx|aes|amx\w*|avx\w*|bmi[12]|cldemote|clflush\w*|clwb|cx16|enqcmd|f16c|fma\w*|gfni|"
    r"lahf_lm|lzcnt|mmx|movbe|movdir\w*|pclmulqdq|popcnt|ptwrite|rdpid|rdrand|rdseed|rtm|"
    r"serialize|sha\w*|sse\w*|ssse3|tbm|vaes|vpclmulqdq|waitpkg|xop|xsave\w*|"
    r"asimd\w*|sve\w*|bf16|i8mm|atomics|crc32|fp\w*|neon|v"
)
"""Flags of /proc/cpuinfo that stand for instructions. The compiler is told to use all there are."""


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


def cpu_instructions() -> str:
    """Hash of the instruction sets of this processor, or "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    line = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    flags = sorted(flag for flag in line.split() if _INSTRUCTIONS.fullmatch(flag))
    return hashlib.sha256(" ".join(flags).encode()).hexdigest()[:16] if flags else ""


def program_facts() -> dict[str, str]:
    """The facts of PROGRAM_FACTS."""
    return {
        "code": code_hash(Path(__file__).resolve().parent.parent),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "instructions": cpu_instructions(),
        "byte order": sys.byteorder,
    }


def is_of_deployment(name: str) -> bool:
    """Whether a deployment decides a fact; otherwise the program and the machine do."""
    return name not in PROGRAM_FACTS and not name.startswith(KERNEL_FACT)


def model_facts(
    config: ModelConfig, dtype: torch.dtype, device: str, num_threads: int | None
) -> dict[str, str]:
    """Facts that are known before a weight is read."""
    return {
        "model": hashlib.sha256(repr(config).encode()).hexdigest()[:16],
        "dtype": str(dtype),
        "device": device,
        "threads": str(num_threads),
    }


def region_facts(
    config: ModelConfig,
    capacity: Capacity,
    options: CompileOptions,
    dtype: torch.dtype,
    device: str,
    storage: str,
    kernels: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Facts by name, for `decodegrid.capture.region_store.RegionStore`.

    storage: how the weights are stored (`decodegrid.graphs.step_weights.storage_form`), which
    depends on their values too. kernels: which kernels a CUDA step calls
    (`decodegrid.engine.cuda_kernels.KernelPlan.facts`); None on the CPU, where the instructions and
    the source say it.
    """
    sizes = {
        f"capacity.{item.name}": str(getattr(capacity, item.name)) for item in fields(capacity)
    }
    return {
        **program_facts(),
        **model_facts(config, dtype, device, options.num_threads),
        **sizes,
        "storage": storage,
        **{f"{KERNEL_FACT}{name}": value for name, value in (kernels or {}).items()},
    }
