"""One round of rejection sampling against loops over plain numbers, and its noise."""

import math
import random

import numpy as np
import pytest
import torch

from decodegrid.kernels.filters import filter_logits
from decodegrid.kernels.rejection import (
    TokenSampling,
    accept_drafts,
    draw_draft,
    draw_final,
    residual,
    verify_rejection,
)
from decodegrid.kernels.sampling import (
    Purpose,
    choose_tokens,
    gumbel_noise,
    stream_counter,
    uniform_noise,
    uniform_noise_op,
)

VOCAB, DRAFTS = 11, 4


def test_counters_never_meet():
    """Every (position, purpose, index) has its own; coupled ones are the positions."""
    positions = torch.tensor([0, 1, 2, 4095, 2**20, 2**21 - 1])
    assert torch.equal(stream_counter(positions, Purpose.COUPLED), positions)
    seen = [
        int(value)
        for purpose in Purpose
        for index in range(32)
        for value in stream_counter(positions, purpose, torch.tensor([index]))
    ]
    assert len(set(seen)) == len(seen) == 4 * 32 * 6
    assert min(seen) >= 0 and max(seen) < 2**28


@pytest.mark.parametrize("form", [uniform_noise, uniform_noise_op])
def test_uniform_numbers(form):
    """Open interval, ten even cells, equal for any batch, and the token 0 of the same hash."""
    count = 20_000
    seed, counter = torch.full((count,), 2**40 + 7), torch.arange(count)
    drawn = form(seed, counter)
    assert drawn.dtype == torch.float64 and 0.0 < float(drawn.min()) < float(drawn.max()) < 1.0
    cells = (drawn * 10).long().bincount(minlength=10).double()
    assert float(((cells - 2000) ** 2 / 2000).sum()) < 27.9  # 9 degrees of freedom, 1 in 1000
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:100]
    assert torch.equal(form(seed[order], counter[order]), drawn[order])
    exponential = (-gumbel_noise(seed[:100], counter[:100], torch.ones(100), 1)[:, 0]).exp()
    torch.testing.assert_close(1 - (-exponential.double()).exp(), drawn[:100], rtol=0, atol=1e-5)


def test_opcheck_uniform_noise():
    for count in (0, 1, 48):
        args = (torch.arange(2 * count)[::2], torch.arange(count))
        torch.library.opcheck(
            uniform_noise_op, args, test_utils=("test_schema", "test_faketensor")
        )


def test_acceptance_is_strict_and_refuses_what_is_no_draft():
    """exp(min(q - r, 0)) > U; equal is not enough, -1 and a token that the target never draws
    fail."""
    target = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64).log().expand(6, -1)
    draft = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log().expand(6, -1)
    half = float((target[0, 0] - draft[0, 0]).exp())
    drafts = torch.tensor([0, 0, 1, 2, -1, 0])
    uniform = [half, half - 1e-9, 1 - 2.0**-33, 2.0**-33, 2.0**-33, 0.9]
    passes = accept_drafts(target, draft, drafts, torch.tensor(uniform, dtype=torch.float64))
    assert passes.tolist() == [False, True, True, False, False, False]


def test_residual_is_never_empty():
    """Equal distributions leave the penalty's share; without a draft the target is left."""
    log_target = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    left = residual(log_target, log_target, torch.tensor([True, False]))
    assert float(left[0].sum()) == pytest.approx(1 - math.exp(-5e-5), rel=0.02)
    assert torch.equal(left[1], log_target[1].exp())


def test_a_mass_of_zeros_draws_from_the_target():
    log_target = torch.tensor([[0.0, -1.0, 9.0]]).log_softmax(-1)
    token = draw_final(
        log_target, log_target, torch.zeros(1, 3), torch.ones(1), torch.zeros(1, 3)
    )
    assert token.tolist() == [2]


def random_round(draw, rows):
    """Inputs of verify_rejection, pads at the end, and the row settings."""
    lens = [draw.randint(1, DRAFTS + 1) for _ in range(rows)] + [0]
    kinds = [(0.0, 1.0, -1, 0.0), (0.8, 1.0, -1, 0.2), (1.0, 0.7, 4, 0.0)]
    settings = [draw.choice(kinds) for _ in lens]
    row = [r for r, length in enumerate(lens) for _ in range(length)] + [rows]
    starts = np.cumsum(lens) - lens
    generator = torch.Generator().manual_seed(draw.randint(0, 2**40))
    logits = torch.randn(len(row), VOCAB, generator=generator, dtype=torch.float64)
    other = logits + torch.randn(len(row), VOCAB, generator=generator, dtype=torch.float64)
    columns = [torch.tensor([settings[r][i] for r in row]) for i in range(4)]
    seeds = torch.tensor([100 + r for r in row])
    floats = [columns[i].double() for i in (0, 1, 3)]
    sampling = TokenSampling(floats[0], floats[1], columns[2], floats[2], seeds)
    positions = torch.tensor([40 + 3 * r for r in row]) + torch.tensor(
        [t - starts[r] for t, r in enumerate(row)]
    )
    drafts, log_drafts = draw_draft(other, sampling, positions + 1, torch.tensor([0]))
    greedy = sampling.temperature == 0
    drafts = torch.where(greedy & (seeds % 2 == 0), logits.argmax(-1), drafts)
    drafts[torch.rand(len(row), generator=generator) < 0.1] = -1
    args = [logits, log_drafts, drafts, positions, sampling, torch.tensor(starts)]
    return [*args, torch.tensor(lens), DRAFTS]


