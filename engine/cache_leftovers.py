"""Removes what killed starts left half done in the cache directory.

Owns the names of all temporary files there: native builds, regions and step-time surfaces are each
written under one of them and then renamed. A process that is killed in between leaves the temporary
name behind, which nothing ever reads. Touches no other name.
"""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

MAX_AGE_S = 86400.0
"""Younger ones may belong to a start that is running."""

# A directory of kernels.native, a file of capture.surface.
_TOP_LEVEL = re.compile(r"\.kernels-build-\w+|\.surface-[0-9a-f]{24}\.[0-9a-f]{32}\.tmp")
_REGIONS = re.compile(r"regions-[0-9a-f]{16}")
# A file of capture.region_store: its final name, and what tempfile adds.
_IN_REGIONS = re.compile(r"\.(manifest|.+-\d+)\.json\.\w{8}")


def remove_leftovers(cache_dir: Path, now: float | None = None) -> list[Path]:
    """Remove temporary files and directories that are older than a day; returns what was removed.

    now: seconds since 1970, None for the clock. What cannot be listed or removed stays: it does no
    harm, and a cache directory may be read-only.
    """
    limit = (time.time() if now is None else now) - MAX_AGE_S
    removed = []
    for path in _temporary(cache_dir):
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
            yield from (item for item in _entries(path) if _IN_REGIONS.fullmatch(item.name))


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
