"""The prefix cache with a toy runner that sees windows: what is shared, kept, given up, and equal.

The toy's next token is a hash of all tokens before it, read through the block table; beside it the
runner here has the rings of a model. Each step checks that the window before it holds this text.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from decodegrid.engine.admission import EngineLimits
from decodegrid.engine.block_manager import BlockManager
from decodegrid.engine.engine_loop import EngineLoop
from decodegrid.engine.logprobs import PromptLogprobList
from decodegrid.engine.prefix_cache import MoveKind, PrefixCache, WindowMove
from decodegrid.engine.request import Request
from decodegrid.engine.scheduler import Scheduler
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.window_snapshots import window_slack

WINDOW = 6
NOTHING: Any = (-1, "nothing")


@pytest.fixture
def make_windowed(make_runner: Any) -> Callable[..., Any]:
    """A class of toy runners with window rings, snapshots, and blocks of several owners."""
    example = make_runner()
    example.prefill(1, [9], 0, (-1, -1, -1), [1])
    make_slot: Any = type(example.slots[1])

    class WindowedRunner(make_runner):
        def __init__(self, *, num_snapshots: int = 8, **options: Any) -> None:
            super().__init__(**options)
            self.num_snapshots = num_snapshots
            ahead = self.num_draft_tokens + 1
            slack = window_slack(self.block_size, self.num_draft_tokens)
            self.ring_len = WINDOW + ahead + (slack if num_snapshots else 0)
            self.rings: dict[int, list[Any]] = {}
            self.snapshots: dict[int, tuple[int, list[Any]]] = {}
            self.resumed: dict[int, int] = {}
            self.num_prefilled = 0

        def load_window(self, slot: int, snapshot: int, position: int) -> None:
            assert slot not in self.slots, "a slot is reused before it was stopped"
            where, rows = self.snapshots[snapshot]
            assert where == position and position % self.block_size == 0
            self.slots[slot] = make_slot([])
            self.slots[slot].num_computed = position
            self.resumed[slot] = position
            ring = self.rings[slot] = [NOTHING] * self.ring_len
            for place in range(position - WINDOW, position):
                ring[place % self.ring_len] = rows[place - position + WINDOW]

        def save_window(self, slot: int, snapshot: int, position: int) -> None:
            assert 0 <= snapshot < self.num_snapshots
            ring = self.rings[slot]
            places = range(position - WINDOW, position)
            self.snapshots[snapshot] = (position, [ring[p % self.ring_len] for p in places])

        def prefill(
            self,
            slot: int,
            token_ids: Sequence[int],
            start: int,
            history: Any,
            block_ids: Sequence[int],
            following: Sequence[int] | None = None,
        ) -> Any:
            if start == 0:
                self.rings[slot] = [NOTHING] * self.ring_len
                self.resumed[slot] = 0
            else:
                self._own(slot, block_ids)
                self.check_window(slot, start)
            self.num_prefilled += len(token_ids)
            found = super().prefill(slot, token_ids, start, history, block_ids, following)
            self.check_window(slot, start + len(token_ids))
            return found

        def start(self, slot: int, request: Any, *rest: Any) -> None:
            if slot not in self.slots:
                self.rings[slot] = [NOTHING] * self.ring_len
                self.resumed[slot] = 0
            super().start(slot, request, *rest)
            self.check_window(slot, request.seq_len - 1)

        def _verify(self, slot: int, width: int, masks: Any) -> list[int]:
            self.check_window(slot, self.slots[slot].seq_len - 1)
            emitted: list[int] = super()._verify(slot, width, masks)
            anchor = self.slots[slot].seq_len - 1
            self.check_window(slot, anchor)
            for place in range(anchor, anchor + self.num_draft_tokens):
                self.rings[slot][place % self.ring_len] = (place, "the drafter's own")
            return emitted

        def check_window(self, slot: int, position: int) -> None:
            first = max(0, position - WINDOW)
            tokens = self._read(slot, position)[first:]
            ring = self.rings[slot]
            found = [ring[p % self.ring_len] for p in range(first, position)]
            assert found == list(enumerate(tokens, first)), "the window is of another text"

        def stop(self, slot: int) -> None:
            self.slots.pop(slot, None)  # stopped before it was used
            self.log.append(("stop", slot))

        def _own(self, slot: int, block_ids: Sequence[int]) -> None:
            assert all(0 < block_id < self.num_blocks for block_id in block_ids)
            assert len(set(block_ids)) == len(block_ids)
            state = self.slots[slot]
            cached = self.resumed[slot] // self.block_size
            for block_id in block_ids[max(cached, len(state.blocks)) :]:
                self.memory[block_id] = -99
            state.blocks = list(block_ids)

        def _write(self, slot: int, position: int, token_id: int) -> None:
            block_id = self.slots[slot].blocks[position // self.block_size]
            owners = [s for s, state in self.slots.items() if block_id in state.blocks]
            assert owners == [slot], "a block of two owners is written"
            super()._write(slot, position, token_id)
            self.rings[slot][position % self.ring_len] = (position, token_id)

    return WindowedRunner


class Engine:
    """A loop around a runner, and the texts it makes."""

    def __init__(
        self, runner: Any, *, async_scheduling: bool = True, steps_per_chunk: int = 4
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(
            EngineLimits.of(runner), decode_steps_per_prefill_chunk=steps_per_chunk
        )
        self.loop = EngineLoop(
            runner, self.scheduler, EngineStats(runner), async_scheduling=async_scheduling
        )
        self.count = 0

    @property
    def prefix(self) -> PrefixCache:
        assert self.scheduler.prefix is not None
        return self.scheduler.prefix

    def request(self, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Request:
        self.count += 1
        length = min(len(prompt) + max_tokens, self.runner.max_model_len)
        options = {"temperature": 0.0, "seed": 0, "stop_token_ids": (), **options}
        return Request(f"r{self.count}", prompt, max_seq_len=length, **options)

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.loop.add(request)
        while self.loop.has_unfinished:
            self.loop.step()

    def generate(self, prompt: Sequence[int], max_tokens: int = 8) -> list[int]:
        request = self.request(prompt, max_tokens)
        self.run(request)
        return request.output_token_ids

    def check_all_free(self) -> None:
        blocks = self.scheduler.blocks
        assert blocks.num_free == blocks.num_usable
        assert all(blocks.ref_count(i) == 0 for i in range(blocks.num_blocks))
        assert blocks.num_idle == self.prefix.num_cached_blocks


def ids(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 266) for _ in range(length)]


def test_the_second_time_nothing_but_the_rest_is_computed(make_windowed: Any, toy: Any) -> None:
    engine = Engine(make_windowed())
    prompt = ids(23, 1)
    want = toy.generate(prompt, 8)
    assert engine.generate(prompt) == want
    assert engine.runner.num_prefilled == 22
    again = engine.request(prompt)
    engine.run(again)
    assert again.output_token_ids == want and again.num_cached_tokens == 20
    assert engine.runner.num_prefilled == 22 + 2
    stats = engine.prefix.stats
    assert (stats.num_tokens, stats.num_tokens_hit, stats.num_blocks_hit) == (44, 20, 5)
    assert (stats.num_admissions, stats.num_hits) == (2, 1)
    assert "20 of 44 tokens hit (45.5%) in 1 of 2 admissions, 5 blocks" in engine.prefix.report()
    engine.check_all_free()


@pytest.mark.parametrize("length", [1, 4, 5, 6, 8, 9, 12, 13])
def test_lengths_around_a_block(make_windowed: Any, toy: Any, length: int) -> None:
    """A last token that opens a block leaves nothing to prefill: the request starts at once."""
    engine = Engine(make_windowed())
    prompt = ids(length, 2)
    for _ in range(3):
        assert engine.generate(prompt) == toy.generate(prompt, 8)
    assert engine.prefix.stats.num_tokens_hit == 2 * ((length - 1) // 4 * 4)
    chunks = [entry for entry in engine.runner.log if entry[0] == "prefill"]
    whole = 1 if length < 10 else 2
    assert len(chunks) == (whole if (length - 1) % 4 == 0 else whole + 2) * (length > 1)


def test_a_conversation_goes_on_behind_its_answer(make_windowed: Any, toy: Any) -> None:
    """What was decoded is cached too, up to the last full block of the answer."""
    engine = Engine(make_windowed(drafts="mixed"))
    text = ids(9, 3)
    for turn in range(4):
        before = engine.prefix.stats.num_tokens_hit
        text += engine.generate(text, 11)
        assert text[-11:] == toy.generate(text[:-11], 11)
        if turn:
            known = len(text) - 11 - 5
            assert engine.prefix.stats.num_tokens_hit - before == (known - 1) // 4 * 4
        text += ids(5, 40 + turn)


def test_a_common_beginning_is_found_by_the_third_at_the_latest(
    make_windowed: Any, toy: Any
) -> None:
    """The second leaves a window where it parts from the first; the third resumes there."""
    engine = Engine(make_windowed(prefill_chunk_sizes=(4, 30)))
    common = ids(20, 4)
    hits = []
    for seed in range(4):
        prompt = common + ids(15, 50 + seed)
        before = engine.prefix.stats.num_tokens_hit
        assert engine.generate(prompt) == toy.generate(prompt, 8)
        hits.append(engine.prefix.stats.num_tokens_hit - before)
    assert hits == [0, 0, 20, 20]


def test_chunks_that_end_on_a_boundary_leave_windows_too(make_windowed: Any, toy: Any) -> None:
    engine = Engine(make_windowed(prefill_chunk_sizes=(4, 8)))
    common = ids(20, 5)
    for seed in range(2):
        prompt = common + ids(15, 60 + seed)
        assert engine.generate(prompt) == toy.generate(prompt, 8)
    assert engine.prefix.stats.num_tokens_hit == 16


def test_completions_of_one_prompt_share_it(make_windowed: Any, toy: Any) -> None:
    engine = Engine(make_windowed())
    prompt = ids(30, 6)
    first = engine.request(prompt, temperature=0.7, seed=1)
    others = [first.sibling(f"s{i}", seed=i, completion=i) for i in range(2, 5)]
    engine.run(first, *others)
    for request in (first, *others):
        assert request.output_token_ids == toy.generate(prompt, 8, 0.7, request.seed)
    assert engine.prefix.stats.num_tokens_hit == 3 * 28
    assert engine.runner.num_prefilled == 29 + 3


def test_a_preempted_request_finds_its_own_blocks(make_windowed: Any, toy: Any) -> None:
    """Three that grow into a pool for two: what is computed again is less than a block or what
    the others took."""
    prompts = [ids(9, seed) for seed in (7, 8, 9)]
    computed = []
    for num_snapshots in (8, 0):
        runner = make_windowed(num_blocks=27, num_snapshots=num_snapshots, drafts=0)
        engine = Engine(runner)
        requests = [engine.request(prompt, 30) for prompt in prompts]
        engine.run(*requests)
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.output_token_ids == toy.generate(prompt, 30)
        assert sum(request.num_preemptions for request in requests) > 0
        # What a preempted request finds again was computed for it.
        assert {request.num_cached_tokens for request in requests} <= {None, 0}
        computed.append(runner.num_prefilled)
    assert computed[0] < computed[1]


def test_cached_blocks_never_keep_a_request_waiting(make_windowed: Any, toy: Any) -> None:
    """A pool full of kept blocks serves a request that needs all of it."""
    engine = Engine(make_windowed(num_blocks=13))
    for seed in range(4):
        engine.generate(ids(17, seed), 8)
    assert engine.scheduler.blocks.num_idle > 10
    prompt = ids(40, 30)
    assert engine.generate(prompt, 8) == toy.generate(prompt, 8)
    assert engine.prefix.stats.num_blocks_evicted > 10
    engine.check_all_free()


def test_the_oldest_goes_first_and_its_end_before_its_start(make_windowed: Any) -> None:
    engine = Engine(make_windowed(num_blocks=13))
    old, new = ids(16, 1), ids(16, 2)
    engine.generate(old, 1)
    engine.generate(new, 1)
    engine.generate(old, 1)
    engine.generate(ids(24, 3), 1)  # six blocks: free ones and two of `new`
    for prompt, want in ((old, 12), (new, 0)):
        before = engine.prefix.stats.num_tokens_hit
        engine.generate(prompt, 1)
        assert engine.prefix.stats.num_tokens_hit - before == want


def test_snapshots_are_bounded_and_the_rest_is_computed_again(make_windowed: Any, toy: Any) -> None:
    """With one snapshot, blocks of other texts are known but nothing can resume at them."""
    engine = Engine(make_windowed(num_snapshots=1))
    first, second = ids(18, 1), ids(18, 2)
    for prompt in (first, second, first, first):
        assert engine.generate(prompt, 1) == toy.generate(prompt, 1)
    assert engine.prefix.num_used_snapshots == 1
    assert engine.prefix.stats.num_tokens_hit == 16
    assert engine.prefix.num_cached_blocks == 8


def test_windows_of_chunk_ends_give_way_first(make_windowed: Any) -> None:
    engine = Engine(make_windowed(num_snapshots=2, prefill_chunk_sizes=(4, 8)))
    engine.generate(ids(14, 1), 1)  # 8, a chunk's end, and 12, the last boundary
    engine.generate(ids(43, 2), 1)  # 8, 16, .., 40: each takes the place of the one before
    assert engine.prefix.stats.num_tokens_hit == 0
    engine.generate(ids(14, 1), 1)
    engine.generate(ids(43, 2), 1)
    assert engine.prefix.stats.num_tokens_hit == 12 + 40


def test_equal_keys_of_different_tokens_are_told_apart(make_windowed: Any, toy: Any) -> None:
    engine = Engine(make_windowed())
    scheduler = engine.scheduler
    scheduler.prefix = PrefixCache(scheduler.blocks, 4, 8, key_of=lambda parent, tokens: b"same")
    prompts = [ids(22, seed) for seed in range(3)]
    for prompt in [*prompts, *prompts]:
        assert engine.generate(prompt) == toy.generate(prompt, 8)
    assert engine.prefix.num_cached_blocks > 0
    engine.check_all_free()


def test_prompt_logprobs_compute_every_position(make_windowed: Any) -> None:
    engine = Engine(make_windowed())
    prompt = ids(23, 1)
    engine.generate(prompt)
    request = engine.request(prompt)
    request.prompt_logprobs = PromptLogprobList(prompt, 0)
    engine.loop.add(request)
    engine.scheduler.schedule()
    assert request.num_computed == 0 and engine.prefix.stats.num_hits == 0


def test_moves_come_in_the_order_in_which_they_were_decided() -> None:
    """With one snapshot: it is loaded before the next text's window takes its place."""
    blocks = BlockManager(20)
    prefix = PrefixCache(blocks, 4, 1)

    def admit(name: str, tokens: list[int], slot: int) -> Request:
        options: dict[str, Any] = {"temperature": 0.0, "seed": 0, "stop_token_ids": ()}
        request = Request(name, tokens, max_seq_len=40, **options)
        request.slot = slot
        prefix.admit(request, 3)
        return request

    first = admit("a", ids(9, 1), 1)
    first.num_computed = 8
    prefix.computed(first)
    second = admit("b", ids(9, 1), 2)
    third = admit("c", ids(9, 2), 3)
    third.num_computed = 8
    prefix.computed(third)
    assert second.num_computed == 8 and second.block_ids[:2] == first.block_ids[:2]
    assert prefix.take_moves() == [
        WindowMove(MoveKind.SAVE, 1, 0, 8),
        WindowMove(MoveKind.LOAD, 2, 0, 8),
        WindowMove(MoveKind.SAVE, 3, 0, 8),
    ]
    assert prefix.take_moves() == []
    for request in (first, second, third):
        prefix.leave(request)
        blocks.free(request.block_ids)
    assert blocks.num_free == 19


