"""The choice of an implementation per op: by device first, with a reason for each other one."""

import json
from dataclasses import replace

import pytest

from decodegrid.kernels.native import OPS
from decodegrid.kernels.providers.implementations import IMPLEMENTATIONS
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import Device, Package, Probe, State, Target, probe_all
from decodegrid.kernels.providers.registry import (
    Implementation,
    KernelTable,
    Kind,
    NativeState,
    StepShape,
    as_if_installed,
    choose,
    lines_of,
)

NATIVE = NativeState(True, "native.so, loaded")
NO_NATIVE = NativeState(False, "no C++ compiler")
CPU = Device(Target.CPU, "the CPU", True)
ANY = frozenset(Target)
HOPPER = frozenset({Target.SM90})

RELEASED = StepShape(
    dtype="bfloat16", hidden_size=5120, num_heads=64, head_dim=512, index_heads=32, index_dim=128,
    index_topk=512, window=128, moe_inner=2304, num_experts=384,
    vocab_size=129280, block_size=128, hc_mult=4, hc_iters=20, hc_eps=1e-6, kv_records=True,
    packed_matrices=True, packed_experts=True,
)  # fmt: skip
TINY = StepShape(
    dtype="float32", hidden_size=192, num_heads=8, head_dim=64, index_heads=16, index_dim=32,
    index_topk=16, window=16, moe_inner=64, num_experts=16,
    vocab_size=1024, block_size=16, hc_mult=4, hc_iters=20, hc_eps=1e-6, kv_records=False,
    packed_matrices=False, packed_experts=False,
)  # fmt: skip


def one(name: str = "planted", targets: frozenset[Target] = HOPPER) -> Package:
    return Package(name, (f"{name}-dist",), (1,), targets, (), f"pip install {name}-dist")


def table_for(target: Target, shape: StepShape = RELEASED) -> KernelTable:
    device, probes = as_if_installed(PACKAGES, target)
    return choose(IMPLEMENTATIONS, device, probes, shape, NATIVE)


def chosen(table: KernelTable) -> dict[str, Kind]:
    return {op: choice.chosen.kind for op, choice in table.choices.items()}


def test_the_first_that_fits_is_chosen_and_the_others_have_reasons() -> None:
    package = one()
    items = [
        Implementation("op", Kind.LIBRARY, "a", frozenset({Target.SM100})),
        Implementation("op", Kind.LIBRARY, "b", HOPPER, package),
        Implementation("op", Kind.TILELANG, "c", HOPPER, None, lambda shape: "heads do not fit"),
        Implementation("op", Kind.TILELANG, "d", HOPPER),
        Implementation("op", Kind.REFERENCE, "e", ANY),
    ]
    card = Device(Target.SM90, "a card", True)
    probe = Probe(package, State.NOT_INSTALLED, "planted is not installed")
    table = choose(items, card, [probe], RELEASED, NATIVE)
    assert table.chosen("op").call == "d"
    reasons = [(r.implementation.call, r.reason, r.install) for r in table.choices["op"].rejected]
    assert reasons == [
        ("a", "for sm100", ""),
        ("b", "planted is not installed", "pip install planted-dist"),
        ("c", "heads do not fit", ""),
        ("e", "tilelang comes first", ""),
    ]


@pytest.mark.parametrize("state", list(State))
def test_only_a_ready_library_is_chosen(state: State) -> None:
    """And what is to be installed is told only where that helps."""
    package = one()
    items = [
        Implementation("op", Kind.LIBRARY, "b", HOPPER, package),
        Implementation("op", Kind.REFERENCE, "e", ANY),
    ]
    probe = Probe(package, state, "why", "planted-dist", "1.0")
    table = choose(items, Device(Target.SM90, "a card", True), [probe], RELEASED, NATIVE)
    is_ready = state is State.READY
    assert table.uses("op", Kind.LIBRARY) == is_ready
    rejected = table.choices["op"].rejected[0]
    helps = state not in (State.READY, State.NO_DEVICE, State.OTHER_DEVICE)
    assert (rejected.install != "") == helps
    assert rejected.reason == ("library comes first" if is_ready else "why")


def test_an_op_without_any_implementation_is_a_fault() -> None:
    items = [Implementation("op", Kind.LIBRARY, "a", HOPPER)]
    with pytest.raises(ValueError, match="op op has no implementation for the CPU"):
        choose(items, CPU, [], RELEASED, NATIVE)


