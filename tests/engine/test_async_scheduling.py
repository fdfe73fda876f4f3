"""One step in flight: the order of calls, late ends, aborts, preemption; on equals off."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from decodegrid.capture.budget import VerifyBudget
from decodegrid.capture.grid import build_grid
from decodegrid.capture.surface import Surface, SurfacePoint
from decodegrid.engine.admission import EngineLimits, build_request
from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.engine_loop import EngineLoop
from decodegrid.engine.llm import LLM
from decodegrid.engine.request import Request, RequestStatus
from decodegrid.engine.runner_protocol import num_mask_words
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.scheduler import Scheduler
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.step_masks import StepMasks
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify, ScheduledVerify, StepRows

EOS = 1
STOP = 60


def make_loop(
    runner: Any, *, overlap: bool = True, masks: StepMasks | None = None, **options: Any
) -> EngineLoop:
    scheduler = Scheduler(EngineLimits.of(runner), **options)
    stats = EngineStats(runner)
    return EngineLoop(runner, scheduler, stats, async_scheduling=overlap, masks=masks)


def add(
    loop: EngineLoop,
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 16,
    *,
    priority: int = 0,
    **options: Any,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0, **options})
    seed = params.seed or 0
    limits = loop.scheduler.limits
    request = build_request(name, prompt, params, seed=seed, eos_token_id=EOS, limits=limits)
    request.priority = priority
    loop.add(request)
    return request


def run(loop: EngineLoop) -> None:
    while loop.has_unfinished:
        loop.step()


def assert_all_free(loop: EngineLoop) -> None:
    scheduler, runner = loop.scheduler, loop.runner
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable
    assert scheduler.slots.num_free == scheduler.slots.num_usable
    assert not runner.slots and not runner.uncollected  # type: ignore[attr-defined]
    assert not scheduler.running and not scheduler.waiting and scheduler.prefilling is None


def test_a_step_is_launched_before_the_last_one_is_collected(
    make_runner: Callable[..., Any],
) -> None:
    """Two prompts of one token, 4 steps of one token each; the last is known to be the last."""
    orders = {}
    for overlap in (False, True):
        runner = make_runner(num_draft_tokens=0)
        loop = make_loop(runner, overlap=overlap)
        add(loop, "a", [20], 4)
        add(loop, "b", [21], 4)
        run(loop)
        orders[overlap] = runner.order
        assert runner.most_in_flight == 1 + overlap
        assert_all_free(loop)
    assert orders[False] == ["launch", "collect"] * 4
    assert orders[True] == ["launch", *["launch", "collect"] * 3, "collect"]


def test_tokens_come_one_call_later_and_a_prompt_drains_the_pipeline(
    make_runner: Callable[..., Any],
) -> None:
    """The toy refuses a chunk while a step is in flight."""
    runner = make_runner(drafts=0, num_draft_tokens=1)
    loop = make_loop(runner, decode_steps_per_prefill_chunk=2)
    add(loop, "a", [20], 12)
    counts = [sum(len(u.token_ids) for u in loop.step()) for _ in range(3)]
    assert counts == [0, 1, 1]
    late = add(loop, "b", range(30, 36), 4)
    run(loop)
    assert late.num_output_tokens == 4
    kinds = "".join(entry[0][0] for entry in runner.log)
    assert kinds.index("p") == len("sddd")
    assert_all_free(loop)


def test_a_request_may_leave_between_its_admission_and_its_first_chunk(
    make_runner: Callable[..., Any], toy: Any
) -> None:
    """The call that admits it only commits the step in flight; its slot was never written to."""
    runner = make_runner(drafts=0, num_draft_tokens=1)
    loop = make_loop(runner, decode_steps_per_prefill_chunk=1)
    first = add(loop, "a", [20], 12)
    for _ in range(3):
        loop.step()
    left = add(loop, "b", range(30, 36), 4)
    loop.step()
    assert left is loop.scheduler.prefilling and left.slot not in runner.slots
    assert loop.abort("b") is left
    run(loop)
    assert list(first.output_token_ids) == toy.generate([20], 12)
    assert_all_free(loop)


@pytest.mark.parametrize(
    ("max_tokens", "num_late", "num_steps"),
    [(1, 0, 1), (2, 0, 2), (7, 1, 3), (8, 0, 3), (13, 1, 4)],
)
def test_an_end_by_length_costs_one_query_token_or_none(
    make_runner: Callable[..., Any], toy: Any, max_tokens: int, num_late: int, num_steps: int
) -> None:
    """Right drafts: 1 token, then up to 6 a step. A row that has one token left is not scheduled
    again; another one that ends is, with the one query token that its length leaves."""
    runner = make_runner()
    loop = make_loop(runner)
    request = add(loop, "a", [20, 21], max_tokens)
    run(loop)
    assert request.output_token_ids == toy.generate([20, 21], max_tokens)
    stats = loop.stats
    assert (stats.num_late_rows, stats.num_late_query_tokens) == (num_late, num_late)
    assert stats.num_decode_steps == num_steps and stats.num_emitted == max_tokens
    assert ("ends found late: 1 rows with 1 query tokens" in stats.report()) is bool(num_late)
    assert_all_free(loop)


def test_a_stop_found_late_costs_one_query_token_where_others_can_use_the_rest(
    make_runner: Callable[..., Any], scripted: Any
) -> None:
    """Both texts go on alike but end after other tokens. The device knows the stop of "a"; the 41st
    stop id of "c" it does not know, so that "c" shares the total like anybody."""
    model = scripted(2, range(100, 160))
    for stops, num_query_tokens in (([104], 1), ([*range(200, 240), 104], 3)):
        runner = make_runner(model=model, max_num_reqs=2)
        loop = make_loop(runner, policy=FixedVerify(7))
        b = add(loop, "b", [20, 21], 40)
        a = add(loop, "a", [22, 23], 40, stop_token_ids=stops)
        while not a.is_finished:
            loop.step()
        stats = loop.stats
        assert stats.num_late_rows == 0 and len(runner.uncollected) == 1
        num_emitted = stats.num_emitted + b.num_in_flight
        loop.step()
        assert (stats.num_late_rows, stats.num_late_query_tokens) == (1, num_query_tokens)
        assert stats.num_emitted <= num_emitted
        run(loop)
        assert a.output_token_ids == list(range(100, 105)) and a.finish_reason == "stop"
        assert b.output_token_ids == list(range(100, 140))
        assert stats.num_emitted == 45
        assert_all_free(loop)


def test_statistics_are_those_of_steps_without_overlap(make_runner: Callable[..., Any]) -> None:
    found = []
    for overlap in (False, True):
        runner = make_runner(drafts="mixed")
        loop = make_loop(runner, overlap=overlap)
        requests = [
            add(loop, str(i), [20 + i] * (2 + i), 9 + 7 * i, stop_token_ids=range(40, 60 + 10 * i))
            for i in range(4)
        ]
        run(loop)
        stats = loop.stats
        found.append(
            [
                stats.num_emitted,
                stats.num_dropped,
                stats.num_decode_rows,
                stats.drafted_per_position,
                stats.offered_per_position,
                stats.verified_per_position,
                stats.accepted_per_position,
                stats.reached_per_position,
                *((r.num_drafted, r.num_verified, r.num_accepted) for r in requests),
            ]
        )
        assert bool(stats.num_late_rows) is overlap
        total = sum(stats.verified_per_position) + stats.num_decode_rows
        assert stats.num_query_tokens == total + stats.num_late_query_tokens
    assert found[0] == found[1]


def test_totals_come_from_rates_of_the_same_age(make_runner: Callable[..., Any]) -> None:
    """The confidence changes from step to step; every total but that of the late step is equal."""
    grid = build_grid(4, 3)
    times = {key: 10.0 + 4.0 * key.num_query_tokens for key in grid.keys}
    points = {key: SurfacePoint(ms, ms, ms, 1) for key, ms in times.items()}
    totals: dict[bool, list[int]] = {}
    for overlap in (False, True):
        runner = make_runner(num_draft_tokens=3, drafts=1)
        runner.grid, runner.graph_s = grid, 0.0  # no time, no correction
        policy = ScheduledVerify(VerifyBudget(grid, Surface(points, 16, 1.0, {}), 3), 5)
        loop = make_loop(runner, overlap=overlap, policy=policy)
        request = add(loop, "a", [20], 60)
        step = 0
        while loop.has_unfinished:
            runner.confidence = (0.05, 0.95, 0.6, 0.5, 0.99)[step % 5]
            loop.step()
            step += 1
        assert request.num_output_tokens == 60
        totals[overlap] = [entry[2] for entry in runner.log if entry[0] == "decode"]
    shorter = min(map(len, totals.values()))
    assert len(set(totals[False])) > 2
    # Near the end the room is what was known.
    assert totals[True][: shorter - 2] == totals[False][: shorter - 2]


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_abort_at_any_time_frees_at_once_and_what_is_in_flight_is_dropped(
    make_runner: Callable[..., Any], toy: Any, num_steps: int
) -> None:
    """The slot and the blocks of the victim go to another while its row is in flight."""
    runner = make_runner(max_num_reqs=2, drafts="mixed")
    loop = make_loop(runner, decode_steps_per_prefill_chunk=0)
    victim = add(loop, "victim", [20], 60)
    other = add(loop, "other", [30], 60)
    heir = add(loop, "heir", [40], 12)
    for _ in range(num_steps):
        loop.step()
    num_tokens, slot = victim.seq_len, victim.slot
    assert loop.abort("victim") is victim and victim.finish_reason == "abort"
    assert not victim.slot and slot not in runner.slots
    assert loop.abort("victim") is None
    updates = loop.step()
    assert victim not in [update.request for update in updates]
    assert heir.slot == slot
    run(loop)
    assert victim.seq_len == num_tokens
    assert victim.output_token_ids == toy.generate([20], num_tokens - 1)
    assert other.output_token_ids == toy.generate([30], 60)
    assert heir.output_token_ids == toy.generate([40], 12)
    assert_all_free(loop)


def test_a_preemption_while_in_flight_drops_the_result(
    make_runner: Callable[..., Any], toy: Any
) -> None:
    """The scheduler does not do it by itself; nothing is lost if it happens."""
    runner = make_runner(max_num_reqs=2, drafts="mixed")
    loop = make_loop(runner, decode_steps_per_prefill_chunk=1)
    requests = [add(loop, str(i), [20 + i, 40], 20) for i in range(2)]
    while requests[1].num_output_tokens < 5:
        loop.step()
    before = list(requests[1].token_ids)
    assert requests[1].num_in_flight and len(runner.uncollected) == 1
    loop.scheduler._preempt(requests[1])
    assert not requests[1].num_in_flight
    loop._stop_slots()
    while requests[1].status is RequestStatus.WAITING:
        loop.step()
        assert requests[1].token_ids == before
    run(loop)
    for i, request in enumerate(requests):
        assert request.output_token_ids == toy.generate([20 + i, 40], 20)
    assert loop.stats.num_late_rows >= 1
    assert_all_free(loop)


def test_nobody_gives_way_while_a_step_is_in_flight(
    make_runner: Callable[..., Any], toy: Any
) -> None:
    """What is in flight may end a request, and would be computed again."""
    runner = make_runner(num_blocks=10, drafts=0, num_draft_tokens=1)
    loop = make_loop(runner)
    scheduler = loop.scheduler
    preempt, num_preempted = scheduler._preempt, 0

    def checked(request: Request) -> None:
        nonlocal num_preempted
        assert not any(r.num_in_flight for r in scheduler.running)
        assert not runner.uncollected
        num_preempted += 1
        preempt(request)

    scheduler._preempt = checked  # type: ignore[method-assign]
    requests = [add(loop, str(i), [20 + i, 40, 41], 20) for i in range(5)]
    run(loop)
    assert num_preempted
    for i, request in enumerate(requests):
        assert request.output_token_ids == toy.generate([20 + i, 40, 41], 20)
    assert_all_free(loop)


class OddStep:
    """Every second id is allowed; checks what it is told."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.num_drafted_rows = 0

    def fill(
        self, requests: Sequence[Request], drafts: Sequence[np.ndarray | None]
    ) -> np.ndarray | None:
        assert self.runner.half is not None, "not between the halves"
        for row, (request, found) in enumerate(zip(requests, drafts, strict=True)):
            state = self.runner.slots[self.runner.half.slots[row]]
            if not request.is_finished:
                assert request.seq_len == state.seq_len, "the step before is not committed"
                assert ([] if found is None else found.tolist()) == state.drafts
            self.num_drafted_rows += found is not None
        words = num_mask_words(self.runner.vocab_size)
        shape = (len(requests), self.runner.num_draft_tokens + 1, words)
        return np.full(shape, 0x55555555, dtype=np.int32)


