"""Builds the tile kernels to cubins, without a GPU: python -m decodegrid.kernels.tile.build

Owns the folder of cubins and its manifests. The kernels of one module of this folder share a cubin:
most of a compilation is the reading of headers. The manifest says, for each kernel, where its cubin
is and how to launch it (entry, grid, block, shared memory, argument order), which is all that a
machine without TileLang needs. What is lowered and what is compiled is kept under the hash of all
that made it, so that a second build does neither.

A kernel without tensor cores is lowered once, and that source is compiled for each architecture.

Data flow: table -> `lower`, in processes -> OUT/lowered/*.json -> nvcc, side by side ->
OUT/ARCH/*.cubin and OUT/ARCH/manifest.json.
"""

import argparse
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from decodegrid.kernels.tile.launch import Launch, Lowered
from decodegrid.kernels.tile.table import ARCHS, HOPPER, TileKernel, find_op, kernels

MANIFEST = "manifest.json"
NVCC_FLAGS = ("-O3", "-std=c++20", "--expt-relaxed-constexpr", "-w")
_LOWERING = "decodegrid.kernels.tile.lower"


class BuildError(Exception):
    """What is missing or does not compile; its text is for the user."""


@dataclass(frozen=True, slots=True)
class Built:
    """One kernel of the manifest."""

    kernel: TileKernel
    launch: Launch
    cubin: Path


@dataclass(frozen=True, slots=True)
class _Task:
    """A kernel to lower, and where the result is kept."""

    kernel: TileKernel
    arch: str
    kept: Path


@dataclass(frozen=True, slots=True)
class _Unit:
    """Kernels that are compiled together."""

    name: str
    arch: str
    flags: tuple[str, ...]
    tasks: list[_Task]


def require_tools() -> str:
    """Path of nvcc. Raises BuildError where nvcc or TileLang is missing."""
    if find_spec("tilelang") is None:
        raise BuildError("the tile kernels are built with TileLang: pip install tilelang==0.1.15")
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise BuildError("the tile kernels are built with nvcc (CUDA 13), which is not on the PATH")
    return nvcc


def build(
    out: Path,
    archs: Sequence[str],
    chosen: Sequence[TileKernel],
    *,
    jobs: int = 1,
    report: Callable[[str, float], None] | None = None,
) -> dict[str, list[Built]]:
    """Build kernels into out/ARCH for each of `archs` and write the manifests.

    `jobs` processes lower, then as many nvcc compile. `report` gets a name and the seconds of all
    that is made, and of nothing that is kept. Raises BuildError where a tool is missing or a
    kernel does not compile.
    """
    nvcc = require_tools()
    units = _units(out, archs, chosen)
    tell = report or (lambda name, seconds: None)
    tasks = {task.kept: task for unit in units for task in unit.tasks}
    _lower_missing([task for task in tasks.values() if not task.kept.exists()], jobs, tell)
    lowered = {kept: Lowered.from_json(json.loads(kept.read_text())) for kept in tasks}
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    made: dict[str, list[Built]] = {arch: [] for arch in archs}
    missing = []
    for unit in units:
        source = "\n".join(lowered[task.kept].source for task in unit.tasks)
        digest = _digest(source, unit.arch, unit.flags, version)
        cubin = out / unit.arch / f"{unit.name}-{digest}.cubin"
        made[unit.arch] += [
            Built(task.kernel, lowered[task.kept].launch, cubin) for task in unit.tasks
        ]
        if not cubin.exists():
            missing.append((nvcc, unit, source, cubin))
    # The longest first, so that no job is left with one of them at the end.
    missing.sort(key=lambda item: len(item[2]), reverse=True)
    with ThreadPoolExecutor(jobs) as threads:
        for unit, seconds in threads.map(lambda item: _compile(*item), missing):
            tell(f"{unit.arch} {unit.name}, {len(unit.tasks)} kernels", seconds)
    for arch, built in made.items():
        text = json.dumps(_manifest(arch, built), indent=1)
        (out / arch / MANIFEST).write_text(text + "\n")
    return made


