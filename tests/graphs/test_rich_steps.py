"""Rich requests through the decode step: penalties, bias, bans and masks at every verify position.

Emitted tokens are compared with the parameters applied id by id to the uncached float64 forward;
rounds of `rejection` are done again in plain loops from what the step read.
"""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from decodegrid.engine.runner_protocol import RichRequest
from decodegrid.graphs.regions_rich import mask_bits
from decodegrid.kernels.filters import filter_logits
from decodegrid.kernels.sampling import Purpose, gumbel_noise, stream_counter, uniform_noise

DRAFTS, VOCAB, COUNT = 3, 96, 9
NEUTRAL = RichRequest({}, 0.0, 0.0, 1.0, 0, (), (), ())
FILTERS = {"top_p": 0.9, "top_k": 30, "min_p": 0.01}

CASES = {
    "bias": {"logit_bias": {token: (-3.0, 1.5, 0.0)[token % 3] for token in range(VOCAB)}},
    "presence": {"presence_penalty": -4.0},
    "frequency": {"presence_penalty": -4.0, "frequency_penalty": 0.9},
    "negative": {"presence_penalty": 0.8, "frequency_penalty": -1.8},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.6},
    "banned": {"min_seq_len": 17, "banned_before": tuple(range(0, VOCAB, 2))},
    "grammar": {"has_grammar": True},
    "everything": {
        "logit_bias": {3: 2.0, 40: -4.0}, "presence_penalty": 0.5, "frequency_penalty": 0.3,
        "repetition_penalty": 1.3, "min_seq_len": 16, "banned_before": tuple(range(60)),
        "has_grammar": True,
    },
}


def is_allowed(token, previous, position):
    """A made-up grammar: what may stand at a position depends on the token before it."""
    return (token * 7 + previous * 3 + position) % 5 > 1


def adjusted(logits, asked, prompt, output):
    """The definition, id by id, in the order that the protocol states."""
    found = logits.copy()
    length = len(prompt) + len(output)
    for token, bias in asked.logit_bias.items():
        found[token] += bias
    for token in {*prompt, *output}:
        rate = asked.repetition_penalty
        found[token] = found[token] / rate if found[token] > 0 else found[token] * rate
    for token, count in Counter(output).items():
        found[token] -= asked.frequency_penalty * count
        found[token] -= asked.presence_penalty
    if length < asked.min_seq_len:
        found[list(asked.banned_before)] = -math.inf
    if asked.has_grammar:
        previous = [*prompt, *output][-1]
        for token in range(VOCAB):
            if not is_allowed(token, previous, length):
                found[token] = -math.inf
    return found