@pytest.mark.parametrize("overlap", [False, True])
def test_masks_are_filled_between_the_halves_and_after_the_commit(
    make_runner: Callable[..., Any], toy: Any, overlap: bool
) -> None:
    def oracle(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            token = toy.next_token(tokens)
            token += token % 2
            tokens.append(token if token < runner.vocab_size else 0)
        return tokens[len(prompt) :]

    runner = make_runner(drafts="mixed", max_num_reqs=2)
    masks = OddStep(runner)
    loop = make_loop(runner, overlap=overlap, masks=masks)
    requests = [add(loop, str(i), [20 + i], 12 + 5 * i, logprobs=0) for i in range(3)]
    run(loop)
    for i, request in enumerate(requests):
        assert request.output_token_ids == oracle([20 + i], 12 + 5 * i)
    order = "".join(name[1] for name in runner.order)  # l(a)unch, c(h)oice, c(o)llect
    assert masks.num_drafted_rows
    if overlap:
        assert order.startswith("ah" + "aoh" * 3)
    else:
        assert order == "aho" * (len(order) // 3)
    assert_all_free(loop)


def test_a_plain_batch_stays_plain(make_runner: Callable[..., Any]) -> None:
    runner = make_runner()
    loop = make_loop(runner)
    add(loop, "rich", [20], 6, logprobs=0)
    add(loop, "plain", [21], 60)
    run(loop)
    assert 0 < runner.order.count("choice") < runner.order.count("launch") - 3


def expected(toy: Any, prompt: Sequence[int], params: dict[str, Any], max_tokens: int) -> list[int]:
    """What the request emits, one token after another."""
    ids: list[int] = toy.generate(
        prompt, max_tokens, params.get("temperature", 0), params.get("seed", 0)
    )
    stops = {EOS, *params.get("stop_token_ids", ())}
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
    return ids[:end]


@pytest.mark.parametrize("seed", range(16))
def test_on_equals_off_and_the_oracle_under_random_load(
    make_runner: Callable[..., Any], toy: Any, seed: int
) -> None:
    """Lengths, stops known and unknown to the device, seeds, draft limits, priorities, arrivals,
    aborts, pools that are too small; the same load with a step in flight and without."""
    for overlap in (False, True):
        draw = random.Random(seed)
        runner = make_runner(
            num_draft_tokens=draw.choice([0, 1, 3, 5]),
            max_num_reqs=draw.choice([1, 2, 4]),
            num_blocks=draw.choice([0, 26, 34]),
            drafts=draw.choice(["mixed", "random", 99, 0]),
        )
        loop = make_loop(
            runner,
            overlap=overlap,
            decode_steps_per_prefill_chunk=draw.choice([0, 1, 4]),
            policy=FixedVerify(draw.choice([None, 3, 9])),
        )
        wanted, aborts = {}, {}
        arrivals: dict[int, list[tuple[Any, ...]]] = {}
        for index in range(14):
            prompt = [draw.randint(20, 200) for _ in range(draw.choice([1, 2, 9, 30]))]
            max_tokens = draw.randint(1, 50)
            options: dict[str, Any] = {"seed": draw.randint(0, 99)}
            options["temperature"] = draw.choice([0, 0.7])
            if draw.random() < 0.6:
                count = draw.choice([3, 8, 40])
                options["stop_token_ids"] = draw.sample(range(10, 266), count)
            if runner.num_draft_tokens and draw.random() < 0.3:
                options["speculation"] = draw.choice(["off", 1, runner.num_draft_tokens])
            priority = draw.choice([0, 0, 5])
            when = draw.choice([0, 0, 3, 10, 25])
            arrivals.setdefault(when, []).append((index, prompt, max_tokens, priority, options))
            wanted[index] = expected(toy, prompt, options, max_tokens)
            if draw.random() < 0.2:
                aborts[when + draw.randint(0, 12)] = index
        requests: dict[int, Request] = {}
        step = 0
        while loop.has_unfinished or step <= 40:
            for index, prompt, max_tokens, priority, options in arrivals.get(step, []):
                requests[index] = add(
                    loop, str(index), prompt, max_tokens, priority=priority, **options
                )
            if step in aborts:
                loop.abort(str(aborts[step]))
            loop.step()
            step += 1
            assert len(runner.uncollected) <= overlap
        for index, request in requests.items():
            ids = request.output_token_ids
            if request.finish_reason == "abort":
                assert ids == wanted[index][: len(ids)]
            else:
                assert ids == wanted[index]
        assert loop.stats.num_emitted == sum(r.num_output_tokens for r in requests.values())
        assert_all_free(loop)
        assert overlap or not loop.stats.num_late_rows


def test_in_flight_accounting(make_runner: Callable[..., Any]) -> None:
    """Tokens that a step may add are reserved from its scheduling to its commit."""
    runner = make_runner(drafts=2)
    loop = make_loop(runner)
    request = add(loop, "a", [20, 21, 22], 40)
    seen = []
    for _ in range(4):
        loop.step()
        seen.append((request.seq_len, request.num_in_flight, len(request.block_ids)))
    # Prefill; a fresh step that adds one; then 3 a step where 6 were possible. Blocks of 4 tokens
    # cover the most that may be committed, and K + 1 more at the next scheduling.
    assert seen == [(3, 0, 3), (3, 1, 3), (4, 6, 3), (7, 6, 4)]
    assert request.fresh is False
    run(loop)
    assert request.num_in_flight == 0


def test_the_rows_that_a_policy_sees(make_runner: Callable[..., Any]) -> None:
    class Spy(FixedVerify):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[StepRows] = []

        def total(self, rows: StepRows) -> int:
            self.rows.append(rows)
            return super().total(rows)

    spy = Spy()
    loop = make_loop(make_runner(drafts=0), policy=spy)
    add(loop, "a", [20], 6)
    loop.step()
    add(loop, "b", [21], 3)
    run(loop)
    seen = [list(zip(r.slots, r.num_offered, r.in_flight, strict=True)) for r in spy.rows]
    # Room behind the least that the step in flight adds, whatever it does add.
    assert seen[:3] == [
        [(1, 0, False)],
        [(1, 4, True), (2, 0, False)],
        [(1, 3, True), (2, 1, True)],
    ]


@pytest.mark.parametrize("stop", [None, "wor", "o w", "zzz", "!"])
@pytest.mark.parametrize("include", [False, True])
def test_text_ids_and_pieces_end_where_they_do_without_overlap(
    make_runner: Callable[..., Any],
    scripted: Any,
    tokenizer: Tokenizer,
    byte_id: Callable[[int], int],
    stop: str | None,
    include: bool,
) -> None:
    """Stop strings are known to the host alone: the row behind one takes its share and is dropped,
    in the text, the ids and the counts."""
    text = "hello world! and so on, for a while"
    model = scripted(2, [byte_id(ord(char)) for char in text])
    params = SamplingParams(
        temperature=0, max_tokens=30, stop=stop, include_stop_str_in_output=include
    )
    found = []
    for overlap in (False, True):
        runner = make_runner(model=model, drafts="mixed")
        llm = LLM.from_runner(runner, tokenizer, async_scheduling=overlap)
        pieces: dict[int, list[Any]] = {0: [], 1: []}
        for piece in llm.stream([[20, 21], [22, 23]], params):
            pieces[piece.index].append((piece.text, piece.token_ids, piece.finish_reason))
        (output,) = llm.generate([[20, 21]], params)
        found.append((pieces, output.outputs, output.num_drafted, output.num_verified))
        stats = llm.stats
        assert stats.num_emitted == 3 * len(output.outputs[0].token_ids)
        assert not runner.uncollected and not llm.stream_table.has_unfinished
        assert bool(stats.num_late_rows) is overlap or stop in (None, "zzz")
        cut = len(text) if stop is None else text.find(stop) + len(stop) * include
        want = text[:30] if stop in (None, "zzz") else text[:cut]
        assert output.outputs[0].text == want
    assert found[0] == found[1]


def test_the_thread_of_an_async_llm_settles_what_is_in_flight(
    make_runner: Callable[..., Any], toy: Any, tokenizer: Tokenizer
) -> None:
    runner = make_runner(drafts="mixed")
    llm = LLM.from_runner(runner, tokenizer, async_scheduling=True)
    engine = AsyncLLM(llm)
    params = SamplingParams(temperature=0, max_tokens=25)
    futures = [engine.submit([20 + i, 30], params) for i in range(9)]
    for i, future in enumerate(futures):
        assert future.result(60).outputs[0].token_ids == tuple(toy.generate([20 + i, 30], 25))
    engine.close()
    assert runner.most_in_flight == 2 and not runner.uncollected and not runner.slots


def test_a_step_that_fails_leaves_nothing_in_flight(
    make_runner: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    """The error of the third collect comes out once; closing does not wait for lost steps."""
    runner = make_runner(drafts=0)
    collect, calls = runner.collect, []

    def fail(step: Any) -> Any:
        calls.append(step)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return collect(step)

    runner.collect = fail
    llm = LLM.from_runner(runner, tokenizer, async_scheduling=True)
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.generate([[20]], SamplingParams(temperature=0, max_tokens=20))
    llm.close()
    assert len(calls) == 3


@pytest.mark.parametrize("call", ["launch", "collect", "launch_forward", "launch_choice"])
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_outlive_a_step_that_fails(
    make_runner: Callable[..., Any], toy: Any, overlap: bool, call: str
) -> None:
    """What was launched and not committed is lost, and computed again."""
    runner = make_runner(drafts="mixed", max_num_reqs=3)
    loop = make_loop(runner, overlap=overlap)
    options = {"logprobs": 0} if call in ("launch_forward", "launch_choice") else {}
    requests = [add(loop, str(i), [20 + i, 30], 30, **options) for i in range(3)]
    real, calls = getattr(runner, call), []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) in (4, 9):
            runner.half = None
            raise RuntimeError("a kernel failed")
        return real(*args)

    setattr(runner, call, fail)
    num_failed = 0
    while loop.has_unfinished:
        try:
            loop.step()
        except RuntimeError:
            num_failed += 1
            runner.uncollected.clear()
            assert not loop.scheduler.running
            assert not any(request.num_in_flight for request in requests)
    assert num_failed == 2
    for i, request in enumerate(requests):
        assert request.output_token_ids == toy.generate([20 + i, 30], 30)
    assert_all_free(loop)
