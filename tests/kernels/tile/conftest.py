"""The CPU route of the tile kernels, as a fixture."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[2] / "build" / "tile-cpu"


def _load_route():
    spec = importlib.util.spec_from_file_location("tile_cpu_route", HERE / "cpu_route.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tile():
    """tile("module.factory", **sizes) -> a call with all tensors in signature order."""
    route, made = _load_route(), {}

    def kernel(factory, **sizes):
        key = (factory, tuple(sorted(sizes.items())))
        if key not in made:
            made[key] = route.compile_kernel(factory, sizes, CACHE)
        return made[key]

    return kernel
