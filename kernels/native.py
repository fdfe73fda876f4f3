"""Native CPU kernels: built once with the C++ compiler that inductor needs anyway.

Owns the shared library of kernels/csrc and its place in a cache directory. The sources register
CPU implementations of the ops that the modules beside this one define with plain torch;
`install_native_kernels` builds and loads them, for the whole process.
"""

import hashlib
import os
import platform
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch.utils.cpp_extension import include_paths, library_paths

from decodegrid.kernels import hyper_connection, moe, sampling, select_entries

OPS = ("routed_experts", "select_entries", "sinkhorn", "gumbel_noise")
DEFINED_BY = (moe, select_entries, hyper_connection, sampling)
"""Modules that define the ops: they must be imported before the library registers kernels."""
CSRC = Path(__file__).resolve().parent / "csrc"
SOURCES = tuple(
    CSRC / f"{name}.cpp" for name in ("experts", "noise", "select_entries", "sinkhorn")
)
# No contraction: the bits must not depend on the instruction set. Two flags let loops vectorise.
BASE_FLAGS = (
    "-O3", "-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno",
)


class NativeBuildError(RuntimeError):
    """The C++ compiler is missing or refused the kernels."""


def machine_flags() -> tuple[str, ...]:
    """Instruction set flags, from what torch found on this CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma")
    if capability == "AVX2":
        return ("-mavx2", "-mfma")
    return ()


def library_path(cache_dir: Path) -> Path:
    """Where the library for these sources, compiler flags, torch and machine belongs."""
    sources = [source.read_text() for source in SOURCES]
    facts = [*sources, *BASE_FLAGS, *machine_flags(), platform.machine(), torch.__version__]
    facts.append(sysconfig.get_python_version())
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    return cache_dir / f"kernels-{key}.so"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NativeBuildError(f"{command[0]}: {error}") from None
    if done.returncode != 0:
        raise NativeBuildError(f"{' '.join(command)} failed: {done.stderr.strip()[:2000]}")


def build_library(cache_dir: Path) -> Path:
    """Compile the kernels unless the library is there; returns its path.

    Two processes may build at once: each works in its own directory and renames the result into
    place.
    """
    target = library_path(cache_dir)
    if target.exists():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    compiler = get_cpp_compiler()
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    flags = [*BASE_FLAGS, *machine_flags(), *includes]
    with tempfile.TemporaryDirectory(dir=cache_dir) as name:
        work = Path(name)
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(work / f"{source.stem}.o")]
            for source in SOURCES
        ]
        with ThreadPoolExecutor(max_workers=min(len(commands), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, commands))
        libraries = [f"-L{path}" for path in library_paths()]
        objects = [command[-1] for command in commands]
        built = str(work / "kernels.so")
        _run([compiler, "-shared", *objects, *libraries, "-lc10", "-ltorch_cpu", "-o", built])
        os.replace(built, target)
    return target


def install_native_kernels(cache_dir: Path) -> Path:
    """Build the kernels and make them the CPU implementation of their ops; returns the library.

    Holds for the process: loading it again changes nothing.
    """
    path = build_library(cache_dir)
    installed = [
        torch._C._dispatch_has_kernel_for_dispatch_key(f"decodegrid::{name}", "CPU")
        for name in OPS
    ]
    if not any(installed):
        torch.ops.load_library(str(path))
    return path
