"""What killed starts left in the cache directory goes after a day; nothing else goes."""

import os
from pathlib import Path

import pytest

from decodegrid.capture.binding import Binding
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.package import PackageLabel, seal_package
from decodegrid.capture.region_store import RegionStore, StoredRegion, write_file
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
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("package")


@pytest.fixture
def die_before_renaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary name is ever renamed or removed."""

    def die(*args: object, **options: object) -> None:
        raise Killed

    monkeypatch.setattr(os, "replace", die)
    monkeypatch.setattr(Path, "unlink", die)


def test_every_kind_of_leftover(
    tmp_path: Path,
    package: Path,
    die_before_renaming: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writers themselves are killed, so that their names are the real ones."""

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
    with pytest.raises(Killed):
        write_file(store.path / "kernels" / f"{'0' * 64}.so", b"half")
    with pytest.raises(Killed):
        seal_package(store.path, PackageLabel({}, [], [], [], {}))
    with pytest.raises(Killed):
        SurfaceStore(package / "surfaces").save(surface)
    monkeypatch.undo()
    (build_directory,) = work
    build_directory.mkdir(exist_ok=True)  # Python removed it, which a killed one cannot
    (build_directory / "half.o").write_bytes(b"half")

    folders = {store.path, store.path / "regions", store.path / "kernels"}
    leftovers = {
        *tmp_path.iterdir(), *(path for folder in folders for path in folder.iterdir()),
        *(package / "surfaces").iterdir(),
    } - folders  # fmt: skip
    assert len(leftovers) == 6
    assert not native.library_path(tmp_path).exists()
    for path in leftovers:
        set_age(path, MAX_AGE_S - 60)
    assert remove_leftovers(tmp_path, NOW, package) == []
    for path in leftovers:
        set_age(path, MAX_AGE_S + 60)
    assert set(remove_leftovers(tmp_path, NOW, package)) == leftovers
    name = store.path.name
    assert everything(tmp_path) == {name, f"{name}/regions", f"{name}/kernels"}
    assert everything(package) == {"surfaces"}


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
        regions / "regions" / "attention-0.json",
        regions / "regions" / ".attention-0.json",
        regions / "deep" / ".attention-0.json.abcdefgh",
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
