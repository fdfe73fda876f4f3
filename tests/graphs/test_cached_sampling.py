"""Sampling through the decode step: filters, both ways to verify, and what the drafter leaves.

Emitted tokens of `coupled` are compared with the definition over the uncached forward; rounds of
`rejection` are done again in plain loops from the step's own logits and the state before it.
"""

import math
import random

import numpy as np
import pytest
import torch

from decodegrid.engine.runner_protocol import SlotRequest
from decodegrid.kernels.filters import filter_logits
from decodegrid.kernels.sampling import (
    Purpose,
    choose_scaled,
    gumbel_noise,
    stream_counter,
    uniform_noise,
)

DRAFTS, VOCAB, COUNT = 3, 96, 9
SETTINGS = {1: (0.8, 0.6, -1, 0.3), 2: (1.0, 1.0, 4, 0.0), 3: (0.9, 0.8, 9, 0.0)}
"""Temperature, top_p, top_k and min_p by slot."""


@pytest.fixture
def sampled_run(make_run, make_prompt):
    """sampled_run(verify, drafts=3, settings=SETTINGS): a run whose three slots are started."""

    def make(verify="coupled", drafts=DRAFTS, settings=SETTINGS):
        run = make_run(num_drafts=drafts, max_num_reqs=3, req_sizes=(1, 3), verify=verify)
        slots = run.runner.model.state.slots
        for slot, (temperature, top_p, top_k, min_p) in settings.items():
            run.begin(slot, make_prompt(5 + 6 * slot, slot), temperature=temperature, seed=slot)
            slots.top_p[slot], slots.top_k[slot], slots.min_p[slot] = top_p, top_k, min_p
        return run

    return make


def parameters(slots, chosen):
    """Temperature, top_p, top_k and min_p of slots."""
    return (
        slots.temperature[chosen], slots.top_p[chosen], slots.top_k[chosen], slots.min_p[chosen]
    )


def by_definition(run, slot):
    """What the uncached logits of a text choose under its own noise."""
    slots, count = run.runner.model.state.slots, len(run.emitted(slot))
    row = torch.full((count,), slot)
    scaled = filter_logits(run.reference_logits(slot), *parameters(slots, row))
    position = torch.arange(count) + run.prompt_lens[slot]
    return choose_scaled(scaled, slots.temperature[row], slots.seed[row], position).tolist()


def decode_until(run, slots, total_of, draw=None):
    """Decode slots together until each has COUNT tokens; `draw` replaces drafts by random ones."""
    while min(len(run.emitted(slot)) for slot in slots) < COUNT:
        if draw is not None:
            for slot in slots:
                if draw.random() < 0.5:
                    run.force_drafts(slot, [draw.randrange(-1, VOCAB) for _ in range(DRAFTS)])
        run.decode(slots, total_of(slots))
    return {slot: run.emitted(slot)[:COUNT] for slot in slots}


def everything(slots):
    """The budget that verifies every draft."""
    return len(slots) * (DRAFTS + 1)


@pytest.mark.parametrize("top_k, held", [(-1, -1), (7, 7), (VOCAB, VOCAB), (10**30, VOCAB)])
def test_start_writes_the_filters(make_run, make_prompt, top_k, held):
    """A count past the vocabulary is held as the vocabulary, whatever its size."""
    run = make_run(num_drafts=0, max_num_reqs=3, req_sizes=(1, 3))
    slots, prompt = run.runner.model.state.slots, make_prompt(4, 1)
    request = SlotRequest(prompt[-1], 4, (0, 1, 2), 20, 0.5, 3, (), 0.25, top_k, min_p=0.125)
    run.runner.start(2, request, [1])
    assert float(slots.top_p[2]) == 0.25 and int(slots.top_k[2]) == held
    assert float(slots.min_p[2]) == 0.125


def test_coupled_is_a_function_of_the_request(sampled_run):
    """Equal tokens without drafts, with the drafter's own, with any others, under fixed and random
    budgets, alone and in a batch; the definition over the uncached forward says which."""
    run = sampled_run(drafts=0)
    want = decode_until(run, [1, 2, 3], len)
    for slot in SETTINGS:
        assert run.emitted(slot) == by_definition(run, slot)
    assert len({token for text in want.values() for token in text}) > 8
    draw = random.Random(0)

    def anything(slots):
        return draw.randint(len(slots), everything(slots))

    for order, total_of, forced in (
        ([1, 2, 3], everything, None),
        ([3, 1, 2], anything, None),
        ([2, 3, 1], anything, draw),
    ):
        run = sampled_run()
        assert decode_until(run, order, total_of, forced) == want
        assert 0 < run.accepted <= run.verified
    run = sampled_run()
    for slot in SETTINGS:
        assert decode_until(run, [slot], everything)[slot] == want[slot]


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_filters_reach_the_drafts(sampled_run, verify):
    """Drafts are drawn from the filtered draft distribution, which `rejection` keeps in state."""
    run = sampled_run(verify)
    slots, live = run.runner.model.state.slots, torch.tensor([1, 2, 3])
    run.decode([1, 2, 3], 3)
    run.decode([1, 2, 3], 12)
    scope = parameters(slots, live)
    removed = 0
    for step in range(DRAFTS):
        scaled = filter_logits(run.runner.buffers.draft_logits[:3, step], *scope)
        removed += int((scaled == float("-inf")).sum())
        place = slots.seq_len[live] + step
        if verify == "rejection":
            place = stream_counter(place, Purpose.DRAFT, step)
            kept = slots.draft_log_probs[live, step]
            assert torch.equal(kept, scaled.log_softmax(-1))
        want = choose_scaled(scaled, scope[0], slots.seed[live], place)
        assert torch.equal(slots.drafts[live, step], want)
    assert removed > 100
    assert slots.draft_log_probs.shape[1] == (DRAFTS if verify == "rejection" else 0)


