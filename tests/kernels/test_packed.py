"""Products with weights that stay packed: plain, op and native forms against NumPy in float64."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from decodegrid.kernels import packed
from decodegrid.kernels.packed import (
    packed_experts,
    packed_experts_op,
    packed_grouped_linear,
    packed_grouped_linear_op,
    packed_linear,
    packed_linear_op,
    packed_rows,
    packed_rows_op,
)

IMPLEMENTED = ("test_schema", "test_faketensor", "test_autograd_registration")
ROWS = (0, 1, 2, 3, 7, 25, 64)
# (outputs, inputs): within a tile, whole tiles, and tiles that are cut on either axis.
SIZES = ((1, 1), (5, 17), (32, 32), (33, 64), (70, 96), (130, 200), (256, 1056))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
"""Of the largest result."""


@pytest.fixture(scope="module", autouse=True)
def installed(native_kernels: Path) -> None:
    """Ops have their native forms."""


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Values by the definition: sign, 4 exponent bits with bias 7, 3 mantissa bits, one NaN."""
    found = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        whole = (mantissa + 8 * (exponent > 0)) / 8
        value = whole * 2.0 ** (max(exponent, 1) - 7)
        value = float("nan") if code & 127 == 127 else value
        found.append(-value if code & 128 else value)
    return np.array(found)[codes]


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Values of pairs in a byte, the low half first."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return values[np.stack((codes & 15, codes >> 4), -1)].reshape(*codes.shape[:-1], -1)


def e8m0(codes: np.ndarray) -> np.ndarray:
    return np.where(codes == 255, np.nan, 2.0 ** (codes.astype(float) - 127))


def tiles(codes: Tensor, scales: Tensor) -> np.ndarray:
    """(..., N, K) values of FP8 tiles, scale by scale."""
    values = e4m3(codes.numpy()).copy()
    for row in range(scales.shape[-2]):
        for column in range(scales.shape[-1]):
            tile = values[..., 32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            tile *= e8m0(scales.numpy()[..., row, column])[..., None, None]
    return values


def blocks(codes: Tensor, scales: Tensor) -> np.ndarray:
    """(..., out, in) values of MXFP4."""
    return e2m1(codes.numpy()) * np.repeat(e8m0(scales.numpy()), 32, -1)


def generator(*shape: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(n * 1009**place for place, n in enumerate(shape)))


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(*shape), dtype=torch.float64)


def codes_of(*shape: int, is_e4m3: bool = True) -> Tensor:
    """Random bytes; no NaN among E4M3 ones."""
    drawn = torch.randint(0, 256, shape, generator=generator(*shape), dtype=torch.uint8)
    return drawn.where((drawn & 127 != 127) | (not is_e4m3), torch.tensor(3, dtype=torch.uint8))


def scales_of(*shape: int) -> Tensor:
    """E8M0 bytes of 2^-9 to 2^2: products of about one."""
    return torch.randint(118, 130, shape, generator=generator(*shape), dtype=torch.uint8)


def spread(tensor: Tensor) -> Tensor:
    """The same values, every second element of a wider tensor."""
    wide = tensor.new_full((*tensor.shape, 2), 7)
    wide[..., 0] = tensor
    return wide[..., 0]


