"""Policies by name; the tables of a first pass; oracle and random rates on a real step."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from decodegrid.capture.budget import VerifyBudget
from decodegrid.capture.surface import Surface, SurfacePoint
from decodegrid.engine.bench_drive import ClosedLoop, PassRequest, run_pass
from decodegrid.engine.bench_policies import BenchPolicy, TableVerify, parse_policies, policy_names
from decodegrid.engine.bench_stats import BenchPass
from decodegrid.engine.bench_summary import DraftCounts
from decodegrid.engine.bench_sweep import make_policy
from decodegrid.engine.bench_tables import (
    DraftNotes,
    DraftTables,
    oracle_tables,
    random_tables,
    split_total,
)
from decodegrid.engine.llm import LLM
from decodegrid.engine.runner import Runner
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify, ScheduledVerify
from decodegrid.kernels.verify import split_verify_lengths, survival


def test_names() -> None:
    found = parse_policies(["none", "k2", "all", "scheduled", "oracle", "random"], 5)
    assert [policy.num_drafts for policy in found] == [0, 2, 5, None, None, None]
    assert [policy.speculation(5) for policy in found] == ["auto", 2, "auto", *["auto"] * 3]
    assert policy_names(3, schedules=("scheduled",)) == ["none", "k1", "k2", "all", "scheduled"]
    assert len(parse_policies(policy_names(5, schedules=()), 5)) == 6
    assert policy_names(0, schedules=("oracle",)) == ["none"]
    assert all(policy.meaning for policy in found)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["most"], "'most'; known are none, all, k0 to k5, scheduled, oracle, random"),
        (["k"], "'k'; known are"),
        (["k-1"], "'k-1'; known are"),
        ([""], "''; known are"),
        (["k6"], "k6; speculation.num_draft_tokens allows k0 to k5"),
        (["none", "k0"], "none and k0, which are the same policy"),
        (["k5", "all"], "k5 and all, which are the same policy"),
        (["oracle", "oracle"], "oracle and oracle"),
    ],
)
def test_refused_names(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"--policies has {message}"):
        parse_policies(names, 5)


def test_no_schedule_without_a_drafter() -> None:
    assert [policy.num_drafts for policy in parse_policies(["none"], 0)] == [0]
    with pytest.raises(ValueError, match=r"oracle, but speculation\.num_draft_tokens is 0"):
        parse_policies(["oracle"], 0)


@pytest.mark.parametrize("seed", range(30))
def test_the_split_is_the_device_s(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    confidence = rng.choice([0.0, 0.5, 1.0, 0.25, 0.9], size=(rows, width)).astype(np.float32)
    limits = rng.integers(0, width + 1, size=rows)
    total = int(rng.integers(rows, rows * (width + 1) + 1))
    device = split_verify_lengths(
        survival(torch.from_numpy(confidence)),
        torch.from_numpy(limits),
        torch.ones(rows, dtype=torch.bool),
        torch.tensor(total),
    )
    assert split_total(confidence, limits.tolist(), total) == (device - 1).tolist()


def test_tables_of_a_first_pass(
    tokenizer: Tokenizer, make_runner: Callable[..., Any], toy: Any
) -> None:
    """Of the toy's drafts at length n, n * 7 % 6 are right."""
    llm = LLM.from_runner(make_runner(drafts="mixed"), tokenizer, async_scheduling=True)
    notes, prompts = DraftNotes(), [(30, 31, 32, 33), (40,), (50, 51)]
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=count, ignore_eos=True)
        for seed, count in ((1, 12), (2, 9), (3, 1))
    ]
    requests = [PassRequest(*pair) for pair in zip(prompts, params, strict=True)]
    run_pass(llm, requests, FixedVerify(1), ClosedLoop(2), observers=[notes])
    tables = notes.tables(5)
    assert set(tables) == {(1, 30, 31, 32, 33), (2, 40), (3, 50, 51)}
    for (_, *prompt), table in tables.items():
        count = table.end - table.start
        assert table.start == len(prompt) and table.confidence.shape == (count, 5)
        lengths = range(table.start, table.end)
        # Behind the end of the text nothing is right.
        wanted = [min(length * 7 % 6, table.end - length) for length in lengths]
        assert table.num_right.tolist() == [0, *wanted[1:]]
        assert (table.confidence[1:] == 0.5).all() and (table.confidence[0] == 0).all()
    true = oracle_tables(tables)
    for key, table in tables.items():
        assert true[key].confidence.sum(1).tolist() == table.num_right.tolist()
        assert (np.diff(true[key].confidence, axis=1) <= 0).all()


