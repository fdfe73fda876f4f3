"""Capture and replay on the CPU."""

import pytest
import torch

from decodegrid.capture.cpu import CpuBackend
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.program import StrayOpError, find_overlap

KEYS = [GraphKey(8, 48), GraphKey(6, 6), GraphKey(2, 12), GraphKey(2, 2)]


def check_replays(toy) -> None:
    """Replay equals the direct call bit for bit, twice, with contents changed in between."""
    backend = CpuBackend(toy.compiler)
    graphs = {}
    for key in KEYS:
        toy.refill(0)
        step = toy.step(key.num_reqs, key.num_query_tokens)
        graphs[key] = backend.capture(key, step)
        assert graphs[key].num_nodes == 3
    for seed, key in enumerate([*KEYS, *reversed(KEYS)], start=1):
        toy.refill(seed)
        before = [w.clone() for w in toy.written()]
        toy.step(key.num_reqs, key.num_query_tokens)()
        want = [w.clone() for w in toy.written()]
        toy.refill(seed)
        graphs[key].replay()
        for have, need, old in zip(toy.written(), want, before, strict=True):
            assert torch.equal(have, need)
            assert not torch.equal(have, old)


def test_replay_equals_direct_call_inductor(inductor_toy):
    check_replays(inductor_toy)
    assert inductor_toy.compiler.num_compilations == 2


@pytest.mark.parametrize("backend", ["eager", "none"])
def test_replay_equals_direct_call_uncompiled(toy_of, backend):
    toy = toy_of(backend)
    check_replays(toy)
    assert toy.compiler.num_compilations == (2 if backend == "eager" else 0)
    assert toy.compiler.counters.planned_compilations == toy.compiler.num_compilations


def test_capture_after_freeze_needs_no_compiler(toy_of):
    toy = toy_of("eager")
    backend = CpuBackend(toy.compiler)
    backend.capture("large", toy.step(8, 48))
    toy.compiler.freeze()
    assert backend.capture("small", toy.step(2, 3)).num_nodes == 3
    assert toy.compiler.num_compilations == 2


@pytest.mark.parametrize("backend", ["eager", "none"])
@pytest.mark.parametrize(
    ("stray", "operation"),
    [
        (lambda toy: toy.out.add_(1), "aten.add_"),
        (lambda toy: toy.x[:4] + 1, "aten.add."),
        (lambda toy: toy.out[:2].copy_(toy.x[:2]), "aten.copy_"),
        (lambda toy: toy.x[0, 0].item(), "aten._local_scalar_dense"),
        (lambda toy: torch.empty(3), "aten.empty"),
        (lambda toy: torch.tensor([3]), "aten.lift_fresh"),
        (lambda toy: toy.x.mT.reshape(-1), "aten.clone"),
        (lambda toy: toy.out.t_(), "aten.t_"),
    ],
)
def test_stray_operation_is_caught(toy_of, backend, stray, operation):
    toy = toy_of(backend)
    step = toy.step(2, 4)

    def strayed() -> None:
        step()
        stray(toy)

    with pytest.raises(StrayOpError, match=operation.replace(".", r"\.")):
        CpuBackend(toy.compiler).capture("strayed", strayed)
    # The guard is gone afterwards, and the compiler can capture again.
    toy.out.add_(1)
    assert CpuBackend(toy.compiler).capture("clean", step).num_nodes == 3


def test_views_are_allowed(toy_of):
    toy = toy_of("none")

    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    scale = toy.compiler.region(double, {})

    def step() -> None:
        first, second = toy.x[:8].view(2, 4, -1).unbind(0)
        scale(first.transpose(0, 1)[:, 1:])
        scale(second.detach().split(2)[0].unsqueeze(0))

    toy.x.fill_(1.0)
    graph = CpuBackend(toy.compiler).capture("views", step)
    graph.replay()
    assert toy.x[:8].mean(-1)[4:].tolist() == [4.0, 4.0, 1.0, 1.0]


def test_opaque_calls_are_recorded_in_order(toy_of):
    toy = toy_of("eager")

    def cumulate(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.cumsum(x, 0, out=out)

    opaque = toy.compiler.opaque(cumulate)

    def step() -> None:
        toy.combine(toy.x[:4], toy.per_req[:2], toy.mid[:4])
        opaque(toy.mid[:4], toy.out[:4])
        toy.combine(toy.out[:4], toy.per_req[:2], toy.mid[:4])

    toy.refill(1)
    graph = CpuBackend(toy.compiler).capture("opaque", step)
    toy.refill(2)
    graph.replay()
    per_req = toy.per_req[:2].sum(0)
    want = (toy.x[:4].softmax(-1) + per_req).cumsum(0)
    torch.testing.assert_close(toy.out[:4], want)
    torch.testing.assert_close(toy.mid[:4], want.softmax(-1) + per_req)
    assert graph.num_nodes == 3
    with pytest.raises(ValueError, match="returned a value"):
        toy.compiler.opaque(lambda x: x + 1)(toy.x)


def test_step_without_calls_is_refused(eager_compiler):
    with pytest.raises(ValueError, match="called no region"):
        CpuBackend(eager_compiler).capture("nothing", lambda: None)


def nested(backend, toy) -> None:
    backend.capture("inner", toy.step(2, 2))


def test_captures_do_not_nest(toy_of):
    toy = toy_of("none")
    backend = CpuBackend(toy.compiler)
    with pytest.raises(RuntimeError, match="nested"):
        backend.capture("outer", lambda: nested(backend, toy))


def test_find_overlap():
    base = torch.zeros(6, 6)
    columns = [base[:, :3], base[:, 3:]]
    assert find_overlap(columns, frozenset({0, 1})) is None
    assert find_overlap([base[:3], 5, base[3:]], frozenset({0, 2})) is None
    assert find_overlap([base[:4], base[3:]], frozenset()) is None
    assert find_overlap([torch.zeros(2), base[:4], base[3:]], frozenset({2})) == (2, 1)
