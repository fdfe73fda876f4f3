"""State after rejection: nothing is undone, and nothing of a rejected draft can be read.

Eight rows stand at the eight offsets of the window (8), so at both halves of a ratio-2 pair, and
all reject at the same place. The proof can fail: rings one slot shorter than needed break it.
"""

import random

import pytest

from decodegrid.graphs import regions_decode, regions_metadata, state

VOCAB = 96
SLOTS = list(range(1, 9))
LENGTHS = [9, 10, 11, 12, 13, 14, 15, 24]
WINDOW = 8


def begin_rows(run, make_prompt):
    """Prefill eight prompts and run one step, so that every row has drafts."""
    assert {length % WINDOW for length in LENGTHS} == set(range(WINDOW))
    for slot, length in zip(SLOTS, LENGTHS, strict=True):
        run.begin(slot, make_prompt(length, 100 + length))
    run.decode(SLOTS, len(SLOTS))
    return run.snapshot()


def greedy_after(run, snapshot, count):
    """Greedy tokens of every row from a snapshot, and a snapshot after each of them."""
    run.restore(snapshot)
    before = {slot: len(run.texts[slot]) for slot in SLOTS}
    later = [snapshot]
    for _ in range(count):
        run.decode(SLOTS, len(SLOTS))
        later.append(run.snapshot())
    return {slot: run.texts[slot][before[slot] :] for slot in SLOTS}, later


def draft_and_reject(run, snapshot, right, place, shift):
    """One step whose drafts are right before `place` and wrong from there on; all verified."""
    run.restore(snapshot)
    for slot in SLOTS:
        drafts = [
            token if i < place else (token + shift + i) % VOCAB
            for i, token in enumerate(right[slot][:5])
        ]
        run.force_drafts(slot, drafts)
    result = run.decode(SLOTS, 6 * len(SLOTS))
    assert result.num_verified.tolist() == [5] * 8
    assert result.num_emitted.tolist() == [place + 1] * 8


@pytest.mark.parametrize("kv_cache", ["compute", "v41"])
def test_readable_state_after_rejection_at_every_place(make_run, make_prompt, kv_cache):
    """Bit-equal for two kinds of wrong drafts; close to a run that never drafted."""
    run = make_run(kv_cache=kv_cache)
    snapshot = begin_rows(run, make_prompt)
    right, never = greedy_after(run, snapshot, 6)
    run.check_greedy()
    for place in range(6):
        draft_and_reject(run, snapshot, right, place, 1)
        first = {slot: run.readable(slot) for slot in SLOTS}
        draft_and_reject(run, snapshot, right, place, 41)
        for slot in SLOTS:
            run.assert_equal(run.readable(slot), first[slot])
        run.restore(never[place + 1])
        for slot in SLOTS:
            run.assert_close(first[slot], run.readable(slot))


def decode_on(run, texts, count, seed):
    """Random acceptance until every row has `count` tokens after its prompt."""
    draw = random.Random(seed)
    while True:
        slots = [s for s in SLOTS if len(run.emitted(s)) < count]
        if not slots:
            return
        for slot in slots:
            done = len(run.emitted(slot))
            place = draw.randint(0, 5)
            run.force_drafts(
                slot,
                [
                    (t + 1) % VOCAB if i >= place else t
                    for i, t in enumerate(texts[slot][done : done + 5])
                ],
            )
        run.decode(slots, 6 * len(slots))


def agrees(run, texts):
    """Tokens and logits of every row are those of the uncached forward."""
    return (
        all(
            run.emitted(slot)[: len(texts[slot])] == texts[slot][: len(run.emitted(slot))]
            for slot in SLOTS
        )
        and run.worst_difference() < 1e-9
    )


@pytest.fixture(scope="module")
def long_texts(make_run, make_prompt):
    """70 greedy tokens after every prompt, from a deployment without drafts."""
    plain = make_run(num_drafts=0)
    for slot, length in zip(SLOTS, LENGTHS, strict=True):
        plain.begin(slot, make_prompt(length, 100 + length))
    for _ in range(70):
        plain.decode(SLOTS, len(SLOTS))
    plain.check_greedy()
    return {slot: plain.emitted(slot) for slot in SLOTS}


def test_decoding_on_after_rejections(make_run, make_prompt, long_texts):
    """Rejected everywhere first, then 60 more tokens with random acceptance."""
    run = make_run()
    snapshot = begin_rows(run, make_prompt)
    right = {slot: text[1:] for slot, text in long_texts.items()}
    draft_and_reject(run, snapshot, right, 0, 1)
    decode_on(run, long_texts, 62, 3)
    assert 0 < run.accepted < run.verified
    assert agrees(run, long_texts)


@pytest.mark.parametrize(
    "window_ahead, compressor_slots, holds",
    [(5, 7, True), (4, 7, False), (6, 6, False)],
    ids=["window + K", "window + K - 1", "compressor ring of 6"],
)
def test_ring_lengths_are_what_is_needed(
    make_run, make_prompt, long_texts, monkeypatch, window_ahead, compressor_slots, holds
):
    """Window ring: window + K is the least that works; compressor ring: 2 + K."""
    for module in (state, regions_metadata, regions_decode):
        monkeypatch.setattr(module, "window_ring_len", lambda *_: WINDOW + window_ahead)
    for module in (state, regions_metadata):
        monkeypatch.setattr(module, "compressor_ring_len", lambda *_: compressor_slots)
    # The noise id keeps this runner apart from those with sound rings; the target is the same.
    run = make_run(req_sizes=(8,), dspark_noise_token_id=90 + window_ahead - compressor_slots)
    assert (run.runner.model.state.ring_len, run.runner.model.state.compressor_len) == (
        WINDOW + window_ahead,
        compressor_slots,
    )
    begin_rows(run, make_prompt)
    decode_on(run, long_texts, 30, 5)
    assert run.accepted < run.verified
    assert agrees(run, long_texts) == holds


def test_the_ring_lengths_of_a_deployment(make_run, small_config):
    run = make_run()
    assert run.runner.model.state.compressor_len == 7
    assert run.runner.model.state.ring_len >= WINDOW + 5
    assert state.window_ring_len(small_config, 0) == WINDOW + 1
    assert state.compressor_ring_len(3) == 5
