"""A package: every file is listed and checked, and one directory takes another's place whole."""

import contextlib
import errno
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from decodegrid.capture import package_swap
from decodegrid.capture.binding import Binding
from decodegrid.capture.code_paths import without_directories
from decodegrid.capture.package import (
    DamagedManifestError,
    PackageError,
    PackageLabel,
    checked_file,
    fact_differences,
    package_files,
    read_manifest,
    seal_package,
)
from decodegrid.capture.package_swap import MAX_AGE_S, Staging, check_target
from decodegrid.capture.region_store import RegionStore, StoredRegion, write_file

FACTS = {"torch": "1", "model": "abc"}


def label(**changes: str) -> PackageLabel:
    return PackageLabel({**FACTS, **changes}, [(1, 1), (2, 12)], (16,), ["fused"], {"torch": "1"})


def fill(path: Path, word: str = "x") -> None:
    """A package of one region, whose kernel is no real one."""
    library = path.parent / f"{word}.so"
    library.write_bytes(f"library {word}".encode())
    stored = StoredRegion(
        "code", Binding((), (), (), ()), frozenset(), "call = print", {"kernel": library}
    )
    RegionStore(path.parent, FACTS, path).save("embed", stored)
    write_file(path / "ledger.json", f'"{word}"'.encode())
    library.unlink()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "package"
    fill(path)
    seal_package(path, label())
    return path


def test_the_manifest_lists_every_file(package: Path) -> None:
    manifest = read_manifest(package)
    assert manifest.facts == FACTS and manifest.pairs == [[1, 1], [2, 12]]
    there = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert {entry.name for entry in manifest.files} == there
    assert len(there) == 3 and "ledger.json" in there
    for entry in manifest.files:
        place = checked_file(package, manifest, entry.name)
        assert place.stat().st_size == entry.bytes


@pytest.mark.parametrize("how", ["truncate", "same length", "missing", "unlisted"])
def test_a_file_that_is_not_what_was_written(package: Path, how: str) -> None:
    manifest = read_manifest(package)
    path = package / "ledger.json"
    name = path.name
    if how == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "same length":
        path.write_bytes(b'"y"')
    elif how == "missing":
        path.unlink()
    else:
        name = "other.json"
        (package / name).write_text("1")
    with pytest.raises(PackageError, match=name):
        checked_file(package, manifest, name)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_cut_manifest_is_not_trusted(package: Path, share: float) -> None:
    path = package / "manifest.json"
    text = path.read_text()
    path.write_text(text[: int(len(text) * share)])
    with pytest.raises(DamagedManifestError, match=r"manifest\.json is damaged"):
        read_manifest(package)


def test_a_changed_manifest_is_not_trusted(package: Path) -> None:
    path = package / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"torch": "1"', '"torch": "2"', 1))
    assert path.read_text() != text
    with pytest.raises(DamagedManifestError, match="checksum"):
        read_manifest(package)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DamagedManifestError):
        read_manifest(package)


def test_what_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="there is no such directory"):
        read_manifest(tmp_path / "missing")
    with pytest.raises(PackageError, match=r"it has no manifest\.json"):
        read_manifest(tmp_path)


def test_differences_name_both_values() -> None:
    theirs, ours = {"torch": "1", "old": "x", "same": "s"}, {"torch": "2", "same": "s"}
    assert fact_differences(theirs, ours) == {
        "old": "old is x there, (absent) here",
        "torch": "torch is 1 there, 2 here",
    }


def test_libraries_that_no_region_needs_go(package: Path) -> None:
    (old,) = (package / "kernels").iterdir()
    for path in (package / "regions").iterdir():
        path.unlink()
    fill(package, "y")
    manifest = seal_package(package, label())
    assert not old.exists()
    assert len(manifest.names("kernels")) == 1
    assert {path.name for path in package_files(package)} >= {"ledger.json"}


def test_directories_are_written_over_in_place() -> None:
    content = b"\0/home/me/cache/22/a.cpp\0/home/me/cache\0/home/meadow/x\0/home/me/y\0text"
    found = without_directories(content, ["/home/me/cache", "/home/me", "/"])
    assert len(found) == len(content)
    assert b"/home/me/" not in found and b"cache" not in found
    assert b"/22/a.cpp\0" in found and b"\0/home/meadow/x\0" in found and found.endswith(b"text")