def test_the_cpu_with_and_without_native_kernels() -> None:
    probes = probe_all(PACKAGES, CPU)
    with_native = choose(IMPLEMENTATIONS, CPU, probes, TINY, NATIVE)
    without = choose(IMPLEMENTATIONS, CPU, probes, TINY, NO_NATIVE)
    assert {op for op, kind in chosen(with_native).items() if kind is Kind.NATIVE} >= set(OPS)
    assert set(chosen(without).values()) == {Kind.REFERENCE}
    assert with_native.choices["linear"].note == "native.so, loaded"
    assert ("no C++ compiler") in [r.reason for r in without.choices["linear"].rejected]


def test_every_native_op_is_in_the_table() -> None:
    assert {item.op for item in IMPLEMENTATIONS if item.kind is Kind.NATIVE} == set(OPS)


def test_every_op_runs_everywhere_with_nothing_installed() -> None:
    for target in Target:
        device = Device(target, str(target), True)
        missing = [Probe(p, State.NOT_INSTALLED, f"{p.name} is not installed") for p in PACKAGES]
        for shape in (TINY, RELEASED):
            table = choose(IMPLEMENTATIONS, device, missing, shape, NO_NATIVE)
            kinds = set(chosen(table).values())
            assert Kind.LIBRARY not in kinds and Kind.NATIVE not in kinds
            assert Kind.TILELANG not in kinds
            for choice in table.choices.values():
                assert all(item.reason for item in choice.rejected)


def test_other_cards_get_plain_torch() -> None:
    assert set(chosen(table_for(Target.OTHER)).values()) == {Kind.REFERENCE}


def test_capability_decides_not_presence() -> None:
    """Everything is installed for both; Hopper gets no kernel that only Blackwell has."""
    hopper, blackwell = table_for(Target.SM90), table_for(Target.SM100)
    assert set(hopper.choices) == set(blackwell.choices)
    for table in (hopper, blackwell):
        for choice in table.choices.values():
            assert table.device.target in choice.chosen.targets
    assert "bf16" in hopper.chosen("packed_linear").call
    assert "fp8" in blackwell.chosen("packed_linear").call
    assert hopper.uses("packed_experts", Kind.TILELANG)
    assert blackwell.uses("packed_experts", Kind.LIBRARY)
    assert blackwell.uses("attention", Kind.LIBRARY)


def test_a_small_model_does_not_fit_the_libraries() -> None:
    """Where a kernel wants the released model's sizes, the reason says which."""
    table = table_for(Target.SM100, TINY)
    reasons = [item.reason for item in table.choices["attention"].rejected]
    assert not table.uses("attention", Kind.LIBRARY) and "records" in reasons[0]
    small = replace(TINY, dtype="bfloat16", kv_records=True)
    table = table_for(Target.SM90, small)
    reasons = [item.reason for item in table.choices["attention"].rejected]
    assert "head_dim 64, not 512" in reasons
    # And our own kernels are built for certain sizes, this one not among them.
    assert not table.uses("gumbel_noise", Kind.TILELANG)
    built = [item.reason for item in table.choices["gumbel_noise"].rejected]
    assert "no kernel is built for vocab 1024" in built
    released = table_for(Target.SM90)
    for op in ("gumbel_noise", "filter_logits"):
        assert not table.uses(op, Kind.TILELANG) and released.uses(op, Kind.TILELANG)


def test_the_table_is_frozen_and_the_same_each_time() -> None:
    first, second = table_for(Target.SM90), table_for(Target.SM90)
    assert json.dumps(first.as_json()) == json.dumps(second.as_json())
    with pytest.raises(TypeError):
        first.choices["linear"] = first.choices["sinkhorn"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        first.device = CPU  # type: ignore[misc]
    with pytest.raises(ValueError, match="deep_gemm is not ready"):
        first.module("deep_gemm")


def test_lines_say_everything() -> None:
    table = choose(IMPLEMENTATIONS, CPU, probe_all(PACKAGES, CPU), TINY, NATIVE)
    lines = list(lines_of(table))
    assert [op for op, _ in lines if op] == list(table.choices)
    total = sum(1 + len(choice.rejected) for choice in table.choices.values())
    assert len(lines) == total
    assert all(words for _, words in lines)
