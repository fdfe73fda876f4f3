"""Builds the tile kernels to cubins, without a GPU: python -m decodegrid.kernels.tile.build

Owns the folder of cubins and its manifest. A cubin is kept under the hash of its source and flags,
so that a second build compiles nothing; the manifest says, for each kernel, where its cubin is and
how to launch it (grid, block, shared memory, argument order), which is all that a machine without
TileLang needs. PTX is kept beside a cubin where it is asked for: it shows which instructions the
products use.

Data flow: table -> `lower` -> nvcc -> OUT/ARCH/*.cubin and OUT/ARCH/manifest.json.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodegrid.kernels.tile.table import ARCHS, TileKernel, find_op, kernels

if TYPE_CHECKING:
    from decodegrid.kernels.tile.lower import Lowered

MANIFEST = "manifest.json"
NVCC_FLAGS = ("-O3", "-std=c++20", "--expt-relaxed-constexpr", "-w")


class BuildError(Exception):
    """What is missing or does not compile; its text is for the user."""


@dataclass(frozen=True, slots=True)
class Built:
    """One kernel of the manifest."""

    kernel: TileKernel
    lowered: "Lowered"
    cubin: Path
    is_new: bool
    seconds: float


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
    arch: str,
    chosen: Sequence[TileKernel],
    *,
    keep_ptx: bool = False,
    report: Callable[[Built], None] | None = None,
) -> list[Built]:
    """Build kernels for one architecture into out/arch and write its manifest.

    Raises BuildError where a tool is missing or a kernel does not compile.
    """
    nvcc = require_tools()
    from decodegrid.kernels.tile.lower import lower

    folder = out / arch
    folder.mkdir(parents=True, exist_ok=True)
    built = []
    for kernel in chosen:
        if arch not in kernel.archs:
            continue
        start = time.perf_counter()
        lowered = lower(kernel, arch)
        flags = (*NVCC_FLAGS, *find_op(kernel.op).flags)
        digest = hashlib.sha256(repr((lowered.source, arch, flags)).encode()).hexdigest()[:20]
        cubin = folder / f"{kernel.op}-{digest}.cubin"
        forms = [("-cubin", cubin)]
        if keep_ptx:
            forms.append(("-ptx", cubin.with_suffix(".ptx")))
        missing = [form for form in forms if not form[1].exists()]
        for option, target in missing:
            _compile(nvcc, kernel.name, lowered.source, (option, f"-arch={arch}", *flags), target)
        entry = Built(kernel, lowered, cubin, bool(missing), time.perf_counter() - start)
        built.append(entry)
        if report is not None:
            report(entry)
    text = json.dumps(_manifest(arch, built), indent=1)
    (folder / MANIFEST).write_text(text + "\n")
    return built


def _compile(nvcc: str, name: str, source: str, options: Sequence[str], target: Path) -> None:
    import tilelang

    home = Path(tilelang.__file__).parent
    text = target.with_suffix(".cu")
    text.write_text(source)
    made = target.with_suffix(target.suffix + ".part")
    command = [
        nvcc, *options, "-I", str(home / "src"), "-I",
        str(home / "3rdparty" / "cutlass" / "include"), str(text), "-o", str(made),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise BuildError(f"nvcc does not compile {name}:\n{run.stderr[:4000]}")
    made.rename(target)


def _manifest(arch: str, built: Sequence[Built]) -> dict[str, Any]:
    return {
        "arch": arch,
        "kernels": {
            item.kernel.name: {
                "op": item.kernel.op,
                "model": item.kernel.model,
                "sizes": item.kernel.sizes,
                "cubin": item.cubin.name,
                **item.lowered.launch.as_json(),
            }
            for item in built
        },
    }


def _print(item: Built) -> None:
    state = f"{item.seconds:5.1f} s" if item.is_new else "   kept"
    print(f"{state}  {item.cubin.stat().st_size:7d} B  {item.kernel.name}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 2 for what a user can mend."""
    parser = argparse.ArgumentParser(prog="python -m decodegrid.kernels.tile.build")
    parser.add_argument("--out", type=Path, default=Path("build/cubins"))
    parser.add_argument("--arch", choices=ARCHS, action="append", help="default: all")
    parser.add_argument("--op", action="append", help="only this op; may be repeated")
    parser.add_argument("--ptx", action="store_true", help="keep the PTX beside each cubin")
    args = parser.parse_args(argv)
    chosen = [
        kernel for kernel in kernels() if kernel.archs and (not args.op or kernel.op in args.op)
    ]
    if not chosen:
        print(f"error: no kernel of {', '.join(args.op)}", file=sys.stderr)
        return 2
    try:
        for arch in args.arch or ARCHS:
            print(arch)
            built = build(args.out, arch, chosen, keep_ptx=args.ptx, report=_print)
            size = sum(item.cubin.stat().st_size for item in built)
            print(f"{len(built)} kernels, {size / 2**20:.1f} MiB in {args.out / arch}")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