def _units(out: Path, archs: Sequence[str], chosen: Sequence[TileKernel]) -> list[_Unit]:
    """Kernels by architecture, module and flags, in the table's order; makes the folders.

    Kernels of a unit share the reading of headers. Products take nvcc much longer than that, so
    each is a unit of its own, for another job.
    """
    units: dict[tuple[str, ...], _Unit] = {}
    sources: dict[str, str] = {}
    version = importlib.metadata.version("tilelang")
    (out / "lowered").mkdir(parents=True, exist_ok=True)
    for arch in archs:
        (out / arch).mkdir(exist_ok=True)
        for kernel in chosen:
            if arch not in kernel.archs:
                continue
            op = find_op(kernel.op)
            module = op.factory.split(".")[0]
            if module not in sources:
                sources[module] = _source_text((f"decodegrid.kernels.tile.{module}", _LOWERING))
            lowered_for = arch if op.uses_tensor_cores else HOPPER
            digest = _digest(sources[module], op.factory, kernel.sizes, lowered_for, version)
            kept = out / "lowered" / f"{kernel.op}-{digest}.json"
            flags = (*NVCC_FLAGS, *op.flags)
            alone = kernel.name if op.uses_tensor_cores else ""
            key = (arch, module, alone, *flags)
            unit = units.setdefault(key, _Unit(module, arch, flags, []))
            unit.tasks.append(_Task(kernel, lowered_for, kept))
    return list(units.values())


def _source_text(modules: Iterable[str]) -> str:
    """Text of modules and of all modules of kernels/ that they import."""
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        spec = find_spec(module)
        if module in found or spec is None or spec.origin is None:
            continue
        found[module] = Path(spec.origin).read_text(encoding="utf-8")
        waiting += re.findall(r"^from (decodegrid\.kernels\.\S+) import", found[module], re.M)
    # The table has all kernels' sizes; those of this one are in its digest.
    found.pop("decodegrid.kernels.tile.table", None)
    return "".join(text for _, text in sorted(found.items()))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _lower_missing(tasks: Sequence[_Task], jobs: int, tell: Callable[[str, float], None]) -> None:
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            tell(task.kernel.name, _lower(task))
        return
    # A fresh process each: the compiler has threads, which a fork would lose.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as processes:
        for task, seconds in zip(tasks, processes.map(_lower, tasks), strict=True):
            tell(task.kernel.name, seconds)


def _lower(task: _Task) -> float:
    """Lower a kernel into its file; seconds."""
    from decodegrid.kernels.tile.lower import lower

    start = time.perf_counter()
    text = json.dumps(lower(task.kernel, task.arch).as_json())
    part = task.kept.with_suffix(".part")
    part.write_text(text)
    part.rename(task.kept)
    return time.perf_counter() - start


def _compile(nvcc: str, unit: _Unit, source: str, target: Path) -> tuple[_Unit, float]:
    """Compile a unit into `target`; the unit and seconds. Raises BuildError with nvcc's words."""
    spec = find_spec("tilelang")
    assert spec is not None and spec.origin is not None
    home = Path(spec.origin).parent
    start = time.perf_counter()
    text = target.with_suffix(".cu")
    text.write_text(source)
    made = target.with_suffix(".part")
    command = [
        nvcc, "-cubin", f"-arch={unit.arch}", *unit.flags, "-I", str(home / "src"), "-I",
        str(home / "3rdparty" / "cutlass" / "include"), str(text), "-o", str(made),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise BuildError(f"nvcc does not compile {text}:\n{run.stderr[:4000]}")
    made.rename(target)
    return unit, time.perf_counter() - start


def _manifest(arch: str, built: Sequence[Built]) -> dict[str, Any]:
    return {
        "arch": arch,
        "kernels": {
            item.kernel.name: {
                "op": item.kernel.op,
                "model": item.kernel.model,
                "sizes": item.kernel.sizes,
                "cubin": item.cubin.name,
                **item.launch.as_json(),
            }
            for item in built
        },
    }


def _print(name: str, seconds: float) -> None:
    print(f"{seconds:6.1f} s  {name}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 2 for what a user can mend."""
    parser = argparse.ArgumentParser(prog="python -m decodegrid.kernels.tile.build")
    parser.add_argument("--out", type=Path, default=Path("build/cubins"))
    parser.add_argument("--arch", choices=ARCHS, action="append", help="default: all")
    parser.add_argument("--op", action="append", help="only this op; may be repeated")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: %(default)s"
    )
    args = parser.parse_args(argv)
    chosen = [kernel for kernel in kernels() if not args.op or kernel.op in args.op]
    if not chosen:
        print(f"error: no kernel of {', '.join(args.op)}", file=sys.stderr)
        return 2
    if args.jobs < 1:
        print(f"error: --jobs {args.jobs}; at least 1 is needed", file=sys.stderr)
        return 2
    start = time.perf_counter()
    try:
        made = build(args.out, args.arch or ARCHS, chosen, jobs=args.jobs, report=_print)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for arch, built in made.items():
        size = sum(cubin.stat().st_size for cubin in {item.cubin for item in built})
        print(f"{arch}: {len(built)} kernels, {size / 2**20:.1f} MiB in {args.out / arch}")
    count = sum(map(len, made.values()))
    print(f"{count} kernels in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
