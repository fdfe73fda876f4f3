"""What a device can run and which optional libraries are fit for use, found out without harm.

Owns the order of the questions: a library's specification, then the distribution that owns its
name, then the device, and only where all of these answer well is the library imported, inside a
handler for everything that an import is known to raise. Owns no state: who asks keeps the answers.
Does not own which libraries there are (`packages.py`), nor what is chosen (`registry.py`).

Data flow: device name -> `Device`; `Package` and `Device` -> `Probe`.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType

import torch

DRIVER = "libcuda.so.1"
"""The driver's library, which every CUDA library needs and which only a machine with a card has."""

IMPORT_ERRORS: tuple[type[BaseException], ...] = (
    ImportError,
    OSError,  # a shared library that is not there
    RuntimeError,  # another ABI, another NCCL
    AssertionError,
    AttributeError,  # another version of what the library builds on
    TypeError,
    ValueError,
    LookupError,
    SystemExit,  # a library must not end the process
)
"""What importing a library that does not fit may raise. Ctrl-C passes."""

_SHOWN_ERROR_CHARS = 200


class Target(StrEnum):
    """What kernels are chosen for."""

    CPU = "cpu"
    SM90 = "sm90"
    """Hopper: H100, H200."""
    SM100 = "sm100"
    """Blackwell of the data centre: B200, GB200, B300."""
    OTHER = "other"
    """Any other CUDA device: plain torch alone."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device that kernels are chosen for."""

    target: Target
    words: str
    """What it is, or why a CUDA device cannot be used."""
    is_usable: bool
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Package:
    """An optional library as it is asked for."""

    name: str
    """Its import name."""
    distributions: tuple[str, ...]
    """Those whose calls were recorded, the one whose version counts first; others may own the same
    import name."""
    minimum: tuple[int, ...]
    """Oldest version whose calls were recorded."""
    targets: frozenset[Target]
    attributes: tuple[str, ...]
    """Dotted names that the wrappers call."""
    install: str
    """What a user would type."""
    imported: str = ""
    """The module that is imported, where it is not the import name itself."""


class State(StrEnum):
    """How far a probe got."""

    READY = "ready"
    NOT_INSTALLED = "not installed"
    OTHER_FORK = "other fork"
    TOO_OLD = "too old"
    NO_DEVICE = "no device"
    OTHER_DEVICE = "other device"
    IMPORT_FAILED = "import failed"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer for one library."""

    package: Package
    state: State
    reason: str
    """For a person; empty where it is ready."""
    distribution: str | None = None
    version: str | None = None
    module: ModuleType | None = field(default=None, compare=False, repr=False)

    @property
    def is_ready(self) -> bool:
        """Whether `module` may be called."""
        return self.state is State.READY


def target_words(targets: frozenset[Target]) -> str:
    """ "sm90, sm100": in the order of their age."""
    return ", ".join(str(target) for target in Target if target in targets)


def target_of(capability: tuple[int, int]) -> Target:
    """The kernels' name for a compute capability."""
    # Cubins with an "a" run on their own architecture only; 10.3 takes those of 10.0's family.
    return {9: Target.SM90, 10: Target.SM100}.get(capability[0], Target.OTHER)


def read_device(name: str) -> Device:
    """What `name`, "cpu" or a CUDA device, is. Makes no CUDA context where there is no driver."""
    if torch.device(name).type != "cuda":
        return Device(Target.CPU, "the CPU", True)
    if torch.version.cuda is None:
        return Device(Target.OTHER, f"torch {torch.__version__} has no CUDA", False)
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return Device(Target.OTHER, f"no NVIDIA driver ({DRIVER})", False)
    if not torch.cuda.is_available():
        return Device(Target.OTHER, "torch sees no CUDA device", False)
    capability = torch.cuda.get_device_capability(name)
    words = f"{torch.cuda.get_device_name(name)}, sm_{capability[0]}{capability[1]}"
    return Device(target_of(capability), words, True, capability)


def probe_all(packages: Sequence[Package], device: Device) -> tuple[Probe, ...]:
    """One answer per library, in order.

    Looks the owners of import names up only if there is a name to look up: that reads the metadata
    of everything that is installed.
    """
    there = [package for package in packages if is_there(package.name)]
    owners = importlib.metadata.packages_distributions() if there else {}
    return tuple(probe(package, device, owners) for package in packages)


def is_there(name: str) -> bool:
    """Whether a top-level name could be imported; imports nothing."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # something put a module without a specification there
        return False


def probe(package: Package, device: Device, owners: Mapping[str, Sequence[str]]) -> Probe:
    """What stands between a library and its use on `device`.

    owners: import name -> the distributions that own it, as
    `importlib.metadata.packages_distributions` tells.
    """
    if not is_there(package.name):
        return Probe(package, State.NOT_INSTALLED, f"{package.name} is not installed")
    names = sorted(set(owners.get(package.name, ())), key=_plain)
    accepted = [
        name for wanted in package.distributions for name in names if _plain(name) == _plain(wanted)
    ]
    if not accepted or len(names) > len(accepted):
        found = " and ".join(names) or "no distribution"
        wanted = " or ".join(package.distributions)
        reason = f"{package.name} belongs to {found}; {wanted} is what was recorded"
        return Probe(package, State.OTHER_FORK, reason, next(iter(names), None))
    distribution = accepted[0]
    version = importlib.metadata.version(distribution)
    if release(version) < package.minimum:
        least = ".".join(map(str, package.minimum))
        reason = f"{distribution} is {version}; {least} or newer is needed"
        return Probe(package, State.TOO_OLD, reason, distribution, version)
    if not device.is_usable:
        return Probe(package, State.NO_DEVICE, device.words, distribution, version)
    if device.target not in package.targets:
        wanted = target_words(package.targets)
        reason = f"{distribution} runs on {wanted}; this is {device.words}"
        return Probe(package, State.OTHER_DEVICE, reason, distribution, version)
    return _import(package, distribution, version)


def _import(package: Package, distribution: str, version: str) -> Probe:
    try:
        module = importlib.import_module(package.imported or package.name)
    except IMPORT_ERRORS as error:
        lines = str(error).splitlines() or [""]
        reason = f"import of {package.name}: {type(error).__name__}: {lines[0]}"
        reason = reason[:_SHOWN_ERROR_CHARS].rstrip(": ")
        return Probe(package, State.IMPORT_FAILED, reason, distribution, version)
    missing = [name for name in package.attributes if not _has(module, name)]
    if missing:
        reason = f"{distribution} {version} lacks {', '.join(missing)}"
        return Probe(package, State.INCOMPLETE, reason, distribution, version)
    return Probe(package, State.READY, "", distribution, version, module)


def _has(module: ModuleType, dotted: str) -> bool:
    missing = object()
    found: object = module
    for name in dotted.split("."):
        found = getattr(found, name, missing)
    return found is not missing


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.8.2.post1" -> (2, 8, 2)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
