"""A directory that takes another's place whole: what a reader sees is the old one or the new one.

Owns the directory in which a new one is filled, beside its place, and the exchange. Does not own
what is written. Data flow: `check_target` before anything slow -> `Staging.path` is filled ->
`Staging.publish`. A process that is killed leaves the old directory, or the new one, and a hidden
directory beside it, which a later one removes.
"""

import ctypes
import errno
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from decodegrid.capture.package import FOLDERS, MANIFEST, PackageError
from decodegrid.capture.region_store import directory_lock

MAX_AGE_S = 86400.0
"""Younger leftovers may belong to a process that is running."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.ENOTSUP)


def check_target(target: Path) -> None:
    """Refuse a place that a package must not take.

    Raises:
        PackageError: it is a file, or a directory with something else in it.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise PackageError(f"{target} is a file; a package is a directory")
    try:
        names = sorted(os.listdir(target))
    except OSError as error:
        raise PackageError(f"cannot read {target}: {error.strerror}") from error
    foreign = [name for name in names if name not in FOLDERS and not name.endswith(".json")]
    if foreign or (names and MANIFEST not in names):
        raise PackageError(
            f"{target} has {(foreign or names)[0]!r} in it and is no package; a package takes the "
            "place of the whole directory"
        )


class Staging:
    """A directory beside `target` that becomes it; as a context manager it is removed where it was
    not published.

    Raises:
        PackageError: nothing can be written there.
    """

    def __init__(self, target: Path) -> None:
        check_target(target)
        self.target = target.resolve()
        parent = self.target.parent
        prefix = f".{self.target.name}.capture-"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_old(parent, prefix)
            self.path = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
            self.path.chmod(0o755)
        except OSError as error:
            raise self.failure(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def failure(self, error: OSError) -> PackageError:
        """What to say of an error while the directory is made or filled."""
        return PackageError(f"cannot write the package {self.target}: {error.strerror or error}")

    def publish(self) -> None:
        """Put the directory in its place; what stood there goes.

        Raises:
            PackageError: it cannot be done, or the place was taken by something else; the old
                directory stays.
        """
        try:
            with directory_lock(self.target.parent):
                check_target(self.target)
                if self.target.exists():
                    _exchange(self.path, self.target)
                else:
                    os.rename(self.path, self.target)
        except OSError as error:
            raise self.failure(error) from error


def _exchange(new: Path, old: Path) -> None:
    """Give two directories each other's name, in one step where the system can."""
    library = ctypes.CDLL(None, use_errno=True)
    rename = getattr(library, "renameat2", None)
    code = errno.ENOSYS
    if rename is not None:
        names = os.fsencode(new), os.fsencode(old)
        if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
    if code not in _NO_EXCHANGE:
        raise OSError(code, os.strerror(code), str(old))
    _exchange_by_steps(new, old)


def _exchange_by_steps(new: Path, old: Path) -> None:
    aside = new.with_name(f"{new.name}.old")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
    os.rename(aside, new)


def _remove_old(parent: Path, prefix: str) -> None:
    """Remove what killed processes left for the same target."""
    for path in parent.iterdir():
        try:
            is_old = path.name.startswith(prefix) and (
                time.time() - path.lstat().st_mtime > MAX_AGE_S
            )
            if is_old and not path.is_symlink():
                shutil.rmtree(path)
        except OSError:
            continue  # it does no harm