def assert_near(got: Tensor, want: np.ndarray, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    scale = float(np.abs(want).max(initial=0.0))
    torch.testing.assert_close(
        got.double(), torch.from_numpy(want), rtol=0, atol=TOLERANCE[dtype] * scale
    )


def linear_inputs(rows: int, outputs: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    scales = scales_of(-(-outputs // 32), -(-columns // 32))
    return floats(rows, columns), codes_of(outputs, columns), scales


def grouped_inputs(rows: int, outputs: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    scales = scales_of(3, -(-outputs // 32), -(-columns // 32))
    return floats(rows, 3, columns), codes_of(3, outputs, columns), scales


@pytest.mark.parametrize("form", [packed_linear, packed_linear_op])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", ROWS)
def test_linear(form: Callable[..., Tensor], dtype: torch.dtype, rows: int) -> None:
    for outputs, columns in SIZES:
        x, codes, scales = linear_inputs(rows, outputs, columns)
        x = x.to(dtype)
        want = x.double().numpy() @ tiles(codes, scales).T
        for args in ((x, codes, scales), (spread(x), spread(codes), spread(scales))):
            got = form(*args)
            assert got.dtype == dtype
            assert_near(got, want, dtype)


@pytest.mark.parametrize("form", [packed_grouped_linear, packed_grouped_linear_op])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 2, 30])
def test_grouped_linear(form: Callable[..., Tensor], dtype: torch.dtype, rows: int) -> None:
    for outputs, columns in SIZES[1:6]:
        x, codes, scales = grouped_inputs(rows, outputs, columns)
        x = x.to(dtype)
        want = np.einsum("tgk,gnk->tgn", x.double().numpy(), tiles(codes, scales))
        for args in ((x, codes, scales), (spread(x), spread(codes), spread(scales))):
            got = form(*args)
            assert got.dtype == dtype
            assert_near(got, want, dtype)


@pytest.mark.parametrize("form", [packed_linear, packed_linear_op])
def test_every_e4m3_byte_under_every_kind_of_scale(form: Callable[..., Tensor]) -> None:
    """One byte pattern in each row, read out by a one; exact, NaN and subnormals included."""
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).view(256, 32)
    for scale in (0, 1, 100, 127, 135, 246, 255):
        scales = torch.full((8, 1), scale, dtype=torch.uint8)
        with np.errstate(over="ignore"):
            want = (e4m3(np.arange(256)) * e8m0(np.array(scale))).astype(np.float32)
        for column in (0, 7, 31):
            x = torch.eye(32)[column : column + 1]
            # The other columns hold the same byte; a NaN times zero is NaN as well.
            got = form(x, codes, scales)[0]
            finite = torch.from_numpy(np.isfinite(want))
            assert torch.equal(got[finite], torch.from_numpy(want)[finite])
            assert not bool(got[~finite].isfinite().any())


@pytest.mark.parametrize("form", [packed_rows, packed_rows_op])
@pytest.mark.parametrize("shape", [(0,), (1,), (5, 3), (2, 1, 4)])
def test_rows(form: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    codes, scales = codes_of(19, 96), scales_of(19, 3)
    index = torch.randint(0, 19, shape, generator=generator(*shape))
    want = (e4m3(codes.numpy()) * np.repeat(e8m0(scales.numpy()), 32, -1))[index.numpy()]
    narrow = torch.full((19, 128), 127, dtype=torch.uint8)
    narrow[:, 16:112] = codes
    for args in ((index, codes, scales), (index, narrow[:, 16:112], scales)):
        got = form(*args)
        assert got.dtype == torch.float32 and got.shape == (*shape, 96)
        assert np.array_equal(got.numpy(), want.astype(np.float32))
    assert np.array_equal(form(spread(index), codes, scales).numpy(), want.astype(np.float32))


def test_rows_outside_of_a_table_are_refused() -> None:
    for row in (-1, 19):
        with pytest.raises(RuntimeError, match=rf"row {row} of a table of 19"):
            packed_rows_op(torch.tensor([row]), codes_of(19, 32), scales_of(19, 1))


ExpertArgs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def expert_inputs(tokens: int, dim: int, inner: int, experts: int = 5) -> ExpertArgs:
    """x, ids (`experts` visits none), routing weights, and the packed matrices."""
    draw = generator(tokens, dim)
    ids = [torch.randperm(experts + 1, generator=draw)[:2] for _ in range(tokens)]
    chosen = torch.stack(ids) if ids else torch.zeros(0, 2, dtype=torch.int64)
    return (
        floats(tokens, dim), chosen, floats(tokens, 2).abs(),
        codes_of(experts, 2 * inner, dim // 2, is_e4m3=False),
        scales_of(experts, 2 * inner, dim // 32),
        codes_of(experts, dim, inner // 2, is_e4m3=False),
        scales_of(experts, dim, inner // 32),
    )


def experts_by_definition(args: ExpertArgs, limit: float) -> np.ndarray:
    """Token by token, in float64."""
    x, ids, weights = (t.numpy() for t in args[:3])
    w13, w2 = blocks(args[3], args[4]), blocks(args[5], args[6])
    out = np.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            if expert < len(w13):
                gate, up = np.split(w13[expert] @ x[token], 2)
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                out[token] += w2[expert] @ (gate / (1 + np.exp(-gate)) * up * weight)
    return out


@pytest.mark.parametrize("form", [packed_experts, packed_experts_op])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 33])
def test_experts(
    form: Callable[..., Tensor],
    dtype: torch.dtype,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fewer pairs than experts and with more, and more experts than are expanded at once."""
    monkeypatch.setattr(packed, "EXPERTS_AT_ONCE", 2)
    for dim, inner in ((32, 32), (64, 96), (160, 32)):
        args = expert_inputs(tokens, dim, inner)
        want = experts_by_definition(args, 1.5)
        x, weights = args[0].to(dtype), args[2].to(dtype)
        dense = (x, args[1], weights, *args[3:])
        for given in (dense, tuple(spread(t) for t in dense)):
            got = form(*given, 1.5)
            assert got.dtype == dtype
            assert_near(got, want, dtype)


@pytest.mark.parametrize("form", [packed_experts, packed_experts_op])
def test_bfloat16_tokens_give_float32_sums(form: Callable[..., Tensor]) -> None:
    """Two roundings on the way: the joined product (by the native form) and the hidden row."""
    args = expert_inputs(7, 64, 32)
    x = args[0].to(torch.bfloat16)
    got = form(x, args[1], args[2].float(), *args[3:], 1.5)
    assert got.dtype == torch.float32
    want = experts_by_definition((x.double(), *args[1:]), 1.5)
    torch.testing.assert_close(
        got.double(), torch.from_numpy(want), rtol=0, atol=0.03 * float(np.abs(want).max())
    )


def test_every_e2m1_byte_and_e8m0_scale() -> None:
    """One expert whose inner values are known: its second matrix is read out exactly."""
    for low in range(0, 256, 32):
        # dim 32 outputs, inner 32: each output holds one byte pattern 16 times.
        codes = torch.arange(low, low + 32, dtype=torch.uint8).view(1, 32, 1).repeat(1, 1, 16)
        for scale in (0, 1, 100, 127, 140, 250, 255):
            w2_scales = torch.full((1, 32, 1), scale, dtype=torch.uint8)
            for inner_index in (0, 1, 16, 31):
                # Gate and up rows of one inner value read x[0] through the code of 1.0.
                w13 = torch.zeros(1, 64, 16, dtype=torch.uint8)
                w13[0, inner_index, 0] = w13[0, 32 + inner_index, 0] = 2
                ones = torch.full((1, 64, 1), 127, dtype=torch.uint8)
                x = torch.zeros(1, 32)
                x[0, 0] = 1.0
                ids, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
                got = packed_experts_op(x, ids, weights, w13, ones, codes, w2_scales, 10.0)[0]
                hidden = np.float32(1.0) / (np.float32(1.0) + np.exp(np.float32(-1.0)))
                with np.errstate(over="ignore"):
                    value = (blocks(codes, w2_scales)[0, :, inner_index]).astype(np.float32)
                want = torch.from_numpy(value * hidden)
                torch.testing.assert_close(got, want, rtol=3e-7, atol=1e-44, equal_nan=True)


def test_only_visited_experts_are_read() -> None:
    """NaN scales everywhere else reach nothing, with few pairs and with many."""
    for tokens in (1, 12):
        args = expert_inputs(tokens, 64, 32)
        ids = torch.tensor([[2, 5]]).expand(tokens, 2)
        scales = [args[4].clone(), args[6].clone()]
        for part in scales:
            part[torch.arange(5) != 2] = 255
        x, weights = args[0].float(), args[2].float()
        got = packed_experts_op(x, ids, weights, args[3], scales[0], args[5], scales[1], 1.5)
        assert bool(got.isfinite().all()) and bool(got.any())
        nothing = packed_experts_op(
            x, torch.full_like(ids, 5), weights, args[3], scales[0], args[5], scales[1], 1.5
        )
        assert not bool(nothing.any())


def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    """Across chunk borders of the native kernels, for linears, groups and experts."""
    for outputs, columns in ((33, 64), (130, 200), (70, 1056)):
        x, codes, scales = linear_inputs(300, outputs, columns)
        x = x.float()
        alone = torch.cat([packed_linear_op(row.unsqueeze(0), codes, scales) for row in x])
        for rows in (2, 3, 7, 48, 300):
            assert torch.equal(packed_linear_op(x[:rows], codes, scales), alone[:rows])
            assert torch.equal(packed_linear_op(x[-rows:], codes, scales), alone[-rows:])
    args = expert_inputs(200, 64, 32)
    x, ids, weights = args[0].float(), args[1], args[2].float()
    single = [
        packed_experts_op(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], *args[3:], 1.5)
        for i in range(200)
    ]
    assert torch.equal(packed_experts_op(x, ids, weights, *args[3:], 1.5), torch.cat(single))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 48])
@pytest.mark.parametrize("dense", [True, False])
def test_opcheck(dtype: torch.dtype, rows: int, dense: bool) -> None:
    def given(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        typed = [t.to(dtype) if t.is_floating_point() else t for t in args]
        return tuple(typed if dense else map(spread, typed))

    plain, groups = given(linear_inputs(rows, 40, 70)), given(grouped_inputs(rows, 40, 70))
    torch.library.opcheck(packed_linear_op, plain, test_utils=IMPLEMENTED)
    torch.library.opcheck(packed_grouped_linear_op, groups, test_utils=IMPLEMENTED)
    experts = (*given(expert_inputs(rows, 64, 32)), 1.5)
    torch.library.opcheck(packed_experts_op, experts, test_utils=IMPLEMENTED)
    index = torch.zeros(rows, 3, dtype=torch.int64)
    table = (spread(index) if not dense else index, codes_of(9, 64), scales_of(9, 2))
    torch.library.opcheck(packed_rows_op, table, test_utils=IMPLEMENTED)


def test_shapes_that_do_not_fit_are_refused() -> None:
    """ValueError by the plain forms, RuntimeError with the same shapes by the native ones."""
    x, codes, scales = linear_inputs(2, 40, 64)
    groups = grouped_inputs(2, 40, 64)
    experts = expert_inputs(2, 64, 32)
    wrong: list[tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[object, ...]]] = [
        (packed_linear, packed_linear_op, (x, codes, scales[:1])),
        (packed_linear, packed_linear_op, (x[:, :32], codes, scales)),
        (packed_grouped_linear, packed_grouped_linear_op, (groups[0][:, :2], *groups[1:])),
        (packed_grouped_linear, packed_grouped_linear_op, (*groups[:2], groups[2][:, :1])),
        (packed_rows, packed_rows_op, (torch.zeros(1).long(), codes, scales)),
        (packed_experts, packed_experts_op, (*experts[:5], experts[5][:, :32], experts[6], 1.5)),
        (packed_experts, packed_experts_op, (experts[0][:1], *experts[1:], 1.5)),
    ]
    for plain, op, args in wrong:
        with pytest.raises(ValueError, match=r"packed_\w+: shapes .*; allowed: "):
            plain(*args)
        with pytest.raises(RuntimeError, match=r"packed_\w+: .*, allowed \("):
            op(*args)
