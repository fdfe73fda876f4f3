"""Projections with weights in their own dtype and in bfloat16: plain, op and native forms."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from decodegrid.kernels.linear import grouped_linear, grouped_linear_op, linear, linear_op
from decodegrid.kernels.moe import routed_experts, routed_experts_op
from decodegrid.kernels.native import install_native_kernels

BUILD = Path(__file__).resolve().parents[2] / "build" / "native"
IMPLEMENTED = ("test_schema", "test_faketensor", "test_autograd_registration")
WIDE = (torch.float32, torch.float64)
# Both sides of a packed step of 16 columns and of a tile of 4 outputs; the shapes of a model.
SIZES = ((1, 1), (3, 15), (4, 16), (5, 17), (10, 31), (24, 64), (33, 200), (192, 256))
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 25, 64)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    install_native_kernels(BUILD)


def floats(*shape: int) -> Tensor:
    """Normal float64 values of a seed that the shape gives."""
    seed = sum(size * 1009**place for place, size in enumerate(shape))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def spread(tensor: Tensor) -> Tensor:
    """The same values, every second element of a wider tensor."""
    wide = tensor.new_full((*tensor.shape, 2), 7.0)
    wide[..., 0] = tensor
    return wide[..., 0]


@pytest.mark.parametrize("form", [linear, linear_op])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("stored", ["same", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS)
def test_linear_against_float64(form, dtype, stored, rows):
    for outputs, columns in SIZES:
        x = floats(rows, columns).to(dtype)
        weight = floats(outputs, columns).to(torch.bfloat16)
        weight = weight if stored == "bfloat16" else weight.to(dtype)
        want = x.double() @ weight.double().t()
        tolerance = 1e-12 if dtype == torch.float64 else 4e-5
        for left, right in ((x, weight), (spread(x), spread(weight)), (x, weight.t().clone().t())):
            got = form(left, right)
            assert got.dtype == dtype and got.shape == (rows, outputs)
            torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("form", [linear, linear_op])
def test_linear_of_bfloat16_rows(form):
    """Both sides narrow: one rounding of a float32 sum."""
    x, weight = floats(5, 64).to(torch.bfloat16), floats(24, 64).to(torch.bfloat16)
    want = x.double() @ weight.double().t()
    got = form(x, weight)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-3)


def test_rows_of_weight_and_padding_around_them_stay_apart():
    """A slice of a larger weight, NaN in every row and column that is not part of it."""
    whole = torch.full((20, 40), torch.nan, dtype=torch.bfloat16)
    whole[4:17, 8:31] = floats(13, 23).to(torch.bfloat16)
    x = torch.full((9, 40), torch.nan)
    x[:, 3:26] = floats(9, 23).float()
    got = linear_op(x[:, 3:26], whole[4:17, 8:31])
    want = floats(9, 23).float().double() @ floats(13, 23).to(torch.bfloat16).double().t()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4e-5)


@pytest.mark.parametrize(("outputs", "columns"), SIZES)
def test_bits_of_a_row_do_not_depend_on_the_others(outputs, columns):
    """Every row count, the two ways of widening and all chunk borders included."""
    x, weight = floats(300, columns).float(), floats(outputs, columns).to(torch.bfloat16)
    alone = torch.cat([linear_op(x[row : row + 1], weight) for row in range(len(x))])
    for rows in (*range(2, 40), 64, 255, 300):
        assert torch.equal(linear_op(x[:rows], weight), alone[:rows]), rows
        assert torch.equal(linear_op(x[-rows:], weight), alone[-rows:]), rows


def test_special_values_pass_through():
    weight = torch.tensor([[1.0, 0.0], [0.0, -2.0]], dtype=torch.bfloat16)
    x = torch.tensor([[torch.inf, 3.0], [torch.nan, 1.0], [2.0**-140, 2.0**120]])
    got, want = linear_op(x, weight), linear(x, weight.float())
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", [grouped_linear, grouped_linear_op])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("stored", ["same", "bfloat16"])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 30])
def test_grouped_linear_against_float64(form, dtype, stored, rows):
    for outputs, columns in SIZES[1:6]:
        x = floats(rows, 3, columns).to(dtype)
        weight = floats(3, outputs, columns).to(torch.bfloat16)
        weight = weight if stored == "bfloat16" else weight.to(dtype)
        want = torch.einsum("tgk,gnk->tgn", x.double(), weight.double())
        tolerance = 1e-12 if dtype == torch.float64 else 4e-5
        for left, right in ((x, weight), (spread(x), spread(weight))):
            got = form(left, right)
            assert got.dtype == dtype and got.shape == (rows, 3, outputs)
            torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("stored", ["same", "bfloat16"])
@pytest.mark.parametrize("rows", [0, 1, 2, 48])
@pytest.mark.parametrize("dense", [True, False])
def test_opcheck(dtype, stored, rows, dense):
    x, weight = floats(rows, 24).to(dtype), floats(10, 24).to(torch.bfloat16)
    groups, weights = floats(rows, 2, 24).to(dtype), floats(2, 10, 24).to(torch.bfloat16)
    if stored == "same":
        weight, weights = weight.to(dtype), weights.to(dtype)
    if not dense:
        x, weight, groups, weights = spread(x), spread(weight), spread(groups), spread(weights)
    torch.library.opcheck(linear_op, (x, weight), test_utils=IMPLEMENTED)
    torch.library.opcheck(grouped_linear_op, (groups, weights), test_utils=IMPLEMENTED)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError, match=r"linear: x \[2, 3\] and weight \[4, 5\]"):
        linear_op(torch.zeros(2, 3), torch.zeros(4, 5, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"grouped_linear: x \[2, 3, 4\] and weight \[2, 5, 4\]"):
        grouped_linear_op(torch.zeros(2, 3, 4), torch.zeros(2, 5, 4, dtype=torch.bfloat16))


def expert_inputs(tokens: int, dim: int, inner: int) -> tuple[Tensor, ...]:
    """x, ids (5 visits no expert), routing weights, and bfloat16 w13 and w2 of five experts."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(tokens)])
    w13, w2 = floats(5, dim, 2 * inner).to(torch.bfloat16), floats(5, inner, dim).to(torch.bfloat16)
    return floats(tokens, dim).float(), ids, floats(tokens, 2).abs().float(), w13, w2


