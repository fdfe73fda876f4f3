"""Windows copied out of a slot and into another: what then decodes is what the uncached forward
decodes, and a text that goes on behind a snapshot is in the state of one that never stopped."""

import pytest
import torch

from decodegrid.engine.window_snapshots import STEPS_ON_THEIR_WAY, WindowSnapshots, window_slack

BLOCK = 8
OF_THE_SLOT = (
    "slots.block_table", "slots.drafts", "slots.confidence", "slots.draft_log_probs",
)  # fmt: skip
"""Other blocks; and there are no drafts yet."""


def make(make_run, kv_cache="compute", verify="coupled"):
    return make_run(kv_cache=kv_cache, verify=verify, num_snapshots=3)


def resume(run, slot, source, prompt, position, snapshot=0):
    """Begin `prompt` in a slot behind the first blocks of another slot and a snapshot."""
    count = position // BLOCK
    own = list(range(1 + (slot - 1) * 16, 1 + slot * 16))
    run.blocks[slot] = run.blocks[source][:count] + own[count:]
    run.runner.load_window(slot, snapshot, position)
    start = position
    while start < len(prompt) - 1:
        end = min(start + 16, len(prompt) - 1)
        history = run.history(prompt, start)
        run.runner.prefill(slot, prompt[start:end], start, history, run.blocks[slot])
        start = end
    run.start(slot, prompt)


@pytest.mark.parametrize(
    ("kv_cache", "verify", "position"),
    [("compute", "coupled", 8), ("compute", "coupled", 40), ("v41", "coupled", 24)],
)
def test_resumed_text_is_in_the_state_of_one_that_never_stopped(
    make_run, make_prompt, kv_cache, verify, position
):
    """Chunks of equal shapes behind the boundary: every bit a later step may read is the same."""
    run = make(make_run, kv_cache, verify)
    common = make_prompt(position, 0)
    first, other = common + make_prompt(9, 1), common + make_prompt(13, 2)
    run.begin(1, first)
    run.runner.save_window(1, 0, position)
    resume(run, 2, 1, other, position)
    chunks = [16] * (position // 16) + [position % 16] * (position % 16 > 0)
    run.begin(3, other, [*chunks, 16])
    want, got = run.readable(3), run.readable(2)
    for name, tensor in want.items():
        if name not in OF_THE_SLOT:
            assert torch.equal(got[name], tensor), name
    for total in (3, 18):
        run.decode([1, 2, 3], total)
    assert run.verified > 0
    run.check_greedy()


def test_the_window_of_a_running_text(make_run, make_prompt):
    """Saved at the last boundary after any number of steps, with drafts accepted and rejected and
    steps launched behind the one that the host knows, at every offset inside the block."""
    run = make(make_run)
    offsets = set()
    for seed in range(3):
        run.reset()
        prompt = make_prompt(21 + seed, seed)
        run.begin(1, prompt)
        while len(run.texts[1]) < 41 + 2 * seed:
            if len(run.texts[1]) % 3:
                truth = run.oracle.logits(torch.tensor(run.texts[1]))[-1].argmax()
                run.force_drafts(1, [int(truth)] + [5] * (len(run.texts[1]) % 4))
            run.decode([1], 6 if run.verified or run.emitted(1) else 1)
        known = list(run.texts[1])
        position = (len(known) - 1) // BLOCK * BLOCK
        offsets.add(len(known) - 1 - position)
        for _ in range(STEPS_ON_THEIR_WAY - 1):
            run.decode([1], 6)
        run.runner.save_window(1, 1, position)
        other = known[:position] + make_prompt(11, 90 + seed)
        resume(run, 2, 1, other, position, snapshot=1)
        run.begin(3, other)
        run.assert_close(run.readable(2), run.readable(3))
        for total in (2, 12):
            run.decode([2, 3], total)
        run.check_greedy()
    assert len(offsets) > 1


def test_snapshots_are_apart(make_run, make_prompt):
    """Three snapshots of three texts, loaded in another order into slots that held other texts."""
    run = make(make_run)
    prompts = [make_prompt(25, seed) for seed in range(3)]
    for slot, prompt in enumerate(prompts, 1):
        run.begin(slot, prompt)
        run.runner.save_window(slot, slot - 1, 24)
    for slot, source in ((4, 3), (5, 1), (6, 2)):
        run.begin(slot, make_prompt(50, slot))
        resume(run, slot, source, prompts[source - 1], 24, source - 1)
        run.assert_close(run.readable(slot), run.readable(source))


def test_a_ring_without_slack_is_refused(make_run):
    run = make_run()
    with pytest.raises(ValueError, match=r"window_slack is 0; .* 8 tokens need 26"):
        WindowSnapshots(run.model.config, run.runner.model.state, 2)
    assert window_slack(8, 5) == 26


def test_bytes(make_run):
    """Three windows of every layer and the drafter's, in the rings' dtype."""
    run = make(make_run)
    config, snapshots = run.model.config, run.runner.snapshots
    row = config.head_dim * 8
    num_layers = config.num_layers_total
    assert snapshots.num_bytes == 3 * config.sliding_window * num_layers * row
