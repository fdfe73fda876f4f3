"""The wheel holds what git tracks in the package folders, and works away from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("engine", "graphs", "kernels", "capture", "configs")

pytestmark = pytest.mark.packaging


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    files = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    return [name for name in files if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def dist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel, built from the tracked files alone, the wheel from the sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    build = f"import setuptools.build_meta as b; b.build_sdist({str(out)!r})"
    run(sys.executable, "-c", build, cwd=source)
    sdist = next(out.glob("*.tar.gz"))
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", str(out), str(sdist), cwd=out)
    return out


def test_wheel_contents(dist: Path, tracked: list[str]) -> None:
    want = set()
    for name in tracked:
        top = name.split("/")[0]
        if top in FOLDERS:
            want.add(f"decodegrid/{name}")
        elif top == "decodegrid":
            want.add(name)
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    have = {name for name in names if ".dist-info/" not in name}
    assert have == want, f"missing {sorted(want - have)}, extra {sorted(have - want)}"
    licenses = {name.rsplit("/", 1)[1] for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "NOTICE"}


def test_wheel_works_elsewhere(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel = next(dist.glob("*.whl"))
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site))
    run(*pip, str(wheel), cwd=tmp_path)
    code = (
        "import decodegrid, decodegrid.configs.load as load; print(load.__file__); "
        "print(load.load_config(None).path); print(decodegrid.__version__)"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    module, deployment, version = run(sys.executable, "-c", code, cwd=tmp_path, env=env).split()
    assert Path(module) == site / "decodegrid/configs/load.py"
    assert Path(deployment) == site / "decodegrid/configs/tiny.yaml"
    assert f"decodegrid-{version}-" in wheel.name