def masks_for(run, slots, asked):
    """What the host fills between the halves: rows of the drafts that the slots hold now."""
    held = run.runner.model.state.slots.drafts
    bits = np.ones((len(slots), DRAFTS + 1, VOCAB), dtype=bool)
    for row, slot in enumerate(slots):
        if asked[slot] is not None and asked[slot].has_grammar:
            fed = [run.texts[slot][-1], *held[slot].tolist()]
            for place in range(DRAFTS + 1):
                position = len(run.texts[slot]) + place
                bits[row, place] = [
                    is_allowed(token, fed[place], position) for token in range(VOCAB)
                ]
    packed = np.packbits(bits, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<i4").astype(np.int32)


def begin(run, make_prompt, asked, temperature):
    """Slots 1 .. n with prompts of their own; a slot without a RichRequest is plain."""
    for slot, rich in asked.items():
        prompt = make_prompt(5 + 3 * slot, slot)
        fields = dict(FILTERS) if temperature else {}
        if rich is not None:
            asked[slot] = replace(rich, prompt_token_ids=prompt)
            fields["rich"] = asked[slot]
        run.begin(slot, prompt, temperature=temperature, seed=slot, asked=fields)
    return asked


def decode_until(run, asked, kind, want=None):
    """Decode together until each slot has COUNT tokens, with drafts of a kind."""
    slots, draw = list(asked), random.Random(4)
    while min(len(run.emitted(slot)) for slot in slots) < COUNT:
        for slot in slots:
            if kind == "random":
                run.force_drafts(slot, [draw.randrange(-1, VOCAB) for _ in range(DRAFTS)])
            elif kind != "own" and want is not None:
                place = len(run.emitted(slot))
                right = (want[slot] + [0] * DRAFTS)[place : place + DRAFTS]
                wrong = [(token + 1) % VOCAB for token in right]
                run.force_drafts(slot, right if kind == "right" else wrong)
        total = len(slots) if kind == "none" else len(slots) * (DRAFTS + 1)
        has_grammar = any(rich is not None and rich.has_grammar for rich in asked.values())
        masks = masks_for(run, slots, asked) if has_grammar else None
        result = run.decode(slots, total, masks)
        held = run.runner.model.state.slots.drafts[slots, :DRAFTS]
        assert np.array_equal(result.drafts, held.numpy())
        draw.shuffle(slots)
    return {slot: run.emitted(slot)[:COUNT] for slot in slots}


def check_by_definition(run, asked, temperature):
    """Every emitted token is the definition's choice behind the text before it."""
    state = run.runner.model.state
    for slot, rich in asked.items():
        text, start = run.texts[slot], run.prompt_lens[slot]
        for index, logits in enumerate(run.reference_logits(slot)):
            wanted, output = logits.numpy(), text[start : start + index]
            if rich is not None:
                wanted = adjusted(wanted, rich, text[:start], output)
            if temperature:
                place = torch.tensor([start + index])
                heat = state.slots.temperature[slot : slot + 1]
                noise = gumbel_noise(state.slots.seed[slot : slot + 1], place, heat, VOCAB)
                facts = (getattr(state.slots, name)[slot : slot + 1] for name in FILTERS)
                scaled = filter_logits(torch.tensor(wanted).unsqueeze(0), heat, *facts)
                wanted = (scaled + noise.double())[0].numpy()
            assert text[start + index] == int(wanted.argmax()), (slot, index)
        if rich is not None:
            counts = torch.bincount(torch.tensor(run.emitted(slot)), minlength=VOCAB)
            assert torch.equal(state.rich.counts[slot].to(torch.int64), counts)
    assert run.worst_difference() < 1e-9


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "first, second",
    [
        ("bias", "presence"),
        ("frequency", "negative"),
        ("repetition", "repetition below 1"),
        ("banned", "grammar"),
        ("everything", "everything"),
    ],
)
def test_against_the_definition(rich_run, make_prompt, first, second, temperature):
    """Two rich rows beside a plain one, without drafts and with own, right, wrong and random
    ones: the text is always the same, and the plain row's is that of a batch without the others."""
    plain = rich_run()
    nothing = begin(plain, make_prompt, {1: None, 2: None, 3: None}, temperature)
    free, want = decode_until(plain, nothing, "own"), None
    for kind in ("none", "own", "right", "wrong", "random"):
        rich = [replace(NEUTRAL, **CASES[name]) for name in (first, second)]
        run = rich_run()
        asked = begin(run, make_prompt, {1: rich[0], 2: None, 3: rich[1]}, temperature)
        found = decode_until(run, asked, kind, want)
        check_by_definition(run, asked, temperature)
        assert found[2] == free[2]
        assert want is None or found == want
        want = found
        assert (run.verified > 0) == (kind != "none")
        if kind == "right":
            assert run.accepted == run.verified
        elif kind == "wrong":
            assert run.accepted == 0
    assert free[1] != want[1] and free[3] != want[3]


def test_a_preempted_request_starts_with_its_counts(rich_run, make_prompt):
    """The output that a request had is counted when it starts again, in a slot that another rich
    request left."""
    heavy = replace(NEUTRAL, presence_penalty=1.2, frequency_penalty=0.9, repetition_penalty=1.2)
    run = rich_run()
    want = decode_until(run, begin(run, make_prompt, {1: heavy}, 0.0), "own")[1]
    run = rich_run()
    other = replace(NEUTRAL, logit_bias={5: 60.0}, min_seq_len=100, banned_before=(5, 6))
    decode_until(run, begin(run, make_prompt, {2: other}, 0.0), "own")
    run.runner.stop(2)
    prompt = make_prompt(8, 1)
    again = replace(heavy, prompt_token_ids=prompt, output_token_ids=want[:7])
    run.begin(2, [*prompt, *want[:7]], asked={"rich": again})
    run.decode([2], 1)
    while len(run.emitted(2)) < COUNT - 7:
        run.decode([2], DRAFTS + 1)
    assert run.emitted(2)[: COUNT - 7] == want[7:]


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_drafts_follow_the_bias(rich_run, make_prompt, verify):
    """One id far above all others is drafted and accepted every time."""
    run = rich_run(verify=verify)
    rich = replace(NEUTRAL, logit_bias={17: 90.0})
    begin(run, make_prompt, {1: rich, 2: None}, 0.0)
    run.decode([1, 2], 2)
    for _ in range(2):
        result = run.decode([1, 2], 2 * (DRAFTS + 1))
        assert result.token_ids[0].tolist() == [17] * (DRAFTS + 1)
        assert result.num_emitted[0] == DRAFTS + 1 and result.drafts[0].tolist() == [17] * DRAFTS