def sideways(weight: Tensor) -> Tensor:
    """The same values with each output's weights side by side, as steps store them."""
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 200])
@pytest.mark.parametrize(("dim", "inner"), [(24, 40), (10, 3), (64, 32)])
def test_narrow_experts_equal_the_same_values_wide(tokens, dim, inner):
    x, ids, weights, w13, w2 = expert_inputs(tokens, dim, inner)
    exact = [t.double() for t in (x, weights, w13, w2)]
    want = routed_experts(exact[0], ids, exact[1], exact[2], exact[3], 1.5)
    scale = float(want.abs().max())
    # torch's grouped product wants rows of whole 16 bytes.
    forms = (routed_experts_op,) if dim % 4 else (routed_experts, routed_experts_op)
    for first, second in ((w13, w2), (sideways(w13), sideways(w2)), (w13.float(), w2.float())):
        for form in forms:
            got = form(x, ids, weights, first, second, 1.5)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6 * scale)
    args = (exact[0], ids, exact[1], w13, w2, 1.5)
    torch.testing.assert_close(routed_experts_op(*args), want, rtol=0, atol=1e-12 * scale)
    narrow = (x, ids, weights, sideways(w13), sideways(w2), 1.5)
    torch.library.opcheck(routed_experts_op, narrow, test_utils=IMPLEMENTED)


def test_bits_of_a_token_do_not_depend_on_the_batch():
    x, ids, weights, w13, w2 = expert_inputs(200, 24, 40)
    first, second = sideways(w13), sideways(w2)
    alone = torch.cat(
        [
            routed_experts_op(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], first, second, 1.5)
            for i in range(200)
        ]
    )
    together = routed_experts_op(x, ids, weights, first, second, 1.5)
    assert torch.equal(together, alone)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    shuffled = routed_experts_op(x[order], ids[order], weights[order], first, second, 1.5)
    assert torch.equal(shuffled, alone[order])
