"""Which implementation each op runs with on a device, and why not another.

Owns the rule: of an op's implementations, in order of preference (`implementations.py`), the first
one whose device, library and shapes all fit. Device capability decides first; a library that is
installed is never chosen for a card that it has no kernels for. Plain torch fits everywhere, so
the choice is total. A kernel of ours whose cubin is not there does not fit, nor does a library's
call that needs one beside it. The result is frozen, holds for one deployment, and is passed to who
needs it; nothing here is kept between calls.

Data flow: `Device`, probes, `StepShape`, the cubins that are there and the state of the native
kernels -> `KernelTable`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType, ModuleType

from decodegrid.kernels.providers.probe import (
    Device,
    Package,
    Probe,
    State,
    Target,
    target_words,
)
from decodegrid.kernels.tile.table import BLACKWELL, HOPPER, kernels

ARCH_OF: Mapping[Target, str] = MappingProxyType({Target.SM90: HOPPER, Target.SM100: BLACKWELL})
"""What kernels of ours are built for, by device."""


class Kind(StrEnum):
    """Where an implementation comes from."""

    REFERENCE = "reference"
    """Plain torch."""
    NATIVE = "native"
    """Our C++ for the CPU."""
    TILELANG = "tilelang"
    """Our TileLang kernels for CUDA."""
    LIBRARY = "library"


@dataclass(frozen=True, slots=True)
class StepShape:
    """The numbers of a deployment that decide whether a kernel fits."""

    dtype: str
    """Of activations: "bfloat16", "float32", "float64"."""
    hidden_size: int
    num_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    window: int
    moe_inner: int
    num_experts: int
    vocab_size: int
    block_size: int
    """Tokens of a block of the cache."""
    hc_mult: int
    hc_iters: int
    hc_eps: float
    kv_records: bool
    """Keys are kept as records of FP8 and FP4 codes."""
    packed_matrices: bool
    """FP8 projections stay packed."""
    packed_experts: bool
    """MXFP4 experts stay packed."""
    num_ranks: int = 1
    draft_experts: int = 0
    """Of a layer of the drafter; 0 without one."""
    packed_inputs: tuple[int, ...] = ()
    """Inputs of the FP8 projections, each number once."""
    group_inputs: int = 0
    """Inputs of one group of the grouped FP8 projection."""
    ratios: tuple[int, ...] = ()
    """Tokens of an entry, each number once; none in a model without compressed keys."""
    candidate_block: int = 0
    """Entries of a candidate block; 0 without them."""
    candidate_count: int = 0
    """Candidate blocks that are kept."""


Needs = Callable[[StepShape], tuple[str, ...]]
"""Names of the kernels of ours that an implementation launches at a shape."""


def needs_nothing(shape: StepShape) -> tuple[str, ...]:
    """No kernel of ours."""
    return ()


Fit = Callable[[StepShape], str]
"""Why a shape does not fit; "" if it does."""


def fits_always(shape: StepShape) -> str:
    """No condition."""
    return ""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run one op."""

    op: str
    kind: Kind
    call: str
    """What is called, for a person."""
    targets: frozenset[Target]
    package: Package | None = None
    fit: Fit = fits_always
    needs: Needs = needs_nothing


@dataclass(frozen=True, slots=True)
class Rejected:
    """An implementation that was not chosen."""

    implementation: Implementation
    reason: str
    install: str = ""
    """What a user would install to have it; empty where that would not help."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation of one op."""

    op: str
    chosen: Implementation
    note: str
    """What is to be said of the one that was chosen."""
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True, slots=True)
class NativeState:
    """Whether the CPU's C++ kernels are, or will be, there."""

    is_used: bool
    words: str
    """Where they are, or why they are not used."""


@dataclass(frozen=True, slots=True)
class BuiltKernels:
    """The kernels of ours that can be launched."""

    names: frozenset[str]
    where: str
    """Behind "no cubin of NAME": where it was looked for, or why there is none."""
    install: str = ""
    """What a user would do to have more of them."""
    digest: str = ""
    """Hash of the cubins; empty where none are there."""