@pytest.mark.parametrize("seed", range(6))
def test_mixed_requests_with_aborts_on_a_small_pool(
    make_windowed: Any, toy: Any, seed: int
) -> None:
    """Texts that begin alike in many ways, priorities, preemptions and aborts at any moment; all
    outputs are the toy's, and at the end everything is free."""
    draw = random.Random(seed)
    runner = make_windowed(
        num_blocks=draw.choice([26, 32, 60]),
        num_snapshots=draw.choice([3, 8, 16]),
        drafts=draw.choice(["mixed", "random", 0, 99]),
        prefill_chunk_sizes=draw.choice([(4, 8), (5, 7), (32,)]),
    )
    engine = Engine(runner, async_scheduling=seed % 2 == 0, steps_per_chunk=draw.choice([0, 1, 4]))
    trunks = [ids(draw.choice([8, 20, 33]), 70 + i) for i in range(3)]
    open_requests: list[Request] = []
    done: list[Request] = []
    for _ in range(60):
        trunk = draw.choice(trunks + [request.token_ids[:40] for request in done[-3:]])
        prompt = trunk[: draw.randint(1, len(trunk))] + ids(draw.randint(0, 9), draw.randint(0, 4))
        request = engine.request(prompt, draw.randint(1, 30))
        request.priority = draw.choice([0, 0, 1])
        open_requests.append(request)
        engine.loop.add(request)
        for _ in range(draw.randint(0, 6)):
            engine.loop.step()
        if draw.random() < 0.2:
            engine.loop.abort(draw.choice(open_requests).request_id)
        done += [request for request in open_requests if request.is_finished]
        open_requests = [request for request in open_requests if not request.is_finished]
    engine.run()
    assert engine.prefix.stats.num_hits > 1
    for request in done + open_requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == toy.generate(prompt, request.num_output_tokens)
    engine.check_all_free()
