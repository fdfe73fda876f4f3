"""What a run on a card needs: few files, few packages, and under 40 MB."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.travel import (
    LIMIT_BYTES,
    ROOT,
    check_size,
    cubins_to_carry,
    describe,
    files_to_carry,
    main,
    size_of,
)

REFUSED = (
    "tilelang", "tvm", "pydantic", "pytest", "_pytest", "yaml", "tokenizers", "fastapi", "uvicorn",
    "safetensors", "scipy", "xgrammar", "deepseek_recipe", "prometheus_client", "transformers",
)  # fmt: skip
"""Packages of this project that a machine with torch and numpy lacks."""
BLOCKER = f"""
import sys
from importlib.machinery import PathFinder

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {REFUSED!r}:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Without() if f is PathFinder else f for f in sys.meta_path]
"""
USES = """
import torch
import tests.gpu.experts, tests.gpu.main, tests.gpu.measure
from decodegrid.graphs.state import Capacity
from decodegrid.kernels.step_kernels import OPS
from decodegrid.kernels.tile.table import kernels
from tests.gpu.cases import CASES
from tests.gpu.scene import ROOT, make_scene, plain_scene, read_config

for kernel in kernels():
    if kernel.model == "tiny":
        CASES[kernel.op](kernel.sizes)
config = read_config(tests.gpu.measure.TINY.path)
scene = make_scene(
    config, Capacity(2, 9, 64, 256, 5, kv_cache="v41"), "cpu", torch.float32, OPS, None
)
scene.ask(1, 2)
with torch.no_grad():
    plain_scene(scene).step(1, 2)()
assert bool(scene.results()["logits"][:2].isfinite().all())
print("ran in", ROOT)
"""


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the list and nothing else."""
    there = tmp_path_factory.mktemp("carried")
    for path in files_to_carry(ROOT):
        target = there / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return there


def run(there: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    blocker = there.parent / "blocker"
    blocker.mkdir(exist_ok=True)
    (blocker / "sitecustomize.py").write_text(BLOCKER)
    return subprocess.run(
        command, cwd=there, capture_output=True, text=True, check=False,
        env={
            "PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": f"{blocker}:{there}",
            "OMP_NUM_THREADS": "1", "HOME": str(there),
        },
    )  # fmt: skip


def test_the_packages_are_missing_there(carried: Path) -> None:
    code = f"""
import importlib
for name in {REFUSED!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    print(name)
"""
    done = run(carried, sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_travels_is_enough(carried: Path) -> None:
    """Everything but the card: the parts import, cases are made, a step runs."""
    done = run(carried, sys.executable, "-c", USES)
    assert (done.returncode, done.stdout) == (0, f"ran in {carried}\n"), done.stderr[-2000:]


def test_the_script_skips_there(carried: Path) -> None:
    done = run(carried, "bash", "tests/gpu/run.sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("skipped: ") and done.stdout.count("\n") == 1


def test_what_travels_is_small(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The sources alone are a small part of the limit; cubins are counted, other files not."""
    assert size_of(files_to_carry(ROOT)) < LIMIT_BYTES // 10
    folder = tmp_path / "sm_90a"
    folder.mkdir()
    for name, count in (("a.cubin", 2_000_000), ("manifest.json", 500_000), ("a.ptx", 10**6)):
        (folder / name).write_bytes(bytes(count))
    assert size_of(cubins_to_carry(tmp_path)) == 2_500_000
    assert "2.5 MB of cubins of 40 MB" in describe(ROOT, tmp_path)
    assert main(["--cubins", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("travels: ")


def test_too_much_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert check_size(LIMIT_BYTES // 2, LIMIT_BYTES // 2) == (
        "20.0 MB of sources and 20.0 MB of cubins of 40 MB"
    )
    with pytest.raises(ValueError, match="the limit is 40 MB"):
        check_size(LIMIT_BYTES // 2, LIMIT_BYTES // 2 + 1)
    folder = tmp_path / "sm_90a"
    folder.mkdir()
    with (folder / "large.cubin").open("wb") as file:
        file.truncate(LIMIT_BYTES)
    assert main(["--cubins", str(tmp_path)]) == 2
    assert "the limit is 40 MB" in capsys.readouterr().err


def test_a_list_that_is_out_of_date_is_seen(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing in .* is decodegrid/\*\.py"):
        files_to_carry(tmp_path)
