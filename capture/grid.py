"""Graph keys, the grid of captured sizes, and the choice of a captured size for a live batch.

Owns the arithmetic of (requests, query tokens) pairs: which pairs are captured, in which order,
and which of them serves a live batch. Does not own what a graph contains or how it is captured.
Data flow: a deployment's limits go in, a `Grid` comes out; at start `check_coverage` proves it;
each step `Grid.select` maps a live (requests, query tokens) to one captured key with two list
look-ups.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class CoverageError(ValueError):
    """A live batch that the grid admits, or was asked for, has no captured pair that covers it."""


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """The two sizes of one captured step graph.

    A live batch of b requests and q query tokens may run in it when b <= num_reqs and q <=
    num_query_tokens.
    """

    num_reqs: int
    """Rows of the graph, 1 or more."""
    num_query_tokens: int
    """Query tokens of the graph, at least num_reqs; a `Grid` also checks num_reqs * (drafts +
    1)."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_reqs <= self.num_query_tokens:
            raise ValueError(
                f"graph key ({self.num_reqs}, {self.num_query_tokens}): "
                "need 1 <= requests <= query tokens"
            )

    def covers(self, num_reqs: int, num_query_tokens: int) -> bool:
        """Whether a live batch of that many requests and query tokens fits into this graph."""
        return num_reqs <= self.num_reqs and num_query_tokens <= self.num_query_tokens

    def __str__(self) -> str:
        return f"({self.num_reqs}, {self.num_query_tokens})"


class StepVariant(Enum):
    """What a captured step does for its rows; every pair of a grid is captured in each variant."""

    FUSED = "fused"
    """One graph from slot rows to slot rows."""
    RICH = "rich"
    """Two graphs, cut after the logits, which are adjusted and reported for each request."""

    def __str__(self) -> str:
        return self.value


Cost = Callable[[GraphKey], float]


def stand_in_cost(num_draft_tokens: int) -> Cost:
    """A cost that orders pairs until a measured step-time surface exists.

    Counts the rows that each pair computes: Q through the target and K for each of B requests
    through the drafter. The unit is rows, not time.
    """

    def cost(key: GraphKey) -> float:
        return float(key.num_query_tokens + num_draft_tokens * key.num_reqs)

    return cost


