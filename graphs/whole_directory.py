"""A directory of files that is there whole or not at all.

Owns the hidden directory that files are written to before they take their place, and its removal:
at once after a failure, and by the next run to the same target after a process that was killed. A
lock on the hidden directory tells the two apart from a run that is going on.

Data flow: target that is absent or empty -> hidden directory, filled by the caller -> target.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PART = re.compile(r"\.part-[0-9a-f]{8}")


def check_target(source: Path, target: Path) -> Path:
    """The absolute target; ValueError unless files of `source` can be written to it anew."""
    # Not Path.resolve, which has an error of its own for a circle of links.
    target = Path(os.path.realpath(target))
    if target == Path(os.path.realpath(source)):
        raise ValueError(f"{target} is both source and target")
    if target.is_symlink():
        raise ValueError(f"{target} is a symbolic link that leads nowhere")
    if target.is_dir():
        if any(not _PART.fullmatch(path.name) for path in target.iterdir()):
            raise ValueError(f"{target} is not empty; a checkpoint is written to a new directory")
    elif target.exists():
        raise ValueError(f"{target} exists and is not a directory")
    elif not target.parent.is_dir():
        raise ValueError(f"there is no directory {target.parent} to write {target.name} in")
    return target


@contextmanager
def appears_whole(target: Path, last: str) -> Iterator[Path]:
    """A new directory that becomes `target` at the end, or is removed on failure.

    It is made beside an absent target and renamed. An existing empty one may be a mount point, or
    the only place where the user may write: the directory is then made in it, and its files are
    moved up, the one called `last` after the others. Raises ValueError where another run writes to
    `target`, and where a disk is full.
    """
    inside = target.is_dir()
    place, prefix = (target, "") if inside else (target.parent, f".{target.name}")
    _remove_leftovers(target, place, prefix)
    part = place / f"{prefix}.part-{secrets.token_hex(4)}"
    part.mkdir()
    lock = os.open(part, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: its leftovers stay
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield part
        if inside:
            _move_up(part, target, last)
        else:
            os.replace(part, target)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise ValueError(f"{target}: cannot be written: {error.strerror}") from None
        raise
    finally:
        os.close(lock)


def _move_up(part: Path, target: Path, last: str) -> None:
    if any(not _PART.fullmatch(path.name) for path in target.iterdir()):
        raise ValueError(f"{target} is no longer empty")
    for path in sorted(part.iterdir(), key=lambda path: path.name == last):
        os.replace(path, target / path.name)
    part.rmdir()


def _remove_leftovers(target: Path, place: Path, prefix: str) -> None:
    """Remove hidden directories of this target, and raise ValueError if its maker is at work."""
    for path in sorted(place.iterdir()):
        if not path.name.startswith(prefix) or not _PART.fullmatch(path.name[len(prefix) :]):
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # no directory of this module
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        except BlockingIOError:
            raise ValueError(f"{target} is being written by another process ({path})") from None
        except OSError:
            continue  # a file system without locks does not say whether it is in use
        finally:
            os.close(lock)
