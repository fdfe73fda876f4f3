"""What a device can do at best right now: bytes read a second and operations a second.

Owns the two measurements that a roofline divides by. They run in the process, on the threads and in
the minutes of the steps they are compared with, so that a loaded machine lowers both sides.
"""

from collections.abc import Callable
from time import perf_counter

import torch

from decodegrid.capture.profile_document import Peaks

BUFFER_BYTES = 256 * 2**20
"""Far above the last cache level of a desktop or a small server."""
MATRIX_SIZE = 1024
REPEATS = 4


def measure_peaks(device: torch.device, dtype: torch.dtype = torch.float32) -> Peaks:
    """The best of a few repeats; takes under a second and holds BUFFER_BYTES meanwhile.

    Args:
        dtype: of the square matrix product whose multiply-adds count as 2 operations.
    """
    source = torch.ones(BUFFER_BYTES // 4, device=device)
    left = torch.rand(MATRIX_SIZE, MATRIX_SIZE, device=device).to(dtype)
    right = torch.rand(MATRIX_SIZE, MATRIX_SIZE, device=device).to(dtype)
    product = torch.empty_like(left)
    read = _best_seconds(source.sum, device)
    multiplied = _best_seconds(lambda: torch.mm(left, right, out=product), device)
    return Peaks(
        read_bytes_per_s=BUFFER_BYTES / read,
        flops_per_s=2 * MATRIX_SIZE**3 / multiplied,
        num_threads=torch.get_num_threads(),
    )


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    call()  # touches the pages and starts the threads
    times = []
    for _ in range(REPEATS):
        _wait(device)
        began = perf_counter()
        call()
        _wait(device)
        times.append(perf_counter() - began)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
