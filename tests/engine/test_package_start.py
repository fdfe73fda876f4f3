"""What a start says of a package that does not fit, and of what the cache directory has."""

import logging
import shutil
from pathlib import Path

import pytest

from decodegrid.capture.binding import Binding
from decodegrid.capture.package import PackageError, PackageLabel, read_manifest, seal_package
from decodegrid.capture.region_store import RegionStore, StoredRegion
from decodegrid.engine.package_start import StartSource, check_named_package, open_source
from decodegrid.engine.region_facts import PROGRAM_FACTS, program_facts
from decodegrid.kernels import native

FACTS = {
    "code": "c0de", "torch": "2.1", "cpu": "AVX2", "model": "abc", "dtype": "torch.float32",
    "device": "cpu", "threads": "1", "capacity.num_draft_tokens": "5",
}  # fmt: skip


def label(facts: dict[str, str]) -> PackageLabel:
    return PackageLabel(facts, [(1, 1)], (16,), ["fused"], {})


def keep(store: RegionStore) -> None:
    """A region without kernels."""
    stored = StoredRegion("code", Binding((), (), (), ()), frozenset(), "call = print")
    store.save("embed", stored)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, cache: Path) -> Path:
    path = tmp_path / "package"
    keep(RegionStore(cache, FACTS, path))
    seal_package(path, label(FACTS))
    return path


def test_a_package_that_fits_is_used(package: Path, cache: Path) -> None:
    source = open_source(package, cache, FACTS)
    assert source.is_package and source.path == package and source.notes == []
    assert len(source.store.load("embed", 1)) == 1
    source.finish(label(FACTS))
    assert source.notes == [] and not cache.exists()


@pytest.mark.parametrize("name", ["model", "dtype", "threads", "capacity.num_draft_tokens"])
def test_another_deployment_is_an_error_that_names_both_values(
    package: Path, cache: Path, name: str
) -> None:
    facts = {**FACTS, name: "other", "torch": "2.2"}
    with pytest.raises(PackageError) as caught:
        open_source(package, cache, facts)
    message = f"package {package} is of another deployment: {name} is {FACTS[name]} there, other"
    assert str(caught.value) == f"{message} here"
    early = {key: facts[key] for key in ("model", "dtype", "device", "threads")}
    if name in early:
        with pytest.raises(PackageError, match=f"{name} is .* there, other here"):
            check_named_package(package, early)
    else:
        check_named_package(package, early)


@pytest.mark.parametrize("name", ["torch", "code", "cpu"])
def test_another_program_or_processor_is_said_and_not_trusted(
    package: Path, cache: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    facts = {**FACTS, name: "other"}
    source = open_source(package, cache, facts)
    assert not source.is_package and source.store.load("embed", 1) == []
    assert source.path.parent == cache
    line = f"package {package} is not used: {name} is {FACTS[name]} there, other here"
    assert source.notes == [f"{line}; compiled for this one instead"]
    assert [record.message for record in caplog.records] == source.notes
    assert caplog.records[0].levelno == logging.WARNING
    keep(source.store)
    source.finish(label(facts))
    assert read_manifest(package).facts == FACTS, "the package is for another machine"
    assert read_manifest(source.path).facts == facts


def test_all_that_this_machine_decides_is_called_a_fact_of_the_program() -> None:
    assert set(program_facts()) == set(PROGRAM_FACTS)
    assert all(program_facts().values())


def test_what_is_no_package_is_an_error(tmp_path: Path, cache: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        for call in (
            lambda path=path: open_source(path, cache, FACTS),
            lambda path=path: check_named_package(path, FACTS),
        ):
            with pytest.raises(PackageError, match="is no package"):
                call()


def test_a_first_start_names_what_the_closest_regions_differ_in(cache: Path) -> None:
    for facts in ({**FACTS, "torch": "1.9", "cpu": "none"}, {**FACTS, "torch": "2.0"}):
        source = open_source(None, cache, facts)
        keep(source.store)
        source.finish(label(facts))
    source = open_source(None, cache, FACTS)
    assert len(source.notes) == 1
    assert source.notes[0].endswith("differs: torch is 2.0 there, 2.1 here")
    keep(source.store)
    source.finish(label(FACTS))
    again = open_source(None, cache, FACTS)
    assert again.notes == [] and again.manifest is not None and again.path == source.path


def test_a_cache_entry_without_a_manifest_gets_one(cache: Path) -> None:
    """As a start leaves it that was killed before it was ready."""
    keep(RegionStore(cache, FACTS))
    source = open_source(None, cache, FACTS)
    assert source.notes == [] and len(source.store.load("embed", 1)) == 1
    source.finish(label(FACTS))
    assert read_manifest(source.path).facts == FACTS


def test_a_directory_that_cannot_be_written_is_noted(
    package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(package, cache, FACTS)
    source.needs_seal = True

    def refuse(*args: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("decodegrid.engine.package_start.seal_package", refuse)
    monkeypatch.setattr("decodegrid.engine.package_start.write_file", refuse)
    source.finish(label(FACTS))
    assert len(source.notes) == 1 and "not completed ([Errno 30]" in source.notes[0]


class TestNativeLibrary:
    """The native kernels of a package: used when they are what was written, else built again."""

    @pytest.fixture
    def source(
        self, package: Path, cache: Path, native_kernels: Path, monkeypatch: pytest.MonkeyPatch
    ) -> StartSource:
        library = native.library_path(native_kernels)
        (package / "native").mkdir()
        shutil.copy(library, package / "native" / library.name)
        seal_package(package, label(FACTS))
        monkeypatch.setattr("decodegrid.engine.package_start.has_native_kernels", lambda: False)
        monkeypatch.setattr(
            "decodegrid.engine.package_start.start_native_kernels",
            lambda place, *, is_shown: self.calls.append(("built", place)),
        )
        monkeypatch.setattr(
            "decodegrid.engine.package_start.load_native_kernels",
            lambda path: self.calls.append(("loaded", path)),
        )
        self.calls: list[tuple[str, Path]] = []
        return open_source(package, cache, FACTS)

    def test_whole(self, source: StartSource, package: Path, cache: Path) -> None:
        source.install_native(cache)
        name = native.library_path(Path()).name
        assert self.calls == [("loaded", package / "native" / name)] and source.notes == []

    def test_damaged(self, source: StartSource, package: Path, cache: Path) -> None:
        (path,) = (package / "native").iterdir()
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"x")
        source.install_native(cache)
        assert self.calls == [("built", cache)]
        assert len(source.notes) == 1 and path.name in source.notes[0]
        source.finish(label(FACTS))
        assert path.read_bytes() != content[:-1] + b"x", "it was not repaired"
        again = open_source(package, cache, FACTS)
        again.install_native(cache)
        assert self.calls[1:] == [("loaded", path)] and again.notes == []
