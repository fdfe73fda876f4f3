"""Compressor, index scores, candidates and top-k on the CPU route; last, all of select_entries."""

import pytest
import torch

from decodegrid.kernels.indexer import (
    candidate_mask,
    index_scores,
    mask_to_indices,
    top_k_mask,
)
from decodegrid.kernels.records import RecordFormat, decode_records, encode_records, round_records
from decodegrid.kernels.select_entries import CandidateMode, entry_rows, select_entries

pytestmark = pytest.mark.kernels

INF = float("inf")


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [0, 1, 6])
@pytest.mark.parametrize("dim", [32, 512])
def test_compress_pairs(tile, tokens, dim):
    """Pairs within the step and across steps, a pad, rows of other slots untouched."""
    ring = draw(1, 21, 2 * dim)
    joined = draw(2, tokens, 2 * dim)
    store = torch.tensor([7, 8, 9, 14, 15, 0])[:tokens]
    previous = torch.tensor([13, 7, 8, 20, 14, 0])[:tokens]
    expected = ring.clone()
    expected[store] = joined
    after = ring.clone()
    pooled = torch.full((tokens, dim), torch.nan, dtype=torch.bfloat16)
    tile("compress.compress_pairs", dim=dim)(joined, store, previous, after, pooled)
    assert torch.equal(after, expected)
    early = expected[previous]
    weight = torch.stack((early[:, :dim], joined[:, :dim])).softmax(0)
    wanted = (weight * torch.stack((early[:, dim:], joined[:, dim:]))).sum(0)
    live = store > 0
    assert torch.allclose(pooled[live].float(), wanted[live], rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(("form", "dim", "heads"), [
    (RecordFormat.Q4X, 32, 16), (RecordFormat.Q4X, 128, 32), (RecordFormat.Q8, 128, 32),
])
@pytest.mark.parametrize("ratio", [1, 2])
def test_index_logits(tile, form, dim, heads, ratio):
    """Lengths of 0, 1, a tile, one more, and the capacity; unused pool rows are poison."""
    block_size, blocks, capacity = 32, 8, 192
    per_block = block_size // ratio
    lengths = torch.tensor([0, 1, 64, 65, min(capacity, blocks * per_block)])
    tokens = len(lengths)
    table = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(3)) + 1
    table, slot = table.view(2, blocks), torch.tensor([0, 1, 1, 0, 1])
    pool = encode_records(draw(4, (2 * blocks + 1) * per_block, dim), form)
    pool[:per_block] = 0xFF
    query = round_records(draw(5, tokens, heads, dim).bfloat16(), int(form))
    weights = draw(6, tokens, heads).bfloat16()
    scores = torch.full((tokens, capacity), torch.nan)
    tile("indexer.index_logits", heads=heads, dim=dim, form=int(form), block_size=block_size,
         ratio=ratio, splits=3)(query, weights, pool, table, slot, lengths, scores)
    for token in range(tokens):
        length = int(lengths[token])
        rows = entry_rows(table[slot[token]], blocks * per_block, ratio, block_size)[:length]
        keys = decode_records(pool[rows], form, dim)
        wanted = index_scores(
            query[None, token : token + 1], weights[None, token : token + 1], keys[None]
        )[0, 0]
        assert torch.allclose(scores[token, :length], wanted, rtol=1e-5, atol=1e-4)
        end = -(-length // 64) * 64
        assert bool((scores[token, length:end] == -INF).all())
        assert bool(scores[token, end:].isnan().all())


def score_rows(kind, tokens, capacity, lengths):
    """Scores with NaN past each length; zeros are frequent, as relu makes them."""
    scores = draw(7, tokens, capacity)
    if kind == "ties":
        scores = scores.round().relu()
    scores[scores.abs() < 0.3] = 0.0
    scores[:, 1::5] *= -0.0 if kind == "zeros" else 1.0
    scores[:, 3::7] = -INF
    scores[torch.arange(capacity) >= lengths.unsqueeze(1)] = torch.nan
    return scores


def visible(scores, lengths):
    past = torch.arange(scores.shape[1]) >= lengths.unsqueeze(1)
    return scores.masked_fill(past, -INF)


@pytest.mark.parametrize("kind", ["random", "ties", "zeros"])
@pytest.mark.parametrize("k", [1, 16, 64])
def test_top_k(tile, kind, k):
    lengths = torch.tensor([0, 1, 15, 16, 17, 300, 700])
    scores = score_rows(kind, len(lengths), 700, lengths)
    ids = torch.full((len(lengths), k), -77, dtype=torch.int32)
    tile("indexer.select_top_k", k=k)(scores, lengths, ids)
    expected = mask_to_indices(top_k_mask(visible(scores, lengths), k), k)
    assert torch.equal(ids.to(torch.int64), expected)


def test_top_k_of_no_token(tile):
    none = torch.empty(0, dtype=torch.int64)
    tile("indexer.select_top_k", k=16)(
        torch.empty(0, 10), none, torch.empty(0, 16, dtype=torch.int32)
    )


@pytest.mark.parametrize("kind", ["random", "ties", "zeros"])
@pytest.mark.parametrize(("block", "count"), [(8, 12), (8, 1), (16, 4)])
def test_candidates(tile, kind, block, count):
    lengths = torch.tensor([0, 1, 8, 9, 16, 250, 600])
    capacity = 608
    scores = score_rows(kind, len(lengths), capacity, lengths)
    best = torch.full((len(lengths), capacity // block), torch.nan)
    level = torch.full((len(lengths),), torch.nan)
    bound = torch.full((len(lengths),), -5, dtype=torch.int32)
    marks = torch.ones(len(lengths), capacity, dtype=torch.bool)
    tile("indexer.block_scores", block=block)(scores, lengths, best)
    tile("indexer.select_threshold", k=count, unit=block)(best, lengths, level, bound)
    tile("indexer.mark_blocks", block=block)(best, level, bound, lengths, marks)
    expected = candidate_mask(visible(scores, lengths), lengths, block, count)
    inside = torch.arange(capacity) < lengths.unsqueeze(1)
    assert torch.equal(marks & inside, expected & inside)
    assert bool(marks[~inside].all()), "wrote past the length"
    masked = scores.clone()
    tile("indexer.mask_scores")(marks, lengths, masked)
    wanted = torch.where(inside & ~expected, torch.tensor(-INF), scores)
    assert torch.equal(masked.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("mode", [CandidateMode.IGNORE, CandidateMode.WRITE, CandidateMode.READ])
def test_the_kernels_together_are_select_entries(tile, mode):
    """One indexer layer end to end, over a record pool, against the op of the CPU's steps."""
    heads, dim, ratio, block_size, k, block, count = 16, 32, 1, 16, 8, 8, 3
    form, capacity = RecordFormat.Q4X, 128
    table = torch.randperm(24, generator=torch.Generator().manual_seed(9))[:16].view(2, 8)
    slot, lengths = torch.tensor([0, 0, 1]), torch.tensor([100, 101, 5])
    pool = encode_records(draw(10, 24 * block_size, dim), form)
    query = round_records(draw(11, 3, heads, dim).bfloat16(), int(form))
    weights = draw(12, 3, heads).bfloat16()
    marks = torch.rand(3, capacity, generator=torch.Generator().manual_seed(2)) < 0.5
    entries = torch.full((3, k), -9)
    expected_marks = marks.clone()
    select_entries(query, weights, pool, table, slot, lengths, ratio, block_size, int(mode), block,
                   count, expected_marks, entries)

    scores = torch.full((3, capacity), torch.nan)
    tile("indexer.index_logits", heads=heads, dim=dim, form=int(form), block_size=block_size,
         ratio=ratio, splits=3)(query, weights, pool, table, slot, lengths, scores)
    if mode == CandidateMode.WRITE:
        best = torch.full((3, capacity // block), torch.nan)
        level, bound = torch.empty(3), torch.empty(3, dtype=torch.int32)
        tile("indexer.block_scores", block=block)(scores, lengths, best)
        tile("indexer.select_threshold", k=count, unit=block)(best, lengths, level, bound)
        tile("indexer.mark_blocks", block=block)(best, level, bound, lengths, marks)
        inside = torch.arange(capacity) < lengths.unsqueeze(1)
        assert torch.equal(marks & inside, expected_marks & inside)
    elif mode == CandidateMode.READ:
        tile("indexer.mask_scores")(marks, lengths, scores)
    ids = torch.empty(3, k, dtype=torch.int32)
    rows = torch.empty(3, k, dtype=torch.int64)
    tile("indexer.select_top_k", k=k)(scores, lengths, ids)
    tile("index.convert_index", top_k=k, block_size=block_size, ratio=ratio)(
        ids, table, slot, lengths, rows
    )
    assert torch.equal(rows, entries)
