"""Coupled noise and filters on the CPU route."""

import pytest
import torch

from decodegrid.kernels.filters import filter_logits
from decodegrid.kernels.sampling import gumbel_noise, gumbel_noise_op, uniform_bits

pytestmark = pytest.mark.kernels

SEEDS = [0, 1, 2**31 - 1, 2**32, 2**63 - 1, 123456789012345678]
POSITIONS = [0, 1, 7, 2**21 - 1, 2**28 - 1, 2**31 + 5]


@pytest.fixture
def rows():
    seeds = torch.tensor([s for s in SEEDS for _ in POSITIONS])
    return seeds, torch.tensor(POSITIONS * len(SEEDS))


@pytest.mark.parametrize("vocab", [1, 1000, 2048])
def test_bits(tile, rows, vocab):
    bits = torch.full((len(rows[0]), vocab), -3, dtype=torch.int32)
    tile("sampling.uniform_bits", vocab=vocab)(*rows, bits)
    assert torch.equal(bits.to(torch.int64) & 0xFFFFFFFF, uniform_bits(*rows, vocab))


def test_noise_is_the_native_kernels_bit_for_bit(tile, rows, native_kernels):
    heat = torch.ones(len(rows[0]))
    heat[::5] = 0.0
    noise = torch.full((len(rows[0]), 1500), torch.nan)
    tile("sampling.gumbel_noise", vocab=1500)(*rows, heat, noise)
    assert torch.equal(noise, gumbel_noise_op(*rows, heat, 1500))
    reference = gumbel_noise(*rows, heat, 1500)
    assert torch.allclose(noise, reference, rtol=2e-6, atol=2e-6)
    assert bool((noise[::5] == 0).all()) and bool((noise[1] != 0).all())


@pytest.mark.parametrize("rows", [0, 1])
def test_noise_of_few_rows(tile, rows):
    seed, place = torch.arange(rows), torch.arange(rows)
    noise = torch.full((rows, 700), torch.nan)
    tile("sampling.gumbel_noise", vocab=700)(seed, place, torch.ones(rows), noise)
    assert torch.allclose(noise, gumbel_noise(seed, place, torch.ones(rows), 700), atol=2e-6)


FILTERS = [
    (1.0, -1, 0.0), (0.9, -1, 0.0), (0.5, 7, 0.0), (1.0, 1, 0.0), (1.0, 40, 0.0), (0.0, -1, 0.0),
    (1.0, -1, 0.05), (0.95, 50, 0.01), (0.999, -1, 1.0), (1.5, 5000, -1.0),
]


@pytest.mark.parametrize("vocab", [5, 1000, 2048])
@pytest.mark.parametrize("kind", ["random", "ties"])
def test_filters(tile, vocab, kind):
    """All filters at two temperatures; with ties, the token id decides at the cut."""
    make = torch.Generator().manual_seed(vocab)
    count = len(FILTERS) * 3
    logits = torch.randn(count, vocab, generator=make) * 3
    if kind == "ties":
        logits = logits.round()
    logits[:, 1] = -0.0
    logits[0, 3:] = -torch.inf
    heat = torch.tensor([0.7, 1.3, 0.0]).repeat(len(FILTERS))
    parts = zip(*FILTERS, strict=True)
    top_p, top_k, min_p = (torch.tensor(part).repeat_interleave(3) for part in parts)
    out = torch.full_like(logits, torch.nan)
    tile("filters.filter_logits", vocab=vocab)(logits, heat, top_p, top_k, min_p, out)
    expected = filter_logits(logits, heat, top_p, top_k, min_p)
    assert torch.equal(out.isinf(), expected.isinf())
    assert torch.equal(out, expected)


def test_filters_where_the_cut_is_the_lowest_float(tile):
    """Tokens masked with the lowest finite number are ties too, at the end of all keys."""
    logits = torch.full((3, 1000), torch.finfo(torch.float32).min)
    logits[:, 500:503] = torch.tensor([1.0, 3.0, 2.0])
    logits[2, 10:400] = -torch.inf
    ones = torch.ones(3)
    asked = (ones, torch.tensor([1.0, 0.9999999, 1.0]), torch.tensor([9, -1, 9]), ones * 0)
    out = torch.full_like(logits, torch.nan)
    tile("filters.filter_logits", vocab=1000)(logits, *asked, out)
    assert torch.equal(out, filter_logits(logits, *asked))
    assert out[0].isfinite().nonzero().flatten().tolist() == [*range(6), 500, 501, 502]
    assert out[2].isfinite().nonzero().flatten().tolist() == [*range(6), 500, 501, 502]


def test_filters_of_no_row(tile):
    empty = torch.empty(0)
    tile("filters.filter_logits", vocab=5)(
        torch.empty(0, 5), empty, empty, empty.to(torch.int64), empty, torch.empty(0, 5)
    )
