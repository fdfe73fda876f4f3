"""Building the native library: places that refuse it, builds that fail, files that are damaged.

No compiler runs: the commands are stood in for.
"""

import os
from pathlib import Path

import pytest
import torch

from decodegrid.kernels import native
from decodegrid.kernels.native import (
    NativeBuildError,
    build_library,
    install_native_kernels,
    library_path,
    require_library,
)

ADVICE = "set compile.cache_dir to a directory that can be written"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The compiler's commands; each "makes" its file."""
    made: list[list[str]] = []

    def run(command: list[str]) -> None:
        made.append(command)
        Path(command[-1]).write_bytes(b"made")

    monkeypatch.setattr(native, "_run", run)
    return made


def test_a_place_that_cannot_be_made(tmp_path: Path, commands: list[list[str]]) -> None:
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    with pytest.raises(NativeBuildError) as caught:
        build_library(cache)
    wanted = f"{cache}: the native kernels cannot be built there (Not a directory); {ADVICE}"
    assert str(caught.value) == wanted
    assert commands == []


@pytest.mark.parametrize("function", ["mkdir", "replace"])
@pytest.mark.parametrize(
    ("number", "reason"), [(30, "Read-only file system"), (28, "No space left on device")]
)
def test_a_place_that_cannot_be_written(
    tmp_path: Path,
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    number: int,
    reason: str,
) -> None:
    """At the first write and at the last one; nothing half done stays behind."""

    def refuse(*args: object, **options: object) -> None:
        raise OSError(number, reason)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, refuse)
        with pytest.raises(NativeBuildError) as caught:
            build_library(tmp_path)
    wanted = f"{tmp_path}: the native kernels cannot be built there ({reason}); {ADVICE}"
    assert str(caught.value) == wanted
    assert list(tmp_path.iterdir()) == []
    assert build_library(tmp_path).read_bytes() == b"made"
    assert list(tmp_path.iterdir()) == [library_path(tmp_path)]


def test_a_library_that_is_there_needs_no_writing(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NativeBuildError, match=r"\(because\); set compile\.cache_dir"):
        require_library(tmp_path, "because")
    library_path(tmp_path).write_bytes(b"there")
    require_library(tmp_path, "because")
    monkeypatch.setattr(os, "mkdir", lambda *args: 1 / 0)
    assert build_library(tmp_path).read_bytes() == b"there"
    assert commands == []


def test_a_killed_build_leaves_no_library(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the last command is that runs, the library has no name before all have run."""

    class Killed(BaseException):
        pass

    num_commands = len(native.SOURCES) + 1
    for last in range(num_commands):
        seen: list[str] = []

        def run(command: list[str], last: int = last, seen: list[str] = seen) -> None:
            if len(seen) == last:
                raise Killed
            seen.append(command[-1])
            Path(command[-1]).write_bytes(b"half")

        with monkeypatch.context() as patch:
            patch.setattr(native, "_run", run)
            patch.setattr(native, "ThreadPoolExecutor", InOrder)
            with pytest.raises(Killed):
                build_library(tmp_path)
        assert not library_path(tmp_path).exists()
        assert all(native.LEFTOVER_PREFIX in name for name in seen)
    assert build_library(tmp_path).read_bytes() == b"made"


class InOrder:
    """An executor without threads."""

    def __init__(self, max_workers: int) -> None:
        self.map = map

    def __enter__(self) -> "InOrder":
        return self

    def __exit__(self, *args: object) -> None:
        return None


def test_a_damaged_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library_path(tmp_path)
    path.write_bytes(b"not a library")
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *args: False)
    with pytest.raises(NativeBuildError, match="remove it to have it built anew") as caught:
        install_native_kernels(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none_found)
    with pytest.raises(NativeBuildError, match=r"^no C\+\+ compiler: No working C\+\+ compiler"):
        build_library(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_what_a_full_disk_does_to_the_compiler(tmp_path: Path) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\necho 'x.o: No space left on device' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(NativeBuildError, match=r"compile\.cache_dir can be on another disk"):
        native._run([str(script), "-c"])


def test_the_error_is_one_that_the_command_line_reports() -> None:
    assert issubclass(NativeBuildError, ValueError)
