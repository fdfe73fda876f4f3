"""The free list: order, references, and what it refuses."""

import pytest

from decodegrid.engine.block_manager import AllocStatus, BlockManager


def test_order_of_the_free_list() -> None:
    blocks = BlockManager(5)
    assert blocks.allocate(3) == [1, 2, 3]
    blocks.free([1, 2, 3])
    assert [blocks.allocate(1)[0] for _ in range(4)] == [4, 3, 2, 1]


def test_status() -> None:
    blocks = BlockManager(5)
    blocks.allocate(2)
    assert [blocks.status(n) for n in (0, 2, 3, 4, 5)] == [
        AllocStatus.OK,
        AllocStatus.OK,
        AllocStatus.LATER,
        AllocStatus.LATER,
        AllocStatus.NEVER,
    ]


def test_a_pinned_block_is_free_after_its_last_reference() -> None:
    blocks = BlockManager(4)
    table = blocks.allocate(2)
    blocks.pin(table)
    blocks.free(table)
    assert blocks.num_free == 1 and blocks.ref_count(table[0]) == 1
    blocks.free(table)
    assert blocks.num_free == blocks.num_usable == 3


@pytest.mark.parametrize("bad", [[0], [4], [-1], [3], [1, 3], [1, 1]])
def test_misuse_changes_nothing(bad: list[int]) -> None:
    blocks = BlockManager(4)
    blocks.allocate(2)
    with pytest.raises(RuntimeError):
        blocks.free(bad)
    if bad != [1, 1]:
        with pytest.raises(RuntimeError):
            blocks.pin(bad)
    assert [blocks.ref_count(i) for i in range(4)] == [0, 1, 1, 0]
    assert blocks.num_free == 1


def test_allocation_is_all_or_nothing() -> None:
    blocks = BlockManager(4)
    with pytest.raises(RuntimeError, match="4 blocks asked, 3 of 3 free"):
        blocks.allocate(4)
    assert blocks.num_free == 3


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockManager(1)
