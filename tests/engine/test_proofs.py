"""Proofs at capture time: they pass on what is right, and each fails on a fault of its kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.engine import proof_eager, proofs
from decodegrid.engine.proof_compare import Part, beyond, distances, largest, same_bits, unexplained
from decodegrid.engine.proof_eager import PlainOps
from decodegrid.engine.proof_report import GraphProof, ProofReport
from decodegrid.engine.proof_state import LiveState, buffer_tensors, row_places
from decodegrid.engine.proofs import prove_counters, prove_coverage, run_proofs
from decodegrid.engine.runner import Runner
from decodegrid.kernels.select_entries import select_entries_op

TEMPERATURES = (1.0, 1.0)
SMALL = {"hc_sinkhorn_iters": 2}


@pytest.fixture(scope="module")
def make(
    make_eager_runner: Callable[..., Runner], make_model: Callable[..., Any],
    layer_changes: dict[int, dict[str, Any]],
) -> Callable[..., Runner]:  # fmt: skip
    """make(num_layers=2, **capacity): float64, two drafts, up to three rows, nothing compiled."""
    torch.set_num_threads(1)

    def runner(num_layers: int = 2, **capacity: Any) -> Runner:
        return make_eager_runner(make_model(**SMALL, **layer_changes[num_layers]), **capacity)

    return runner


@pytest.fixture(scope="module")
def runner(make: Callable[..., Runner]) -> Runner:
    """What faults are planted in."""
    return make()


class Planted:
    """A captured graph with a fault before or behind it."""

    def __init__(
        self, graph: Any, before: Callable[[], object] | None, after: Callable[[], object] | None
    ) -> None:
        self.graph, self.before, self.after = graph, before, after

    def replay(self) -> None:
        with torch.no_grad():
            if self.before is not None:
                self.before()
            self.graph.replay()
            if self.after is not None:
                self.after()


@pytest.fixture
def plant(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """plant(key, before=None, after=None): a fault in one fused pair, or in one prefill size.

    Of the others two are proven beside it, to save time.
    """
    largest = GraphKey(3, 9)
    whole = {**runner.prefill_graphs, **runner.decode_graphs}
    kept: dict[Any, Any] = {8: whole[8], largest: whole[largest]}

    def put(key: Any, before: Any = None, after: Any = None) -> None:
        kept[key] = Planted(whole[key], before, after)
        chunks = {key: graph for key, graph in kept.items() if isinstance(key, int)}
        pairs = {key: graph for key, graph in kept.items() if not isinstance(key, int)}
        monkeypatch.setattr(runner, "prefill_graphs", chunks)
        monkeypatch.setattr(runner, "decode_graphs", pairs)

    return put


def few(runner: Runner) -> Runner:
    """The runner with three of its pairs, to save time; coverage fails for the others."""
    pairs = (GraphKey(1, 1), GraphKey(2, 4), GraphKey(3, 9))
    runner.decode_graphs = {pair: runner.decode_graphs[pair] for pair in pairs}
    return runner


def failing(report: ProofReport) -> dict[str, GraphProof]:
    return {graph.graph: graph for graph in report.graphs if not graph.ok}


def test_a_right_runner_passes_and_is_left_as_it_was(make: Callable[..., Runner]) -> None:
    runner = make(4, rich=True)
    slots, rich = runner.model.state.slots, runner.model.state.rich
    assert rich is not None and runner.buffers.rich is not None
    slots.seed[2], rich.presence[1] = 77, 0.25
    runner.buffers.rich.masks.fill_(-1)
    before = {name: tensor.clone() for name, tensor in runner.model.state.tensors()}
    report = run_proofs(runner, TEMPERATURES)
    assert report.ok, report.format()
    # Two prefill sizes and every pair, in both variants.
    assert len(report.graphs) == 2 * (2 + len(runner.grid)) == runner.num_captured
    for graph in report.graphs:
        assert graph.max_difference <= 1e-12 and graph.draws == 1, graph
    for name, tensor in runner.model.state.tensors():
        kept = name.startswith(("slots.", "rich."))
        assert torch.equal(tensor, before[name] if kept else torch.zeros_like(tensor)), name
    assert bool((runner.buffers.rich.masks == -1).all())
    text = report.format()
    assert "coverage: 15 batches of requests" in text
    assert text.endswith("graphs equal to the eager step and pads inert")


def test_the_rows_of_a_scene_are_worth_proving_on(runner: Runner) -> None:
    """Steps accept some drafts and reject others, in rows of several kinds."""
    emitted: list[int] = []
    plain = proofs.DecodeCase.view

    def view(case: Any) -> Any:
        found = plain(case)
        emitted.extend(found["num_emitted"].values.tolist())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs.DecodeCase, "view", view)
        assert run_proofs(runner, TEMPERATURES, seed=1).ok
    assert min(emitted) == 1 and max(emitted) == 3


def test_one_wrong_logit(runner: Runner, plant: Callable[..., None]) -> None:
    logits = runner.buffers.output.logits
    plant(GraphKey(3, 9), after=lambda: logits[4, 7].add_(1e-4))
    report = run_proofs(runner, TEMPERATURES)
    (bad,) = failing(report).values()
    assert bad.graph == "(3, 9) fused" and bad.not_inert is None
    assert bad.unequal is not None and bad.where == "logits"
    assert "and no rounding explains it" in bad.unequal
    assert "FAILED (3, 9) fused: not the eager step: logits of row" in report.format()
    assert "proofs: FAILED for 1 of" in report.format()


def test_one_wrong_token(runner: Runner, plant: Callable[..., None]) -> None:
    tokens = runner.buffers.rows.token_ids
    plant(GraphKey(1, 1), after=lambda: tokens[0, 0].add_(1))
    (bad,) = failing(run_proofs(runner, TEMPERATURES)).values()
    assert bad.unequal is not None and bad.unequal.startswith("token_ids of row 0 is off by 1")


def test_one_wrong_key_in_a_ring_or_a_pool(runner: Runner, plant: Callable[..., None]) -> None:
    """State that a later step reads: the largest key of a chunk's or a step's own rows."""
    ring, pool = runner.model.state.window_rings[1], runner.model.state.pools[1].keys
    rows = runner.buffers.target

    plant(8, after=lambda: pool[rows.entry_store_one[3]].mul_(1.001))
    plant(GraphKey(2, 2), after=lambda: ring[rows.window_store[1]].mul_(1.001))
    bad = failing(run_proofs(runner, TEMPERATURES))
    assert set(bad) == {"prefill 8", "(2, 2) fused"}
    assert bad["prefill 8"].where == "pools.1.keys"
    assert bad["(2, 2) fused"].where == "window_rings.1"


def test_a_graph_that_does_nothing(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers hold the right results of the run before; they are cleared first."""

    class Nothing:
        def replay(self) -> None:
            pass

    graphs = {GraphKey(2, 4): Nothing(), GraphKey(3, 9): runner.decode_graphs[GraphKey(3, 9)]}
    monkeypatch.setattr(runner, "decode_graphs", graphs)
    (bad,) = failing(run_proofs(runner, TEMPERATURES)).values()
    assert bad.graph == "(2, 4) fused" and bad.unequal is not None


