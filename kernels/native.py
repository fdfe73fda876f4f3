"""Native CPU kernels: built once with the C++ compiler that inductor needs anyway.

Owns the shared library of kernels/csrc and its place in a cache directory. The sources have a plain
C interface and no torch headers, so a build takes seconds. `install_native_kernels` puts them
behind the ops whose CPU implementation is plain torch until then.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler

from decodegrid.kernels import hyper_connection, sampling

SOURCES = tuple(
    Path(__file__).resolve().parent / "csrc" / name for name in ("noise.cpp", "sinkhorn.cpp")
)
# No contraction: the bits must not depend on the instruction set. The last two let loops vectorise.
BASE_FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-trapping-math",
    "-fno-math-errno",
)
MAX_SIZE = 8
"""Largest matrix side that the native Sinkhorn takes, as in the source."""


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
    """Where the library for this source, compiler flags and machine belongs."""
    sources = [source.read_text() for source in SOURCES]
    facts = [*sources, *BASE_FLAGS, *machine_flags(), platform.machine()]
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    return cache_dir / f"kernels-{key}.so"


def build_library(cache_dir: Path) -> Path:
    """Compile the kernels unless the library is there; returns its path.

    Two processes may build at once: each writes its own file and renames it into place.
    """
    target = library_path(cache_dir)
    if target.exists():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=cache_dir)
    os.close(handle)
    command = [get_cpp_compiler(), *BASE_FLAGS, *machine_flags(), "-o", name, *map(str, SOURCES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NativeBuildError(f"{' '.join(command)} failed: {done.stderr.strip()[:500]}")
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


class NativeNoise:
    """The CPU kernel of decodegrid::gumbel_noise; holds the loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.decodegrid_gumbel_noise
        self._function.argtypes = (ctypes.c_void_p,) * 4 + (ctypes.c_int64,) * 2
        self._function.restype = None

    def __call__(
        self, seed: Tensor, position: Tensor, temperature: Tensor, vocab_size: int
    ) -> Tensor:
        """See sampling.gumbel_noise."""
        seed, position = seed.contiguous(), position.contiguous()
        temperature = temperature.to(torch.float64).contiguous()
        out = torch.empty((seed.shape[0], vocab_size), dtype=torch.float32)
        self._function(
            seed.data_ptr(), position.data_ptr(), temperature.data_ptr(), out.data_ptr(),
            seed.shape[0], vocab_size,
        )
        return out


class NativeSinkhorn:
    """The CPU kernel of decodegrid::sinkhorn; holds the loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {
            torch.float32: library.decodegrid_sinkhorn_f32,
            torch.float64: library.decodegrid_sinkhorn_f64,
        }
        pointer, size = ctypes.c_void_p, ctypes.c_int
        for function in self._functions.values():
            function.argtypes = (pointer, pointer, ctypes.c_int64, size, size, ctypes.c_double)
            function.restype = ctypes.c_int

    def __call__(self, logits: Tensor, iters: int, eps: float) -> Tensor:
        """(..., n, n) fp32 or fp64, n up to 8; see hyper_connection.sinkhorn."""
        logits = logits.contiguous()
        out = torch.empty_like(logits)
        size = logits.shape[-1]
        status = self._functions[logits.dtype](
            logits.data_ptr(), out.data_ptr(), logits.numel() // (size * size), size, iters, eps
        )
        if status != 0:
            raise ValueError(f"sinkhorn: matrix side {size} (1..{MAX_SIZE}), {iters} rounds (>= 1)")
        return out


def install_native_kernels(cache_dir: Path) -> Path:
    """Build the kernels and make them the CPU implementation of their ops; returns the library."""
    path = build_library(cache_dir)
    library = ctypes.CDLL(str(path))
    if not torch._C._dispatch_has_kernel_for_dispatch_key("decodegrid::sinkhorn", "CPU"):
        hyper_connection.LIBRARY.impl("sinkhorn", NativeSinkhorn(library), "CPU")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("decodegrid::gumbel_noise", "CPU"):
        sampling.LIBRARY.impl("gumbel_noise", NativeNoise(library), "CPU")
    return path