def test_a_new_package_takes_the_place_of_the_old_one(package: Path) -> None:
    with Staging(package) as staging:
        fill(staging.path, "new")
        seal_package(staging.path, label())
        assert (package / "ledger.json").read_text() == '"x"'
        staging.publish()
    assert (package / "ledger.json").read_text() == '"new"'
    assert [path.name for path in package.parent.iterdir()] == [package.name]
    assert package.stat().st_mode & 0o777 == 0o755


def test_without_an_exchange_of_the_system(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_swap.ctypes, "get_errno", lambda: errno.EINVAL)
    monkeypatch.setattr(package_swap, "_RENAME_EXCHANGE", 1 << 30)  # no such flag
    with Staging(package) as staging:
        fill(staging.path, "new")
        seal_package(staging.path, label())
        staging.publish()
    assert (package / "ledger.json").read_text() == '"new"'
    assert [path.name for path in package.parent.iterdir()] == [package.name]


def test_a_failure_on_the_way_leaves_the_old_one(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}

    def full(new: Path, old: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(old))

    monkeypatch.setattr(package_swap, "_exchange", full)
    with pytest.raises(PackageError, match=r"cannot write the package .*: No space left"):  # noqa: SIM117
        with Staging(package) as staging:
            fill(staging.path, "new")
            staging.publish()
    assert {path: path.read_bytes() for path in package.rglob("*") if path.is_file()} == before
    assert [path.name for path in package.parent.iterdir()] == [package.name]


def test_places_that_are_no_package_stay(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(PackageError, match="is a file"):
        check_target(tmp_path / "file")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("kept")
    with pytest.raises(PackageError, match=r"has 'notes\.txt' in it and is no package"):
        Staging(tmp_path / "work")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.json").write_text("kept")
    with pytest.raises(PackageError, match=r"has 'data\.json' in it and is no package"):
        Staging(tmp_path / "data")
    with pytest.raises(PackageError, match=r"cannot write the package .*File exists"):
        Staging(tmp_path / "file" / "package")
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    check_target(tmp_path / "missing")


def test_leftovers_of_the_same_target_go_after_a_day(package: Path) -> None:
    names = [f".{package.name}.capture-old", f".{package.name}.capture-new", ".other.capture-old"]
    for name in names:
        (package.parent / name).mkdir()
        (package.parent / name / "file").write_text("x")
    for name in (names[0], names[2]):
        when = time.time() - MAX_AGE_S - 60
        os.utime(package.parent / name, (when, when))
    with Staging(package):
        pass
    assert {path.name for path in package.parent.iterdir()} == {package.name, *names[1:]}


def _capture(target: Path, word: str, rounds: int, is_enough: Any = None) -> None:
    """At least so many times, and until is_enough is set; without it, until it is killed."""
    for number in count():
        if number >= rounds and is_enough is not None and is_enough.is_set():
            return
        with Staging(target) as staging:
            fill(staging.path, word)
            seal_package(staging.path, label(word=word))
            staging.publish()


@pytest.fixture
def context() -> Any:
    return multiprocessing.get_context("fork")


@pytest.fixture
def start(context: Any) -> Iterator[Callable[..., Any]]:
    """start(target, word, ...): a process that captures; none outlives the test."""
    started: list[Any] = []

    def run(*args: object) -> Any:
        started.append(context.Process(target=_capture, args=args))
        started[-1].start()
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.join()


def test_captures_at_once_leave_one_whole_package(
    tmp_path: Path, start: Callable, context: Any
) -> None:
    """They are read meanwhile, and go on until one of each was: a busy machine may take turns."""
    target, is_enough = tmp_path / "package", context.Event()
    processes = [start(target, word, 25, is_enough) for word in ("a", "b")]
    seen = set()
    while any(process.is_alive() for process in processes):
        with contextlib.suppress(PackageError):  # not there yet
            seen.add(read_manifest(target).facts["word"])
        if len(seen) == 2 or not all(process.is_alive() for process in processes):
            is_enough.set()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    manifest = read_manifest(target)
    assert json.loads((target / "ledger.json").read_text()) == manifest.facts["word"]
    for entry in manifest.files:
        checked_file(target, manifest, entry.name)
    assert seen == {"a", "b"} and [path.name for path in tmp_path.iterdir()] == [target.name]


@pytest.mark.parametrize("seconds", [0.002, 0.01, 0.03, 0.08])
def test_a_killed_capture_leaves_a_whole_package(
    package: Path, start: Callable, seconds: float
) -> None:
    process = start(package, "new", 0)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    manifest = read_manifest(package)
    word = manifest.facts.get("word", "x")
    assert json.loads((package / "ledger.json").read_text()) == word
    for entry in manifest.files:
        checked_file(package, manifest, entry.name)
