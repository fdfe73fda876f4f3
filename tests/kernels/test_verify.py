"""Verify lengths on the device and acceptance, against published vectors and brute force."""

import math
import random

import pytest
import torch

from decodegrid.kernels.verify import accept_prefix, split_verify_lengths, survival

NAN = math.nan


def split(confidences, total, limits=None, live=None):
    rates = survival(torch.tensor(confidences, dtype=torch.float64))
    rows, num_drafts = rates.shape
    limits = [num_drafts] * rows if limits is None else limits
    live = [True] * rows if live is None else live
    lens = split_verify_lengths(
        rates, torch.tensor(limits), torch.tensor(live), torch.tensor([total])
    )
    assert lens.dtype == torch.int64
    return lens.tolist()


P0, P1 = [0.9, 0.8, 0.5], [0.6, 0.9, 0.9]
FRESH = [0.0, 0.0, 0.0]


@pytest.mark.parametrize("total, want", [(8, [4, 1, 3]), (12, [4, 4, 4])])
def test_published_vectors_with_a_fresh_row(total, want):
    """DeepInfer's device split: previous rows 1 and 0, and a fresh row without confidences."""
    assert split([P1, FRESH, P0], total) == want


def test_published_vector_of_equal_confidences():
    assert split([[1.0] * 3] * 3, 5) == [3, 1, 1]


def test_survival_is_the_running_product():
    rates = survival(torch.tensor([P1, FRESH, P0], dtype=torch.float64))
    want = torch.tensor([[0.6, 0.54, 0.486], FRESH, [0.9, 0.72, 0.36]], dtype=torch.float64)
    torch.testing.assert_close(rates, want)


def test_survival_of_rubbish_is_a_rate():
    rates = survival(torch.tensor([[NAN, 1.0], [2.0, 0.5], [-3.0, 1.0], [1.0, math.inf]]))
    assert rates.tolist() == [[0.0, 0.0], [1.0, 0.5], [0.0, 0.0], [1.0, 0.0]]


def brute_split(confidences, total, limits, live):
    """Hand out one draft after another to the best next draft of any row."""
    lens = [int(alive) for alive in live]
    values = []
    for row in confidences:
        product, rates = 1.0, []
        for value in row:
            value = 0.0 if math.isnan(value) else min(max(value, 0.0), 1.0)
            product *= value
            rates.append(product)
        values.append(rates)
    for _ in range(total - sum(live)):
        # The next draft of each row; the largest rate, then the lowest row, since a row's rates
        # do not grow: exactly the order by (rate, flat index), row by row.
        best = None
        for i, rates in enumerate(values):
            taken = lens[i] - 1
            ahead = live[i] and taken < limits[i]
            if ahead and (best is None or rates[taken] > values[best][lens[best] - 1]):
                best = i
        if best is None:
            break
        lens[best] += 1
    return lens


def test_random_cases_against_brute_force():
    """Ties, zeros, ones, NaN, limits and rows that are not live."""
    draw = random.Random(0)
    cut = 0
    for _ in range(600):
        rows, num_drafts = draw.randint(1, 6), draw.randint(1, 6)
        confidences = [
            [
                draw.choice([0.0, 0.25, 0.5, 0.5, 1.0, 1.0, NAN, draw.random()])
                for _ in range(num_drafts)
            ]
            for _ in range(rows)
        ]
        limits = [draw.choice([0, num_drafts, draw.randint(0, num_drafts)]) for _ in range(rows)]
        live = [draw.random() < 0.8 for _ in range(rows)]
        total = draw.randint(sum(live), sum(live) + rows * num_drafts)
        got = split(confidences, total, limits, live)
        assert got == brute_split(confidences, total, limits, live)
        room = sum(1 + limit for limit, alive in zip(limits, live, strict=True) if alive)
        assert sum(got) == min(total, room)
        for length, limit, alive in zip(got, limits, live, strict=True):
            assert 1 <= length <= limit + 1 if alive else length == 0
        cut += total > room
    assert cut > 20


def test_every_total_is_handed_out_exactly():
    draw = random.Random(1)
    confidences = [[draw.choice([0.0, 0.5, 1.0, NAN]) for _ in range(5)] for _ in range(8)]
    for total in range(8, 49):
        assert sum(split(confidences, total)) == total


def test_winners_of_a_larger_total_contain_those_of_a_smaller():
    draw = random.Random(2)
    confidences = [[draw.random() for _ in range(5)] for _ in range(4)]
    previous = [1, 1, 1, 1]
    for total in range(5, 25):
        lens = split(confidences, total)
        assert sorted(b - a for a, b in zip(previous, lens, strict=True)) == [0, 0, 0, 1]
        previous = lens


def test_acceptance_against_brute_force():
    draw = random.Random(3)
    seen = set()
    for _ in range(300):
        num_drafts = draw.randint(0, 5)
        rows = draw.randint(1, 4)
        chosen = [[draw.randint(0, 1) for _ in range(num_drafts + 1)] for _ in range(rows)]
        drafts = [[draw.randint(0, 1) for _ in range(num_drafts)] for _ in range(rows)]
        lens = [draw.randint(0, num_drafts + 1) for _ in range(rows)]
        got = accept_prefix(
            torch.tensor(chosen),
            torch.tensor(drafts, dtype=torch.int64).reshape(rows, num_drafts),
            torch.tensor(lens),
        ).tolist()
        for row in range(rows):
            want = 0
            while want < lens[row] - 1 and chosen[row][want] == drafts[row][want]:
                want += 1
            assert got[row] == want
            seen.add(want)
    assert seen == {0, 1, 2, 3, 4, 5}