def one_round(before, run, slot, logits):
    """Tokens of one row by the definition of rejection sampling, from the step's raw logits."""
    facts = {name: tensor[slot : slot + 1] for name, tensor in before.items()}
    rich, drafts = run.asked[slot], facts["slots.drafts"][0].tolist()
    start, seed, heat = run.prompt_lens[slot], facts["slots.seed"], facts["slots.temperature"]
    output, emitted = run.texts[slot][start : int(facts["slots.seq_len"])], []
    for offset, raw in enumerate(logits):
        wanted = raw.numpy()
        if rich is not None:
            prompt = run.texts[slot][:start]
            wanted = adjusted(wanted, rich, prompt, [*output, *drafts[:offset]])
        scaled = filter_logits(
            torch.tensor(wanted).unsqueeze(0), heat,
            *(facts[f"slots.{name}"] for name in FILTERS),
        )
        target, position = scaled[0].softmax(-1).numpy(), facts["slots.seq_len"] + offset
        if offset < len(logits) - 1:
            proposal = np.exp(facts["slots.draft_log_probs"][0, offset].numpy())
            uniform = float(uniform_noise(seed, stream_counter(position, Purpose.ACCEPTANCE)))
            if min(target[drafts[offset]] / proposal[drafts[offset]], 1.0) > uniform:
                emitted.append(drafts[offset])
                continue
            target = np.maximum(target - proposal * math.exp(-5e-5), 0.0)
        noise = gumbel_noise(seed, stream_counter(position, Purpose.FINAL), heat, VOCAB)[0]
        with np.errstate(divide="ignore"):
            return [*emitted, int((np.log(target) + noise.numpy()).argmax())]
    raise AssertionError("the last query token always ends the round")


@pytest.mark.parametrize("name", ["everything", "frequency", "banned"])
def test_rejection_rounds_follow_the_definition(rich_run, make_prompt, name):
    """The distributions that drafts are held against are the adjusted ones, at every position."""
    run, draw, seen = rich_run(verify="rejection"), random.Random(1), set()
    rich = replace(NEUTRAL, **CASES[name])
    run.asked = begin(run, make_prompt, {1: rich, 2: None, 3: rich}, 0.9)
    buffers = run.runner.buffers
    for _ in range(9):
        order = draw.sample([1, 2, 3], 3)
        before = run.snapshot().tensors
        masks = masks_for(run, order, run.asked)
        result = run.decode(order, draw.choice((12, 12, 7)), masks)
        for row, slot in enumerate(order):
            start, length = int(buffers.rows.query_starts[row]), int(result.num_verified[row]) + 1
            count = int(result.num_emitted[row])
            logits = buffers.output.logits[start : start + length]
            want = one_round(before, run, slot, logits)
            assert result.token_ids[row, :count].tolist() == want
            seen.add((count, length))
    assert run.worst_difference() < 1e-9
    assert 0 < run.accepted < run.verified and len(seen) > 3


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 90])
def test_mask_bits(vocab):
    """Lowest bit first, the sign bit like any other, bits behind the vocabulary ignored."""
    bits = np.random.default_rng(vocab).random((5, -(-vocab // 32) * 32)) < 0.5
    bits[0], bits[1] = True, False
    words = np.packbits(bits, axis=-1, bitorder="little").view("<i4")
    found = mask_bits(torch.from_numpy(words), vocab)
    assert np.array_equal(found.numpy(), bits[:, :vocab])
