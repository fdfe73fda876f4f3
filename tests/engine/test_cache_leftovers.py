"""What killed starts left in the cache directory goes after a day; nothing else goes."""

import os
from pathlib import Path

import pytest

from decodegrid.capture.binding import Binding
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.region_store import RegionStore, StoredRegion
from decodegrid.capture.surface import Surface, SurfacePoint
from decodegrid.capture.surface_store import SurfaceStore
from decodegrid.engine.cache_leftovers import MAX_AGE_S, remove_leftovers
from decodegrid.kernels import native

NOW = 2_000_000_000.0


class Killed(BaseException):
    """Stands for kill -9: nothing cleans up after it."""


def set_age(path: Path, seconds: float) -> None:
    os.utime(path, (NOW - seconds, NOW - seconds))


def everything(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@pytest.fixture
def die_before_renaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary name is ever renamed or removed."""

    def die(*args: object, **options: object) -> None:
        raise Killed

    monkeypatch.setattr(os, "replace", die)
    monkeypatch.setattr(Path, "unlink", die)


def test_every_kind_of_leftover(
    tmp_path: Path, die_before_renaming: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three writers themselves are killed, so that their names are the real ones."""

    work = set()

    def build(command: list[str]) -> None:
        work.add(Path(command[-1]).parent)
        Path(command[-1]).write_bytes(b"half")

    monkeypatch.setattr(native, "_run", build)
    with pytest.raises(Killed):
        native.build_library(tmp_path)
    point = SurfacePoint(1.0, 1.0, 1.0, 1)
    surface = Surface({GraphKey(1, 1): point}, 8, 1.0, {"a": "b"})
    with pytest.raises(Killed):
        SurfaceStore(tmp_path).save(surface)
    store = RegionStore(tmp_path, {"a": "b"})
    stored = StoredRegion("code", Binding((), (), (), ()), frozenset())
    with pytest.raises(Killed):
        store.save("attention", stored)
    region_part = store.path / f".attention-0.json.{'x' * 8}"
    region_part.write_text("half")
    monkeypatch.undo()
    (build_directory,) = work
    build_directory.mkdir(exist_ok=True)  # Python removed it, which a killed one cannot
    (build_directory / "half.o").write_bytes(b"half")

    leftovers = {path for path in (*tmp_path.iterdir(), *store.path.iterdir())} - {store.path}
    assert len(leftovers) == 4
    assert not native.library_path(tmp_path).exists()
    for path in leftovers:
        set_age(path, MAX_AGE_S - 60)
    assert remove_leftovers(tmp_path, NOW) == []
    for path in leftovers:
        set_age(path, MAX_AGE_S + 60)
    assert set(remove_leftovers(tmp_path, NOW)) == leftovers
    assert everything(tmp_path) == {store.path.name}


def test_other_names_stay(tmp_path: Path) -> None:
    regions = tmp_path / f"regions-{'0' * 16}"
    other = tmp_path / "regions-of-someone"
    files = [
        tmp_path / "kernels-0123456789abcdef.so",
        tmp_path / f"surface-{'0' * 24}.json",
        tmp_path / ".surface-of-mine.tmp",
        tmp_path / ".hidden",
        tmp_path / "tmp12345678" / "file",
        tmp_path / "kernels-build-x" / "file",
        tmp_path / "deep" / ".kernels-build-abc" / "file",
        regions / "manifest.json",
        regions / "attention-0.json",
        regions / ".attention-0.json",
        regions / ".notes.txt",
        other / ".attention-0.json.abcdefgh",
    ]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept")
    before = everything(tmp_path)
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        set_age(path, 10 * MAX_AGE_S)
    assert remove_leftovers(tmp_path, NOW) == []
    assert everything(tmp_path) == before


def test_a_link_is_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    cache = tmp_path / "cache"
    cache.mkdir()
    link = cache / ".kernels-build-abc"
    link.symlink_to(outside)
    os.utime(link, (0, 0), follow_symlinks=False)
    assert remove_leftovers(cache, NOW) == [link]
    assert (outside / "file").read_text() == "kept"


def test_a_directory_that_is_missing_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remove_leftovers(tmp_path / "missing", NOW) == []
    left = tmp_path / ".kernels-build-abc"
    left.mkdir()
    set_age(left, 2 * MAX_AGE_S)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Read-only file system", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    assert remove_leftovers(tmp_path, NOW) == []
    assert left.is_dir()
