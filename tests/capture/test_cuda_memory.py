"""Memory of captured graphs on a card (case C24). Needs CUDA: `pytest -m gpu`."""

from collections.abc import Sequence

import pytest
import torch

from decodegrid.capture.cuda import CudaBackend, CudaGraph

SIZES = (64, 512, 2048)
"""Rows of a step; its temporaries grow with them."""


def captured(sizes: Sequence[int], width: int = 4096) -> tuple[int, list[CudaGraph]]:
    """Bytes of the card that captures in this order took, and the graphs that hold them."""
    device = torch.device("cuda")
    weight = torch.randn(width, width, device=device)
    inputs = {size: torch.randn(size, width, device=device) for size in sizes}
    outputs = {size: torch.empty(size, width, device=device) for size in sizes}

    def step(size: int) -> None:
        first = inputs[size] @ weight
        outputs[size].copy_(torch.relu(first) @ weight)

    for size in sizes:  # what libraries allocate once, outside of the pool
        step(size)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    backend = CudaBackend(device)
    before = torch.cuda.memory_reserved()
    graphs = [backend.capture(size, lambda size=size: step(size)) for size in sizes]
    torch.cuda.empty_cache()  # what the warm-ups took from the ordinary pool
    return torch.cuda.memory_reserved() - before, graphs


@pytest.mark.gpu
def test_largest_first_needs_no_more_than_the_largest() -> None:
    alone, held = captured((max(SIZES),))
    del held
    torch.cuda.empty_cache()
    down, held = captured(sorted(SIZES, reverse=True))
    assert down == alone > 0
    for graph in held:
        graph.replay()
    torch.cuda.synchronize()
    del held
    torch.cuda.empty_cache()
    up, _ = captured(sorted(SIZES))
    assert up >= down
