"""The Makefile's check of the machine: each missing thing gives one clear line."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def check_machine(folder: Path, *variables: str) -> tuple[int, list[str]]:
    """Exit status and lines of `make check-machine` in a folder that has no .venv."""
    command = ["make", "-s", "-C", str(folder), "-f", str(ROOT / "Makefile"), "check-machine"]
    done = subprocess.run([*command, *variables], capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def changed_python(folder: Path, change: str) -> str:
    """A Python that runs `-c CODE` after the statement `change`."""
    code = f"import sys; {change}; exec(sys.argv[1])"
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$2"\n')
    path.chmod(0o755)
    return f"PYTHON={path}"


def test_complete_machine_says_nothing(tmp_path: Path) -> None:
    assert check_machine(tmp_path, f"PYTHON={sys.executable}", "CXX=sh -x") == (0, [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("sys.version_info = (3, 10, 9)", ["3.11 or newer"]),
        ("import sysconfig; sysconfig.get_paths = lambda: {'include': '/absent'}", ["Python.h"]),
        (
            "import importlib.util as u; u.find_spec = lambda name: None",
            ["lacks the module venv"],
        ),
    ],
    ids=["old", "headers", "venv"],
)
def test_python_that_lacks_something(tmp_path: Path, change: str, words: list[str]) -> None:
    status, lines = check_machine(tmp_path, changed_python(tmp_path, change), "CXX=sh")
    errors = [line for line in lines if line.startswith("error: ")]
    assert status != 0
    assert len(errors) == 1, lines
    assert all(word in errors[0] for word in words)


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    status, lines = check_machine(tmp_path, "PYTHON=/absent/python3", "CXX=/absent/c++")
    errors = [line for line in lines if line.startswith("error: ")]
    assert status != 0
    assert [line.split(":")[1].strip() for line in errors] == ["no C++ compiler", "no Python"]
    assert "/absent/c++" in errors[0]
    assert "/absent/python3" in errors[1]
    assert not (tmp_path / ".venv").exists()
