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

from decodegrid.kernels import (
    filters,
    hyper_connection,
    linear,
    moe,
    packed,
    records,
    sampling,
    select_entries,
    top_logits,
)

OPS = (
    "routed_experts", "select_entries", "sinkhorn", "gumbel_noise", "uniform_noise",
    "filter_logits", "linear", "grouped_linear",
    "encode_records", "take_records", "round_records",
    "packed_linear", "packed_grouped_linear", "packed_rows", "packed_experts",
    "top_logits",
)
DEFINED_BY = (
    moe, select_entries, hyper_connection, sampling, filters, linear, records, packed, top_logits,
)
"""Modules that define the ops: they must be imported before the library registers kernels."""
CSRC = Path(__file__).resolve().parent / "csrc"
SOURCES = tuple(
    CSRC / f"{name}.cpp"
    for name in (
        "bf16_rows", "experts", "filters", "linear", "noise", "packed_experts", "packed_fp8",
        "records", "select_entries", "sinkhorn", "top_logits", "total_scan",
    )
)
HEADERS = tuple(
    CSRC / f"{name}.h" for name in ("bf16_rows", "experts", "packed_values", "records")
)
# No contraction: the bits must not depend on the instruction set. Two flags let loops vectorise.
BASE_FLAGS = (
    "-O3", "-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno",
)


LEFTOVER_PREFIX = ".kernels-build-"
"""Start of the names of build directories; a build that was killed leaves one in the cache."""


class NativeBuildError(ValueError):
    """The kernels cannot be built or kept: no compiler, its refusal, or a place to write to."""


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
    sources = [source.read_text() for source in (*SOURCES, *HEADERS)]
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
        full = "No space left on device" in done.stderr
        hint = "; compile.cache_dir can be on another disk" if full else ""
        raise NativeBuildError(f"{' '.join(command)} failed: {done.stderr.strip()[:2000]}{hint}")


def _find_compiler() -> str:
    # Imported here: only a build needs torch's code generator.
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return str(get_cpp_compiler())
    except RuntimeError as error:  # torch tried every compiler that it knows
        raise NativeBuildError(f"no C++ compiler: {error}") from None


def _cannot_write(cache_dir: Path, reason: str) -> NativeBuildError:
    return NativeBuildError(
        f"{cache_dir}: the native kernels cannot be built there ({reason}); "
        "set compile.cache_dir to a directory that can be written"
    )


def require_library(cache_dir: Path, reason: str) -> None:
    """Raise NativeBuildError for a place that cannot be written, unless the library is there."""
    if not library_path(cache_dir).exists():
        raise _cannot_write(cache_dir, reason)


def build_library(cache_dir: Path) -> Path:
    """Compile the kernels unless the library is there; returns its path.

    Two processes may build at once: each works in its own directory and renames the result into
    place, so that a build which is killed leaves no library, only its directory. Raises
    NativeBuildError; of a place that cannot be written it names the setting.
    """
    target = library_path(cache_dir)
    if target.exists():
        return target
    compiler = _find_compiler()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _build(compiler, cache_dir, target)
    except OSError as error:
        raise _cannot_write(cache_dir, error.strerror or str(error)) from None
    return target


def _build(compiler: str, cache_dir: Path, target: Path) -> None:
    """Compile and link in a directory of its own, then move the library to `target`."""
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    flags = [*BASE_FLAGS, *machine_flags(), *includes]
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=LEFTOVER_PREFIX) as name:
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
        with open(built, "rb") as library:
            os.fsync(library.fileno())  # whole on the disk before it has its name
        os.replace(built, target)


def has_native_kernels() -> bool:
    """Whether this process has the CPU implementations of all ops."""
    return all(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"decodegrid::{name}", "CPU")
        for name in OPS
    )


def loaded_library() -> Path | None:
    """The library that install_native_kernels loaded in this process, from whatever place."""
    name = library_path(Path()).name
    loaded = (Path(path) for path in torch.ops.loaded_libraries)
    return next((path for path in loaded if path.name == name), None)


def install_native_kernels(cache_dir: Path) -> None:
    """Build the kernels and make them the CPU implementation of their ops.

    Holds for the process: a second call builds and changes nothing.
    """
    if not has_native_kernels():
        load_native_kernels(build_library(cache_dir))


def load_native_kernels(path: Path) -> None:
    """Make a library that was built before, whose file name is its key, the CPU implementation.

    Holds for the process: a second call changes nothing. Raises NativeBuildError where the system
    does not load it.
    """
    if has_native_kernels():
        return
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise NativeBuildError(f"{path}: {error}; remove it to have it built anew") from None