def test_a_step_that_reads_a_pad_row(runner: Runner, plant: Callable[..., None]) -> None:
    """The null slot's ring leaks into a live logit, by nothing but NaN."""
    ring, logits = runner.model.state.window_rings[0], runner.buffers.output.logits
    plant(GraphKey(3, 6), after=lambda: logits[0, 0].add_(1e-30 * ring[3, 0]))
    (bad,) = failing(run_proofs(runner, TEMPERATURES)).values()
    assert bad.graph == "(3, 6) fused" and bad.unequal is None
    assert bad.not_inert is not None and "changes logits" in bad.not_inert


def test_a_step_that_reads_the_length_of_a_pad_row(
    runner: Runner, plant: Callable[..., None]
) -> None:
    """A whole number this time, before the step: a live row is as long as the null slot says."""
    slots, rows = runner.model.state.slots, runner.buffers.rows

    def leak() -> None:
        if int(slots.seq_len[0]) < 0:
            slots.seed[rows.slots[0]] += 1

    plant(GraphKey(1, 2), before=leak)
    (bad,) = failing(run_proofs(runner, TEMPERATURES)).values()
    assert bad.not_inert is not None and bad.not_inert.startswith("poison -1 changes")
    assert "slots.seed" in bad.not_inert


def test_a_step_that_writes_elsewhere(runner: Runner, plant: Callable[..., None]) -> None:
    """The last block of the pool, and a slot that is not in the batch."""
    pool, slots = runner.model.state.pools[1].keys, runner.model.state.slots
    live = runner.buffers.rows.slots

    def spill() -> None:
        others = set(range(1, 4)) - set(live[:2].tolist())
        slots.num_drafts[min(others)] = 0

    plant(GraphKey(1, 3), after=spill)
    plant(16, after=lambda: pool[:].index_fill_(0, torch.arange(len(pool) - 64, len(pool)), 0.0))
    bad = failing(run_proofs(runner, TEMPERATURES))
    assert bad["(1, 3) fused"].unequal is None
    assert bad["(1, 3) fused"].not_inert == (
        "rows that no live request owns are written in slots.num_drafts"
    )
    assert "prefill 16" in bad


