"""The verify budget: how many query tokens the next step runs, and so in which captured pair.

Owns the choice of the total from survival rates and a step-time surface. Does not own which request
gets how many of the tokens (the device splits them by fresher rates), and measures nothing. Data
flow: each step the scheduler hands over the rates of an older step and gets a `BudgetChoice`;
reports use the same functions.

The rates must be those of a step whose tokens are already fixed: under rejection sampling the total
must not depend on what a draft's own later confidences say.

Source: DeepInfer's DSpark schedule. Its greedy walks the rates from the largest down and keeps the
first total with the most expected tokens per ms. Between two captured columns the cost is flat and
expected tokens never fall, so comparing the far end of each column finds the same total.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.capture.surface import Surface
from decodegrid.capture.total_scan import MakeScan, NumpyScan, ScanMemory, best_column

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class BudgetChoice(NamedTuple):
    """The total for one step, and what the two simple rules would have had for the same rows.

    A named tuple because one is made each step: a frozen dataclass takes three times as long.
    """

    num_query_tokens: int
    """Query tokens to run, one for each row and the rest for drafts."""
    key: GraphKey
    """The captured pair that serves them."""
    expected_tokens: float
    """Tokens that the step emits if the rates are right."""
    step_ms: float | None
    """Predicted time, corrections included; None without a surface, as the other times."""
    verify_all: bool
    """There is no surface, so everything usable is verified."""
    all_tokens: float
    """Expected tokens of verifying every usable draft."""
    all_ms: float | None
    """Predicted time of that."""
    none_ms: float | None
    """Predicted time of verifying no draft, which emits one token for each row."""


class _Columns:
    """What can be chosen for one number of rows: a column is a run of totals in one pair.

    `last` and `first` count drafts, which is the total less the rows.
    """

    __slots__ = ("correction", "first", "keys", "last", "ms", "surface_ms", "tokens")

    def __init__(self, grid: Grid, surface: Surface | None, num_reqs: int) -> None:
        most = num_reqs * (grid.num_draft_tokens + 1)
        # What covers a total changes only where a captured pair ends.
        ends = {
            key.num_query_tokens for key in grid.keys if num_reqs <= key.num_query_tokens < most
        }
        last: list[int] = []
        self.keys: list[GraphKey] = []
        for total in sorted(ends | {most}):
            key = grid.select(num_reqs, total)
            if self.keys and self.keys[-1] == key:
                last[-1] = total - num_reqs
            else:
                last.append(total - num_reqs)
                self.keys.append(key)
        self.last = np.array(last, dtype=np.int64)
        self.first = [0, *(end + 1 for end in last[:-1])]
        self.tokens = np.array([key.num_query_tokens for key in self.keys], dtype=np.float64)
        times = [1.0 if surface is None else surface.ms(key) for key in self.keys]
        self.surface_ms = np.array(times, dtype=np.float64)
        self.ms = self.surface_ms.copy()
        self.correction = (0.0, 0.0)

    def correct(self, slope_ms_per_token: float, extra_ms: float) -> None:
        """Set `ms` to surface + slope * captured tokens + extra."""
        if not (slope_ms_per_token >= 0.0 and extra_ms >= 0.0):
            raise ValueError(
                f"slope_ms_per_token is {slope_ms_per_token} and extra_ms {extra_ms}; "
                "both must be 0 or more"
            )
        self.ms[:] = self.surface_ms + slope_ms_per_token * self.tokens + extra_ms
        self.correction = (slope_ms_per_token, extra_ms)


class _Scratch:
    """Memory for the rates of the largest batch; `views` are cut out of it for one batch size."""

    def __init__(self, max_num_reqs: int, num_draft_tokens: int) -> None:
        count = max_num_reqs * num_draft_tokens
        self.width = width = num_draft_tokens
        self.most_of = np.tri(width + 1, width, -1, dtype=np.float32)
        """(K + 1, K) fp32: row u has 1 for the first u drafts."""
        # The rates end right before the last element, which holds the number of rows.
        self.terms = np.zeros(count + 1, dtype=np.float32)
        self.sums = np.zeros(count + 1, dtype=np.float32)
        self.most = np.zeros(count, dtype=np.float32)


class _Views:
    """The scratch memory as one number of rows sees it, and the walk over it."""

    __slots__ = ("flat_most", "most", "rates", "scan", "sums")

    def __init__(
        self, scratch: _Scratch, num_reqs: int, columns: _Columns, make_scan: MakeScan
    ) -> None:
        count, width = num_reqs * scratch.width, scratch.width
        terms = scratch.terms[len(scratch.terms) - 1 - count :]
        self.rates = terms[:-1]
        self.sums = scratch.sums[: count + 1]
        self.flat_most = scratch.most[:count]
        self.most = self.flat_most.reshape(num_reqs, width)
        """The largest that a rate may be: 1 where the draft is usable, else 0."""
        first = np.array(columns.first, dtype=np.int64)
        memory = ScanMemory(terms, self.sums, first, columns.last, columns.ms, width)
        self.scan = make_scan(memory)


class VerifyBudget:
    """Chooses totals for one grid and one surface; holds scratch memory, so one thread at a time.

    Args:
        grid: the captured pairs; every batch it admits must be covered.
        surface: times of all its pairs; None verifies everything.
        num_draft_tokens: K, the width of the rates; must be the grid's.
        make_scan: makes the walk over the rates for each number of rows; a compiled one is faster.

    Raises:
        ValueError: another K than the grid's, a pair without a time, or an uncovered batch.
    """

    def __init__(
        self,
        grid: Grid,
        surface: Surface | None,
        num_draft_tokens: int,
        make_scan: MakeScan = NumpyScan,
    ) -> None:
        if num_draft_tokens != grid.num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens}; the grid has {grid.num_draft_tokens}"
            )
        self.grid = grid
        self.surface = surface
        self.num_draft_tokens = num_draft_tokens
        counts = range(1, grid.max_num_reqs + 1)
        self._columns = [_Columns(grid, surface, count) for count in counts]
        self._scratch = _Scratch(grid.max_num_reqs, num_draft_tokens)
        self._views = [
            _Views(self._scratch, count, columns, make_scan)
            for count, columns in zip(counts, self._columns, strict=True)
        ]
        self._set_rows(1, np.zeros(1, dtype=np.int64))

    def choose(
        self,
        rates: Floats,
        num_usable: Ints,
        *,
        slope_ms_per_token: float = 0.0,
        extra_ms: float = 0.0,
    ) -> BudgetChoice:
        """The total with the most expected tokens per ms; of equal ones the smallest.

        A rate is the probability that a draft and all before it are accepted. NaN counts as 0;
        rates are clamped to 0..1 and to the rate before them. Expected tokens are added up in
        fp32, largest rate first, and divided in fp64.

        Args:
            rates: (num_reqs, K) fp32, in batch order, of an older step. Not written.
            num_usable: (num_reqs,) int64, drafts that each row can verify, 0..K.
            slope_ms_per_token: correction for each query token of a captured pair, 0 or more.
            extra_ms: time of a step outside its graph, 0 or more. The same for every total, but
                the larger it is, the more drafts pay.

        Raises:
            ValueError: other shapes, num_usable outside 0..K, or a negative correction.
        """
        num_reqs = len(num_usable)
        usable = num_usable.tobytes()
        if usable != self._usable or num_reqs != self._num_reqs:
            self._set_rows(num_reqs, num_usable)
        if rates.shape != self._shape:
            raise ValueError(f"rates have shape {rates.shape}; need {self._shape} as num_usable")
        columns, limit = self._columns_now, self._limit
        if columns.correction != (slope_ms_per_token, extra_ms):
            columns.correct(slope_ms_per_token, extra_ms)
        self._sort(rates)
        views, ms, num_columns = self._views_now, columns.ms, self._num_columns
        # Without a surface all times are 1: only the sums are wanted.
        num_drafts, column = views.scan.best(num_columns)
        expected = views.sums
        if self.surface is None:
            tokens = expected.item(limit)
            total = num_reqs + limit
            return BudgetChoice(
                total, columns.keys[num_columns - 1], tokens, None, True, tokens, None, None
            )
        return BudgetChoice(
            num_reqs + num_drafts,
            columns.keys[column],
            expected.item(num_drafts),
            ms.item(column),
            False,
            expected.item(limit),
            ms.item(num_columns - 1),
            ms.item(0),
        )

    def _set_rows(self, num_reqs: int, num_usable: Ints) -> None:
        """Check num_usable and keep what follows from it; it seldom changes between steps."""
        width, most = self.num_draft_tokens, self.grid.max_num_reqs
        if not (num_usable.ndim == 1 and 1 <= num_reqs <= most):
            raise ValueError(f"num_usable has shape {num_usable.shape}; allowed are 1..{most} rows")
        # Unsigned, a negative count is larger than any.
        if np.maximum.reduce(num_usable.astype(np.uint64)) > width:
            raise ValueError(f"num_usable is {num_usable.tolist()}; allowed are 0..{width}")
        self._num_reqs = num_reqs
        self._shape = (num_reqs, width)
        self._usable = num_usable.tobytes()
        self._limit = int(np.add.reduce(num_usable))
        columns, views = self._columns[num_reqs - 1], self._views[num_reqs - 1]
        self._columns_now, self._views_now = columns, views
        self._num_columns = bisect_right(columns.first, self._limit)
        self._all_usable = self._limit == num_reqs * width
        self._scratch.terms[-1] = num_reqs
        self._scratch.most_of.take(num_usable, axis=0, out=views.most, mode="clip")

    def _sort(self, rates: Floats) -> None:
        """Clean rates into the scratch memory, sorted upwards; unusable ones are worth nothing."""
        views = self._views_now
        values = views.rates
        if self._all_usable:
            values[:] = rates.ravel()
        else:
            np.minimum(rates.ravel(), views.flat_most, out=values)
        # Rates come as running products and are in order; repairing them costs as much as the rest.
        if not views.scan.is_ordered():
            values[:] = clean_rates(rates, views.most).ravel()
        values.sort()
        if len(values) and not (values.item(0) >= 0.0 and values.item(-1) <= 1.0):
            values[:] = clean_rates(rates, views.most).ravel()
            values.sort()


def clean_rates(rates: Floats, most: Floats) -> Floats:
    """Rates with NaN as 0, none below 0, above `most` or above the one before it.

    rates, most: (num_reqs, K) fp32. Returns a new array.
    """
    clean = np.minimum(np.fmax(rates, np.float32(0.0)), most)
    if clean.shape[1]:
        np.minimum.accumulate(clean, axis=1, out=clean)
    return clean


def expected_tokens(rates: Floats, num_usable: Ints, total: int) -> float:
    """Tokens that a step of `total` query tokens emits if the rates are right.

    Args:
        rates: (num_reqs, K) fp32; cleaned as in `VerifyBudget.choose`.
        num_usable: (num_reqs,) int64, drafts that each row can verify, 0..K.
        total: one for each row and the rest for its drafts, the most probable first.

    Raises:
        ValueError: more or fewer query tokens than the rows can have.
    """
    num_reqs, limit = len(num_usable), int(num_usable.sum())
    if not num_reqs <= total <= num_reqs + limit:
        raise ValueError(f"total is {total}; these rows have {num_reqs}..{num_reqs + limit}")
    usable = np.arange(rates.shape[1]) < num_usable[:, None]
    clean = clean_rates(rates, usable.astype(np.float32))
    return _expected_of(clean.reshape(-1), num_reqs).item(total - num_reqs)


def choose_total(
    rates: Floats,
    num_reqs: int,
    column_tokens: Sequence[int],
    column_ms: Sequence[float],
) -> tuple[int, int]:
    """The choice on plain arrays, for any curve of query tokens against time.

    Args:
        rates: (num_drafts,) fp32 in any order, each in 0..1.
        num_reqs: rows, each with one query token besides its drafts.
        column_tokens: largest total of each column, ascending; the first column begins at 1.
        column_ms: time of each column.

    Returns:
        The total and the index of its column.

    Raises:
        ValueError: columns that do not ascend or have not one time each, or more rows than the
            last column has tokens.
    """
    if len(column_ms) != len(column_tokens) or sorted(set(column_tokens)) != list(column_tokens):
        raise ValueError(f"columns of {column_tokens} tokens do not ascend or fit {column_ms} ms")
    skipped = bisect_left(column_tokens, num_reqs)
    # Columns beyond the one that holds all drafts cannot be filled.
    used = bisect_left(column_tokens, num_reqs + len(rates)) + 1
    ends = [min(tokens - num_reqs, len(rates)) for tokens in column_tokens[skipped:used]]
    if not ends:
        raise ValueError(f"{num_reqs} rows do not fit into columns of {column_tokens} tokens")
    first = np.array([0, *(end + 1 for end in ends[:-1])], dtype=np.int64)
    ms = np.array(column_ms[skipped:used], dtype=np.float64)
    expected = _expected_of(rates, num_reqs)
    num_drafts, column = best_column(expected, first, np.array(ends, dtype=np.int64), ms)
    return num_reqs + num_drafts, skipped + column


def _expected_of(rates: Floats, num_reqs: int) -> Floats:
    """Expected tokens of 0, 1, 2, ... drafts in fp32, added one after the other."""
    terms = np.append(np.sort(rates), np.float32(num_reqs)).astype(np.float32)
    return np.add.accumulate(terms[::-1])

