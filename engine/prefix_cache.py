"""What requests have computed, kept for later ones that begin with the same tokens.

Owns the tree of full blocks (a block's key is a hash of its parent's key and its token ids; the ids
are compared too), the list of window snapshots at block boundaries, and what is given up first. Has
no tensor: a block id means rows of the pools, a snapshot number rows of the device's store, and
take_moves() says which windows to copy between slots and snapshots.

A request resumes at the last boundary of its prefix that has a snapshot, and what lies behind it is
computed again into blocks of its own: the state there is what the request would have computed.
Snapshots are taken where texts end and where they are seen to part; where a chunk happens to end on
a boundary one is taken that counts less. A block enters the tree when every position of it is
committed, so no draft can write to it any more. Blocks that no request holds are free blocks: they
are given up, the least recently used first, before an admission waits.
Source: hash-chained blocks as in vLLM's prefix cache; snapshots as in DeepInfer's prefix store.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

from decodegrid.engine.block_manager import BlockManager
from decodegrid.engine.request import Request


class MoveKind(Enum):
    """Direction of a copy between a slot's window rings and a snapshot."""

    SAVE = "save"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class WindowMove:
    """Copy the window that ends before `position`; moves are done in order."""

    kind: MoveKind
    slot: int
    snapshot: int
    position: int


