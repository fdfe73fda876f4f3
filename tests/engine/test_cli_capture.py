"""The verb `capture`, its errors before anything slow, and the options that name a package."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decodegrid.capture.binding import Binding
from decodegrid.capture.package import checked_file, read_manifest
from decodegrid.capture.phases import PhaseClock
from decodegrid.capture.profile_document import read_profile
from decodegrid.capture.region_store import RegionStore, StoredRegion
from decodegrid.capture.surface import Surface, SurfacePoint
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine import build
from decodegrid.engine.cli import EXIT_USER_ERROR, main
from decodegrid.engine.package_start import StartSource
from decodegrid.engine.runner import Runner


@pytest.fixture(scope="module")
def made(
    make_eager_runner: Callable[..., Runner],
    make_model: Callable[..., Any],
    layer_changes: dict[int, dict[str, Any]],
    native_kernels: Path,
) -> Runner:
    return make_eager_runner(make_model(**layer_changes[2]))


@pytest.fixture
def runner(made: Runner, tmp_path: Path) -> Runner:
    """A real runner that claims to have compiled one region."""
    store = RegionStore(tmp_path / "cache", made.facts)
    stored = StoredRegion("code", Binding((), (), (), ()), frozenset(), "call = print")
    store.save("embed", stored)
    made.source = StartSource(store, False, None)
    return made


@pytest.fixture
def started(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[LoadedConfig]:
    """Starts of the verb: each gives the runner; what they were asked for."""
    asked: list[LoadedConfig] = []

    def start(loaded: LoadedConfig, clock: PhaseClock | None = None) -> Runner:
        asked.append(loaded)
        return runner

    point = SurfacePoint(1.0, 1.0, 1.0, 1)
    surface = Surface(dict.fromkeys(runner.grid.keys, point), 16, 5.0, runner.facts)
    monkeypatch.setattr(build, "build_runner", start)
    monkeypatch.setattr(
        "decodegrid.engine.surface_run.obtain_surface", lambda *args: (surface, "measured")
    )
    return asked


def test_a_package_is_written(
    started: list[LoadedConfig], runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "deep" / "package"
    assert main(["capture", "--out", str(out)]) == 0
    manifest = read_manifest(out)
    assert manifest.facts == runner.facts
    assert manifest.names("regions") == ["regions/embed-0.json"]
    assert len(manifest.names("native")) == len(manifest.names("surfaces")) == 1
    assert read_profile(out / "ledger.json").command == ["decodegrid", "capture"]
    for entry in manifest.files:
        checked_file(out, manifest, entry.name)
    assert capsys.readouterr().out.startswith(f"{out}: {len(manifest.files)} files, ")
    assert [path.name for path in out.parent.iterdir()] == ["package"]


def test_without_a_directory_the_cache_is_completed(
    started: list[LoadedConfig], runner: Runner, capsys: pytest.CaptureFixture
) -> None:
    assert main(["capture", "--no-report"]) == 0
    assert runner.source is not None
    assert read_manifest(runner.source.path).facts == runner.facts
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{runner.source.path}: ") and captured.err == ""


def test_the_deployments_package_is_where_it_goes_and_not_where_it_comes_from(
    started: list[LoadedConfig], tmp_path: Path
) -> None:
    config = tmp_path / "here" / "deployment.yaml"
    config.parent.mkdir()
    config.write_text("compile:\n  package: kept\n")
    assert main(["capture", "--config", str(config)]) == 0
    assert read_manifest(tmp_path / "here" / "kept").names("regions")
    assert [loaded.package_dir for loaded in started] == [None]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("x"), "is a file; a package is a directory"),
        (lambda path: (path.mkdir(), (path / "a.txt").write_text("x")), "has 'a.txt' in it"),
    ],
    ids=["file", "other directory"],
)
def test_places_that_are_refused_before_the_start(
    started: list[LoadedConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    make: Callable[[Path], object],
    message: str,
) -> None:
    out = tmp_path / "out"
    make(out)
    assert main(["capture", "--out", str(out)]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith(f"decodegrid: error: {out}") and message in error
    assert error.count("\n") == 1 and started == []


def test_a_full_disk_leaves_the_old_package(
    started: list[LoadedConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "package"
    assert main(["capture", "--out", str(out), "--no-report"]) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decodegrid.engine.package_write.seal_package", full)
    capsys.readouterr()
    assert main(["capture", "--out", str(out), "--no-report"]) == EXIT_USER_ERROR
    error = f"decodegrid: error: cannot write the package {out}: No space left on device\n"
    assert capsys.readouterr().err == error
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["package"]


def test_code_that_is_not_kept_in_files(
    started: list[LoadedConfig], runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert runner.source is not None
    runner.source.store.variants["draft"] = {}
    assert main(["capture", "--out", str(tmp_path / "out"), "--no-report"]) == EXIT_USER_ERROR
    assert "a package would lack the code of region draft" in capsys.readouterr().err
    runner.source = None
    assert main(["capture", "--out", str(tmp_path / "out"), "--no-report"]) == EXIT_USER_ERROR
    assert "compile.backend is eager" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


VERBS = [
    ["generate", "prompt"], ["chat"], ["batch", "in.jsonl", "out.jsonl"], ["profile"],
    ["bench", "decode"], ["doctor", "--self-test"],
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_verbs_that_start_take_a_package(
    verb: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(
        json.dumps(
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": "a", "model": "m"},
            }
        )
        + "\n"
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n")))
    for name, message in (("no such", "there is no such directory"), ("", "--package is empty")):
        assert main([*verb, "--package", name]) == EXIT_USER_ERROR
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not name or str(tmp_path / name) in error


@pytest.mark.parametrize("ok", [True, False])
def test_what_is_not_proven_is_not_written(
    started: list[LoadedConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    ok: bool,
) -> None:
    report = SimpleNamespace(ok=ok, format=lambda: "proofs: as told")
    monkeypatch.setattr("decodegrid.engine.proofs.run_proofs", lambda *args: report)
    out = tmp_path / "package"
    assert main(["capture", "--out", str(out), "--no-report", "--prove"]) == (0 if ok else 1)
    assert capsys.readouterr().out.startswith("proofs: as told\n")
    assert out.exists() is ok
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
