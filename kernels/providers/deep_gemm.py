"""DeepGEMM's matrix products behind our ops.

Owns the ops `decodegrid_gemm::*` for products: their schemas, what they accept, and the calls.
Outputs are preallocated by the caller. Scales come in the layouts of `layouts.py`, made once at
load for weights and by a cast kernel for activations. Never imports the library: `bind` gets the
module that was probed. Index logits are in deep_gemm_index.py, experts in deep_gemm_experts.py.

What runs where (the library's own host checks): bfloat16 products and einsum on Hopper and
Blackwell; FP8 and FP4 with one scale per 32 on Blackwell alone, where scales are packed int32; on
Hopper FP8 has float32 scales per 128. Compiles a kernel for each new (N, K): every size must run
once before a capture.

Source: DeepGEMM, sgl-deep-gemm 0.2.2 and 0.2.5.
"""

from types import ModuleType

import torch
from torch import Tensor

from decodegrid.kernels.providers.wrapper import (
    Wrapper,
    bind,
    define,
    expect,
    expect_columns,
    expect_dense_rows,
    expect_that,
)

LIBRARY = torch.library.Library("decodegrid_gemm", "FRAGMENT")

OUT_ROW_BYTES = 32
"""Rows of a result start at multiples of this."""
FP8 = torch.float8_e4m3fn
FP4 = torch.int8
"""Two E2M1 codes, even column low."""
SCALES = (torch.int32, torch.float32)
"""Packed E8M0 on Blackwell, float32 on Hopper."""
GRANULARITY = {torch.int32: (32, 128), torch.float32: (128,)}


