"""Top-k, candidate blocks and index scores against brute force, ties and empty rows included."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from decodegrid.kernels.indexer import candidate_mask, index_scores, mask_to_indices, top_k_mask

HIDDEN = -math.inf


def best(scores: list[float], k: int) -> set[int]:
    """The k largest visible entries; among equals the lower index wins."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    return {j for j in order[:k] if scores[j] > HIDDEN}


def chosen(mask: Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_small_row_of_ties(dtype: torch.dtype) -> None:
    """All rows of 5 entries over 4 levels, for every k."""
    rows = list(itertools.product([HIDDEN, -1.0, 0.0, 2.5], repeat=5))
    scores = torch.tensor(rows, dtype=dtype)
    for k in range(1, 8):
        mask = top_k_mask(scores, k)
        for row, picked in zip(rows, mask, strict=True):
            assert chosen(picked) == best(list(row), k), (row, k)


def test_long_rows_with_many_zeros() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 7, 200, generator=draw).relu()
    lengths = torch.randint(0, 201, (40, 7, 1), generator=draw)
    scores = scores.masked_fill(torch.arange(200) >= lengths, HIDDEN)
    mask = top_k_mask(scores, 64)
    for row, picked in zip(scores.reshape(-1, 200), mask.reshape(-1, 200), strict=True):
        assert chosen(picked) == best(row.tolist(), 64)
    flat = mask_to_indices(mask, 64)
    assert flat.shape == (40, 7, 64)
    for row, picked in zip(flat.reshape(-1, 64).tolist(), mask.reshape(-1, 200), strict=True):
        wanted = sorted(chosen(picked))
        assert row == wanted + [-1] * (64 - len(wanted))


def test_negative_and_positive_zero_are_equal() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert chosen(top_k_mask(scores, 2)[0]) == {0, 1}


def brute_candidates(scores: list[float], length: int, size: int, count: int) -> set[int]:
    blocks = [scores[start : start + size] for start in range(0, len(scores), size)]
    value = [max(block) for block in blocks]
    if length > 0:
        value[(length - 1) // size] = math.inf
    kept = best(value, count)
    return {j for j in range(len(scores)) if j // size in kept}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 4, 40])
def test_candidate_blocks(size: int, count: int) -> None:
    draw = torch.Generator().manual_seed(size * 100 + count)
    scores = torch.randint(-2, 6, (60, 29), generator=draw).double().relu()
    lengths = torch.randint(0, 30, (60,), generator=draw)
    lengths[:3] = torch.tensor([0, 1, 29])
    scores = scores.masked_fill(torch.arange(29) >= lengths[:, None], HIDDEN)
    mask = candidate_mask(scores, lengths, size, count)
    for row, length, picked in zip(scores.tolist(), lengths.tolist(), mask, strict=True):
        wanted = brute_candidates(row, length, size, count)
        assert chosen(picked) == wanted
        if length:
            assert length - 1 in wanted, "the newest entry is always a candidate"


def test_index_scores() -> None:
    draw = torch.Generator().manual_seed(9)
    query = torch.randn(2, 3, 4, 5, generator=draw, dtype=torch.float64)
    weights = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    keys = torch.randn(2, 6, 5, generator=draw, dtype=torch.float64)
    found = index_scores(query, weights, keys)
    for b, s, j in itertools.product(range(2), range(3), range(6)):
        wanted = sum(
            float(weights[b, s, h]) * max(0.0, float(query[b, s, h] @ keys[b, j])) for h in range(4)
        )
        assert found[b, s, j].item() == pytest.approx(wanted, abs=1e-12)
    assert (
        index_scores(query.bfloat16(), weights.bfloat16(), keys.bfloat16()).dtype == torch.float32
    )
