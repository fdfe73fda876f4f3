"""A start from a package: wherever it lies, without a compiler, and only from what is undamaged."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.package import PackageError, checked_file, read_manifest
from decodegrid.capture.package_swap import Staging
from decodegrid.capture.phases import PhaseClock
from decodegrid.capture.surface import Surface, SurfacePoint
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.package_surface import packaged_surface
from decodegrid.engine.package_write import write_package
from decodegrid.graphs.checkpoint import save_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, os, sys
from pathlib import Path

import torch

from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.runner_protocol import SlotRequest
from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.state import Capacity

started = []
sys.addaudithook(
    lambda event, args: started.append(args[0]) if event == "subprocess.Popen" else None
)
facts = json.loads(sys.argv[1])
torch.set_num_threads(1)
options = RunnerOptions(
    capacity=Capacity(**facts["capacity"]),
    grid=Grid([GraphKey(*key) for key in facts["keys"]], facts["max_num_reqs"], 5),
    prefill_chunk_sizes=tuple(facts["chunks"]),
    dtype=torch.float32,
    device="cpu",
    compile_options=CompileOptions("inductor", Path(facts["cache"]), 1),
    draft_temperatures=(1.0,) * 5,
    show_progress=False,
    native_cache_dir=Path(facts["cache"]),
    package_dir=Path(facts["package"]) if facts["package"] else None,
)
runner = make_runner(load_model(facts["checkpoint"]), options, PhaseClock())
compiler_is_loaded = "torch._dynamo" in sys.modules or "torch._inductor" in sys.modules
prompt = facts["prompt"]
runner.prefill(1, prompt[:16], 0, (-1, -1, -1), [1, 2, 3, 4])
runner.prefill(1, prompt[16:-1], 16, tuple(prompt[13:16]), [1, 2, 3, 4])
request = SlotRequest(
    last_token=prompt[-1], seq_len=len(prompt), history=tuple(prompt[-4:-1]), max_seq_len=60,
    temperature=0.0, seed=0, stop_token_ids=(),
)
runner.start(1, request, [1, 2, 3, 4])
emitted = []
for total in (1, 6, 6):
    result = runner.decode([1], total)
    emitted += result.token_ids[0, : int(result.num_emitted[0])].tolist()
slots = runner.model.state.slots
print(json.dumps({
    "compilations": runner.num_compilations,
    "loaded": runner.counters.num_loaded,
    "captured": runner.num_captured,
    "compiler_is_loaded": compiler_is_loaded,
    "started": [str(name) for name in started],
    "notes": runner.source.notes,
    "emitted": emitted,
    "drafts": slots.drafts[1].tolist(),
    "confidence": slots.confidence[1].tolist(),
}))
"""
COMPILERS = ("g++", "gcc", "c++", "cc", "clang", "clang++")


@pytest.fixture(scope="module")
def surface(compiled_run: Any) -> Surface:
    """Made-up times of every pair."""
    runner = compiled_run.runner
    point = SurfacePoint(1.0, 1.0, 1.0, 1)
    return Surface(dict.fromkeys(runner.grid.keys, point), 16, 5.0, runner.facts)


