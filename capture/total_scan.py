"""The walk over sorted survival rates that finds a step's total: what it reads, and in NumPy.

Owns the order check of the rates and the comparison of columns, on memory that the verify budget
cuts for one number of rows. Does not sort, and knows no grid and no request. A compiled form can
stand in for `NumpyScan`: it gives the same answer to the bit.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class ScanMemory(NamedTuple):
    """Arrays of one number of rows, which never move; all contiguous."""

    terms: NDArray[np.float32]
    """(num_drafts + 1,) rates, in batch order or sorted upwards, and then the number of rows: read
    backwards they are the terms of the expected tokens."""
    sums: NDArray[np.float32]
    """(num_drafts + 1,) written: expected tokens of 0, 1, 2, ... drafts."""
    first: NDArray[np.int64]
    """(num_columns,) fewest drafts of each column."""
    last: NDArray[np.int64]
    """(num_columns,) most drafts of each column."""
    ms: NDArray[np.float64]
    """(num_columns,) time of each column; written by its owner when corrections change."""
    width: int
    """Drafts of a row."""


class TotalScan(Protocol):
    """See NumpyScan."""

    def is_ordered(self) -> bool:
        """Whether the rates of every row never rise; False where one is NaN beside another."""

    def best(self, num_columns: int) -> tuple[int, int]:
        """Drafts and column of the most expected tokens per ms, of the leading columns; the first
        of equals in both. The rates are sorted upwards. Writes the sums."""


MakeScan = Callable[[ScanMemory], TotalScan]


class NumpyScan:
    """TotalScan with NumPy alone."""

    __slots__ = ("_earlier", "_first", "_last", "_later", "_ms", "_ordered", "_row_ends", "_sums",
                 "_terms_down")

    def __init__(self, memory: ScanMemory) -> None:
        rates, width = memory.terms[:-1], memory.width
        self._later, self._earlier = rates[1:], rates[:-1]
        self._ordered = np.zeros(max(len(rates) - 1, 0), dtype=np.bool_)
        self._row_ends = self._ordered[width - 1 :: width] if width else self._ordered
        self._terms_down, self._sums = memory.terms[::-1], memory.sums
        self._first, self._last, self._ms = memory.first, memory.last, memory.ms

    def is_ordered(self) -> bool:
        """See TotalScan."""
        np.less_equal(self._later, self._earlier, out=self._ordered)
        self._row_ends.fill(True)
        return 0 not in self._ordered.tobytes()

    def best(self, num_columns: int) -> tuple[int, int]:
        """See TotalScan."""
        expected = np.add.accumulate(self._terms_down, out=self._sums)
        last = self._last[:num_columns]
        return best_column(expected, self._first, last, self._ms[:num_columns])


def best_column(
    expected: NDArray[np.float32],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    ms: NDArray[np.float64],
) -> tuple[int, int]:
    """Drafts and column of the most expected tokens per ms; the first of equals in both.

    expected: (num_drafts + 1,) fp32, never falling; first, last: drafts at the ends of each column.
    """
    ends = expected.take(last)
    column = int((ends / ms).argmax())
    num_drafts = last.item(column)
    # A rate that changes nothing in fp32, zero for one, is not worth a draft.
    if num_drafts > first.item(column) and expected.item(num_drafts - 1) == ends.item(column):
        num_drafts = max(first.item(column), int(expected.searchsorted(ends[column])))
    return num_drafts, column
