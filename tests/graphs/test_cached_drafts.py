"""Drafts of every count, right and wrong: what is emitted is the uncached greedy choice.

The prompts stand at every offset modulo window (8) and ratio (2), and the texts run across the
window, the first compressed pair, the top-k (6 entries) and the candidate blocks (4 of 2 entries).
"""

import random

import pytest
import torch

VOCAB = 96
SLOTS = list(range(1, 9))
SHORT = [1, 2, 3, 4, 5, 6, 7, 8]
LONGER = [9, 10, 19, 28, 37, 30, 15, 24]


@pytest.fixture(scope="module")
def greedy_of(make_model, make_run):
    """Greedy continuations of prompts, from a runner without drafts, each text checked against the
    uncached forward."""

    def continuations(prompts, count):
        run = make_run(num_drafts=0)
        for slot, prompt in zip(SLOTS, prompts, strict=False):
            run.begin(slot, prompt)
        slots = SLOTS[: len(prompts)]
        for _ in range(count):
            run.decode(slots, len(slots))
        assert run.verified == 0
        run.check_greedy()
        return [run.emitted(slot) for slot in slots]

    return continuations


@pytest.fixture(scope="module")
def greedy_texts(greedy_of, make_prompt):
    """Eight short and eight longer prompts with 26 greedy tokens each."""
    made = {}
    for name, lengths in (("short", SHORT), ("longer", LONGER)):
        assert {length % 8 for length in lengths} == set(range(8))
        prompts = [make_prompt(length, length) for length in lengths]
        made[name] = list(zip(prompts, greedy_of(prompts, 26), strict=True))
    return made


KINDS = ("own", "right", "wrong", "random", "up to")


def forced_drafts(kind, right, num_drafts, draw):
    """Drafts of one row, None for the drafter's own; `right` is what greedy emits next."""
    if kind == "own":
        return None
    if kind == "right":
        return right
    if kind == "wrong":
        return [(token + 1) % VOCAB for token in right]
    if kind == "random":
        return [draw.randrange(VOCAB) for _ in right]
    # Right up to a place, wrong there, right again after it.
    place = draw.randint(0, num_drafts)
    return [(token + 7) % VOCAB if i == place else token for i, token in enumerate(right)]


def run_forced(run, texts, kinds, draw, *, rows_of, total_of, num_tokens):
    """Decode until every row has `num_tokens` more; drafts are replaced before each step."""
    num_drafts = run.runner.num_draft_tokens
    for slot, (prompt, _) in zip(SLOTS, texts, strict=True):
        run.begin(slot, prompt)
    while True:
        waiting = [
            s
            for s, (_, t) in zip(SLOTS, texts, strict=True)
            if len(run.emitted(s)) < num_tokens and len(t) >= num_tokens + num_drafts
        ]
        if not waiting:
            return
        slots = rows_of(waiting)
        for slot in slots:
            done = len(run.emitted(slot))
            right = texts[slot - 1][1][done : done + num_drafts]
            drafts = forced_drafts(draw.choice(kinds), right, num_drafts, draw)
            if drafts is not None:
                run.force_drafts(slot, drafts)
        run.decode(slots, total_of(slots))


def check_texts(run, texts):
    for slot, (_, want) in zip(SLOTS, texts, strict=True):
        emitted = run.emitted(slot)
        shared = min(len(emitted), len(want))
        assert emitted[:shared] == want[:shared]
    assert run.worst_difference() < 1e-9


@pytest.mark.parametrize(
    "num_drafts, kinds",
    [(1, KINDS), (2, KINDS), (3, KINDS), (4, KINDS), (5, KINDS), (5, ["right"]), (5, ["wrong"])],
)
def test_every_count_and_kind(make_run, greedy_texts, num_drafts, kinds):
    """Eight rows, everything verified: tokens equal those of a deployment without drafts."""
    run = make_run(num_drafts=num_drafts, req_sizes=(8,))
    texts = greedy_texts["short"]
    run_forced(
        run,
        texts,
        kinds,
        random.Random(num_drafts),
        rows_of=lambda waiting: waiting,
        total_of=lambda slots: len(slots) * (num_drafts + 1),
        num_tokens=20,
    )
    check_texts(run, texts)
    assert run.verified > 0
    if kinds == ["right"]:
        assert run.accepted == run.verified
    elif kinds == ["wrong"]:
        assert run.accepted == 0
    else:
        assert 0 < run.accepted < run.verified


@pytest.mark.parametrize("max_rows", [1, 3])
@pytest.mark.parametrize("name", ["short", "longer"])
def test_mixed_batches_and_random_totals(make_run, greedy_texts, name, max_rows):
    """Batches of 1 and of up to 3 rows in any order, any total, drafts of any kind."""
    run = make_run()
    draw = random.Random(max_rows)
    texts = greedy_texts[name]
    if max_rows == 1:
        texts = [(prompt, text if i % 4 == 1 else []) for i, (prompt, text) in enumerate(texts)]
    run_forced(
        run,
        texts,
        KINDS,
        draw,
        rows_of=lambda waiting: draw.sample(waiting, min(len(waiting), draw.randint(1, max_rows))),
        total_of=lambda slots: draw.randint(len(slots), 6 * len(slots)),
        num_tokens=20,
    )
    check_texts(run, texts)
    assert 0 < run.accepted < run.verified


def test_the_length_limit_cuts_drafts(make_run, make_prompt):
    """A text that ends at the limit verifies no draft that would pass it (C17)."""
    run = make_run()
    run.begin(1, make_prompt(20, 9))
    slots = run.runner.model.state.slots
    slots.max_seq_len[1] = 24
    run.decode([1], 6)
    result = run.decode([1], 6)
    assert int(slots.seq_len[1]) <= 24
    assert int(result.num_verified[0]) == 24 - 21 - 1
    assert result.num_query_tokens == 3
    run.check_greedy()


def test_plain_steps_equal_captured_steps(make_run, make_prompt):
    """Greedy choice and Gumbel choice do not depend on how many drafts were verified (coupled)."""
    run = make_run()
    prompt = make_prompt(13, 11)
    texts = []
    for total in (1, 3, 6):
        run.reset()
        run.begin(1, prompt, temperature=0.8, seed=1234)
        while len(run.emitted(1)) < 12:
            run.decode([1], total)
        assert run.worst_difference() < 1e-9
        texts.append(run.emitted(1)[:12])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) > 4
    assert torch.equal(run.runner.model.state.slots.seed[1], torch.tensor(1234))
