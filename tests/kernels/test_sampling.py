"""The choice of a token: noise that is a pure function, and the distribution that it samples."""

import math
import random

import pytest
import torch

from decodegrid.kernels.sampling import choose_tokens, gumbel_noise, gumbel_noise_op, uniform_bits

EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1]


def python_mix(x):
    """The 32-bit mixer in plain integers."""
    mask = 2**32 - 1
    assert 0 <= x <= mask
    x ^= x >> 16
    x = (x * 0x7FEB352D) & mask
    x ^= x >> 15
    x = (x * 0x2C1B3C6D) & mask
    x ^= x >> 12
    x = (x * 0x297A2D39) & mask
    return x ^ (x >> 15)


def python_bits(seed, position, token):
    mask = 2**32 - 1
    key = python_mix(python_mix(seed & mask) ^ (seed >> 32))
    key = python_mix(key ^ ((position * 0x1B873593) & mask))
    return python_mix(python_mix(key ^ ((token * 0x3C6EF35F) & mask)) ^ token)


@pytest.mark.parametrize("seed", EXTREMES)
def test_bits_at_the_ends_of_the_range(seed):
    """Equal to unbounded integers, so nothing overflowed; never negative, below 2**32."""
    positions = [0, 1, 4095, 2**20, 2**31 - 1]
    bits = uniform_bits(torch.full((5,), seed), torch.tensor(positions), 300)
    assert int(bits.min()) >= 0 and int(bits.max()) < 2**32
    draw = random.Random(seed)
    for row, position in enumerate(positions):
        for token in [0, 1, 299, *(draw.randrange(300) for _ in range(20))]:
            assert int(bits[row, token]) == python_bits(seed, position, token)


def test_large_token_ids():
    bits = uniform_bits(torch.tensor([2**63 - 1]), torch.tensor([2**31 - 1]), 150_000)[0]
    for token in (129_279, 149_999):
        assert int(bits[token]) == python_bits(2**63 - 1, 2**31 - 1, token)
    assert bits.unique().numel() > 149_900


FORMS = [gumbel_noise, gumbel_noise_op]


@pytest.mark.parametrize("noise_of", FORMS)
def test_noise_depends_on_seed_position_and_id_alone(noise_of):
    """Equal bits in any row order, for any number of rows, any vocabulary that has the id and any
    temperature above 0."""
    seeds = torch.tensor([5, 5, 9, 2**40, 5, 9])
    positions = torch.tensor([0, 1, 1, 77, 300, 4095])
    ones = torch.ones(6)
    whole = noise_of(seeds, positions, ones, 200)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.equal(noise_of(seeds[order], positions[order], 0.3 * ones, 200), whole[order])
    for row in range(6):
        one = slice(row, row + 1)
        assert torch.equal(noise_of(seeds[one], positions[one], ones[one], 200)[0], whole[row])
    assert torch.equal(noise_of(seeds, positions, ones, 77), whole[:, :77])
    assert len({tuple(row.tolist()) for row in whole}) == 6


@pytest.mark.parametrize("noise_of", FORMS)
def test_noise_is_finite_and_gumbel(noise_of):
    """Finite everywhere; mean is Euler's constant, variance pi squared over 6; none when greedy."""
    noise = noise_of(torch.full((400,), 3), torch.arange(400), torch.ones(400), 1000)
    assert bool(noise.isfinite().all())
    assert abs(float(noise.mean()) - 0.5772156649) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    greedy = noise_of(torch.full((4,), 3), torch.arange(4), torch.zeros(4), 1000)
    assert not greedy.any()


def test_choices_do_not_depend_on_the_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 50, generator=generator)
    temperature = torch.tensor([0.0, 0.7, 1.0] * 4)
    seed, position = torch.arange(12) % 5, torch.arange(12) + 40
    whole = choose_tokens(logits, temperature, seed, position)
    for rows in (torch.tensor([7]), torch.tensor([11, 0, 5, 2]), torch.arange(12).flip(0)):
        part = choose_tokens(logits[rows], temperature[rows], seed[rows], position[rows])
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_takes_the_lowest_of_equals(dtype):
    logits = torch.zeros(4, 64, dtype=dtype)
    logits[1, 40:] = 2.0
    logits[2, 63] = 1.0
    logits[3] = float("-inf")
    zero = torch.zeros(4, dtype=dtype)
    chosen = choose_tokens(logits, zero, torch.arange(4), torch.arange(4))
    assert chosen.tolist() == [0, 40, 63, 0]


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("varied", ["position", "seed"])
def test_goodness_of_fit(temperature, varied):
    """20000 draws over positions of one seed, or over seeds at one position.

    With 7 degrees of freedom chi-square exceeds 24.3 once in 1000; draws are the same every time.
    """
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, 0.2], dtype=torch.float64)
    count = 20_000
    moving, still = torch.arange(count), torch.full((count,), 11)
    seed, position = (still, moving) if varied == "position" else (moving, still)
    chosen = choose_tokens(
        logits.expand(count, -1),
        torch.full((count,), temperature, dtype=torch.float64),
        seed,
        position,
    )
    counts = chosen.bincount(minlength=8).double()
    expected = (logits / temperature).softmax(0) * count
    assert chi_square(counts, expected) < 24.3
    other = (logits / (temperature + 0.1)).softmax(0) * count
    assert chi_square(counts, other) > 24.3


def test_neighbouring_positions_are_independent():
    """Pairs of draws at positions p and p + 1 follow the product distribution (9 cells)."""
    count = 30_000
    logits = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    chosen = choose_tokens(
        logits.expand(count, -1),
        torch.ones(count, dtype=torch.float64),
        torch.full((count,), 4),
        torch.arange(count),
    )
    pairs = (chosen[0::2] * 3 + chosen[1::2]).bincount(minlength=9).double()
    probability = logits.softmax(0)
    expected = torch.outer(probability, probability).flatten() * (count // 2)
    assert chi_square(pairs, expected) < 26.1  # 8 degrees of freedom, once in 1000
