"""Probing optional libraries: nothing is imported before everything else answers well, and nothing
that an import raises gets out.

The libraries here are planted: packages with metadata in a temporary directory on the path, which
leave a mark when their code runs.
"""

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decodegrid.kernels.providers import probe as probing
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import (
    Device,
    Package,
    State,
    Target,
    probe_all,
    read_device,
    release,
    target_of,
)

HOPPER = Device(Target.SM90, "a planted card, sm_90", True, (9, 0))
NO_DRIVER = Device(Target.OTHER, "no NVIDIA driver (libcuda.so.1)", False)

Plant = Callable[..., Path]


def package(**changes: object) -> Package:
    values: dict[str, object] = {
        "name": "planted_gemm",
        "distributions": ("planted-gemm",),
        "minimum": (0, 2, 2),
        "targets": frozenset({Target.SM90}),
        "attributes": ("product", "part.cast"),
        "install": "pip install planted-gemm",
        **changes,
    }
    return Package(**values)  # type: ignore[arg-type]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """plant(code, distribution="planted-gemm", version="0.2.2") -> the file that importing it
    writes; a distribution None leaves the package without metadata."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(code: str, distribution: str | None = "planted-gemm", version: str = "0.2.2") -> Path:
        mark = tmp_path / "imported"
        folder = tmp_path / "planted_gemm"
        folder.mkdir()
        (folder / "part.py").write_text("def cast(): ...\n")
        first = f"open({str(mark)!r}, 'w').close()\n"
        (folder / "__init__.py").write_text(first + code)
        if distribution is not None:
            info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            )
            (info / "top_level.txt").write_text("planted_gemm\n")
        importlib.invalidate_caches()
        for name in [n for n in sys.modules if n.split(".")[0] == "planted_gemm"]:
            monkeypatch.delitem(sys.modules, name)
        return mark

    yield make
    for name in [n for n in sys.modules if n.split(".")[0] == "planted_gemm"]:
        del sys.modules[name]


WHOLE = "from planted_gemm import part\ndef product(): ...\n"


def test_a_library_that_fits_is_ready(plant: Plant) -> None:
    mark = plant(WHOLE)
    (found,) = probe_all([package()], HOPPER)
    assert found.state is State.READY and found.is_ready and found.reason == ""
    assert (found.distribution, found.version) == ("planted-gemm", "0.2.2")
    assert found.module is sys.modules["planted_gemm"] and mark.exists()


@pytest.mark.parametrize(
    ("raises", "words"),
    [
        ("raise ImportError('libnvrtc.so.13: not there')", "ImportError: libnvrtc.so.13"),
        ("raise OSError('undefined symbol: x')", "OSError: undefined symbol"),
        ("raise RuntimeError('needs NCCL 2.30')", "RuntimeError: needs NCCL"),
        ("assert False, 'two libraries'", "AssertionError: two libraries"),
        ("import sys; sys.exit('no card')", "SystemExit: no card"),
        ("import planted_gemm.nothing", "ModuleNotFoundError"),
        ("[].nothing", "AttributeError"),
        ("{}['x']", "KeyError"),
    ],
)
def test_what_an_import_raises_is_an_answer(plant: Plant, raises: str, words: str) -> None:
    mark = plant(raises + "\n")
    (found,) = probe_all([package()], HOPPER)
    assert found.state is State.IMPORT_FAILED and not found.is_ready
    assert words in found.reason and found.module is None and mark.exists()
    assert "planted_gemm" not in sys.modules


def test_ctrl_c_passes(plant: Plant) -> None:
    plant("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        probe_all([package()], HOPPER)


def test_calls_that_are_missing_are_named(plant: Plant) -> None:
    plant("def product(): ...\n")
    (found,) = probe_all([package(attributes=("product", "part.cast", "mega"))], HOPPER)
    assert found.state is State.INCOMPLETE and found.module is None
    assert found.reason == "planted-gemm 0.2.2 lacks part.cast, mega"


@pytest.mark.parametrize(
    ("distribution", "words"),
    [
        ("another-gemm", "planted_gemm belongs to another-gemm; planted-gemm is what was recorded"),
        (None, "planted_gemm belongs to no distribution; planted-gemm is what was recorded"),
    ],
)
def test_another_fork_is_never_imported(plant: Plant, distribution: str | None, words: str) -> None:
    mark = plant(WHOLE, distribution)
    (found,) = probe_all([package()], HOPPER)
    assert found.state is State.OTHER_FORK and found.reason == words
    assert not mark.exists() and "planted_gemm" not in sys.modules


def test_two_owners_of_one_name_are_refused(plant: Plant, tmp_path: Path) -> None:
    """Which of them wrote the files last, nobody knows."""
    mark = plant(WHOLE)
    info = tmp_path / "another_gemm-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another-gemm\nVersion: 9\n")
    (info / "top_level.txt").write_text("planted_gemm\n")
    importlib.invalidate_caches()
    (found,) = probe_all([package()], HOPPER)
    assert found.state is State.OTHER_FORK and not mark.exists()
    assert "another-gemm and planted-gemm" in found.reason


