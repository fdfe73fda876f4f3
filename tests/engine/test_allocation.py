"""Memory that is not there is refused with the settings that ask for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine.build import RunnerOptions, make_runner, named_allocation
from decodegrid.graphs.state import Capacity


def test_a_pool_beyond_the_address_space(make_model: Callable[..., Any]) -> None:
    options = RunnerOptions(
        capacity=Capacity(3, 2**42, 8, 64, 2),
        grid=build_grid(2, 2, (2,)),
        prefill_chunk_sizes=(8,),
        dtype=torch.float64,
        device="cpu",
        compile_options=CompileOptions("none", None, 1),
        draft_temperatures=(1.0, 1.0),
        show_progress=False,
    )
    model = make_model(hc_sinkhorn_iters=2)
    with pytest.raises(ValueError) as caught:
        make_runner(model, options, PhaseClock())
    text = str(caught.value)
    assert "4398046511104 blocks (cache.num_blocks)" in text
    assert "scheduler.max_num_reqs = 2: " in text
    assert "can't allocate memory" in text and "\n" not in text


def test_a_device_without_memory_and_other_errors() -> None:
    capacity = Capacity(5, 9, 8, 64, 2)
    wanted = r"of 9 blocks .* = 4: CUDA out of memory$"
    with pytest.raises(ValueError, match=wanted), named_allocation(capacity):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore lines")
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), named_allocation(capacity):
        raise RuntimeError("shapes differ")
