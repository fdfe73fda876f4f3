"""The launch of kernels that were built beforehand, with a stand-in for the driver."""

import ast
import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decodegrid.kernels.providers.cubins import (
    CubinError,
    CubinLauncher,
    DriverError,
    evaluate,
    read_manifest,
)

MANIFEST: dict[str, Any] = {
    "arch": "sm_90a",
    "kernels": {
        "copy-dim8": {
            "op": "copy", "model": "tiny", "sizes": {"dim": 8}, "cubin": "copy.cubin",
            "entry": "copy_kernel",
            "tensors": [
                {"name": "x", "dtype": "float32", "shape": ["m", 8]},
                {"name": "out", "dtype": "bfloat16", "shape": ["m", 8]},
            ],
            "arguments": ["out", "x", "m"],
            "grid": ["(m + 15) // 16", "2", "1"],
            "block": [128, 1, 1],
            "shared_bytes": 100000,
        },
        "fill": {
            "op": "fill", "model": "tiny", "sizes": {}, "cubin": "copy.cubin", "entry": "fill",
            "tensors": [{"name": "out", "dtype": "int64", "shape": ["n"]}],
            "arguments": ["out", "n"], "grid": ["min(n, 4)", "1", "1"], "block": [32, 1, 1],
            "shared_bytes": 0,
        },
    },
}  # fmt: skip


class Driver:
    """Records calls as cuda-python gives results: a status, then values."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self, status: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = status

    def cuModuleLoadData(self, image: bytes) -> tuple[int, str]:
        self.calls.append(("load", image))
        return 0, "module"

    def cuModuleGetFunction(self, module: str, entry: bytes) -> tuple[int, str]:
        self.calls.append(("function", entry))
        return 0, entry.decode()

    def cuFuncSetAttribute(self, function: str, attribute: int, value: int) -> tuple[int]:
        self.calls.append(("attribute", function, attribute, value))
        return (0,)

    def cuLaunchKernel(self, *args: Any) -> tuple[int]:
        self.calls.append(("launch", *args))
        return (self.status,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    (tmp_path / "copy.cubin").write_bytes(b"code")
    return tmp_path


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))


def test_a_launch(folder: Path) -> None:
    """Arguments in the manifest's order, sizes as int32, shared memory asked for once."""
    driver = Driver()
    launch = CubinLauncher(folder, driver)
    x, out = torch.zeros(33, 8), torch.zeros(33, 8, dtype=torch.bfloat16)
    for _ in range(2):
        launch("copy-dim8", x, out)
    kinds = [call[0] for call in driver.calls]
    assert kinds == ["load", "function", "attribute", "launch", "launch"]
    assert driver.calls[2] == ("attribute", "copy_kernel", 8, 100000)
    pointers = (out.data_ptr(), x.data_ptr(), 33)
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
    want = ("copy_kernel", 3, 2, 1, 128, 1, 1, 100000, 77, (pointers, types), 0)
    assert driver.calls[-1] == ("launch", *want)


def test_kernels_of_one_cubin_load_it_once(folder: Path) -> None:
    driver = Driver()
    launch = CubinLauncher(folder, driver)
    launch.load(["copy-dim8", "fill"])
    assert [call[0] for call in driver.calls].count("load") == 1
    launch("fill", torch.zeros(9, dtype=torch.int64))
    assert driver.calls[-1][1:5] == ("fill", 4, 1, 1)


def test_no_rows_are_no_launch(folder: Path) -> None:
    driver = Driver()
    launch = CubinLauncher(folder, driver)
    launch("copy-dim8", torch.zeros(0, 8), torch.zeros(0, 8, dtype=torch.bfloat16))
    assert "launch" not in [call[0] for call in driver.calls]


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.zeros(3, 8), torch.zeros(4, 8, dtype=torch.bfloat16)),
        (torch.zeros(3, 9), torch.zeros(3, 8, dtype=torch.bfloat16)),
        (torch.zeros(3, 8), torch.zeros(3, 8)),
        (torch.zeros(8, 3).t(), torch.zeros(3, 8, dtype=torch.bfloat16)),
        (torch.zeros(3, 8, 1), torch.zeros(3, 8, dtype=torch.bfloat16)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    folder: Path, x: torch.Tensor, out: torch.Tensor
) -> None:
    driver = Driver()
    with pytest.raises(CubinError, match=r"copy-dim8: (x|out) is torch\."):
        CubinLauncher(folder, driver)("copy-dim8", x, out)
    assert "launch" not in [call[0] for call in driver.calls]


def test_other_errors_name_the_kernel(folder: Path) -> None:
    launch = CubinLauncher(folder, Driver(status=700))
    with pytest.raises(CubinError, match="no kernel copy-dim9 was built"):
        launch("copy-dim9")
    with pytest.raises(CubinError, match="fill: 2 tensors; it takes 1"):
        launch("fill", torch.zeros(1), torch.zeros(1))
    with pytest.raises(DriverError, match="cuLaunchKernel returned 700"):
        launch("fill", torch.zeros(9, dtype=torch.int64))


def test_manifests_that_are_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CubinError, match="No such file"):
        read_manifest(tmp_path / "nothing")
    (folder / "copy.cubin").unlink()
    with pytest.raises(CubinError, match=r"names copy\.cubin, which is not there"):
        read_manifest(folder)
    for text in ("{", "[]", '{"kernels": {"a": {}}}', '{"kernels": []}'):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(CubinError, match="is no manifest of kernels"):
            read_manifest(folder)


@pytest.mark.parametrize(
    ("text", "value"), [("(m + 15) // 16 * 2", 6), ("max(m % 7, 1)", 5), ("m >> 2", 8), ("-m", -33)]
)
def test_grid_arithmetic(text: str, value: int) -> None:
    assert evaluate(ast.parse(text, mode="eval").body, {"m": 33}) == value


@pytest.mark.parametrize("text", ["n", "m / 2", "m ** 9", "open('x')", "m.real", "[1][0]", "1.5"])
def test_anything_but_integer_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(CubinError, match="a grid of"):
        evaluate(ast.parse(text, mode="eval").body, {"m": 33})