def test_a_graph_that_raises(runner: Runner, plant: Callable[..., None]) -> None:
    def fail() -> None:
        raise RuntimeError("index out of bounds\nmore")

    plant(GraphKey(3, 3), before=fail)
    (bad,) = failing(run_proofs(runner, TEMPERATURES)).values()
    assert bad.unequal == bad.not_inert == "it raises RuntimeError: index out of bounds"


def test_a_hole_in_the_grid(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that is not there, and one that is planned but was not captured."""
    assert prove_coverage(runner).ok
    keys = [key for key in runner.grid.keys if key != GraphKey(3, 9)]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "grid", Grid(keys, 3, 2))
        report = run_proofs(runner, TEMPERATURES)
        assert not report.ok and not failing(report)
        assert "no captured pair covers 3 requests with 7 query tokens" in report.problems[0]
    graphs = {key: graph for key, graph in runner.decode_graphs.items() if key.num_reqs != 2}
    with monkeypatch.context() as patch:
        patch.setattr(runner, "decode_graphs", graphs)
        problem = prove_coverage(runner).problem
        assert problem == "batch (2, 2) is given the pair (2, 2), which is not captured"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "has_rich", True)
        problem = prove_coverage(runner).problem
        assert problem == "batch (1, 1) is given the pair (1, 1), which is not captured"
    monkeypatch.setattr(runner, "prefill_graphs", {8: runner.prefill_graphs[8]})
    assert prove_coverage(runner).problem == "prefill size 16 is planned or captured, not both"


def test_a_counter_that_moved(
    runner: Runner, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = runner.counters
    before = (counters.num_compilations, counters.num_captured)
    assert prove_counters(runner, before).ok
    region = next(iter(counters.planned_by_region))
    with monkeypatch.context() as patch:
        patch.setitem(counters.compiled_by_region, region, 1)
        problem = prove_counters(runner, before).problem
        assert problem is not None and f"{region} is compiled or loaded 1 times" in problem
        assert "during the proofs 1 compilations" in problem and "both must be 0" in problem

    def capture() -> None:
        counters.num_captured += 1

    plant(GraphKey(1, 1), before=capture)
    count = counters.num_captured
    try:
        report = run_proofs(runner, TEMPERATURES)
    finally:
        counters.num_captured = count
    assert not failing(report) and not report.ok
    assert report.problems[-1].startswith(f"counters: {count + 4} captures, planned {count}")


@pytest.mark.parametrize("changes", [
    {"verify": "rejection"}, {"num_layers": 4, "bounded_replay": "compact", "keep_tokens": 14},
    {"num_layers": 4, "bounded_replay": "mask", "keep_tokens": 14}, {"num_blocks": 3},
])  # fmt: skip
def test_other_deployments(changes: dict[str, Any], make: Callable[..., Runner]) -> None:
    """Rejection sampling, bounded replay, and fewer blocks than rows."""
    report = run_proofs(few(make(**changes)), TEMPERATURES)
    assert len(report.graphs) == 5 and not failing(report), report.format()


def test_records(
    make_eager_runner: Callable[..., Runner], make_model: Callable[..., Any],
    layer_changes: dict[int, dict[str, Any]],
) -> None:  # fmt: skip
    """A cache of records; a wrong byte of one is seen as the number that it stands for."""
    model = make_model(**SMALL, **layer_changes[2], head_dim=32, index_head_dim=32)
    runner = few(make_eager_runner(model, kv_cache="v41"))
    assert not failing(run_proofs(runner, TEMPERATURES))
    ring, rows = runner.model.state.window_rings[0], runner.buffers.target
    key = GraphKey(3, 9)
    wrong = Planted(
        runner.decode_graphs[key], None, lambda: ring[rows.window_store[2], 5].bitwise_xor_(0x40)
    )
    runner.decode_graphs = {**runner.decode_graphs, key: wrong}
    (bad,) = failing(run_proofs(runner, TEMPERATURES)).values()
    assert bad.where == "window_rings.0" and bad.unequal is not None


def test_a_near_tie_is_told_from_a_fault(
    runner: Runner, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rounding noise moves as much is a near tie: it proves nothing, and another draw must."""
    logits, size, replays = runner.buffers.output.logits, [0.0], [0]

    def disturb() -> None:
        replays[0] += 1
        if replays[0] == 1 or size[0] < 0:
            logits[:9].mul_(1.0 + abs(size[0]))

    key = GraphKey(3, 6)  # the largest pair makes the scene too
    plant(key, after=disturb)
    monkeypatch.setattr(proofs, "NOISE", {torch.float64: 1e-7})
    monkeypatch.setattr(proofs, "NUM_DISTURBED", 3)
    monkeypatch.setattr(proofs, "MAX_DRAWS", 3)

    def prove(scale: float) -> GraphProof:
        size[0], replays[0] = scale, 0
        report = run_proofs(runner, TEMPERATURES)
        return next(graph for graph in report.graphs if graph.graph == f"{key} fused")

    once = prove(2e-8)
    assert once.ok and once.draws == 2 and once.near_ties >= 1 and once.max_difference <= 1e-12
    always = prove(-2e-8)
    assert always.unequal == "3 draws all had near ties; nothing is shown"
    fault = prove(1e-3)
    assert fault.draws == 1 and fault.unequal is not None
    assert fault.unequal.startswith("logits of row") and "no rounding explains" in fault.unequal


def test_the_plain_form_of_every_op_is_used(
    native_kernels: Any, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native kernels are installed; an op without a plain form is refused."""
    plain, called = dict(proof_eager.PLAIN_FORMS), []

    def select(*args: Any) -> None:
        called.append(args)
        plain[select_entries_op](*args)

    monkeypatch.setattr(proof_eager, "PLAIN_FORMS", {**plain, select_entries_op: select})
    assert run_proofs(runner, TEMPERATURES).ok
    assert called
    with PlainOps(), pytest.raises(RuntimeError, match=r"linear\.default has no plain form"):
        torch.ops.decodegrid.linear.default(torch.rand(2, 3), torch.rand(4, 3))


def test_every_row_of_state_has_one_owner(runner: Runner) -> None:
    """Rows of all slots and all blocks, counted once each, are the whole tensor."""
    model, capacity = runner.model, runner.model.state.capacity
    for places in row_places(model):
        per = places.per_slot * capacity.num_slots + places.per_block * capacity.num_blocks
        expected = places.tensor.shape[0]
        assert per == expected or (per == 0 and places.name.endswith("compressor")), places.name
    live = LiveState(model, [2], [[1, 3]])
    pool = next(part for part in live.parts if part.name == "pools.1.keys")
    assert pool.index.tolist() == [*range(8, 16), *range(24, 32)] and pool.spared == 8
    names = [name for name, _ in buffer_tensors(runner.buffers)]
    assert len(names) == len(set(names)) and "draft_steps" not in names
    assert "prefill.facts" in names and "target.taps.0" in names


def test_distances_by_hand() -> None:
    owner = torch.tensor([0, 0, 1])
    want = {
        "numbers": Part(torch.tensor([[1.0, 2.0], [torch.inf, 4.0], [0.0, torch.nan]]), owner),
        "ids": Part(torch.tensor([5, 6, 7]), owner),
    }
    got = {
        "numbers": Part(torch.tensor([[1.0, 2.4], [torch.inf, 4.0], [-0.0, torch.nan]]), owner),
        "ids": Part(torch.tensor([5, 6, 8]), owner),
    }
    found = distances(got, want, 2)
    assert found["numbers"].tolist() == [pytest.approx(0.1), 0.0]
    assert found["ids"].tolist() == [0.0, 1.0]
    assert same_bits(got, want) == ["numbers", "ids"] and same_bits(want, want) == []
    assert largest(found).name == "ids"
    over = beyond(found, want, 0.2)
    assert over["numbers"].tolist() == [0.0, 0.0] and over["ids"].tolist() == [0.0, 1.0]
    quiet = {name: torch.zeros(2, dtype=torch.float64) for name in want}
    assert unexplained(over, quiet)["ids"].tolist() == [0.0, 1.0]
    assert unexplained(over, over)["ids"].tolist() == [0.0, 0.0]
    short = {**want, "ids": Part(torch.tensor([5, 6]), torch.tensor([0, 1]))}
    assert distances(short, want, 2)["ids"].tolist() == [torch.inf, torch.inf]