def packed_words(columns: int, block: int) -> int:
    """Columns of a packed scale tensor."""
    return -(-columns // (4 * block))


def _check_bf16(a: Tensor, b: Tensor, out: Tensor) -> None:
    op = "bf16_gemm"
    expect(op, "a", a, torch.bfloat16, (None, None))
    expect(op, "b", b, torch.bfloat16, (None, a.shape[1]))
    expect(op, "out", out, (torch.bfloat16, torch.float32), (a.shape[0], b.shape[0]))
    expect_dense_rows(op, "a", a)
    expect_dense_rows(op, "b", b)
    expect_dense_rows(op, "out", out, OUT_ROW_BYTES)


def _call_bf16(module: ModuleType, a: Tensor, b: Tensor, out: Tensor) -> None:
    module.bf16_gemm_nt(a, b, out)


def check_scales(op: str, name: str, scales: Tensor, rows: int, columns: int, block: int) -> None:
    """Scales of (rows, columns) values: packed int32 or float32, MN-major."""
    kinds = GRANULARITY.get(scales.dtype, ())
    expect_that(block in kinds, op, f"{name} is {scales.dtype} with one scale per {block} channels")
    width = packed_words(columns, block) if scales.dtype == torch.int32 else -(-columns // block)
    expect(op, name, scales, SCALES, (rows, width))
    expect_columns(op, name, scales)


def _check_fp8(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, block: int, out: Tensor
) -> None:
    op, (rows, inner) = "fp8_gemm", a.shape
    expect(op, "a", a, FP8, (None, None))
    stored = inner // 2 if b.dtype == FP4 else inner
    expect(op, "b", b, (FP8, FP4), (None, stored))
    check_scales(op, "a_scales", a_scales, rows, inner, block)
    if b_scales.dtype == torch.int32:
        check_scales(op, "b_scales", b_scales, b.shape[0], inner, block)
    else:
        # Hopper has one scale per 128 x 128 tile of the weight.
        expect(op, "b_scales", b_scales, torch.float32, (-(-b.shape[0] // 128), -(-inner // 128)))
    expect(op, "out", out, (torch.bfloat16, torch.float32), (rows, b.shape[0]))
    expect_dense_rows(op, "out", out, OUT_ROW_BYTES)


def _call_fp8(
    module: ModuleType,
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    block: int,
    out: Tensor,
) -> None:
    if b_scales.dtype == torch.float32:
        module.fp8_fp4_gemm_nt((a, a_scales), (b, b_scales), out, recipe=(1, 128, 128))
        return
    module.fp8_fp4_gemm_nt(
        (a, a_scales), (b, b_scales), out, recipe_a=(1, block), recipe_b=(1, block)
    )


GROUPED_OUT = "bhr,hdr->bhd"
"""Each group h of a token b times its own matrix."""


def _check_einsum(a: Tensor, b: Tensor, out: Tensor) -> None:
    op = "grouped_bf16_gemm"
    expect(op, "a", a, torch.bfloat16, (None, None, None))
    tokens, groups, inner = a.shape
    expect(op, "b", b, torch.bfloat16, (groups, None, inner))
    expect(op, "out", out, torch.bfloat16, (tokens, groups, b.shape[1]))


def _call_einsum(module: ModuleType, a: Tensor, b: Tensor, out: Tensor) -> None:
    module.einsum(GROUPED_OUT, a, b, out)


def _check_fp8_einsum(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out: Tensor
) -> None:
    op = "grouped_fp8_gemm"
    expect(op, "a", a, FP8, (None, None, None))
    tokens, groups, inner = a.shape
    expect(op, "b", b, FP8, (groups, None, inner))
    words = packed_words(inner, 32)
    expect(op, "a_scales", a_scales, torch.int32, (tokens, groups, words))
    # Read group by group: a view of MN-major scales of (groups, tokens, words).
    expect_columns(op, "a_scales", a_scales.transpose(0, 1))
    expect(op, "b_scales", b_scales, torch.int32, (groups, b.shape[1], words))
    expect_columns(op, "b_scales", b_scales)
    expect(op, "out", out, torch.bfloat16, (tokens, groups, b.shape[1]))


def _call_fp8_einsum(
    module: ModuleType, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out: Tensor
) -> None:
    module.fp8_einsum(GROUPED_OUT, (a, a_scales), (b, b_scales), out, recipe=(1, 1, 32))


def _check_prenorm(x: Tensor, fn: Tensor, mixed: Tensor, squares: Tensor) -> None:
    op = "hc_prenorm"
    expect(op, "x", x, torch.bfloat16, (None, None))
    expect(op, "fn", fn, torch.float32, (None, x.shape[1]))
    splits = mixed.shape[0] if mixed.dim() == 3 else None
    lead: tuple[int | None, ...] = () if splits is None else (splits,)
    expect(op, "mixed", mixed, torch.float32, (*lead, x.shape[0], fn.shape[0]))
    expect(op, "squares", squares, torch.float32, (*lead, x.shape[0]))


def _call_prenorm(
    module: ModuleType, x: Tensor, fn: Tensor, mixed: Tensor, squares: Tensor
) -> None:
    splits = mixed.shape[0] if mixed.dim() == 3 else None
    module.tf32_hc_prenorm_gemm(x, fn, mixed, squares, splits)


WRAPPERS = (
    Wrapper("bf16_gemm(Tensor a, Tensor b, Tensor(a!) out) -> ()", _check_bf16, _call_bf16),
    Wrapper(
        "fp8_gemm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, int block, "
        "Tensor(a!) out) -> ()",
        _check_fp8,
        _call_fp8,
    ),
    Wrapper(
        "grouped_bf16_gemm(Tensor a, Tensor b, Tensor(a!) out) -> ()", _check_einsum, _call_einsum
    ),
    Wrapper(
        "grouped_fp8_gemm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, "
        "Tensor(a!) out) -> ()",
        _check_fp8_einsum,
        _call_fp8_einsum,
    ),
    Wrapper(
        "hc_prenorm(Tensor x, Tensor fn, Tensor(a!) mixed, Tensor(b!) squares) -> ()",
        _check_prenorm,
        _call_prenorm,
    ),
)
"""bf16_gemm: out = a @ b.T; fp8_gemm the same with FP8 a and FP8 or FP4 b, `block` channels a
scale; grouped_*: out[:, g] = a[:, g] @ b[g].T; hc_prenorm: x @ fn.T in TF32 and the sums of squares
of x, in one part or in mixed.shape[0] parts to add up."""

define(LIBRARY, WRAPPERS)


def bind_library(module: ModuleType) -> None:
    """Make the probed module's calls the CUDA implementations of these ops."""
    bind(LIBRARY, WRAPPERS, module)
