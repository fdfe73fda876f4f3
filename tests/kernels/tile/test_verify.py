"""Verify lengths and acceptance on the CPU route."""

import pytest
import torch

from decodegrid.graphs.regions_verify import verify_regions
from decodegrid.graphs.state import Capacity
from decodegrid.kernels.verify import split_verify_lengths, survival

pytestmark = pytest.mark.kernels

DRAFTS = 5


def rates(kind, rows, seed):
    make = torch.Generator().manual_seed(seed)
    if kind == "ties":
        return torch.full((rows, DRAFTS), 0.5)
    if kind == "zeros":
        return torch.zeros(rows, DRAFTS)
    confidence = torch.rand(rows, DRAFTS, generator=make)
    if kind == "coarse":
        confidence = (confidence * 2).round() / 2
    return survival(confidence)


@pytest.mark.parametrize("kind", ["random", "coarse", "ties", "zeros"])
@pytest.mark.parametrize("rows", [1, 2, 7, 32])
def test_split(tile, kind, rows):
    """Every total from none to more than fits; limits and dead rows at random."""
    make = torch.Generator().manual_seed(rows)
    limits = torch.randint(0, DRAFTS + 1, (rows,), generator=make)
    live = torch.rand(rows, generator=make) < 0.8
    value = rates(kind, rows, rows)
    kernel = tile("verify.split_lengths", num_drafts=DRAFTS, max_rows=32)
    for total in range(0, rows * (DRAFTS + 1) + 3, 1 if rows < 8 else 5):
        lens = torch.full((rows,), -5)
        kernel(value, limits, live, torch.tensor([total]), lens)
        expected = split_verify_lengths(value, limits, live, torch.tensor([total]))
        assert lens.tolist() == expected.tolist(), total


def test_split_poison(tile):
    """NaN rates of dead rows and past the limits change nothing."""
    value, live = torch.full((4, DRAFTS), torch.nan), torch.tensor([True, False, True, False])
    value[0, :2] = torch.tensor([0.9, 0.3])
    value[2, :1] = 0.5
    lens = torch.empty(4, dtype=torch.int64)
    limits = torch.tensor([2, 5, 1, 5])
    kernel = tile("verify.split_lengths", num_drafts=DRAFTS, max_rows=32)
    kernel(value, limits, live, torch.tensor([4]), lens)
    assert lens.tolist() == [2, 0, 2, 0]


STATE = ("last_token", "seq_len", "history", "drafts", "num_drafts", "stop_token_ids")


@pytest.mark.parametrize("seed", range(6))
def test_accept(tile, tiny_config, seed):
    """Against the region of a decode step: tokens, counts, stops, every slot's next state."""
    make = torch.Generator().manual_seed(seed)

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=make)

    capacity = Capacity(num_slots=7, num_blocks=9, block_size=16, max_model_len=144,
                        num_draft_tokens=DRAFTS)
    slots = torch.tensor([[3], [5, 0, 1], [0, 0], [6, 5, 4, 3, 2, 1], [2, 0], [1, 2, 3]][seed])
    rows = len(slots)
    lens = (draw(DRAFTS + 1, rows) + 1) * (slots > 0)
    starts = lens.cumsum(0) - lens
    chosen = draw(3, max(int(lens.sum()), 1))
    state = dict(
        last_token=draw(9, 7), seq_len=draw(90, 7) + 1, history=draw(9, 7, 3),
        drafts=draw(3, 7, DRAFTS), num_drafts=draw(6, 7), stop_token_ids=draw(5, 7, 8) - 1,
    )
    results = {}
    for name in ("region", "kernel"):
        own = {key: value.clone() for key, value in state.items()}
        outs = (
            torch.full((rows, DRAFTS + 1), -9), torch.full((rows,), -9),
            torch.ones(rows, dtype=torch.bool),
        )
        call = (
            verify_regions(tiny_config, capacity)["accept"].function
            if name == "region"
            else tile("verify.accept", num_drafts=DRAFTS, stop_ids=8)
        )
        if name == "region":
            call(chosen, slots, lens, starts, *own.values(), *outs)
        else:
            call(chosen, slots, lens, starts, *own.values(), *outs)
        results[name] = (*own.values(), *outs)
    for name, expected, found in zip(
        (*STATE, "token_ids", "num_emitted", "stopped"), results["region"], results["kernel"],
        strict=True,
    ):
        assert torch.equal(found, expected), name