class Grid:
    """A set of captured pairs with a look-up from live batches to the cheapest pair that covers
    them.

    Args:
        keys: the captured pairs; order and repeats do not matter.
        max_num_reqs: most live requests of a step.
        num_draft_tokens: K, drafts offered per request and step, 0 or more.
        cost: smaller is better; among equal costs the smaller key wins.

    Raises:
        ValueError: no keys, or a key outside 1 <= B <= max_num_reqs, B <= Q <= B * (K + 1).
    """

    __slots__ = (
        "_req_bucket",
        "_table",
        "_token_bucket",
        "keys",
        "max_num_reqs",
        "num_draft_tokens",
    )

    def __init__(
        self,
        keys: Iterable[GraphKey],
        max_num_reqs: int,
        num_draft_tokens: int,
        cost: Cost | None = None,
    ) -> None:
        if max_num_reqs < 1:
            raise ValueError(f"max_num_reqs is {max_num_reqs}; at least 1 is needed")
        if num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens}; at least 0 is needed")
        self.max_num_reqs = max_num_reqs
        self.num_draft_tokens = num_draft_tokens
        self.keys: tuple[GraphKey, ...] = tuple(sorted(set(keys)))
        if not self.keys:
            raise ValueError("a grid needs at least one pair of (requests, query tokens)")
        for key in self.keys:
            self._check_key(key)
        self._build_table(stand_in_cost(num_draft_tokens) if cost is None else cost)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def largest_key(self) -> GraphKey:
        """The largest admissible pair, which is what a full batch with all drafts needs."""
        return GraphKey(self.max_num_reqs, self.max_num_reqs * (self.num_draft_tokens + 1))

    def with_cost(self, cost: Cost) -> "Grid":
        """The same pairs under another cost, for example a measured step-time surface."""
        return Grid(self.keys, self.max_num_reqs, self.num_draft_tokens, cost)

    def capture_order(self) -> tuple[GraphKey, ...]:
        """All keys, largest first, so that a shared memory pool never has to grow."""
        return tuple(
            sorted(self.keys, key=lambda key: (key.num_query_tokens, key.num_reqs), reverse=True)
        )

    def select(self, num_reqs: int, num_query_tokens: int) -> GraphKey:
        """The cheapest captured pair that covers a live batch.

        Raises:
            CoverageError: the batch is not admissible, or no captured pair covers it.
        """
        most = num_reqs * (self.num_draft_tokens + 1)
        if not (1 <= num_reqs <= self.max_num_reqs and num_reqs <= num_query_tokens <= most):
            raise CoverageError(
                f"batch ({num_reqs}, {num_query_tokens}): need 1..{self.max_num_reqs} requests and "
                f"1..{self.num_draft_tokens + 1} query tokens for each"
            )
        key = self._find(num_reqs, num_query_tokens)
        if key is None:
            raise CoverageError(
                f"no captured pair covers {num_reqs} requests with {num_query_tokens} query "
                f"tokens; the largest captured pair is {self.capture_order()[0]}"
            )
        return key

    def check_coverage(self) -> None:
        """Prove that every admissible batch has a captured pair.

        What covers (b, q) covers every (b, q') with q' <= q, so the fullest batch of each b
        decides; a hole is then searched in order so that the error names the first.

        Raises:
            CoverageError: names the first uncovered (requests, query tokens).
        """
        for num_reqs in range(1, self.max_num_reqs + 1):
            fullest = num_reqs * (self.num_draft_tokens + 1)
            if self._find(num_reqs, fullest) is None:
                for num_query_tokens in range(num_reqs, fullest + 1):
                    self.select(num_reqs, num_query_tokens)

    def _check_key(self, key: GraphKey) -> None:
        most = key.num_reqs * (self.num_draft_tokens + 1)
        if key.num_query_tokens > most:
            raise ValueError(
                f"graph key {key}: {key.num_reqs} requests with {self.num_draft_tokens} drafts "
                f"have at most {most} query tokens"
            )
        if key.num_reqs > self.max_num_reqs:
            raise ValueError(
                f"graph key {key}: more than max_num_reqs = {self.max_num_reqs} requests"
            )

    def _find(self, num_reqs: int, num_query_tokens: int) -> GraphKey | None:
        return self._table[self._req_bucket[num_reqs]][self._token_bucket[num_query_tokens]]

    def _build_table(self, cost: Cost) -> None:
        """Fill a table over captured sizes only, so that it stays small for large batch limits.

        Row i stands for live batches whose request count rounds up to the i-th captured one,
        columns likewise for query tokens; the last row and column stand for
        "larger than anything captured".
        """
        req_sizes = sorted({key.num_reqs for key in self.keys})
        token_sizes = sorted({key.num_query_tokens for key in self.keys})
        ranked = sorted(self.keys, key=lambda key: (cost(key), key))
        places = {(key.num_reqs, key.num_query_tokens): i for i, key in enumerate(ranked)}
        rows, columns = len(req_sizes) + 1, len(token_sizes) + 1
        best = [[len(ranked)] * columns for _ in range(rows)]
        # What covers a cell is the pair of its own sizes, or covers the next row or column.
        for row in reversed(range(rows - 1)):
            for column in reversed(range(columns - 1)):
                place = places.get((req_sizes[row], token_sizes[column]), len(ranked))
                best[row][column] = min(place, best[row + 1][column], best[row][column + 1])
        self._table: list[list[GraphKey | None]] = [
            [ranked[place] if place < len(ranked) else None for place in line] for line in best
        ]
        most_tokens = self.largest_key.num_query_tokens
        self._req_bucket = [bisect_left(req_sizes, n) for n in range(self.max_num_reqs + 1)]
        self._token_bucket = [bisect_left(token_sizes, n) for n in range(most_tokens + 1)]


def build_grid(
    max_num_reqs: int,
    num_draft_tokens: int,
    num_reqs: Iterable[int] = (),
    num_query_tokens_per_req: Iterable[int] = (),
    pairs: Iterable[tuple[int, int]] = (),
) -> Grid:
    """Generate a grid from limits and a spacing; the largest admissible pair is always in it.

    Args:
        max_num_reqs: most live requests of a step.
        num_draft_tokens: K, drafts per request and step.
        num_reqs: request counts to capture; empty means powers of two up to max_num_reqs.
            max_num_reqs is always added.
        num_query_tokens_per_req: query tokens per request to capture; empty means 1..K+1. K+1 is
            always added.
        pairs: (requests, query tokens) to capture instead of all (B, B * n); the largest
            admissible one is always added. Empty means the two lists.

    Returns:
        The checked grid of all (B, B * n), or of the pairs.

    Raises:
        ValueError: a size outside 1..max_num_reqs or 1..K+1, or a pair that no batch can have.
    """
    if max_num_reqs < 1:
        raise ValueError(f"max_num_reqs is {max_num_reqs}; at least 1 is needed")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}; at least 0 is needed")
    most = num_draft_tokens + 1
    req_sizes = set(num_reqs) or {1 << i for i in range(max_num_reqs.bit_length())}
    per_req = set(num_query_tokens_per_req) or set(range(1, most + 1))
    for size in sorted(req_sizes):
        if not 1 <= size <= max_num_reqs:
            raise ValueError(f"num_reqs has {size}; allowed are 1..{max_num_reqs} (max_num_reqs)")
    for size in sorted(per_req):
        if not 1 <= size <= most:
            raise ValueError(
                f"num_query_tokens_per_req has {size}; allowed are 1..{most} (num_draft_tokens + 1)"
            )
    keys = [GraphKey(b, b * n) for b in req_sizes | {max_num_reqs} for n in per_req | {most}]
    given = [GraphKey(*pair) for pair in pairs]
    if given:
        keys = [*given, GraphKey(max_num_reqs, max_num_reqs * most)]
    grid = Grid(keys, max_num_reqs, num_draft_tokens)
    grid.check_coverage()
    return grid
