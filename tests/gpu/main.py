"""What only a GPU can prove, part by part, and one table: see run.sh.

Owns the order of the parts and the time that each may take. A part that fails leaves its line in
the table and the next one begins; the exit status says whether any failed.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import Device, Target, probe_all, read_device
from tests.gpu.figures import Budget, Row, format_table
from tests.gpu.travel import ROOT, describe

FOLDERS = {Target.SM90: "sm_90a", Target.SM100: "sm_100a"}
Part = Callable[[], Iterator[Row]]


def skip_reason(device: Device) -> str:
    """Why nothing can run here; "" if it can."""
    if not device.is_usable:
        return device.words
    if device.target not in FOLDERS:
        return f"{device.words}: kernels are built for Hopper and Blackwell"
    return ""


def facts(device: Device, travels: str) -> Iterator[Row]:
    """Machine and versions, for the README's table."""
    yield Row("travels", travels)
    yield Row("device", device.words)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    yield Row("versions", versions, f"Python {platform.python_version()}")
    yield Row("date", time.strftime("%Y-%m-%d"))
    for probe in probe_all(PACKAGES, device):
        words = "ready" if probe.is_ready else probe.reason
        yield Row(f"library {probe.package.name}", words, probe.version or "")


def run_part(name: str, part: Part) -> list[Row]:
    """The rows of a part; an error that it raises is one more row, a failure."""
    rows = []
    try:
        for row in part():
            print(f"  {row.what}: {row.result} {row.note}", flush=True)
            rows.append(row)
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        rows.append(Row(name, "FAILED", f"{type(error).__name__}: {lines[0]}"))
    return rows


def run_parts(
    parts: Sequence[tuple[str, float, Part]], budget: Budget, clock: Callable[[], float]
) -> list[Row]:
    """All parts in order; one for which too little time is left is "not run"."""
    rows = []
    for name, needed, part in parts:
        if not budget.allows(clock(), needed):
            rows.append(Row(name, "not run", f"{budget.left(clock()):.0f} s left of the run"))
            continue
        began = clock()
        print(f"{name} ...", flush=True)
        rows += run_part(name, part)
        rows.append(Row(f"{name}, time", f"{clock() - began:.0f} s"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 all right or no GPU, 1 something failed, 2 bad arguments."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", allow_abbrev=False)
    parser.add_argument("--cubins", type=Path, default=Path("build/cubins"), metavar="DIR")
    parser.add_argument("--seconds", type=float, default=450.0, metavar="S")
    args = parser.parse_args(argv)
    budget, clock = Budget(args.seconds, time.monotonic()), time.monotonic
    device = read_device("cuda")
    reason = skip_reason(device)
    if reason:
        print(f"skipped: {reason}")
        return 0
    folder = args.cubins / FOLDERS[device.target]
    if not (folder / "manifest.json").is_file():
        print(f"error: no cubins in {folder}: python -m decodegrid.kernels.tile.build")
        return 2
    try:
        travels = describe(ROOT, args.cubins)
    except ValueError as error:
        print(f"error: {error}")
        return 2
    # Imported here: nothing below is of use without a card.
    from tests.gpu.measure import Bench

    bench = Bench(device, folder)
    parts = [
        ("facts", 1.0, lambda: facts(device, travels)),
        ("values", 60.0, bench.values),
        ("tiny step", 60.0, bench.tiny_step),
        ("released step", 120.0, bench.released_step),
        ("kernel times", 30.0, bench.kernel_times),
    ]
    rows = run_parts(parts, budget, clock)
    print()
    print(format_table(rows))
    return 1 if any(row.is_failure for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