def one_round(before, slot, logits, length):
    """Tokens of one row by the definition of rejection sampling, from raw logits per query."""
    facts = {name: tensor[slot : slot + 1] for name, tensor in before.items()}
    emitted = []
    for offset in range(length):
        scaled = filter_logits(
            logits[offset : offset + 1],
            facts["slots.temperature"], facts["slots.top_p"], facts["slots.top_k"],
            facts["slots.min_p"],
        )[0]
        target = scaled.softmax(-1).numpy()
        position, seed = facts["slots.seq_len"] + offset, facts["slots.seed"]
        if offset < length - 1:
            draft = int(facts["slots.drafts"][0, offset])
            proposal = np.exp(facts["slots.draft_log_probs"][0, offset].numpy())
            uniform = float(uniform_noise(seed, stream_counter(position, Purpose.ACCEPTANCE)))
            if draft >= 0 and min(target[draft] / proposal[draft], 1.0) > uniform:
                emitted.append(draft)
                continue
            if draft >= 0:
                target = np.maximum(target - proposal * math.exp(-5e-5), 0.0)
        counter = stream_counter(position, Purpose.FINAL)
        noise = gumbel_noise(seed, counter, facts["slots.temperature"], VOCAB)[0].numpy()
        with np.errstate(divide="ignore"):
            return [*emitted, int((np.log(target) + noise).argmax())]
    raise AssertionError("the last query token always ends the round")


def test_rejection_rounds_follow_the_definition(sampled_run):
    """Random totals and orders, a draft of -1 here and there."""
    run, draw, seen = sampled_run("rejection"), random.Random(1), set()
    buffers, slots = run.runner.buffers, run.runner.model.state.slots
    for step in range(14):
        order = draw.sample([1, 2, 3], 3)
        if step % 3 == 2:
            slots.drafts[order[0], draw.randrange(DRAFTS)] = -1
        before = run.snapshot().tensors
        result = run.decode(order, draw.randint(3, 12))
        for row, slot in enumerate(order):
            start = int(buffers.rows.query_starts[row])
            length = int(result.num_verified[row]) + 1
            logits = buffers.output.logits[start : start + length]
            count = int(result.num_emitted[row])
            want = one_round(before, slot, logits, length)
            assert result.token_ids[row, :count].tolist() == want
            seen.add((count, length))
            assert int(slots.seq_len[slot]) == len(run.texts[slot])
            assert int(slots.last_token[slot]) == run.texts[slot][-1]
    assert run.worst_difference() < 1e-9
    assert 0 < run.accepted < run.verified and len(seen) > 5


def test_rejection_at_temperature_zero_is_greedy(sampled_run):
    """Token for token the coupled text and the uncached choice, whatever the budget and drafts."""
    cold = {slot: (0.0, 0.5, 3, 0.5) for slot in SETTINGS}
    want = decode_until(sampled_run("coupled", settings=cold), [1, 2, 3], everything)
    draw = random.Random(3)
    for forced in (None, draw):
        run = sampled_run("rejection", settings=cold)
        found = decode_until(run, [2, 1, 3], lambda slots: draw.randint(3, 12), forced)
        assert found == want
        run.check_greedy()
        assert run.verified > 0


def test_rejection_repeats_itself(sampled_run):
    """The same seeds and budgets give the same tokens twice; a row alone those of the batch, if
    everything is verified; other seeds give others."""
    totals = [3, 12, 7, 12, 5, 9, 12, 12]

    def texts(shift=0):
        run, left = sampled_run("rejection"), iter(totals * 2)
        run.runner.model.state.slots.seed[1:4] += shift
        return decode_until(run, [1, 2, 3], lambda slots: next(left))

    assert texts() == texts() != texts(100)
    want = decode_until(sampled_run("rejection"), [1, 2, 3], everything)
    run = sampled_run("rejection")
    for slot in SETTINGS:
        assert decode_until(run, [slot], everything)[slot] == want[slot]


def test_a_draft_of_minus_one_is_rejected(sampled_run):
    """Even where the target would choose nothing else: the token is the target's own."""
    run = sampled_run("rejection", settings={1: (0.0, 1.0, -1, 0.0), 2: (1.0, 1.0, 1, 0.0)})
    run.decode([1, 2], 2)
    for slot in (1, 2):
        run.force_drafts(slot, [-1] * DRAFTS)
    result = run.decode([1, 2], 8)
    assert result.num_verified.tolist() == [DRAFTS, DRAFTS]
    assert result.num_emitted.tolist() == [1, 1]
    run.check_greedy()


def test_rejection_without_drafts_draws_from_the_target(sampled_run):
    """K = 0 keeps no distributions; the text is the coupled one."""
    run = sampled_run("rejection", drafts=0)
    assert run.runner.model.state.slots.draft_log_probs.numel() == 0
    decode_until(run, [1, 2, 3], len)
    for slot in SETTINGS:
        assert run.emitted(slot) == by_definition(run, slot)