def brute_round(args, row):
    """Emitted tokens of one row by the definition, one draft after another."""
    logits, log_drafts, drafts, positions, sampling, starts, lens, _ = args
    start, length = int(starts[row]), int(lens[row])
    emitted = []
    for offset in range(length):
        token = start + offset
        one = slice(token, token + 1)
        temperature = float(sampling.temperature[token])
        scaled = filter_logits(logits[one], *(part[one] for part in sampling[:4]))[0].numpy()
        target = np.exp(scaled - scaled.max())
        target /= target.sum()
        proposal = np.exp(log_drafts[token].numpy())
        draft, verified = int(drafts[token]), offset < length - 1
        seed, place = sampling.seed[one], positions[one] + 1
        if verified and temperature == 0 and draft == int(scaled.argmax()):
            emitted.append(draft)
            continue
        if verified and temperature > 0 and draft >= 0:
            uniform = float(uniform_noise(seed, stream_counter(place, Purpose.ACCEPTANCE)))
            if min(target[draft] / proposal[draft], 1.0) > uniform:
                emitted.append(draft)
                continue
            target = np.maximum(target - proposal * math.exp(-5e-5), 0.0)
        if temperature == 0:
            return [*emitted, int(scaled.argmax())]
        counter = stream_counter(place, Purpose.FINAL)
        noise = gumbel_noise(seed, counter, sampling.temperature[one], VOCAB)[0].numpy()
        with np.errstate(divide="ignore"):
            return [*emitted, int((np.log(target) + noise).argmax())]
    raise AssertionError("the last query token always ends the round")


def test_rounds_against_the_definition():
    draw = random.Random(5)
    kinds = set()
    for _ in range(150):
        args = random_round(draw, draw.randint(1, 4))
        found = verify_rejection(*args)
        for row in range(len(args[6]) - 1):
            want = brute_round(args, row)
            count = int(found.accepted[row]) + 1
            assert found.token_ids[row, :count].tolist() == want
            heat = float(args[4].temperature[int(args[5][row])]) > 0
            kinds.add((heat, count - 1 == int(args[6][row]) - 1, count > 1))
        assert int(found.accepted[-1]) == 0
        assert found.token_ids.shape == (len(args[6]), DRAFTS + 1)
    assert len(kinds) == 8


def test_estimate_is_the_overlap():
    """Sum of the smaller of both probabilities, up to the penalty; 1 without a draft."""
    args = random_round(random.Random(8), 4)
    found = verify_rejection(*args)
    logits, log_drafts, drafts, _, sampling = args[:5]
    target = filter_logits(logits, *sampling[:4]).softmax(-1)
    overlap = torch.minimum(target, log_drafts.exp()).sum(-1)
    overlap[drafts < 0] = 1.0
    torch.testing.assert_close(found.estimate, overlap, rtol=0, atol=1e-4)
    assert bool((drafts >= 0).any()) and float(overlap.min()) < 0.9


def test_temperature_zero_is_coupled_greedy():
    """Ties included: the lowest of the largest, in both."""
    logits = torch.randint(0, 3, (40, VOCAB), generator=torch.Generator().manual_seed(1)).double()
    zero, index = torch.zeros(40, dtype=torch.float64), torch.arange(40)
    sampling = TokenSampling(zero, zero + 0.5, index * 0 + 2, zero + 0.9, index)
    best = choose_tokens(logits, zero, index, index)
    found = verify_rejection(
        logits, logits, best, index, sampling, index[::5], torch.full((8,), 5), DRAFTS
    )
    assert torch.equal(found.token_ids, best.reshape(8, 5))
    assert torch.equal(found.accepted, torch.full((8,), 4))
    draft, log_probs = draw_draft(logits, sampling, index, torch.tensor([2]))
    assert torch.equal(draft, best)
    assert bool(log_probs.isfinite().all())


def test_rows_do_not_depend_on_the_batch():
    """A row alone gives the same tokens as in the batch."""
    args = random_round(random.Random(11), 4)
    whole = verify_rejection(*args)
    for row in range(4):
        part = slice(int(args[5][row]), int(args[5][row]) + int(args[6][row]))
        alone = verify_rejection(
            *(value[part] for value in args[:4]),
            TokenSampling(*(value[part] for value in args[4])),
            torch.zeros(1, dtype=torch.int64),
            args[6][row : row + 1],
            DRAFTS,
        )
        assert torch.equal(alone.accepted[0], whole.accepted[row])
        assert torch.equal(alone.token_ids[0], whole.token_ids[row])
