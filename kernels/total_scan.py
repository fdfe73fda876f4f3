"""The verify budget's walk over survival rates, compiled.

Owns the binding of two C functions to arrays of the host. They take the place of a dozen NumPy
calls a step. The sums have to run in order in fp32, because ties are defined by them, and a
compiled loop does that in a quarter of the time. They are no torch ops: they never touch a device,
and a call through ctypes costs a fifth of one through torch's dispatcher. What the arrays mean and
which answer is right: decodegrid.capture.total_scan.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Memory(ctypes.Structure):
    """As `Memory` in csrc/total_scan.cpp."""

    _fields_ = (
        ("terms", ctypes.c_void_p), ("sums", ctypes.c_void_p), ("first", ctypes.c_void_p),
        ("last", ctypes.c_void_p), ("ms", ctypes.c_void_p), ("num_drafts", ctypes.c_int64),
        ("num_columns", ctypes.c_int64), ("width", ctypes.c_int64),
    )


class NativeScan:
    """The two functions bound to the arrays of one number of rows.

    Args:
        library: the native kernels (decodegrid.kernels.native), loaded.
        terms: (num_drafts + 1,) fp32; sums: the same, written.
        first, last: (num_columns,) int64; ms: (num_columns,) fp64.
        width: drafts of a row.

    Raises:
        ValueError: arrays of other types or sizes, not contiguous, or columns that do not fit.
    """

    __slots__ = ("_arrays", "_best", "_in_order", "_memory", "_place")

    def __init__(
        self,
        library: ctypes.CDLL,
        terms: NDArray[np.float32],
        sums: NDArray[np.float32],
        first: NDArray[np.int64],
        last: NDArray[np.int64],
        ms: NDArray[np.float64],
        width: int,
    ) -> None:
        arrays: tuple[NDArray[Any], ...] = (terms, sums, first, last, ms)
        self._arrays = arrays  # kept alive
        wanted = (np.float32, np.float32, np.int64, np.int64, np.float64)
        for array, dtype in zip(arrays, wanted, strict=True):
            if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(
                    f"an array of the scan is {array.dtype} {array.shape}; "
                    f"it must be contiguous {np.dtype(dtype)} of one dimension"
                )
        num_drafts = len(terms) - 1
        if len(sums) != num_drafts + 1 or (num_drafts % width if width else num_drafts):
            raise ValueError(
                f"{num_drafts} rates in rows of {width} do not fit {len(sums)} sums"
            )
        if not len(first) == len(last) == len(ms) >= 1:
            raise ValueError(f"columns: {len(first)} first, {len(last)} last, {len(ms)} ms")
        if not (first.min() >= 0 and bool((first <= last).all()) and last.max() <= num_drafts):
            raise ValueError(f"columns {first} to {last} do not fit {num_drafts} drafts")
        places = (array.ctypes.data for array in arrays)
        self._memory = _Memory(*places, num_drafts, len(first), width)
        self._place = ctypes.addressof(self._memory)
        self._in_order = library.decodegrid_rates_in_order
        self._in_order.argtypes, self._in_order.restype = (ctypes.c_void_p,), ctypes.c_bool
        self._best = library.decodegrid_best_total
        self._best.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._best.restype = ctypes.c_int64

    def is_ordered(self) -> bool:
        """Whether the rates of every row never rise; False where one is NaN beside another."""
        found: bool = self._in_order(self._place)
        return found

    def best(self, num_columns: int) -> tuple[int, int]:
        """Drafts and column of the most expected tokens per ms, of the leading `num_columns` (1 to
        all); the first of equals in both. Writes the sums."""
        found: int = self._best(self._place, num_columns)
        return found & 0xFFFFFFFF, found >> 32


def native_scan(library: Path) -> Callable[..., NativeScan]:
    """Makes scans with the kernels' library; the arguments that follow are NativeScan's."""
    loaded = ctypes.CDLL(str(library))
    return lambda *memory: NativeScan(loaded, *memory)
