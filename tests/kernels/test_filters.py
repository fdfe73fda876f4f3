"""Min-p, top-p and top-k against the definition, and what rows without a filter cost."""

import math
import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decodegrid.kernels.filters import filter_logits, filter_logits_op

FORMS = [filter_logits, filter_logits_op]
NEVER = float("-inf")


def brute(row, temperature, top_p, top_k, min_p):
    """Scaled row with -inf for removed tokens; plain loops over the sorted tokens."""
    if not temperature > 0:
        return row.copy()
    scaled = row / row.dtype.type(max(temperature, 1e-5))
    distance = scaled.astype(np.float64) - scaled.max()
    weight, lowest = np.exp(distance), math.log(min_p) if min_p > 0 else NEVER
    order = sorted(range(len(row)), key=lambda i: (-scaled[i], i))
    order = [token for token in order if distance[token] >= lowest]
    out, before = np.full_like(scaled, NEVER), 0.0
    whole = weight[order].sum()
    for rank, token in enumerate(order):
        if rank and ((top_p < 1 and before > top_p * whole) or rank == top_k):
            break
        out[token] = scaled[token]
        before += weight[token]
    return out


def inputs(settings, vocab, dtype, seed, step=0.0):
    """Logits (rounded to multiples of `step`, which makes ties) and the four parameters."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(settings), vocab, generator=generator, dtype=torch.float64)
    if step:
        logits = (logits / step).round() * step
    columns = zip(*settings, strict=True)
    temperature, top_p, top_k, min_p = (torch.tensor(column) for column in columns)
    return logits.to(dtype), temperature.to(dtype), top_p.to(dtype), top_k, min_p.to(dtype)


SETTINGS = [
    (temperature, top_p, top_k, min_p)
    for temperature in (0.0, 0.6, 1.0, 1.7)
    for top_p in (1e-6, 0.3, 0.5, 0.9, 0.999, 1.0)
    for top_k in (-1, 1, 2, 7, 1000)
    for min_p in (0.0, 0.03, 0.6)
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [1, 2, 37, 300])
def test_against_the_definition(vocab, step, dtype, form):
    logits, *asked = inputs(SETTINGS, vocab, dtype, vocab, step)
    before = logits.clone()
    got = form(logits, *asked)
    assert torch.equal(logits, before) and got.dtype == dtype
    removed = 0
    for row in range(len(SETTINGS)):
        facts = (part[row].item() for part in asked)
        want = brute(logits[row].numpy(), *facts)
        assert np.array_equal(got[row].numpy(), want), SETTINGS[row]
        removed += int((want == NEVER).sum())
    assert removed > 0 or vocab == 1


@pytest.mark.parametrize("form", FORMS)
def test_ties_go_to_the_lower_id(form):
    """Eight equal tokens: each holds an eighth exactly, so the borders are exact."""
    cases = [(1.0, 0.5, -1, 5), (1.0, 0.49, -1, 4), (1.0, 0.125, -1, 2), (1.0, 1e-9, -1, 1)]
    cases += [(1.0, 1.0, 3, 3), (1.0, 0.5, 3, 3), (1.0, 0.25, 7, 3), (0.0, 0.5, 3, 8)]
    for temperature, top_p, top_k, kept in cases:
        got = form(
            torch.zeros(1, 8),
            torch.tensor([temperature]),
            torch.tensor([top_p]),
            torch.tensor([top_k]),
            torch.zeros(1),
        )
        assert got[0].tolist() == [0.0] * kept + [NEVER] * (8 - kept)


@pytest.mark.parametrize("form", FORMS)
def test_published_order_top_p_before_top_k(form):
    """top_p looks at the whole distribution, not at what top_k leaves: half of it lies in tokens
    that top_k removes, so top_p removes nothing more."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0]]).log()
    got = form(logits, torch.ones(1), torch.tensor([0.6]), torch.tensor([3]), torch.zeros(1))
    assert got.isfinite().tolist() == [[True, True, True, False, False]]


@pytest.mark.parametrize("form", FORMS)
def test_min_p_comes_before_top_p(form):
    """The mass that top_p counts is what min_p leaves: of weights 4, 2, 2, 1, 1 it leaves 4, 2, 2,
    and of these half is reached with the first token."""
    logits = torch.tensor([[4.0, 2.0, 2.0, 1.0, 1.0]]).log()
    cases = [(0.3, 1.0, 3), (0.3, 0.49, 1), (0.0, 0.49, 2), (0.3, 0.51, 2), (1.0, 1.0, 1)]
    cases += [(0.49, 1.0, 3), (0.51, 1.0, 1), (7.0, 1.0, 1)]
    for min_p, top_p, kept in cases:
        asked = torch.tensor([top_p]), torch.tensor([-1]), torch.tensor([min_p])
        got = form(logits, torch.ones(1), *asked)
        assert got.isfinite().tolist() == [[True] * kept + [False] * (5 - kept)], (min_p, top_p)