def as_if_built(target: Target) -> BuiltKernels:
    """Every kernel that is built for a device."""
    arch = ARCH_OF.get(target, "")
    return BuiltKernels(frozenset(k.name for k in kernels() if arch in k.archs), "is built")


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The choice for every op on one device; never changes."""

    device: Device
    choices: Mapping[str, Choice]
    probes: tuple[Probe, ...]
    built: BuiltKernels

    def chosen(self, op: str) -> Implementation:
        """The implementation of an op. Raises KeyError for a name that is none."""
        return self.choices[op].chosen

    def uses(self, op: str, kind: Kind) -> bool:
        """Whether an op runs with an implementation of this kind."""
        return self.chosen(op).kind is kind

    def module(self, name: str) -> ModuleType:
        """The library of an import name. Raises ValueError where it is not ready."""
        for probe in self.probes:
            if probe.package.name == name and probe.module is not None:
                return probe.module
        raise ValueError(f"{name} is not ready on {self.device.words}")

    def as_json(self) -> dict[str, object]:
        """Plain values, the same for the same machine and deployment."""
        return {
            "device": {"target": str(self.device.target), "words": self.device.words},
            "cubins": {"count": len(self.built.names), "digest": self.built.digest},
            "ops": [_choice_json(choice) for choice in self.choices.values()],
            "libraries": [
                {
                    "name": probe.package.name,
                    "state": str(probe.state),
                    "reason": probe.reason,
                    "distribution": probe.distribution,
                    "version": probe.version,
                    "install": probe.package.install,
                }
                for probe in self.probes
            ],
        }


def _choice_json(choice: Choice) -> dict[str, object]:
    return {
        "op": choice.op,
        "chosen": str(choice.chosen.kind),
        "call": choice.chosen.call,
        "note": choice.note,
        "others": [
            {
                "kind": str(item.implementation.kind),
                "call": item.implementation.call,
                "reason": item.reason,
                "install": item.install,
            }
            for item in choice.rejected
        ],
    }


def choose(
    implementations: Sequence[Implementation],
    device: Device,
    probes: Sequence[Probe],
    shape: StepShape,
    native: NativeState,
    built: BuiltKernels | None = None,
) -> KernelTable:
    """Choose for every op that `implementations` name, in their order of preference.

    built: the cubins that are there; None takes every kernel that can be built for the device.
    Raises ValueError where an op has no implementation that fits everything, which would be a fault
    of the list.
    """
    by_op: dict[str, list[Implementation]] = {}
    for item in implementations:
        by_op.setdefault(item.op, []).append(item)
    found = {probe.package.name: probe for probe in probes}
    built = as_if_built(device.target) if built is None else built
    choices = {}
    for op, candidates in by_op.items():
        chosen: Implementation | None = None
        rejected = []
        for item in candidates:
            refusal = _refusal(item, device, found, shape, native)
            if refusal is None:
                refusal = _lack(item, device.target, shape, built)
            if refusal is None and chosen is None:
                chosen = item
            elif refusal is None:
                rejected.append(Rejected(item, _later_words(chosen)))
            else:
                rejected.append(refusal)
        if chosen is None:
            raise ValueError(f"op {op} has no implementation for {device.words}")
        note = native.words if chosen.kind is Kind.NATIVE else ""
        choices[op] = Choice(op, chosen, note, tuple(rejected))
    return KernelTable(device, MappingProxyType(choices), tuple(probes), built)


def _later_words(chosen: Implementation | None) -> str:
    assert chosen is not None
    return f"{chosen.kind} comes first"


def _refusal(
    item: Implementation,
    device: Device,
    probes: Mapping[str, Probe],
    shape: StepShape,
    native: NativeState,
) -> Rejected | None:
    """Why an implementation cannot be used; None if it can."""
    if device.target not in item.targets:
        return Rejected(item, f"for {target_words(item.targets)}")
    if item.kind is Kind.NATIVE and not native.is_used:
        return Rejected(item, native.words)
    misfit = item.fit(shape)
    if misfit:
        return Rejected(item, misfit)
    if item.package is None:
        return None
    probe = probes.get(item.package.name)
    if probe is None:
        return Rejected(item, f"{item.package.name} was not looked for", item.package.install)
    if probe.is_ready:
        return None
    # Another version or distribution helps there; nothing that is installed helps another card.
    helps = probe.state not in (State.NO_DEVICE, State.OTHER_DEVICE)
    return Rejected(item, probe.reason, item.package.install if helps else "")


def _lack(
    item: Implementation, target: Target, shape: StepShape, built: BuiltKernels
) -> Rejected | None:
    """Which kernel of ours an implementation lacks; None for one that has all it launches."""
    missing = [name for name in item.needs(shape) if name not in built.names]
    if not missing:
        return None
    known = as_if_built(target).names
    unknown = [name for name in missing if name not in known]
    if unknown:
        return Rejected(item, f"no kernel is built for these sizes: {unknown[0]}")
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return Rejected(item, f"no cubin of {missing[0]}{more} {built.where}", built.install)


def as_if_installed(packages: Sequence[Package], target: Target) -> tuple[Device, list[Probe]]:
    """A device of this kind and probes as if every library with kernels for it were ready.

    For tables of devices that are not there; the probes have no modules, so nothing can be called.
    """
    names = {Target.SM90: "a Hopper card", Target.SM100: "a Blackwell card"}
    device = Device(target, names.get(target, "the CPU"), True)
    probes = []
    for package in packages:
        fits = target in package.targets
        state = State.READY if fits else State.OTHER_DEVICE
        reason = "" if fits else f"{package.name} runs on {target_words(package.targets)}"
        probes.append(Probe(package, state, reason, package.distributions[0]))
    return device, probes


def lines_of(table: KernelTable) -> Iterator[tuple[str, str]]:
    """(op, words) of the choices: what runs, then each other one with its reason."""
    for op, choice in table.choices.items():
        note = f" ({choice.note})" if choice.note else ""
        yield op, f"{choice.chosen.kind}: {choice.chosen.call}{note}"
        for item in choice.rejected:
            hint = f"; {item.install}" if item.install else ""
            yield (
                "",
                f"not {item.implementation.kind}, {item.implementation.call}: {item.reason}{hint}",
            )