@dataclass(slots=True)
class PrefixStats:
    """Counts since the cache was made."""

    num_admissions: int = 0
    num_hits: int = 0
    """Admissions that resumed behind a cached prefix."""
    num_tokens: int = 0
    """Tokens that admitted requests needed computed, cached or not."""
    num_tokens_hit: int = 0
    num_blocks_hit: int = 0
    num_blocks_evicted: int = 0
    num_snapshots_saved: int = 0
    num_snapshots_evicted: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the needed tokens that were cached; 0 before the first."""
        return self.num_tokens_hit / self.num_tokens if self.num_tokens else 0.0


@dataclass(slots=True, eq=False)
class _Node:
    """A full block that is known, and the ones that follow it."""

    key: bytes
    token_ids: tuple[int, ...]
    parent: "_Node | None"
    block_id: int
    children: "dict[bytes, _Node]" = field(default_factory=dict)
    snapshot: int | None = None
    """Window before the position at which the block ends."""


@dataclass(slots=True)
class _Chain:
    """What is known of one request's text."""

    keys: list[bytes] = field(default_factory=list)
    """Keys of its full blocks so far."""
    branch: int = 0
    """Position where its text leaves what is cached, if no snapshot is there; else 0."""
    known: "list[_Node]" = field(default_factory=list)
    """Nodes of its leading blocks."""


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a block behind the block with key `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Works on the blocks of one scheduler, which calls it at each change of a request."""

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        num_snapshots: int,
        *,
        state_key: str = "",
        tail: int = 1,
        key_of: Callable[[bytes, Sequence[int]], bytes] = block_key,
    ) -> None:
        """num_snapshots: of the device's store, at least 1. state_key: what beside the tokens
        decides what a block holds. tail: last tokens of a text that it always computes itself: the
        one it decodes, or those that a bounded replay keeps, whose windows depend on its length.
        key_of: as block_key."""
        if num_snapshots < 1:
            raise ValueError(f"num_snapshots must be at least 1, got {num_snapshots}")
        self.stats = PrefixStats()
        self.num_snapshots = num_snapshots
        self._blocks = blocks
        self._block_size = block_size
        self._key_of = key_of
        self._tail = tail
        root_key = blake2b(state_key.encode(), digest_size=16).digest()
        self._root = _Node(root_key, (), None, 0)
        self._nodes: dict[int, _Node] = {}
        """By block id."""
        self._chains: dict[str, _Chain] = {}
        """By request id, of those that hold blocks or ask for them."""
        self._free_snapshots = list(range(num_snapshots - 1, -1, -1))
        self._spare: OrderedDict[int, _Node] = OrderedDict()
        self._worthy: OrderedDict[int, _Node] = OrderedDict()
        """By snapshot number, least recently used first; spare ones are given up first."""
        self._moves: list[WindowMove] = []
        blocks.forget = self._forget_block

    @property
    def num_cached_blocks(self) -> int:
        return len(self._nodes)

    @property
    def num_used_snapshots(self) -> int:
        return len(self._spare) + len(self._worthy)

    def take_moves(self) -> list[WindowMove]:
        """Copies to make since the last call, before the device does anything else."""
        moves, self._moves = self._moves, []
        return moves

    def num_blocks_taken(self, request: Request, num_needed: int) -> int:
        """Free blocks that the request's admission with num_needed blocks uses up."""
        resumed = self._resumed(self._match(request))
        in_use = sum(self._blocks.ref_count(node.block_id) > 0 for node in resumed)
        return num_needed - in_use

    def admit(self, request: Request, num_needed: int) -> None:
        """Give a request in a slot its blocks, cached ones first, and the position it resumes at.

        Sets block_ids and num_computed. There are num_blocks_taken free blocks.
        """
        matched = self._match(request)
        resumed = self._resumed(matched)
        chain = self._chains[request.request_id]
        chain.known = list(resumed)
        chain.branch = len(matched) * self._block_size if len(matched) > len(resumed) else 0
        cached = [node.block_id for node in resumed]
        self._blocks.share(cached)
        request.block_ids = cached + self._blocks.allocate(num_needed - len(cached))
        request.num_computed = len(cached) * self._block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed, request.num_prompt_tokens)
        self.stats.num_admissions += 1
        self.stats.num_tokens += request.seq_len - 1
        if resumed:
            snapshot = resumed[-1].snapshot
            assert snapshot is not None
            self._touch(snapshot)
            self._move(MoveKind.LOAD, request, snapshot, request.num_computed)
            self.stats.num_hits += 1
            self.stats.num_tokens_hit += request.num_computed
            self.stats.num_blocks_hit += len(resumed)

    def chunk_size(self, request: Request, size: int) -> int:
        """`size` tokens from num_computed on, or fewer to end where a snapshot is wanted."""
        branch = self._chains[request.request_id].branch
        start = request.num_computed
        return branch - start if start < branch < start + size else size

    def computed(self, request: Request) -> None:
        """Take what a chunk of prefill completed."""
        position = self._num_final(request)
        nodes = self._register(request)
        chain = self._chains[request.request_id]
        if position == request.seq_len - 1:
            self._save(request, nodes, is_spare=False)
        elif position % self._block_size == 0:
            self._save(request, nodes, is_spare=position != chain.branch)

    def leave(self, request: Request) -> None:
        """Take what a request leaves behind; called while it still has its slot and blocks."""
        if request.slot and request.request_id in self._chains:
            self._save(request, self._register(request), is_spare=False)
        self._chains.pop(request.request_id, None)

    def report(self) -> str:
        """One line of what was cached and what it was good for."""
        stats = self.stats
        return (
            f"prefix cache: {stats.num_tokens_hit:,} of {stats.num_tokens:,} tokens hit "
            f"({stats.hit_rate:.1%}) in {stats.num_hits} of {stats.num_admissions} admissions, "
            f"{stats.num_blocks_hit:,} blocks; {self.num_cached_blocks:,} blocks kept, "
            f"{stats.num_blocks_evicted:,} given up; {self.num_used_snapshots} of "
            f"{self.num_snapshots} window snapshots kept, {stats.num_snapshots_evicted:,} given up"
        )

    def _match(self, request: Request) -> list[_Node]:
        """Known nodes of the request's leading blocks; its last token is never among them."""
        chain = self._chains.setdefault(request.request_id, _Chain())
        node = self._root
        found: list[_Node] = []
        prompt_logprobs = request.prompt_logprobs
        if prompt_logprobs is not None and not prompt_logprobs.is_complete:
            return found  # every position has to be computed
        for index in range((request.seq_len - self._tail) // self._block_size):
            ids = self._ids(request, index)
            child = node.children.get(self._key(chain, node, index, ids))
            if child is None or child.token_ids != ids:
                break
            found.append(child)
            node = child
        return found

    def _resumed(self, matched: list[_Node]) -> list[_Node]:
        """The leading ones, up to the last that has a snapshot."""
        count = len(matched)
        while count and matched[count - 1].snapshot is None:
            count -= 1
        return matched[:count]

    def _ids(self, request: Request, index: int) -> tuple[int, ...]:
        size = self._block_size
        return tuple(request.token_ids[index * size : (index + 1) * size])

    def _key(self, chain: _Chain, parent: _Node, index: int, ids: tuple[int, ...]) -> bytes:
        """Key of block `index`; the tokens of a request before it never change."""
        if index == len(chain.keys):
            chain.keys.append(self._key_of(parent.key, ids))
        return chain.keys[index]

    def _num_final(self, request: Request) -> int:
        """Positions whose state is computed and committed."""
        return min(request.num_computed, request.seq_len - 1)

    def _register(self, request: Request) -> list[_Node]:
        """Enter the full blocks that the request has; returns the nodes of its text so far."""
        chain = self._chains[request.request_id]
        nodes = chain.known
        if nodes and self._nodes.get(nodes[-1].block_id) is not nodes[-1]:
            nodes.clear()  # given up meanwhile with the blocks before them
        for index in range(len(nodes), self._num_final(request) // self._block_size):
            parent = nodes[-1] if nodes else self._root
            node = self._enter(request, chain, parent, index)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def _enter(self, request: Request, chain: _Chain, parent: _Node, index: int) -> _Node | None:
        """The node of block `index`, made if it is new; None when another text has its key."""
        ids, block_id = self._ids(request, index), request.block_ids[index]
        key = self._key(chain, parent, index, ids)
        node = parent.children.get(key)
        if node is None:
            node = _Node(key, ids, parent, block_id)
            parent.children[key] = node
        elif node.token_ids != ids:
            return None
        elif node.block_id == block_id or self._blocks.ref_count(node.block_id):
            return node
        else:  # computed twice; the block in use stays longer
            del self._nodes[node.block_id]
            self._blocks.drop(node.block_id)
            node.block_id = block_id
        self._nodes[block_id] = node
        self._blocks.keep(block_id)
        return node

    def _save(self, request: Request, nodes: list[_Node], *, is_spare: bool) -> None:
        """Keep the window before the last full block's end, where that block is known."""
        count = self._num_final(request) // self._block_size
        if count == 0 or len(nodes) < count:
            return
        node = nodes[count - 1]
        if node.snapshot is not None:
            self._touch(node.snapshot, is_spare=is_spare)
            return
        if not self._free_snapshots:
            if is_spare and not self._spare:
                return
            oldest = next(iter(self._spare or self._worthy))
            self._give_up_snapshot(oldest)
            self.stats.num_snapshots_evicted += 1
        node.snapshot = self._free_snapshots.pop()
        (self._spare if is_spare else self._worthy)[node.snapshot] = node
        self._move(MoveKind.SAVE, request, node.snapshot, count * self._block_size)
        self.stats.num_snapshots_saved += 1

    def _touch(self, snapshot: int, *, is_spare: bool = False) -> None:
        """A snapshot was used, or would have been taken again."""
        if is_spare and snapshot in self._spare:
            self._spare.move_to_end(snapshot)
        elif not is_spare:
            node = self._spare.pop(snapshot, None) or self._worthy.pop(snapshot)
            self._worthy[snapshot] = node

    def _give_up_snapshot(self, snapshot: int) -> None:
        node = self._spare.pop(snapshot, None) or self._worthy.pop(snapshot)
        node.snapshot = None
        self._free_snapshots.append(snapshot)

    def _forget_block(self, block_id: int) -> None:
        """Give up a block, and all that follow it: nothing leads to them any more."""
        top = self._nodes[block_id]
        assert top.parent is not None
        del top.parent.children[top.key]
        left = [top]
        while left:
            node = left.pop()
            left += node.children.values()
            if node.snapshot is not None:
                self._give_up_snapshot(node.snapshot)
            del self._nodes[node.block_id]
            self._blocks.drop(node.block_id)
            self.stats.num_blocks_evicted += 1

    def _move(self, kind: MoveKind, request: Request, snapshot: int, position: int) -> None:
        self._moves.append(WindowMove(kind, request.slot, snapshot, position))
