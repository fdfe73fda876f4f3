"""Published vectors of the counter-based random numbers."""

import pytest

from decodegrid.kernels.sampling_reference import DrawCase, splitmix_hash, splitmix_uniform


def test_vectors() -> None:
    assert splitmix_hash(0) == 0.8833108082136426
    assert splitmix_uniform(1234, 7, DrawCase.ORDINARY) == 0.35423550928347436
    assert splitmix_uniform(1234, 7, DrawCase.RESIDUAL) == 0.2336706822575918
    assert splitmix_uniform(1234, 7, DrawCase.ACCEPTANCE) == 0.15946601078533218
    assert splitmix_uniform(1234, 7, 2) == splitmix_uniform(1234, 7, DrawCase.ACCEPTANCE)


def test_seed_wraps_at_64_bits() -> None:
    assert splitmix_uniform(2**64 + 5, 3, 0) == splitmix_uniform(5, 3, 0)
    assert splitmix_uniform(-1, 3, 2) == splitmix_uniform(2**64 - 1, 3, 2)


def test_uniform_over_positions() -> None:
    draws = [splitmix_uniform(9, position, case) for position in range(2000) for case in range(3)]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    assert len(set(draws)) == len(draws)
    counts = [sum(int(draw * 10) == cell for draw in draws) for cell in range(10)]
    # 600 expected in each; 5 standard deviations are 116.
    assert all(484 < count < 716 for count in counts)


def test_unknown_case() -> None:
    with pytest.raises(ValueError, match="3"):
        splitmix_uniform(1, 1, 3)
