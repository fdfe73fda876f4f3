"""The most probable tokens against a sort in plain Python: order, ties, rows that want none."""

import math

import pytest
import torch

from decodegrid.kernels.top_logits import top_logits, top_logits_op

FORMS = [top_logits, top_logits_op]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [0.0, 1.0])
@pytest.mark.parametrize("vocab, count", [(1, 3), (7, 20), (96, 20), (96, 1), (96, 96)])
def test_against_a_sort(form, dtype, step, vocab, count, native_kernels):
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(30, vocab, generator=generator, dtype=torch.float64)
    logits = ((logits / step).round() * step if step else logits).to(dtype)
    logits[::7, ::5] = -math.inf
    wanted = torch.arange(30) % 3 > 0
    before = logits.clone()
    values, ids = form(logits, wanted, count)
    assert torch.equal(logits, before)
    assert values.dtype == dtype and values.shape == ids.shape == (30, count)
    for row in range(30):
        order = sorted(range(vocab), key=lambda i: (-float(logits[row, i]), i))[:count]
        if not wanted[row]:
            order = []
        rest = count - len(order)
        assert ids[row].tolist() == order + [-1] * rest
        assert values[row].tolist() == logits[row, order].tolist() + [-math.inf] * rest


def test_rows_of_nan_stay_inside_the_vocabulary(native_kernels):
    """What a pad may hold."""
    logits = torch.full((2, 40), math.nan)
    logits[1, 3] = 5.0
    for form in FORMS:
        _, ids = form(logits, torch.ones(2, dtype=torch.bool), 20)
        assert bool(((ids >= 0) & (ids < 40)).all())


@pytest.mark.parametrize("rows", [0, 1, 2, 48])
@pytest.mark.parametrize("dense", [True, False])
def test_opcheck(rows, dense):
    logits = torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows))
    wanted = torch.arange(rows) % 2 == 0
    if not dense:
        logits = torch.stack((logits, logits), -1)[..., 1]
        wanted = torch.stack((wanted, wanted), -1)[..., 1]
    torch.library.opcheck(
        top_logits_op,
        (logits, wanted, 20),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
