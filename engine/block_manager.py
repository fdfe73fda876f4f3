"""Reference-counted ids of fixed-size resources: cache blocks, and slots with the same rules.

Owns which id is free, how often each is referenced, and which free ids still hold something worth
keeping. Owns no memory: an id means a block of the device's pool. Id 0 is the null resource that
pads point at and is never handed out. Ids leave at the front of one free list and come back at its
end; those whose content is kept wait in a second list, the least recently used first, and are
handed out when the first is empty.
Source: free list of the reference engine; eviction order of content: vLLM's free block queue.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import Enum


class AllocStatus(Enum):
    """Whether a number of ids can be had."""

    OK = "ok"
    LATER = "later"
    """Not now, but when others have freed theirs."""
    NEVER = "never"
    """More than the pool has."""


class BlockManager:
    """Hands out ids 1 .. num_blocks - 1. Misuse raises RuntimeError and changes nothing."""

    __slots__ = ("_free", "_idle", "_kept", "_ref_counts", "forget", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: ids of the pool, the null one included; at least 2."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block): {num_blocks}")
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self._ref_counts = [0] * num_blocks
        self.forget: Callable[[int], None] = self.drop
        """Called with an id whose kept content is given up; has to drop it, may drop others."""

    @property
    def num_free(self) -> int:
        """Ids without references, those with kept content among them."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Ids without references whose content is kept."""
        return len(self._idle)

    @property
    def num_usable(self) -> int:
        """Ids that exist, the null one not counted."""
        return self.num_blocks - 1

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def status(self, num_needed: int) -> AllocStatus:
        """Say whether num_needed ids can be allocated now, later, or never."""
        if num_needed >= self.num_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if num_needed <= self.num_free else AllocStatus.LATER

    def allocate(self, num_needed: int) -> list[int]:
        """Take ids from the front of the free list, each with one reference; all or nothing.

        Where that list is too short, kept content is given up, the least recently used first.
        """
        status = self.status(num_needed)
        if status is not AllocStatus.OK:
            raise RuntimeError(
                f"{num_needed} blocks asked, {self.num_free} of {self.num_usable} free "
                f"({status.value})"
            )
        while len(self._free) < num_needed:
            self.forget(next(iter(self._idle)))
        block_ids = [self._free.popleft() for _ in range(num_needed)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def pin(self, block_ids: Sequence[int]) -> None:
        """Add a reference to ids in use."""
        for block_id in block_ids:
            self._check_in_use(block_id, "pinned")
        for block_id in block_ids:
            self._ref_counts[block_id] += 1

    def keep(self, block_id: int) -> None:
        """Keep what an id in use holds beyond its last reference."""
        self._check_in_use(block_id, "kept")
        self._kept.add(block_id)

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to ids whose content is kept, in use or not."""
        for block_id in block_ids:
            if block_id not in self._kept:
                raise RuntimeError(f"block {block_id} shared, but its content is not kept")
        for block_id in block_ids:
            self._idle.pop(block_id, None)
            self._ref_counts[block_id] += 1

    def drop(self, block_id: int) -> None:
        """Keep the content of an id no longer; without references it is an ordinary free one."""
        if block_id not in self._kept:
            raise RuntimeError(f"block {block_id} dropped, but its content is not kept")
        self._kept.remove(block_id)
        if block_id in self._idle:
            del self._idle[block_id]
            self._free.append(block_id)

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop a reference of each id, last one first; an id without references becomes free.

        Last first, so that of a table whose content is kept the end is given up before the start.
        """
        for block_id in block_ids:
            self._check_in_use(block_id, "freed")
        if len(set(block_ids)) != len(block_ids):
            raise RuntimeError(f"a block is freed twice in one table: {list(block_ids)}")
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if block_id in self._kept:
                    self._idle[block_id] = None
                else:
                    self._free.append(block_id)

    def _check_in_use(self, block_id: int, verb: str) -> None:
        if not 0 < block_id < self.num_blocks:
            raise RuntimeError(f"block {block_id} {verb}, ids are 1 to {self.num_blocks - 1}")
        if self._ref_counts[block_id] == 0:
            raise RuntimeError(f"block {block_id} {verb} but not in use")