@pytest.mark.parametrize("form", FORMS)
def test_min_p_follows_the_temperature(form):
    """Weights 4, 1 at temperature 1 are 16, 1 at 1/2 and 2, 1 at 2; a greedy row keeps all."""
    logits, off = torch.tensor([[4.0, 1.0]]).log().expand(4, 2), torch.full((4,), -1)
    heat = torch.tensor([0.5, 1.0, 2.0, 0.0])
    got = form(logits, heat, torch.ones(4), off, torch.full((4,), 0.2))
    assert got.isfinite().sum(1).tolist() == [1, 2, 2, 2]
    got = form(logits, heat, torch.ones(4), off, torch.full((4,), 0.4))
    assert got.isfinite().sum(1).tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("form", FORMS)
def test_min_p_of_zero_changes_no_bit(form):
    """Not of the rows that another filter cuts either."""
    logits, *asked = inputs([s for s in SETTINGS if s[3] == 0], 300, torch.float32, 5)
    want = form(logits, *asked)
    assert torch.equal(form(logits, *asked[:3], torch.full_like(asked[3], -1.0)), want)
    nearly = torch.full_like(asked[3], 1e-30)
    assert torch.equal(form(logits, *asked[:3], nearly), want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_give_no_nan(form, dtype):
    """Masked tokens, huge logits and a temperature at and below its floor."""
    logits = torch.tensor(
        [[NEVER, 1.0, NEVER, 0.5], [NEVER] * 4, [3e4, -3e4, 0.0, 3e4], [1.0, 1.0, 1.0, 0.0]],
        dtype=dtype,
    )
    half, two = torch.full((4,), 0.5, dtype=dtype), torch.full((4,), 2)
    tenth = torch.full((4,), 0.1, dtype=dtype)
    for temperature in (1e-9, 1e-5, 1.0, 100.0):
        got = form(logits, torch.full((4,), temperature, dtype=dtype), half, two, tenth)
        assert not got.isnan().any()
        assert got[0].argmax() == 1 and got[2].isfinite().tolist() == [True, False, False, True]
        assert got[1].tolist() == [NEVER] * 4
    tiny = form(logits, torch.full((4,), 1e-9, dtype=dtype), half, two, tenth)
    floor = form(logits, torch.full((4,), 1e-5, dtype=dtype), half, two, tenth)
    assert torch.equal(tiny, floor)


@pytest.mark.parametrize("form", FORMS)
def test_rubbish_parameters_keep_at_least_one_token(form):
    """What a slot without a request may hold."""
    logits = torch.arange(6.0).expand(7, 6)
    heat = torch.tensor([1.0, 1.0, 1.0, math.nan, -2.0, 1.0, 1.0])
    top_p = torch.tensor([-3.0, math.nan, 0.0, 0.5, 0.5, 1.0, 1.0])
    top_k = torch.tensor([-1, 2**61, -(2**61), 2, 2, -1, -1])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.5, math.nan, math.inf])
    got = form(logits, heat, top_p, top_k, min_p)
    assert got.isfinite().sum(1).tolist() == [1, 6, 1, 6, 6, 6, 1]
    assert got[0, 5] == 5.0


class Spy(TorchDispatchMode):
    """Shapes of what is sorted or exponentiated."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.sort, torch.ops.aten.exp):
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_rows_without_a_filter_cost_a_division():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    heat = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0])
    with Spy() as spy:
        plain = filter_logits(
            logits, heat, torch.tensor([0.5, 1.0, 1.0, 1.0, 1.0]),
            torch.tensor([3, -1, 40, 1, 99]), torch.tensor([0.5, 0.0, -1.0, 0.5, 0.0]),
        )
    assert spy.rows == []
    assert torch.equal(plain, logits / torch.tensor([1.0, 1.0, 0.5, 1.0, 2.0]).unsqueeze(1))
    with Spy() as spy:
        filter_logits(
            logits, heat, torch.tensor([0.5, 0.9, 1.0, 1.0, 1.0]),
            torch.tensor([3, -1, 5, 1, -1]), torch.tensor([0.5, 0.0, 0.0, 0.0, 0.1]),
        )
    assert spy.rows == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 2, 48])
@pytest.mark.parametrize("dense", [True, False])
def test_opcheck(rows, dtype, dense):
    settings = [random.Random(rows).choice(SETTINGS) for _ in range(rows)]
    args = inputs(settings or [(1.0, 0.5, 2, 0.1)], 24, dtype, rows)
    args = tuple(part[:rows] for part in args)
    if not dense:
        args = tuple(torch.stack((part, part), -1)[..., 1] for part in args)
    torch.library.opcheck(
        filter_logits_op,
        args,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
