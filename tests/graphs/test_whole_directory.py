"""Directories that appear whole: leftovers, runs that meet, links, places of every kind."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from decodegrid.configs.load import CONFIGS_DIR
from decodegrid.graphs.whole_directory import appears_whole, check_target

# Writes one file, says so, and waits to be killed.
PROGRAM = """
import sys, time
from pathlib import Path
from decodegrid.graphs.whole_directory import appears_whole

with appears_whole(Path(sys.argv[1]), last="z") as part:
    (part / "a").write_text("half")
    print("ready", flush=True)
    time.sleep(600)
"""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write(target: Path) -> None:
    with appears_whole(target, last="z") as part:
        for name in ("z", "a", "b"):
            (part / name).write_text(name)


@pytest.fixture
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A target that is absent, or with the parameter "empty" a directory."""
    (tmp_path / "place").mkdir()
    if getattr(request, "param", "absent") == "empty":
        (tmp_path / "place" / "t").mkdir()
    return tmp_path / "place" / "t"


@pytest.mark.parametrize("target", ["absent", "empty"], indirect=True)
def test_a_killed_run_leaves_what_the_next_one_removes(target: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(target)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=CONFIGS_DIR.parent,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        # While it runs, nobody else writes there, and nothing of it is taken away.
        with pytest.raises(ValueError, match="t is being written by another process"):
            write(check_target(target.parent.parent, target))
        hidden = [path for path in target.parent.rglob("*") if ".part-" in path.name]
        assert len(hidden) == 1 and names(hidden[0]) == ["a"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert hidden[0].is_dir()
    write(check_target(target.parent.parent, target))
    assert names(target) == ["a", "b", "z"]
    assert names(target.parent) == ["t"]


def test_leftovers_of_other_targets_and_other_names_stay(target: Path) -> None:
    place = target.parent
    for name in (".u.part-01234567", ".t.part-0123456", ".t.part-x1234567", ".part-01234567"):
        (place / name).mkdir()
    (place / ".t.part-01234567").write_text("a file")
    (place / ".t.part-76543210").symlink_to(place / ".u.part-01234567")
    before = names(place)
    write(target)
    assert names(place) == sorted([*before, "t"])


def test_an_empty_directory_is_filled_in_place(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a mount point or a working directory, so it must stay the same one."""
    target.mkdir()
    inode = target.stat().st_ino
    moved = []
    replace = os.replace

    def record(source: Path, destination: Path) -> None:
        moved.append(destination.name)
        replace(source, destination)

    monkeypatch.setattr(os, "replace", record)
    write(target)
    assert target.stat().st_ino == inode
    assert moved[-1] == "z" and sorted(moved) == names(target) == ["a", "b", "z"]
    assert names(target.parent) == ["t"]


def test_what_came_into_an_empty_directory_meanwhile_is_kept(target: Path) -> None:
    target.mkdir()
    with pytest.raises(ValueError, match=r"t is no longer empty"):  # noqa: SIM117
        with appears_whole(target, last="z") as part:
            (part / "a").write_text("ours")
            (target / "a").write_text("theirs")
    assert names(target) == ["a"] and (target / "a").read_text() == "theirs"


def test_a_full_disk_is_named_by_its_target(target: Path) -> None:
    message = rf"^{target}: cannot be written: No space left on device$"
    with pytest.raises(ValueError, match=message), appears_whole(target, last="z") as part:
        (part / "a").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as writes raise it, without a name
    assert not names(target.parent)


@pytest.mark.parametrize("target", ["absent", "empty"], indirect=True)
def test_a_file_system_without_locks(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    place = target if target.is_dir() else target.parent
    leftover = place / (".part-01234567" if target.is_dir() else ".t.part-01234567")
    leftover.mkdir()
    monkeypatch.setattr(fcntl, "flock", refuse)
    write(check_target(target.parent.parent, target))
    assert {"a", "b", "z"} <= set(names(target))
    assert leftover.is_dir(), "nobody can say whether it is in use"


def test_links(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    assert check_target(source, tmp_path / "link") == tmp_path / "real"
    assert check_target(source, source / "new") == source / "new"
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ValueError, match="circle is a symbolic link that leads nowhere"):
        check_target(source, tmp_path / "circle")
    (tmp_path / "same").symlink_to(source)
    with pytest.raises(ValueError, match="source is both source and target"):
        check_target(source, tmp_path / "same")