def test_an_old_version_is_never_imported(plant: Plant) -> None:
    mark = plant(WHOLE, version="0.2.0.post3")
    (found,) = probe_all([package()], HOPPER)
    assert found.state is State.TOO_OLD and not mark.exists()
    assert found.reason == "planted-gemm is 0.2.0.post3; 0.2.2 or newer is needed"


@pytest.mark.parametrize(
    ("device", "state", "words"),
    [
        (NO_DRIVER, State.NO_DEVICE, "no NVIDIA driver (libcuda.so.1)"),
        (read_device("cpu"), State.OTHER_DEVICE, "runs on sm90; this is the CPU"),
        (
            Device(Target.SM100, "a card, sm_100", True),
            State.OTHER_DEVICE,
            "this is a card, sm_100",
        ),
        (Device(Target.OTHER, "a card, sm_89", True), State.OTHER_DEVICE, "this is a card, sm_89"),
    ],
)
def test_the_device_comes_before_the_import(
    plant: Plant, device: Device, state: State, words: str
) -> None:
    """The version is told all the same."""
    mark = plant(WHOLE)
    (found,) = probe_all([package()], device)
    assert found.state is state and words in found.reason
    assert found.version == "0.2.2" and not mark.exists()


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody reads the metadata of everything that is installed."""

    def refuse() -> None:
        raise AssertionError("read")

    monkeypatch.setattr(importlib.metadata, "packages_distributions", refuse)
    (found,) = probe_all([package()], HOPPER)
    assert found.state is State.NOT_INSTALLED and found.version is None


def test_a_module_without_a_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that a program made itself."""
    module = type(sys)("planted_gemm")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "planted_gemm", module)
    assert probe_all([package()], HOPPER)[0].state is State.NOT_INSTALLED


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is asked only behind a good answer to the one before it."""
    assert read_device("cpu") == Device(Target.CPU, "the CPU", True)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(probing.ctypes, "CDLL", lambda name: pytest.fail("looked for a driver"))
    found = read_device("cuda")
    assert not found.is_usable and found.words == f"torch {torch.__version__} has no CUDA"

    def no_driver(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(probing.ctypes, "CDLL", no_driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for a device"))
    assert read_device("cuda:0") == NO_DRIVER
    monkeypatch.setattr(probing.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert read_device("cuda").words == "torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda name: "Card")
    assert read_device("cuda") == Device(Target.SM90, "Card, sm_90", True, (9, 0))


def test_capabilities() -> None:
    targets = [target_of(c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))]
    other = Target.OTHER
    assert targets == [other, other, Target.SM90, Target.SM100, Target.SM100, other]


def test_versions() -> None:
    assert release("2.8.2.post20261020") == (2, 8, 2) and release("0.1.15+cpu") == (0, 1, 15)
    assert release("1.0.0rc1") == (1, 0, 0) and release("dev") == ()


CODE = """
import sys
import torch
before = set(sys.modules)
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import probe_all, read_device
for device in ("cpu", "cuda"):
    for found in probe_all(PACKAGES, read_device(device)):
        assert found.module is None, found
names = {package.name for package in PACKAGES} | {"triton", "cuda", "tvm", "tvm_ffi"}
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} & names))
"""


def test_nothing_optional_is_imported_where_it_cannot_run() -> None:
    """In a process of its own, with whatever is installed here and no card."""
    if torch.cuda.is_available():
        return  # here libraries may well be imported
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_packages_are_named_once() -> None:
    assert len({item.name for item in PACKAGES}) == len(PACKAGES)
    for item in PACKAGES:
        assert item.install.startswith("pip install") and item.distributions[0] in item.install
        assert Target.CPU not in item.targets and Target.OTHER not in item.targets
