"""Keys, grids, coverage and selection."""

import dataclasses

import pytest

from decodegrid.capture.grid import CoverageError, GraphKey, Grid, build_grid


def brute_force(grid: Grid, num_reqs: int, num_query_tokens: int, cost) -> GraphKey:
    """The cheapest covering key by looking at all of them."""
    fits = [k for k in grid.keys if k.num_reqs >= num_reqs]
    fits = [k for k in fits if k.num_query_tokens >= num_query_tokens]
    return min(fits, key=lambda k: (cost(k), k.num_reqs, k.num_query_tokens))


@pytest.mark.parametrize("num_draft_tokens", range(8))
@pytest.mark.parametrize("max_num_reqs", [1, 3, 6, 7, 12, 100, 257, 300])
def test_every_admissible_batch_is_covered(max_num_reqs, num_draft_tokens):
    """All pairs for covering; the minimal cost against brute force on all pairs of small grids."""
    grid = build_grid(max_num_reqs, num_draft_tokens)
    captured = set(grid.keys)
    assert GraphKey(max_num_reqs, max_num_reqs * (num_draft_tokens + 1)) in captured
    few = max(1, (max_num_reqs - 1) // 12)
    for b in range(1, max_num_reqs + 1):
        for q in range(b, b * (num_draft_tokens + 1) + 1):
            key = grid.select(b, q)
            assert key in captured and key.num_reqs >= b and key.num_query_tokens >= q
            if (b + q) % few == 0:
                want = brute_force(
                    grid, b, q, lambda k: k.num_query_tokens + num_draft_tokens * k.num_reqs
                )
                assert key == want


def test_selection_follows_the_cost():
    grid = build_grid(8, 5)
    assert grid.select(1, 6) == GraphKey(1, 6)
    measured = {key: 10.0 for key in grid.keys} | {GraphKey(4, 8): 1.0}
    flat = grid.with_cost(measured.__getitem__)
    assert flat.select(1, 6) == GraphKey(4, 8)
    assert flat.select(3, 9) == brute_force(grid, 3, 9, measured.__getitem__)


def test_default_grid():
    grid = build_grid(6, 1)
    assert grid.keys == tuple(GraphKey(b, b * n) for b in (1, 2, 4, 6) for n in (1, 2))
    order = grid.capture_order()
    assert order[0] == grid.largest_key == GraphKey(6, 12)
    assert [k.num_query_tokens for k in order] == sorted(
        (k.num_query_tokens for k in grid.keys), reverse=True
    )


def test_given_sizes_keep_the_largest_pair():
    grid = build_grid(5, 5, num_reqs=[2], num_query_tokens_per_req=[2])
    assert set(grid.keys) == {GraphKey(b, b * n) for b in (2, 5) for n in (2, 6)}
    assert len(grid) == 4


def test_hole_is_named():
    """Without the pair (4, 12), 4 requests are covered up to 8 tokens only."""
    grid = Grid([GraphKey(2, 6), GraphKey(4, 8)], max_num_reqs=4, num_draft_tokens=2)
    assert grid.select(3, 8) == GraphKey(4, 8)
    with pytest.raises(CoverageError, match="3 requests with 9 query tokens"):
        grid.check_coverage()
    small = Grid([GraphKey(2, 6)], max_num_reqs=4, num_draft_tokens=2)
    with pytest.raises(CoverageError, match="3 requests with 3 query tokens"):
        small.check_coverage()


@pytest.mark.parametrize("batch", [(0, 0), (1, 0), (2, 1), (1, 7), (9, 9), (8, 49)])
def test_inadmissible_batches_are_refused(batch):
    with pytest.raises(CoverageError, match=f"batch \\({batch[0]}, {batch[1]}\\)"):
        build_grid(8, 5).select(*batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GraphKey(0, 1), r"\(0, 1\)"),
        (lambda: GraphKey(3, 2), r"\(3, 2\)"),
        (lambda: Grid([GraphKey(1, 7)], 1, 5), "at most 6 query tokens"),
        (lambda: Grid([GraphKey(2, 2)], 1, 5), "max_num_reqs = 1"),
        (lambda: Grid([], 1, 5), "at least one pair"),
        (lambda: build_grid(0, 5), "max_num_reqs is 0"),
        (lambda: build_grid(4, -1), "num_draft_tokens is -1"),
        (lambda: build_grid(4, 5, num_reqs=[5]), r"num_reqs has 5; allowed are 1\.\.4"),
        (lambda: build_grid(4, 5, num_query_tokens_per_req=[7]), r"has 7; allowed are 1\.\.6"),
    ],
)
def test_bad_sizes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_key_is_frozen_and_ordered():
    key = GraphKey(2, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        key.num_reqs = 3  # type: ignore[misc]
    assert sorted([GraphKey(2, 4), GraphKey(1, 6), GraphKey(2, 3)])[0] == GraphKey(1, 6)
    assert str(key) == "(2, 4)" and not hasattr(key, "__dict__")
