"""Prefill in any chunking: what it leaves behind and what decodes from it."""

import random

import pytest


def random_sizes(seed):
    draw = random.Random(seed)
    return [draw.randint(1, 16) for _ in range(80)]


CHUNKINGS = [[16] * 5, [1] * 9, [4] * 8, [15, 2, 16, 1, 3, 13], random_sizes(0), random_sizes(1)]


@pytest.mark.parametrize("kv_cache", ["compute", "v41"])
def test_any_chunking_leaves_the_same_state(make_run, make_prompt, kv_cache):
    """Six chunkings of one text in six slots: equal integers, floats within 1e-10, and what then
    decodes is the uncached forward's."""
    run = make_run(kv_cache=kv_cache)
    prompt = make_prompt(71, 0)
    slots = list(range(1, len(CHUNKINGS) + 1))
    for slot, sizes in zip(slots, CHUNKINGS, strict=True):
        run.begin(slot, prompt, sizes)
    want = run.readable(1)
    assert want["keys.1"].shape[0] == 35 and want["keys.4"].shape[0] == 70
    for slot in slots[1:]:
        run.assert_close(run.readable(slot), want)
    for total in (6, 20, 36):
        run.decode(slots, total)
    assert run.verified == 14 + 30
    run.check_greedy()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 16, 17, 18])
def test_short_prompts(make_run, make_prompt, length):
    """Lengths around a chunk, the window and the first compressed pair, from stale state."""
    run = make_run()
    run.begin(1, make_prompt(length, length))
    for total in (1, 6, 6):
        run.decode([1], total)
    run.check_greedy()


def test_a_slot_is_used_again(make_run, make_prompt):
    """A shorter text in the slot and blocks of a longer one sees nothing of it."""
    run = make_run()
    run.begin(1, make_prompt(60, 2))
    for _ in range(3):
        run.decode([1], 6)
    run.runner.stop(1)
    run.begin(1, make_prompt(7, 3), [3, 1])
    for _ in range(6):
        run.decode([1], 6)
    run.check_greedy()
    assert run.prompt_lens[1] + len(run.emitted(1)) > 12


def test_prefill_between_decode_steps(make_run, make_prompt):
    """Chunks of one slot between decode steps of another change nothing for either."""
    run = make_run()
    run.begin(1, make_prompt(20, 4))
    prompt = make_prompt(41, 5)
    for _ in run.prefill(2, prompt, (7, 16, 1, 16)):
        run.decode([1], 6)
    run.start(2, prompt)
    run.begin(3, prompt)
    run.assert_close(run.readable(2), run.readable(3))
    run.decode([1, 2, 3], 18)
    run.check_greedy()


@pytest.mark.parametrize("count", [0, 17])
def test_chunk_sizes_that_are_not_captured(make_run, count):
    run = make_run()
    with pytest.raises(ValueError, match=rf"chunk has {count} tokens.*1\.\.16"):
        run.runner.prefill(1, [0] * count, 0, (-1, -1, -1), [1, 2, 3])
