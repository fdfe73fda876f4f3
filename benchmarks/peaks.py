"""What this machine can do at best right now: bytes a second and fp32 operations a second.

Owns the two measurements that the roofline divides by. They run in the same process, on the same
threads and in the same minutes as the steps, so a loaded machine lowers both sides.
"""

from dataclasses import dataclass
from time import perf_counter

import torch

from benchmarks.timing import time_call

BUFFER_BYTES = 256 * 2**20
"""Far above the last cache level of a desktop or a small server."""
MATRIX_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Peaks:
    """Best of the repeats."""

    read_bytes_per_s: float
    """Sum over a buffer that is read once."""
    copy_bytes_per_s: float
    """Copy of it, bytes read and bytes written together."""
    flops_per_s: float
    """Square fp32 matrix product, a multiply-add counted as 2."""

    @property
    def bytes_per_s(self) -> float:
        """The better of reading and copying."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)


def measure_peaks(repeats: int) -> Peaks:
    """Takes about 0.2 s a repeat; holds two buffers of BUFFER_BYTES meanwhile."""
    source = torch.ones(BUFFER_BYTES // 4)
    target = torch.zeros_like(source)
    left = torch.rand(MATRIX_SIZE, MATRIX_SIZE)
    right = torch.rand(MATRIX_SIZE, MATRIX_SIZE)
    product = torch.empty_like(left)
    read, copied, multiplied = [], [], []
    for repeat in range(repeats + 1):
        times = (
            time_call(source.sum),
            time_call(lambda: target.copy_(source)),
            _time_products(left, right, product),
        )
        if repeat > 0:  # the first touches the pages and starts the threads
            read.append(times[0])
            copied.append(times[1])
            multiplied.append(times[2])
    return Peaks(
        BUFFER_BYTES / min(read),
        2 * BUFFER_BYTES / min(copied),
        2 * MATRIX_SIZE**3 / min(multiplied),
    )


def _time_products(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    """Seconds of one product, the better of two in a row."""
    best = float("inf")
    for _ in range(2):
        began = perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, perf_counter() - began)
    return best