def test_drafts_of_every_length_are_needed(
    tokenizer: Tokenizer, make_runner: Callable[..., Any]
) -> None:
    llm = LLM.from_runner(make_runner(drafts=3), tokenizer)
    notes = DraftNotes()
    request = PassRequest((30, 31), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    run_pass(llm, [request], FixedVerify(), ClosedLoop(1), observers=[notes])
    with pytest.raises(ValueError, match="no drafts were made at length 4"):
        notes.tables(5)


class Bench:
    """An engine around a small random model in float64, and requests of which some drafts are
    right: noise that is equal on both sides makes them so."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        draw = random.Random(5)
        self.requests = [
            PassRequest(
                tuple(draw.randrange(20, 90) for _ in range(draw.randint(1, 12))),
                SamplingParams(temperature=2.0, seed=i, max_tokens=6 + 3 * i, ignore_eos=i % 2 > 0),
            )
            for i in range(5)
        ]

    def run(self, policy: Any, **options: Any) -> BenchPass:
        return run_pass(self.llm, self.requests, policy, ClosedLoop(3), **options)

    def leave_out_the_widest(self) -> None:
        """Another surface, on which verifying every draft of a full batch never pays."""
        runner: Any = self.llm.stream_table.loop.runner
        own = self.llm.scheduler.policy
        assert isinstance(own, ScheduledVerify)
        most = {key: key.num_query_tokens == 3 * key.num_reqs for key in runner.grid.keys}
        times = {key: 100.0 if is_most else 1.0 for key, is_most in most.items()}
        points = {key: SurfacePoint(ms, ms, ms, 1) for key, ms in times.items()}
        own.budget = VerifyBudget(runner.grid, Surface(points, 16, 1.0, {}), 2)

    def table_policy(self, name: str, tables: DraftTables) -> tuple[TableVerify, BenchPass]:
        policy = make_policy(self.llm, BenchPolicy(name, None))
        assert isinstance(policy, TableVerify)
        policy.set_tables(tables)
        # Corrections follow measured times, and choices the corrections.
        policy.record_step = lambda done: None  # type: ignore[method-assign]
        return policy, self.run(policy, observers=[policy.observe])


@pytest.fixture(scope="module")
def device(
    make_model: Callable[..., Any],
    make_eager_runner: Callable[..., Runner],
    layer_changes: dict[int, dict[str, Any]],
    tokenizer: Tokenizer,
) -> Runner:
    changes = {**layer_changes[2], "vocab_size": tokenizer.vocab_size, "hc_sinkhorn_iters": 1}
    return make_eager_runner(make_model(**changes))


def make_bench(device: Runner, tokenizer: Tokenizer, *, overlap: bool) -> Bench:
    """Every pair takes the same time, so that a schedule verifies whatever may survive."""
    points = {key: SurfacePoint(1.0, 1.0, 1.0, 1) for key in device.grid.keys}
    budget = VerifyBudget(device.grid, Surface(points, 16, 1.0, {}), 2)
    policy = ScheduledVerify(budget, device.max_num_reqs + 1)
    return Bench(LLM.from_runner(device, tokenizer, policy=policy, async_scheduling=overlap))


@dataclass
class Known:
    """What passes without a schedule say of the requests."""

    tables: DraftTables
    everything: BenchPass
    """Every draft verified."""


@pytest.fixture(scope="module")
def known(device: Runner, tokenizer: Tokenizer) -> Known:
    bench, notes = make_bench(device, tokenizer, overlap=False), DraftNotes()
    nothing = bench.run(FixedVerify(1), observers=[notes])
    everything = bench.run(FixedVerify())
    assert everything.outputs == nothing.outputs
    return Known(notes.tables(2), everything)


@pytest.fixture(params=[False, True], ids=["alone", "overlap"])
def bench(request: pytest.FixtureRequest, device: Runner, tokenizer: Tokenizer) -> Bench:
    return make_bench(device, tokenizer, overlap=request.param)


def test_the_oracle_verifies_what_survives(bench: Bench, known: Known) -> None:
    everything = known.everything
    policy, found = bench.table_policy("oracle", oracle_tables(known.tables))
    assert found.outputs == everything.outputs
    assert policy.num_rows == policy.num_as_foreseen == DraftCounts.of([found]).rounds
    wanted, counts = DraftCounts.of([everything]), DraftCounts.of([found])
    # No draft in vain, and as many tokens a round as there are to be had.
    assert counts.verified == counts.accepted
    assert counts.rounds == wanted.rounds and sum(wanted.verified) > sum(wanted.accepted) > 10
    assert counts.emitted == sum(len(ids) for ids in everything.outputs)


def test_random_rates_say_nothing(bench: Bench, known: Known) -> None:
    tables = known.tables
    mixed = random_tables(tables, 1)
    pool = {row.tobytes() for table in tables.values() for row in table.confidence[1:]}
    drawn = [row.tobytes() for table in mixed.values() for row in table.confidence[1:]]
    assert set(drawn) <= pool and len(set(drawn)) > len(drawn) / 4
    kept = [row.tobytes() for table in tables.values() for row in table.confidence[1:]]
    assert drawn != kept
    again = random_tables(tables, 1)
    assert all((again[key].confidence == mixed[key].confidence).all() for key in mixed)
    bench.leave_out_the_widest()
    policy, found = bench.table_policy("random", mixed)
    counts = DraftCounts.of([found])
    assert sum(counts.offered) > sum(counts.verified) > sum(counts.accepted)
    assert found.outputs == known.everything.outputs
    assert policy.num_rows == policy.num_as_foreseen > 0


def test_the_split_follows_the_tables(bench: Bench, known: Known) -> None:
    """A surface on which not all drafts pay that survive: those that are verified still do."""
    bench.leave_out_the_widest()
    policy, found = bench.table_policy("oracle", oracle_tables(known.tables))
    counts, wanted = DraftCounts.of([found]), DraftCounts.of([known.everything])
    assert counts.verified == counts.accepted
    assert 0 < sum(counts.accepted) < sum(wanted.accepted)
    assert policy.num_rows == policy.num_as_foreseen == counts.rounds


def test_a_wrong_table_is_noticed(bench: Bench, known: Known) -> None:
    """The proof of the two tests above: drafts that are said to be right and are not."""
    wrong = {
        key: replace(table, num_right=np.full_like(table.num_right, 2))
        for key, table in known.tables.items()
    }
    policy, found = bench.table_policy("oracle", oracle_tables(wrong))
    counts = DraftCounts.of([found])
    assert policy.num_as_foreseen < policy.num_rows
    assert sum(counts.verified) > sum(counts.accepted)


def test_policies_that_need_a_surface(
    tokenizer: Tokenizer, make_runner: Callable[..., Any], bench: Bench
) -> None:
    plain = LLM.from_runner(make_runner(), tokenizer)
    with pytest.raises(ValueError, match="scheduled, but the deployment has no step-time surface"):
        make_policy(plain, BenchPolicy("scheduled", None))
    scheduled = make_policy(bench.llm, BenchPolicy("scheduled", None))
    own = bench.llm.scheduler.policy
    assert isinstance(scheduled, ScheduledVerify) and isinstance(own, ScheduledVerify)
    assert scheduled is not own and scheduled.budget is own.budget
    plain.scheduler.policy = own
    with pytest.raises(ValueError, match="oracle, which needs the confidences of a device"):
        make_policy(plain, BenchPolicy("oracle", None))