@pytest.fixture(scope="module")
def package(compiled_run: Any, surface: Surface, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of the compiled run."""
    path = tmp_path_factory.mktemp("packages") / "package"
    with Staging(path) as staging:
        write_package(compiled_run.runner, staging, [surface], {"ledger.json": '{"format": 1}'})
    return path


@pytest.fixture
def decode(compiled_run: Any, make_prompt: Callable[..., list[int]]) -> Callable[[], dict]:
    """What the compiled run itself emits and drafts behind the prompt of the second start."""

    def run() -> dict[str, Any]:
        made, prompt = compiled_run, make_prompt(21, 3)
        made.reset()
        made.begin(1, prompt, [16, 4])
        for total in (1, 6, 6):
            made.decode([1], total)
        slots = made.runner.model.state.slots
        return {
            "emitted": made.emitted(1),
            "drafts": slots.drafts[1].tolist(),
            "confidence": slots.confidence[1].tolist(),
        }

    return run


@pytest.fixture
def facts(
    compiled_run: Any, make_prompt: Callable[..., list[int]], tmp_path: Path
) -> dict[str, Any]:
    """The deployment of the compiled run for a process of its own, with a cache that is empty."""
    run, runner = compiled_run, compiled_run.runner
    save_model(run.model, tmp_path / "model", torch.float32, run.raw)
    capacity = runner.model.state.capacity
    return {
        "cache": str(tmp_path / "cache"),
        "package": "",
        "checkpoint": str(tmp_path / "model"),
        "capacity": asdict(capacity),
        "keys": [[key.num_reqs, key.num_query_tokens] for key in runner.grid.keys],
        "max_num_reqs": runner.max_num_reqs,
        "chunks": list(runner.prefill_chunk_sizes),
        "prompt": make_prompt(21, 3),
    }


@pytest.fixture
def start_without_compiler(tmp_path: Path) -> Callable[[dict], dict]:
    """start_without_compiler(facts): the script in a process of another home, in which every
    compiler is a program that notes its call and fails."""
    programs = tmp_path / "programs"
    programs.mkdir()
    called = tmp_path / "called"
    for name in COMPILERS:
        script = programs / name
        script.write_text(f'#!/bin/sh\necho "$0 $*" >> {called}\nexit 1\n')
        script.chmod(0o755)

    def start(facts: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "home").mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(facts)],
            env={
                "PATH": f"{programs}:{os.environ['PATH']}",
                "CXX": str(programs / "g++"),
                "CC": str(programs / "gcc"),
                "HOME": str(tmp_path / "home"),
                "PYTHONPATH": str(ROOT),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert not called.exists(), called.read_text()
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return start


def test_a_moved_package_starts_without_any_compiler(
    compiled_run, package, facts, start_without_compiler, decode, tmp_path
):
    moved = shutil.copytree(package, tmp_path / "elsewhere" / "moved package")
    before = {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()}
    for path in (moved, *moved.rglob("*")):  # as on a medium that cannot be written
        path.chmod(0o555 if path.is_dir() else 0o444)
    found = start_without_compiler({**facts, "package": str(moved)})
    for path in (moved, *moved.rglob("*")):
        path.chmod(0o755)
    assert found["started"] == [] and not found["compiler_is_loaded"]
    assert found["compilations"] == 0 and found["notes"] == []
    assert found["loaded"] == compiled_run.runner.counters.planned_compilations
    assert found["captured"] == compiled_run.runner.num_captured
    want = decode()
    assert want["emitted"] and {name: found[name] for name in want} == want
    assert {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()} == before
    assert not Path(facts["cache"]).exists(), "something was built"


def test_a_cache_directory_has_the_same_property(
    compiled_run, facts, start_without_compiler, decode, tmp_path
):
    kept = compiled_run.runner.source.path
    shutil.copytree(kept, Path(facts["cache"]) / kept.name)
    found = start_without_compiler(facts)
    assert found["started"] == [] and not found["compiler_is_loaded"]
    assert found["compilations"] == 0 and found["notes"] == []
    want = decode()
    assert {name: found[name] for name in want} == want


def test_the_manifest_and_what_it_lists(compiled_run, package):
    runner, manifest = compiled_run.runner, read_manifest(package)
    assert manifest.facts == runner.facts
    assert manifest.pairs == [[key.num_reqs, key.num_query_tokens] for key in runner.grid.keys]
    assert manifest.prefill_chunk_sizes == list(runner.prefill_chunk_sizes)
    assert manifest.variants == ["fused"] and manifest.versions["torch"] == torch.__version__
    there = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    assert {entry.name for entry in manifest.files} == there - {"manifest.json"}
    assert len(manifest.names("regions")) == runner.counters.planned_compilations
    assert len(manifest.names("native")) == 1 and len(manifest.names("surfaces")) == 1
    assert manifest.names("kernels") and "ledger.json" in there
    for entry in manifest.files:
        checked_file(package, manifest, entry.name)


def test_nothing_in_a_package_names_a_place_or_a_person(compiled_run, package):
    names = [Path.home(), compiled_run.cache_dir, ROOT, Path(torch.__file__).parents[1]]
    for path in package.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for name in names:
                assert str(name).encode() + b"/" not in content, (path, name)
                assert str(name).encode() + b"\0" not in content, (path, name)
            if path.suffix == ".json":
                for word in (os.uname().nodename, "home", os.path.basename(Path.home())):
                    assert f'"{word}' not in content.decode(), (path, word)


def options_of(run: Any, package: Path | None, cache: Path, **capacity: Any) -> RunnerOptions:
    runner = run.runner
    return RunnerOptions(
        capacity=replace(runner.model.state.capacity, **capacity),
        grid=runner.grid,
        prefill_chunk_sizes=runner.prefill_chunk_sizes,
        dtype=torch.float32,
        device="cpu",
        compile_options=CompileOptions("inductor", cache, 1),
        draft_temperatures=(1.0,) * 5,
        show_progress=False,
        native_cache_dir=cache,
        package_dir=package,
    )


def test_damaged_parts_are_named_compiled_again_and_repaired(compiled_run, package, tmp_path):
    """A cut region, a kernel with one bit turned and a missing kernel; the rest is used."""
    broken = shutil.copytree(package, tmp_path / "broken")
    region = broken / "regions" / "embed-0.json"
    region.write_bytes(region.read_bytes()[:-100])
    kernels = {}
    for name in ("copy_window", "collapse"):
        body = json.loads((broken / "regions" / f"{name}-0.json").read_text())["body"]
        digest = next(iter(json.loads(body)["kernels"].values()))
        kernels[name] = broken / "kernels" / f"{digest}.so"
    content = bytearray(kernels["copy_window"].read_bytes())
    content[len(content) // 2] ^= 1
    kernels["copy_window"].write_bytes(content)
    kernels["collapse"].unlink()

    options = options_of(compiled_run, broken, compiled_run.cache_dir)
    runner = make_runner(compiled_run.model, options, PhaseClock())
    assert runner.num_compilations == 3
    assert runner.counters.num_loaded == compiled_run.runner.counters.planned_compilations - 3
    notes = "\n".join(runner.source.notes)
    for name in ("embed-0.json", kernels["copy_window"].name, kernels["collapse"].name):
        assert name in notes and name in runner.start_up_report
    assert len(runner.source.notes) == 3

    manifest = read_manifest(broken)
    for entry in manifest.files:
        checked_file(broken, manifest, entry.name)
    again = make_runner(compiled_run.model, options, PhaseClock())
    assert again.num_compilations == 0 and again.source.notes == []
    assert len(again.source.manifest.names("surfaces")) == 1, "the rest was lost"


def test_a_damaged_manifest_costs_no_compilation(compiled_run, package, tmp_path):
    broken = shutil.copytree(package, tmp_path / "broken")
    (broken / "manifest.json").write_text("{")
    options = options_of(compiled_run, broken, compiled_run.cache_dir)
    runner = make_runner(compiled_run.model, options, PhaseClock())
    assert runner.num_compilations == 0
    assert len(runner.source.notes) == 1 and "manifest.json is damaged" in runner.source.notes[0]
    assert read_manifest(broken).facts == runner.facts


def test_a_package_of_another_deployment_is_an_error(compiled_run, package, make_model, tmp_path):
    cases = [
        (compiled_run.model, {"num_blocks": 8193}, r"capacity\.num_blocks is \d+ there, 8193 here"),
        (make_model(dtype=torch.float32), {}, r"model is [0-9a-f]{16} there, [0-9a-f]{16} here"),
    ]
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    for model, changes, message in cases:
        options = options_of(compiled_run, package, tmp_path / "cache", **changes)
        with pytest.raises(PackageError, match=rf"is of another deployment: .*{message}"):
            make_runner(model, options, PhaseClock())
    assert {path: path.read_bytes() for path in package.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "cache").exists()


def test_the_surface_of_a_package(compiled_run, package, surface, tmp_path, caplog):
    damaged = shutil.copytree(package, tmp_path / "damaged")
    options = options_of(compiled_run, damaged, compiled_run.cache_dir)
    runner = make_runner(compiled_run.model, options, PhaseClock())

    def look(context_len: int = 16) -> tuple[Surface | None, str]:
        return packaged_surface(runner.source, runner.grid.keys, context_len, runner.facts, now=1e9)

    found, reason = look()
    assert found == surface and reason == "", "its age is no reason not to use it"
    found, reason = look(17)
    assert found is None and "context_len was 16, now 17" in reason
    (path,) = (damaged / "surfaces").iterdir()
    path.write_text(path.read_text().replace("1.0", "2.0"))
    found, reason = look()
    assert found is None and path.name in reason and path.name in caplog.text
