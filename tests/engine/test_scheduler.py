"""Order, pacing, growth, preemption, abort: the scheduler against the toy runner."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from decodegrid.engine.admission import EngineLimits, build_request
from decodegrid.engine.engine_loop import EngineLoop
from decodegrid.engine.request import Request, RequestStatus
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.scheduler import Scheduler
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.step_plan import DecodeStep, PrefillStep
from decodegrid.engine.verify_policy import FixedVerify

EOS = 1


def make_loop(runner: Any, **options: Any) -> EngineLoop:
    return EngineLoop(runner, Scheduler(EngineLimits.of(runner), **options), EngineStats(runner))


def add(
    loop: EngineLoop, name: str, prompt: Sequence[int], max_tokens: int = 16, priority: int = 0
) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    limits = loop.scheduler.limits
    request = build_request(name, prompt, params, seed=0, eos_token_id=EOS, limits=limits)
    request.priority = priority
    loop.add(request)
    return request


def run(loop: EngineLoop) -> None:
    while loop.has_unfinished:
        loop.step()


def assert_all_free(loop: EngineLoop) -> None:
    scheduler = loop.scheduler
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable
    assert scheduler.slots.num_free == scheduler.slots.num_usable
    assert not loop.runner.slots  # type: ignore[attr-defined]
    assert not scheduler.running and not scheduler.waiting and scheduler.prefilling is None


def kinds(runner: Any) -> str:
    """The log as one letter a call: p(refill), s(tart), d(ecode), x (stop)."""
    letters = {"prefill": "p", "start": "s", "decode": "d", "stop": "x"}
    return "".join(letters[entry[0]] for entry in runner.log)


def test_a_prompt_alone_is_prefilled_back_to_back(make_runner: Callable[..., Any]) -> None:
    runner = make_runner(drafts=0)
    loop = make_loop(runner)
    request = add(loop, "a", range(20, 40), max_tokens=3)
    run(loop)
    assert [entry for entry in runner.log if entry[0] == "prefill"] == [
        ("prefill", 1, 8),
        ("prefill", 1, 8),
        ("prefill", 1, 3),
    ]
    assert kinds(runner) == "pppsdddx"
    assert request.finish_reason == "length"
    assert_all_free(loop)


@pytest.mark.parametrize("pace", [1, 2, 4])
def test_a_waiting_prompt_gets_a_chunk_every_n_decode_steps(
    make_runner: Callable[..., Any], pace: int
) -> None:
    runner = make_runner(drafts=0)
    loop = make_loop(runner, decode_steps_per_prefill_chunk=pace)
    add(loop, "a", range(20, 25), max_tokens=40)
    loop.step()
    add(loop, "b", range(30, 55), max_tokens=2)
    run(loop)
    assert kinds(runner).startswith("ps" + ("d" * pace + "p") * 3 + "s")


def test_a_prompt_that_comes_late_does_not_wait_its_turn_again(
    make_runner: Callable[..., Any],
) -> None:
    runner = make_runner(drafts=0)
    loop = make_loop(runner)
    add(loop, "a", range(20, 25), max_tokens=40)
    for _ in range(10):
        loop.step()
    add(loop, "b", range(30, 35), max_tokens=2)
    loop.step()
    assert kinds(runner)[-2:] == "ps"


def test_a_prompt_of_one_token_needs_no_prefill(make_runner: Callable[..., Any], toy: Any) -> None:
    runner = make_runner()
    loop = make_loop(runner)
    request = add(loop, "a", [20], max_tokens=7)
    run(loop)
    assert "p" not in kinds(runner)
    assert request.output_token_ids == toy.generate([20], 7)
    assert_all_free(loop)


def test_admission_is_in_order_and_bounded_by_slots(make_runner: Callable[..., Any]) -> None:
    runner = make_runner(max_num_reqs=2, drafts=0)
    loop = make_loop(runner)
    requests = [add(loop, str(i), [20 + i, 21, 22], max_tokens=4) for i in range(5)]
    ended = []
    while loop.has_unfinished:
        ended += [u.request.request_id for u in loop.step() if u.request.is_finished]
        assert len(loop.scheduler.running) <= 2
        started = [r.status is not RequestStatus.WAITING for r in requests]
        assert started == sorted(started, reverse=True)
    assert ended == ["0", "1", "2", "3", "4"]
    assert_all_free(loop)


def test_a_fresh_row_verifies_no_draft_and_rows_end_within_their_length(
    make_runner: Callable[..., Any],
) -> None:
    loop = make_loop(make_runner(drafts=0))
    add(loop, "a", [20, 21, 22], max_tokens=4)
    loop.step()
    offered = []
    while loop.has_unfinished:
        plan = loop.scheduler.schedule()
        assert isinstance(plan.step, DecodeStep)
        offered.append(plan.step.num_offered)
        loop._decode(plan.step, 0.0)
    assert offered == [(0,), (2,), (1,), (0,)]


@pytest.mark.parametrize(("limit", "total"), [(None, 18), (18, 18), (7, 7), (3, 3), (1, 3)])
def test_a_fixed_policy_bounds_the_total(
    make_runner: Callable[..., Any], limit: int | None, total: int
) -> None:
    runner = make_runner(drafts=0)
    loop = make_loop(runner, policy=FixedVerify(limit))
    for i in range(3):
        add(loop, str(i), [20 + i], max_tokens=50)
    loop.step()
    loop.step()
    assert [entry[2] for entry in runner.log if entry[0] == "decode"] == [3, total]


@pytest.mark.parametrize("num_drafts", range(8))
@pytest.mark.parametrize("max_num_reqs", [1, 3, 6, 7, 12, 100])
def test_every_decode_step_is_an_admissible_pair(
    make_runner: Callable[..., Any], max_num_reqs: int, num_drafts: int
) -> None:
    """C14: rows b <= max_num_reqs and query tokens b <= q <= b * (K + 1)."""
    runner = make_runner(
        max_num_reqs=max_num_reqs, num_draft_tokens=num_drafts, max_model_len=24, drafts="mixed"
    )
    loop = make_loop(runner)
    for i in range(max_num_reqs + 2):
        add(loop, str(i), [20 + i % 200], max_tokens=1 + i % 9)
    run(loop)
    pairs = {entry[1:] for entry in runner.log if entry[0] == "decode"}
    assert pairs
    for rows, tokens in pairs:
        assert 1 <= rows <= max_num_reqs and rows <= tokens <= rows * (num_drafts + 1)
    assert_all_free(loop)


def test_the_longest_output_gives_way_and_is_computed_again(
    make_runner: Callable[..., Any], toy: Any
) -> None:
    """Blocks of 4 tokens, 9 of them: two requests that end with 20 tokens each need 10."""
    runner = make_runner(num_blocks=10, drafts=0, num_draft_tokens=1)
    loop = make_loop(runner)
    first = add(loop, "first", [20, 21, 22, 23], max_tokens=16)
    for _ in range(4):
        loop.step()
    second = add(loop, "second", [30, 31, 32, 33], max_tokens=16)
    preempted_at = None
    while loop.has_unfinished:
        was = first.num_preemptions
        loop.step()
        if first.num_preemptions > was:
            assert preempted_at is None
            preempted_at = first.num_output_tokens
            assert first.num_output_tokens > second.num_output_tokens - 2
            assert loop.scheduler.waiting[0] is first
            assert not first.block_ids and not first.slot
    assert preempted_at and not second.num_preemptions
    assert first.output_token_ids == toy.generate([20, 21, 22, 23], 16)
    assert second.output_token_ids == toy.generate([30, 31, 32, 33], 16)
    recomputed = sum(e[2] for e in runner.log if e[0] == "prefill") - 3 - 3
    assert recomputed == 4 + preempted_at - 1
    assert_all_free(loop)


@pytest.mark.parametrize(
    ("priorities", "victim"), [([0, 0, 0], 0), ([0, 0, 7], 2), ([0, 7, 7], 1), ([-3, 0, -3], 1)]
)
def test_the_largest_priority_number_gives_way_first(
    make_runner: Callable[..., Any], toy: Any, priorities: list[int], victim: int
) -> None:
    """Then the longest output: the requests come two steps apart, the first is the longest."""
    runner = make_runner(num_blocks=12, drafts=0, num_draft_tokens=1, max_num_reqs=3)
    loop = make_loop(runner)
    requests = []
    for i, priority in enumerate(priorities):
        requests.append(add(loop, str(i), [20 + i], max_tokens=24, priority=priority))
        loop.step()
        loop.step()
    while not any(request.num_preemptions for request in requests):
        loop.step()
    assert [request.num_preemptions for request in requests] == [int(i == victim) for i in range(3)]
    assert loop.scheduler.waiting[0] is requests[victim]
    run(loop)
    for i, request in enumerate(requests):
        assert request.output_token_ids == toy.generate([20 + i], 24)
    assert_all_free(loop)


def test_a_preempted_request_goes_before_those_that_wait(
    make_runner: Callable[..., Any], toy: Any
) -> None:
    runner = make_runner(num_blocks=10, max_num_reqs=2, drafts=0, num_draft_tokens=1)
    loop = make_loop(runner)
    requests = [add(loop, str(i), [20 + i, 30, 31, 32], max_tokens=20) for i in range(3)]
    while not any(request.num_preemptions for request in requests):
        loop.step()
    victim = next(request for request in requests if request.num_preemptions)
    assert list(loop.scheduler.waiting) == [victim, requests[2]]
    run(loop)
    for i, request in enumerate(requests):
        assert request.output_token_ids == toy.generate([20 + i, 30, 31, 32], 20)
    assert_all_free(loop)


def test_admission_leaves_a_block_to_each_running_request(make_runner: Callable[..., Any]) -> None:
    """Of 6 blocks "a" holds 2 and will ask for more, so the 4 that "b" needs are not all given."""
    runner = make_runner(num_blocks=7, drafts=0, num_draft_tokens=1)
    loop = make_loop(runner, decode_steps_per_prefill_chunk=1)
    a = add(loop, "a", [20, 21, 22, 23], max_tokens=10)
    loop.step()
    b = add(loop, "b", range(30, 44), max_tokens=3)
    while loop.has_unfinished:
        loop.step()
        if not a.is_finished:
            assert b.status is RequestStatus.WAITING
    assert not a.num_preemptions and b.num_output_tokens == 3


def test_a_row_that_gives_way_to_a_prefill_lets_it_go_on(
    make_runner: Callable[..., Any], toy: Any
) -> None:
    """The only running request needs a block that the prompt being prefilled holds."""
    runner = make_runner(num_blocks=10, drafts=0, num_draft_tokens=1)
    loop = make_loop(runner, decode_steps_per_prefill_chunk=30)
    first = add(loop, "first", [20, 21], max_tokens=30)
    for _ in range(32):
        if loop.scheduler.prefilling is not None:
            break
        if loop.scheduler._num_decode_steps_since_chunk == 3:
            # The pace is due at once for this one prompt, and then not for 30 steps.
            loop.scheduler._num_decode_steps_since_chunk = 30
            add(loop, "second", range(30, 50), max_tokens=4)
        loop.step()
    second = loop.scheduler.prefilling
    assert second is not None and second.num_computed == 8
    run(loop)
    assert first.num_preemptions == 1 and not second.num_preemptions
    assert first.output_token_ids == toy.generate([20, 21], 30)
    assert second.output_token_ids == toy.generate(range(30, 50), 4)
    assert_all_free(loop)


@pytest.mark.parametrize("where", ["waiting", "prefilling", "started", "running", "preempted"])
def test_abort_frees_everything_at_once(make_runner: Callable[..., Any], where: str) -> None:
    runner = make_runner(num_blocks=14, max_num_reqs=2, drafts=0)
    loop = make_loop(runner)
    victim = add(loop, "victim", range(20, 40), max_tokens=12)
    num_steps = {"waiting": 0, "prefilling": 1, "started": 3, "running": 6, "preempted": 6}[where]
    for _ in range(num_steps):
        loop.step()
    if where == "preempted":
        loop.scheduler._preempt(victim)
    expected = {
        "waiting": RequestStatus.WAITING,
        "prefilling": RequestStatus.PREFILLING,
        "preempted": RequestStatus.WAITING,
    }
    assert victim.status is expected.get(where, RequestStatus.RUNNING)
    assert loop.abort("victim") is victim
    assert victim.finish_reason == "abort"
    assert_all_free(loop)
    assert loop.abort("victim") is None and loop.abort("nobody") is None
    other = add(loop, "other", range(20, 40), max_tokens=3)
    run(loop)
    assert other.num_output_tokens == 3
    assert_all_free(loop)


def test_an_aborted_prefill_leaves_the_turn_to_the_next(make_runner: Callable[..., Any]) -> None:
    loop = make_loop(make_runner())
    add(loop, "a", range(20, 40))
    b = add(loop, "b", range(40, 50))
    loop.step()
    loop.abort("a")
    plan = loop.scheduler.schedule()
    assert isinstance(plan.step, PrefillStep) and plan.step.request is b and plan.step.start == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "empty"),
        ([20, 10**6], 4, r"token id 1 is 1000000; the vocabulary has ids 0 to 265"),
        ([-1], 4, "-1"),
        ([20.5], 4, "20.5"),
        (range(20, 116), 4, "96 tokens; the context of 96 tokens .* at most 95"),
        (range(20, 60), 40, "40 prompt tokens and 40 output tokens need 20 cache blocks .* has 15"),
    ],
)
def test_what_can_never_be_served_is_refused(
    make_runner: Callable[..., Any], prompt: Any, max_tokens: int, message: str
) -> None:
    loop = make_loop(make_runner(num_blocks=16))
    with pytest.raises(RequestError, match=message):
        add(loop, "a", prompt, max_tokens)
    assert_all_free(loop)


def test_stop_token_ids_are_checked(make_runner: Callable[..., Any]) -> None:
    """The device gets the first 8, the end of text first; the host knows them all."""
    limits = EngineLimits.of(make_runner())

    def build(**options: Any) -> Request:
        params = SamplingParams(**options)
        return build_request("a", [20], params, seed=0, eos_token_id=EOS, limits=limits)

    assert build(stop_token_ids=[5, EOS, 5]).stop_token_ids == (EOS, 5)
    assert build(ignore_eos=True).stop_token_ids == ()
    many = build(stop_token_ids=range(20, 60))
    assert many.stop_token_ids == (EOS, *range(20, 60))
    assert many.slot_request().stop_token_ids == (EOS, *range(20, 27))
    with pytest.raises(RequestError, match="stop token id 0 is 5000"):
        build(stop_token_ids=[5000])


def test_zero_prefills_all_prompts_that_have_a_slot_first(make_runner: Callable[..., Any]) -> None:
    runner = make_runner(drafts=0)
    loop = make_loop(runner, decode_steps_per_prefill_chunk=0)
    for index in range(6):
        add(loop, str(index), [20 + index] * 12, max_tokens=5)
    for _ in range(9):
        loop.step()
    # Four slots, two chunks each, then one step with all four rows.
    assert [entry[0] for entry in runner.log if entry[0] in ("prefill", "decode")] == [
        *["prefill"] * 8,
        "decode",
    ]
    assert runner.log[-1] == ("decode", 4, 4)
    run(loop)
    assert_all_free(loop)


def test_bad_scheduler_settings(make_runner: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        make_loop(make_runner(), decode_steps_per_prefill_chunk=-1)
    with pytest.raises(ValueError, match="at least 1"):
        FixedVerify(0)
