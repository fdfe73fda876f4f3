"""Removes what killed starts left half done in the cache directory, and in a package.

Owns the names of all temporary files there: native builds, files of a package and step-time
surfaces are each written under one of them and then renamed. A process that is killed in between
leaves the temporary name behind, which nothing ever reads. Touches no other name. What a killed
capture leaves beside its target, `decodegrid.capture.package_swap` removes.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from decodegrid.capture.package import FOLDERS

MAX_AGE_S = 86400.0
"""Younger ones may belong to a start that is running."""

# A directory of kernels.native, a file of capture.surface.
_TOP_LEVEL = re.compile(r"\.kernels-build-\w+|\.surface-[0-9a-f]{24}\.[0-9a-f]{32}\.tmp")
_REGIONS = re.compile(r"regions-[0-9a-f]{16}")
# A file of capture.region_store: its final name, and what tempfile adds.
_IN_PACKAGE = re.compile(r"\..+\.(json|so)\.\w{8}")
# In the folder of surfaces, and in a cache directory.
_IN_SURFACES = re.compile(r"\.surface-[0-9a-f]{24}\.[0-9a-f]{32}\.tmp")


def remove_leftovers(
    cache_dir: Path, now: float | None = None, package_dir: Path | None = None
) -> list[Path]:
    """Remove temporary files and directories that are older than a day; returns what was removed.

    now: seconds since 1970, None for the clock. package_dir: is searched too; None for none. What
    cannot be listed or removed stays: it does no harm, and a directory may be read-only.
    """
    limit = (time.time() if now is None else now) - MAX_AGE_S
    removed = []
    for path in (*_temporary(cache_dir), *(_in_package(package_dir) if package_dir else ())):
        try:
            if path.lstat().st_mtime >= limit:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError:
            continue
        removed.append(path)
    return removed


def _temporary(cache_dir: Path) -> Iterator[Path]:
    for path in _entries(cache_dir):
        if _TOP_LEVEL.fullmatch(path.name):
            yield path
        elif _REGIONS.fullmatch(path.name):
            yield from _in_package(path)


def _in_package(directory: Path) -> Iterator[Path]:
    for folder in (directory, *(directory / name for name in FOLDERS)):
        for path in _entries(folder):
            if _IN_PACKAGE.fullmatch(path.name) or _IN_SURFACES.fullmatch(path.name):
                yield path


def _entries(directory: Path) -> list[Path]:
    """Entries whose names leftovers or their directories can have, in order."""
    try:
        # torch keeps hundreds of directories here, and a start looks every time.
        names = sorted(name for name in os.listdir(directory) if name[0] in ".r")
    except OSError:
        return []
    return [directory / name for name in names]
