"""The scheduled policy: which rates decide, what corrections do, and what the status says."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from decodegrid.capture.budget import VerifyBudget
from decodegrid.capture.grid import GraphKey, build_grid
from decodegrid.capture.surface import Surface, SurfacePoint
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import ScheduledVerify, StepDone, StepRows

GRID = build_grid(4, 3)


def surface_of(ms_per_token: float) -> Surface:
    """10 ms and so much for each query token."""
    times = {key: 10.0 + ms_per_token * key.num_query_tokens for key in GRID.keys}
    points = {key: SurfacePoint(ms, ms, ms, 1) for key, ms in times.items()}
    return Surface(points, 16, 1.0, {})


def make_policy(ms_per_token: float = 2.0, **options: Any) -> ScheduledVerify:
    budget = VerifyBudget(GRID, surface_of(ms_per_token), 3)
    return ScheduledVerify(budget, 5, **options)


def rates(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def rows_of(slots: list[int], num_offered: list[int], *, in_flight: bool = False) -> StepRows:
    return StepRows(slots, num_offered, [in_flight] * len(slots))


def test_the_total_comes_from_rates_two_steps_old() -> None:
    policy = make_policy()
    policy.start(1)
    assert policy.total(rows_of([1], [0])) == 1  # the first step has no drafts
    policy.record_rates([1], rates([0.0, 0.0, 0.0]))
    assert policy.total(rows_of([1], [3])) == 4  # nothing two steps old: drafts count as certain
    policy.record_rates([1], rates([1.0, 1.0, 1.0]))
    assert policy.total(rows_of([1], [3])) == 1  # the zeros of the first step
    policy.record_rates([1], rates([0.0, 0.0, 0.0]))
    assert policy.total(rows_of([1], [3])) == 4  # the ones of the second


@pytest.mark.parametrize("overlap", [False, True])
def test_overlapping_steps_use_rates_of_the_same_age(overlap: bool) -> None:
    """Six steps of one slot; the total of a step decides on the rates of the one before the last.

    With overlap a step is scheduled before the rates of the last one are recorded.
    """
    made = [rates([1.0, 1.0, 0.0]), rates([0.0] * 3), rates([1.0] * 3), rates([1.0, 0.0, 1.0])]
    policy, totals = make_policy(), []
    policy.start(1)
    late: list[np.ndarray] = []
    for step, found in enumerate([*made, rates([1.0] * 3), rates([1.0] * 3)]):
        in_flight = bool(late)
        totals.append(policy.total(rows_of([1], [3 if step else 0], in_flight=in_flight)))
        late.append(found)
        while len(late) > overlap:
            policy.record_rates([1], late.pop(0))
    assert totals == [1, 4, 3, 1, 4, 2]


def test_rows_in_flight_and_others_in_one_step() -> None:
    """Slot 1 has a step in flight: its newest known rates are two steps old; slot 2 has none."""
    policy = make_policy()
    for slot in (1, 2):
        policy.start(slot)
        policy.record_rates([slot], rates([0.0] * 3))
    assert policy.total(StepRows([1, 2], [3, 3], [True, False])) == 5


def test_fresh_rates_are_those_of_the_last_step() -> None:
    policy = make_policy(fresh_rates=True)
    policy.start(2)
    policy.record_rates([2], rates([0.0, 1.0, 1.0]))
    assert policy.total(rows_of([2], [3])) == 1
    policy.record_rates([2], rates([1.0, 1.0, 0.0]))
    assert policy.total(rows_of([2], [3])) == 3


def test_rates_belong_to_slots_and_a_new_request_forgets_them() -> None:
    policy = make_policy()
    for slot in (1, 2):
        policy.start(slot)
    for _ in range(2):
        policy.record_rates([2, 1], rates([0.0] * 3, [1.0] * 3))
    assert policy.total(rows_of([1], [3])) == 4
    assert policy.total(rows_of([2], [3])) == 1
    policy.start(2)
    assert policy.total(rows_of([2], [3])) == 4


def test_confidences_are_cleaned() -> None:
    policy = make_policy()
    policy.start(1)
    for _ in range(2):
        policy.record_rates([1], rates([1.5, np.nan, 1.0]))
    assert policy.total(rows_of([1], [3])) == 2


def test_load_changes_no_choice_but_the_prediction() -> None:
    policy = make_policy()
    policy.start(1)
    for _ in range(2):
        policy.record_rates([1], rates([0.5, 0.5, 0.5]))
    before = policy.total(rows_of([1], [3]))
    first_ms = policy.predicted_ms
    for key in GRID.keys:
        for _ in range(12):
            ms = surface_of(2.0).ms(key)
            policy.record_step(StepDone(key, key.num_reqs, 2, 2 * ms * 1e-3, 0.0))
    assert policy.total(rows_of([1], [3])) == before
    assert policy.predicted_ms - first_ms == pytest.approx(2 * first_ms)


def test_time_outside_the_graph_makes_drafts_pay() -> None:
    policy = make_policy(ms_per_token=8.0)
    policy.start(1)
    for _ in range(2):
        policy.record_rates([1], rates([0.4, 0.9, 0.9]))
    assert policy.total(rows_of([1], [3])) == 1
    for _ in range(9):
        policy.record_step(StepDone(GraphKey(1, 1), 1, 2, 18e-3, 40e-3))
    assert policy.total(rows_of([1], [3])) == 4


def test_drift_from_the_surface_is_flagged() -> None:
    policy = make_policy()
    key = GraphKey(1, 4)
    for _ in range(49):
        policy.record_step(StepDone(key, 1, 2, 18e-3 * 2.5, 0.0))
    words = "step time over the surface's: 2.50 (not judged yet, median of 49 steps; it needs 50)"
    assert words in "\n".join(policy.status())
    for _ in range(200):
        policy.record_step(StepDone(key, 1, 2, 18e-3 * 1.2, 0.0))
    assert "1.20 (no drift, median of 200 steps)" in "\n".join(policy.status())
    for _ in range(200):
        policy.record_step(StepDone(key, 1, 2, 18e-3 * 1.5, 0.0))
    assert "1.50 (DRIFTED" in "\n".join(policy.status())


def test_steps_of_another_variant_count_but_teach_no_times() -> None:
    policy = make_policy()
    for _ in range(200):
        policy.total(rows_of([1], [3]))
        policy.record_step(StepDone(GraphKey(1, 4), 1, 2, 5.0, 5.0, is_fused=False))
    status = "\n".join(policy.status())
    assert "load x1.00, 0.0 us a query token, host 0 us" in status and "DRIFTED" not in status
    assert "expected 4.00, measured 2.00" in status


def test_without_a_surface_everything_is_verified_and_the_status_says_so() -> None:
    policy = ScheduledVerify(VerifyBudget(GRID, None, 3), 5, note="surface.repeats is 0")
    assert policy.total(rows_of([1, 2], [3, 1])) == 6
    policy.record_step(StepDone(GraphKey(1, 1), 1, 2, 1.0, 1.0))
    (line,) = policy.status()
    assert "everything is verified (surface.repeats is 0)" in line


def test_a_run_is_scheduled_and_reported(
    tokenizer: Tokenizer, make_runner: Callable[..., Any]
) -> None:
    """Confidence 1/2 and dear tokens: one draft a row; the text is that of any other total."""
    options = {"num_draft_tokens": 3, "max_num_reqs": 4, "drafts": "mixed"}
    prompts = [[20 + i] * (3 + i) for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=20)
    policy = make_policy(ms_per_token=3.0)
    runner = make_runner(**options)
    runner.grid = GRID
    llm = LLM.from_runner(runner, tokenizer, policy=policy)
    scheduled = llm.generate(prompts, params)
    plain = LLM.from_runner(make_runner(**options), tokenizer).generate(prompts, params)
    assert [r.outputs[0].token_ids for r in scheduled] == [r.outputs[0].token_ids for r in plain]
    verified = llm.stats.verified_per_position
    assert 0 < sum(verified) < sum(llm.stats.offered_per_position)
    report = llm.report()
    assert "verify budget: scheduled on" in report
    assert "times that of verifying all drafts" in report
    emitted = sum(len(result.outputs[0].token_ids) for result in scheduled)
    assert emitted <= policy.measured_tokens <= emitted + 3 * len(prompts)
    assert f"measured {policy.measured_tokens / llm.stats.num_decode_steps:.2f}" in report
