"""What goes to a machine with a GPU, and how large it is: files of the repository, and cubins.

Owns the list. The wheels of torch are the machine's own. Standard library alone, so that it runs
where nothing is installed: `python -m tests.gpu.travel` prints the size and says whether it fits.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 40 * 10**6
SOURCES = (
    "decodegrid/*.py", "configs/*.py", "kernels/**/*.py", "kernels/providers/*.json",
    "graphs/*.py", "capture/*.py", "tests/gpu/*.py", "tests/gpu/run.sh",
    "configs/tiny-v41/config.json", "tests/released_config.json",
)  # fmt: skip
"""Patterns of files, below the repository's root."""
CUBINS = ("*/manifest.json", "*/*.cubin")
"""Below the folder of cubins; sources and PTX stay where they were built."""


def files_to_carry(root: Path) -> list[Path]:
    """The repository's files that a run needs, sorted.

    Raises ValueError for a pattern that finds none: the list would be out of date.
    """
    found: set[Path] = set()
    for pattern in SOURCES:
        matches = [path for path in root.glob(pattern) if path.is_file()]
        if not matches:
            raise ValueError(f"nothing in {root} is {pattern}, which a run on a GPU needs")
        found.update(matches)
    return sorted(found)


def cubins_to_carry(folder: Path) -> list[Path]:
    """Manifests and cubins of all architectures, sorted; none where there is no such folder."""
    return sorted(path for pattern in CUBINS for path in folder.glob(pattern))


def size_of(files: Sequence[Path]) -> int:
    """Bytes."""
    return sum(path.stat().st_size for path in files)


def check_size(sources: int, cubins: int, limit: int = LIMIT_BYTES) -> str:
    """One line about the size. Raises ValueError where it is over the limit."""
    words = f"{sources / 1e6:.1f} MB of sources and {cubins / 1e6:.1f} MB of cubins"
    if sources + cubins > limit:
        raise ValueError(f"what travels is {words}; the limit is {limit / 1e6:.0f} MB")
    return f"{words} of {limit / 1e6:.0f} MB"


def describe(root: Path, folder: Path) -> str:
    """The line for a repository and a folder of cubins. Raises ValueError as the others do."""
    return check_size(size_of(files_to_carry(root)), size_of(cubins_to_carry(folder)))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 it fits, 2 it does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.travel", allow_abbrev=False)
    parser.add_argument("--cubins", type=Path, default=Path("build/cubins"), metavar="DIR")
    args = parser.parse_args(argv)
    try:
        print(f"travels: {describe(ROOT, args.cubins)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
