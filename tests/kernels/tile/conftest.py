"""The CPU route of the tile kernels and the reading of machine code, as fixtures."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[2] / "build" / "tile-cpu"


def _load(name):
    """A module beside this file, once a process: TileLang takes the rules of one alone."""
    spec = importlib.util.spec_from_file_location(f"tile_{name}", HERE / f"{name}.py")
    if spec.name not in sys.modules:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    return sys.modules[spec.name]


@pytest.fixture(scope="session")
def tile():
    """tile("module.factory", **sizes) -> a call with all tensors in signature order."""
    route, made = _load("cpu_route"), {}

    def kernel(factory, **sizes):
        key = (factory, tuple(sorted(sizes.items())))
        if key not in made:
            made[key] = route.compile_kernel(factory, sizes, CACHE)
        return made[key]

    return kernel


@pytest.fixture(scope="session")
def machine_code():
    """The module machine_code.py beside this file."""
    return _load("machine_code")
