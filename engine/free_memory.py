"""How much memory a device could still give: the host's, bounded by its control group, or a GPU's.

Owns the reading of /proc/meminfo and of the memory controllers of control groups, version 1 and 2.
Data flow: device -> bytes, at the moment of the call.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: str) -> int:
    """Bytes that are free on "cpu" or "cuda". Raises ValueError where the system does not say."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return int(free)
    return free_host_bytes()


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """MemAvailable, or what the limits of this process's control groups leave if that is less.

    proc, cgroups: where the kernel shows itself. Raises ValueError without a MemAvailable line.
    """
    available = _mem_available(proc / "meminfo")
    return max(0, min([available, *_cgroup_rooms(proc / "self" / "cgroup", cgroups)]))


def _mem_available(path: Path) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise ValueError(f"{path}: {what}; free memory is unknown") from None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ValueError(f"{path}: no MemAvailable line; free memory is unknown")


def _cgroup_rooms(membership: Path, root: Path) -> Iterator[int]:
    """Limit less use of every memory controller above this process."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # a kernel without control groups limits nothing
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = ("memory.max", "memory.current", "inactive_file")
            yield from _rooms_upwards(root, path, files)
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _rooms_upwards(root / "memory", path, files)


def _rooms_upwards(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Of a group and all groups around it; inside a container the own group is the root."""
    limit_name, use_name, cache_name = names
    group = PurePosixPath(path.lstrip("/"))
    for part in (group, *group.parents):
        directory = root / part
        limit, use = _number(directory / limit_name), _number(directory / use_name)
        if limit is None or use is None:
            continue
        # Pages of files that nobody has mapped are given back before the limit bites.
        yield limit - use + _stat(directory / "memory.stat", cache_name)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file, or it says "max"."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
