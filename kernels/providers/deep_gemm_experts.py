"""DeepGEMM's expert products behind our ops: grouped products, the gate, and the fused MoE kernel.

Owns the ops `decodegrid_experts::*` and the buffer of the fused kernel. Rows of an expert stand
together, each expert's at a multiple of the library's alignment; where they end is read on the
device (`layouts.expert_ends`), so no count reaches the host. Never imports the library.

The fused kernel (Blackwell alone) routes, multiplies by both matrices and adds up in one launch; it
takes its input through a buffer of the library, which is made once, before a capture, for the
largest number of tokens, and knows its numbers of experts: target and drafter have one each. One
rank's buffer is plain memory.

Source: DeepGEMM, sgl-deep-gemm 0.2.2 and 0.2.5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from decodegrid.kernels.providers.deep_gemm import FP4, FP8, check_scales, packed_words
from decodegrid.kernels.providers.wrapper import (
    KernelArgumentError,
    Wrapper,
    bind,
    define,
    expect,
    expect_columns,
    expect_that,
)

LIBRARY = torch.library.Library("decodegrid_experts", "FRAGMENT")

SIZE_MULTIPLE = 128
"""Of hidden and inner size, for the fused kernel."""
SCORING = "sqrtsoftplus"


def _check_ends(op: str, ends: Tensor, experts: int) -> None:
    expect(op, "ends", ends, torch.int32, (experts,))


def _check_bf16(a: Tensor, b: Tensor, ends: Tensor, out: Tensor) -> None:
    op = "grouped_bf16"
    expect(op, "a", a, torch.bfloat16, (None, None))
    expect(op, "b", b, torch.bfloat16, (None, None, a.shape[1]))
    _check_ends(op, ends, b.shape[0])
    expect(op, "out", out, torch.bfloat16, (a.shape[0], b.shape[1]))


def _call_bf16(module: ModuleType, a: Tensor, b: Tensor, ends: Tensor, out: Tensor) -> None:
    module.m_grouped_bf16_gemm_nt_contiguous(a, b, out, ends, use_psum_layout=True)


def _check_fp8(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, out: Tensor
) -> None:
    op, (rows, inner) = "grouped_fp8", a.shape
    expect(op, "a", a, FP8, (None, None))
    check_scales(op, "a_scales", a_scales, rows, inner, 32)
    stored = inner // 2 if b.dtype == FP4 else inner
    expect(op, "b", b, (FP8, FP4), (None, None, stored))
    experts, columns = b.shape[:2]
    words = packed_words(inner, 32)
    expect(op, "b_scales", b_scales, torch.int32, (experts, columns, words))
    expect_columns(op, "b_scales", b_scales)
    _check_ends(op, ends, experts)
    expect(op, "out", out, torch.bfloat16, (rows, columns))


def _call_fp8(
    module: ModuleType,
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    ends: Tensor,
    out: Tensor,
) -> None:
    module.m_grouped_fp8_fp4_gemm_nt_contiguous(
        (a, a_scales),
        (b, b_scales),
        out,
        ends,
        recipe_a=(1, 32),
        recipe_b=(1, 32),
        use_psum_layout=True,
    )


def _check_masked(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    counts: Tensor,
    expected: int,
    out: Tensor,
) -> None:
    op, (experts, rows, inner) = "masked_fp8", a.shape
    expect(op, "a", a, FP8, (None, None, None))
    words = packed_words(inner, 32)
    expect(op, "a_scales", a_scales, torch.int32, (experts, rows, words))
    stored = inner // 2 if b.dtype == FP4 else inner
    expect(op, "b", b, (FP8, FP4), (experts, None, stored))
    expect(op, "b_scales", b_scales, torch.int32, (experts, b.shape[1], words))
    for name, scales in (("a_scales", a_scales), ("b_scales", b_scales)):
        expect_columns(op, name, scales)
    expect(op, "counts", counts, torch.int32, (experts,))
    expect_that(0 < expected <= rows, op, f"expected rows {expected} of {rows}")
    expect(op, "out", out, torch.bfloat16, (experts, rows, b.shape[1]))


def _call_masked(
    module: ModuleType,
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    counts: Tensor,
    expected: int,
    out: Tensor,
) -> None:
    module.m_grouped_fp8_fp4_gemm_nt_masked(
        (a, a_scales), (b, b_scales), out, counts, expected, recipe_a=(1, 32), recipe_b=(1, 32)
    )


def _check_gate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    valid: Tensor,
    scaling: float,
    ids: Tensor,
    weights: Tensor,
) -> None:
    op, (tokens, hidden) = "gate", x.shape
    expect(op, "x", x, torch.bfloat16, (None, None))
    expect(op, "weight", weight, torch.bfloat16, (None, hidden))
    expect(op, "bias", bias, torch.float32, (weight.shape[0],))
    expect(op, "valid", valid, torch.bool, (tokens,))
    expect(op, "ids", ids, torch.int64, (tokens, None))
    expect(op, "weights", weights, torch.float32, (tokens, ids.shape[1]))
    expect_that(scaling > 0, op, f"scaling is {scaling}")


def _call_gate(
    module: ModuleType,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    valid: Tensor,
    scaling: float,
    ids: Tensor,
    weights: Tensor,
) -> None:
    module.bf16_mega_gate(
        x,
        weight,
        ids.shape[1],
        use_shared_as_routed=False,
        num_shared_experts=0,
        routed_scaling_factor=scaling,
        ep_rank=0,
        scoring_func=SCORING,
        mask=valid,
        bias=bias,
        out=(ids, weights),
    )


WRAPPERS = (
    Wrapper(
        "grouped_bf16(Tensor a, Tensor b, Tensor ends, Tensor(a!) out) -> ()",
        _check_bf16, _call_bf16,
    ),
    Wrapper(
        "grouped_fp8(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor ends, "
        "Tensor(a!) out) -> ()",
        _check_fp8, _call_fp8,
    ),
    Wrapper(
        "masked_fp8(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor counts, "
        "int expected, Tensor(a!) out) -> ()",
        _check_masked, _call_masked,
    ),
)  # fmt: skip
"""out = a @ b[expert].T by rows of one expert; masked: the first counts[e] rows of a[e]."""
GATE = Wrapper(
    "gate(Tensor x, Tensor weight, Tensor bias, Tensor valid, float scaling, Tensor(a!) ids, "
    "Tensor(b!) weights) -> ()",
    _check_gate,
    _call_gate,
)
"""Blackwell alone: experts ranked by sqrt(softplus(x @ weight.T)) + bias, their scores without the
bias normalised to a sum of `scaling`. Its first call makes a barrier buffer: before a capture."""


@dataclass(frozen=True, slots=True)
class MegaMoe:
    """The fused kernel's buffer: the library's object, with views of what goes in."""

    buffer: Any
    limit: float

    def run(
        self,
        module: ModuleType,
        codes: Tensor,
        scales: Tensor,
        ids: Tensor,
        weights: Tensor,
        w13: Tensor,
        w13_scales: Tensor,
        w2: Tensor,
        w2_scales: Tensor,
        out: Tensor,
    ) -> None:
        """Copy the tokens into the buffer and launch."""
        count = codes.shape[0]
        for name, value in (
            ("x", codes), ("x_sf", scales), ("topk_idx", ids), ("topk_weights", weights),
        ):  # fmt: skip
            getattr(self.buffer, name)[:count].copy_(value)
        module.fp8_fp4_mega_moe(
            out,
            (w13, w13_scales),
            (w2, w2_scales),
            self.buffer,
            activation_clamp=self.limit,
            fast_math=True,
        )


def check_mega_moe(
    codes: Tensor,
    scales: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w2: Tensor,
    w2_scales: Tensor,
    out: Tensor,
) -> None:
    """What the fused kernel takes: see `layouts.mega_moe_weights`."""
    op, (tokens, hidden) = "mega_moe", codes.shape
    expect(op, "codes", codes, FP8, (None, None))
    # Here rows are dense: the other layout of scales.
    expect(op, "scales", scales, torch.int32, (tokens, packed_words(hidden, 32)))
    expect(op, "ids", ids, torch.int64, (tokens, None))
    expect(op, "weights", weights, torch.float32, tuple(ids.shape))
    expect(op, "w13", w13, FP4, (None, None, hidden // 2))
    experts, both = w13.shape[:2]
    inner = both // 2
    expect(op, "w13_scales", w13_scales, torch.int32, (experts, both, packed_words(hidden, 32)))
    expect(op, "w2", w2, FP4, (experts, hidden, inner // 2))
    expect(op, "w2_scales", w2_scales, torch.int32, (experts, hidden, packed_words(inner, 32)))
    expect(op, "out", out, torch.bfloat16, (tokens, hidden))
    for name, size in (("hidden", hidden), ("inner", inner)):
        expect_that(size % SIZE_MULTIPLE == 0, op, f"{name} size {size}, no multiple of 128")


MEGA_SCHEMA = (
    "mega_moe(Tensor codes, Tensor scales, Tensor ids, Tensor weights, Tensor w13, "
    "Tensor w13_scales, Tensor w2, Tensor w2_scales, Tensor(a!) out) -> ()"
)


class OneRank:
    """What the buffer asks of the process group of a single rank, without one."""

    def size(self) -> int:
        """Ranks."""
        return 1

    def rank(self) -> int:
        """Of this process."""
        return 0

    def barrier(self) -> None:
        """Nobody to wait for."""


Buffers = Mapping[tuple[int, int], MegaMoe]
"""By (experts, experts of a token)."""


def make_mega_buffer(
    module: ModuleType,
    group: Any,
    num_experts: int,
    max_tokens: int,
    top_k: int,
    hidden: int,
    inner: int,
) -> Any:
    """The library's buffer for up to `max_tokens`; synchronises, so before any capture."""
    return module.mega.get_symm_buffer_for_mega_moe(
        group, num_experts, max_tokens, top_k, hidden, inner
    )


def bind_mega_moe(module: ModuleType, buffers: Buffers) -> None:
    """Make the fused kernel the CUDA implementation of `mega_moe`, for the process's buffers.

    The op raises KernelArgumentError for experts that no buffer was made for.
    """

    def call(module: ModuleType, codes: Tensor, scales: Tensor, ids: Tensor, *rest: Tensor) -> None:
        key = rest[1].shape[0], ids.shape[1]
        if key not in buffers:
            raise KernelArgumentError(
                f"mega_moe: {key[0]} experts, {key[1]} of a token; buffers are there for "
                f"{', '.join(map(str, buffers))}"
            )
        buffers[key].run(module, codes, scales, ids, *rest)

    bind(LIBRARY, (Wrapper(MEGA_SCHEMA, check_mega_moe, call),), module)


_MEGA = Wrapper(MEGA_SCHEMA, check_mega_moe, MegaMoe.run)
define(LIBRARY, (*WRAPPERS, GATE, _MEGA))


def bind_library(module: ModuleType, *, with_gate: bool) -> None:
    """Make the probed module's calls the CUDA implementations; the gate on Blackwell alone."""
    bind(LIBRARY, (*WRAPPERS, GATE) if with_gate else WRAPPERS, module)
