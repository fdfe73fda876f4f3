"""Where a profile is written to, as the command line says it.

Owns the checks of the targets, which come before a start-up of minutes, and the order of the files.
Data flow: options -> `ProfileTargets.check` -> ... -> `Profile` -> files.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from decodegrid.capture.profile_costs import costs_text
from decodegrid.capture.profile_csv import write_csv
from decodegrid.capture.profile_document import Profile, profile_text
from decodegrid.capture.report_libraries import require_report_libraries


@dataclass(frozen=True, slots=True)
class ProfileTargets:
    """Files and directories that are asked for; None where one is not."""

    json: Path | None = None
    csv: Path | None = None
    html: Path | None = None
    png: Path | None = None
    costs: Path | None = None
    trace: Path | None = None
    """Checked here and written by `decodegrid.engine.profile_trace`."""

    def check(self) -> None:
        """Raise ValueError where a target cannot be made, or a report has no library."""
        seen: dict[Path, tuple[str, bool]] = {}
        for name, path, is_directory in self._given():
            if is_directory:
                check_directory(name, path)
            else:
                check_file(name, path)
            other, shares = seen.setdefault(path.resolve(), (name, is_directory))
            if other != name and not (shares and is_directory):
                raise ValueError(f"{other} and {name} are both {path}; each needs its own file")
        if self.html is not None or self.png is not None:
            require_report_libraries()

    def write(self, profile: Profile) -> list[str]:
        """Write everything but the trace; one line of text for each file or directory.

        Raises OSError.
        """
        lines = []
        texts: list[tuple[Path | None, Callable[[Profile], str], str]] = [
            (self.json, profile_text, "profile"), (self.costs, costs_text, "costs of the pairs"),
        ]  # fmt: skip
        for path, make, what in texts:
            if path is not None:
                write_whole(path, make(profile))
                lines.append(f"{what}: {path}")
        if self.csv is not None:
            lines.append(f"tables: {len(write_csv(profile, self.csv))} files in {self.csv}")
        # Imported here: they draw with libraries that nothing else needs.
        if self.html is not None:
            from decodegrid.capture.report_page import write_report

            write_report(profile, self.html)
            lines.append(f"report: {self.html}")
        if self.png is not None:
            from decodegrid.capture.report_png import write_plots

            lines.append(f"plots: {len(write_plots(profile, self.png))} files in {self.png}")
        return lines

    def _given(self) -> Iterator[tuple[str, Path, bool]]:
        """(option, path, whether it is a directory) of those that are asked for."""
        for name, path, is_directory in (
            ("--json", self.json, False),
            ("--costs", self.costs, False),
            ("--html", self.html, False),
            ("--trace", self.trace, False),
            ("--csv", self.csv, True),
            ("--png", self.png, True),
        ):
            if path is not None:
                yield name, path, is_directory


def check_file(name: str, path: Path) -> None:
    """Raise ValueError where no file of that name can be made. name: the option, for messages."""
    if path.is_dir():
        raise ValueError(f"{name} is {path}, which is a directory; a file is needed")
    if not path.parent.is_dir():
        raise ValueError(f"{name} is {path}; there is no directory {path.parent}")
    _check_writable(name, path, path.parent)


def check_directory(name: str, path: Path) -> None:
    """Raise ValueError where no files can be made in that directory, which may be a new one."""
    if path.is_dir():
        _check_writable(name, path, path)
        return
    if path.exists() or path.is_symlink():
        raise ValueError(f"{name} is {path}, which is a file; a directory is needed")
    if not path.parent.is_dir():
        raise ValueError(f"{name} is {path}; there is no directory {path.parent}")
    _check_writable(name, path, path.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place, then put it there. Raises OSError."""
    part = path.parent / f".{path.name}.{uuid4().hex}.tmp"
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _check_writable(name: str, path: Path, directory: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"{name} is {path}; {directory} cannot be written to: {error.strerror}"
        ) from None
