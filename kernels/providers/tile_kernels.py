"""DeepSeek's TileKernels behind our ops, where they fit: casts, the expert activation, the gate.

Owns the ops `decodegrid_tk::*`. They are an alternative to our own TileLang kernels on cards where
the package is installed, and what those are compared with there. Results are new tensors, made by
the library in the layouts that its GEMMs read. Never imports the library.

Source: TileKernels, tile-kernels 2.1.0.
"""

from types import ModuleType

import torch
from torch import Tensor

from decodegrid.kernels.providers.deep_gemm import packed_words
from decodegrid.kernels.providers.layouts import column_rows
from decodegrid.kernels.providers.wrapper import Wrapper, bind, define, expect, expect_that

LIBRARY = torch.library.Library("decodegrid_tk", "FRAGMENT")

BLOCK = 32


def _packed_like(x: Tensor, rows: int, columns: int) -> Tensor:
    """An empty tensor of packed MN-major scales for (rows, columns) values."""
    words, step = packed_words(columns, BLOCK), column_rows(rows, 4)
    return x.new_empty_strided((rows, words), (1, step), dtype=torch.int32)


def _check_cast(x: Tensor) -> None:
    op = "cast_fp8"
    expect(op, "x", x, torch.bfloat16, (None, None))
    expect_that(x.shape[1] % 128 == 0, op, f"x has {x.shape[1]} columns, no multiple of 128")


def _fake_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), _packed_like(x, *x.shape)


def _call_cast(module: ModuleType, x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = module.quant.per_token_cast(
        x,
        "e4m3",
        num_per_channels=BLOCK,
        round_sf=True,
        use_tma_aligned_col_major_sf=True,
        use_packed_ue8m0=True,
    )
    return codes, scales


def _check_swiglu(x: Tensor, ends: Tensor, weights: Tensor, limit: float) -> None:
    op = "swiglu_cast"
    expect(op, "x", x, torch.bfloat16, (None, None))
    expect_that(x.shape[1] % 256 == 0, op, f"x has {x.shape[1]} columns, no multiple of 256")
    expect(op, "ends", ends, torch.int32, (None,))
    expect(op, "weights", weights, torch.float32, (x.shape[0],))
    expect_that(limit > 0, op, f"limit is {limit}")


def _fake_swiglu(x: Tensor, ends: Tensor, weights: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    rows, inner = x.shape[0], x.shape[1] // 2
    return x.new_empty((rows, inner), dtype=torch.float8_e4m3fn), _packed_like(x, rows, inner)


def _call_swiglu(
    module: ModuleType, x: Tensor, ends: Tensor, weights: Tensor, limit: float
) -> tuple[Tensor, Tensor]:
    codes, scales = module.quant.swiglu_forward_and_per_token_cast(
        x,
        "e4m3",
        BLOCK,
        psum_num_tokens_per_expert=ends,
        topk_weights=weights,
        clamp_value=limit,
        round_sf=True,
        use_tma_aligned_col_major_sf=True,
        use_packed_ue8m0=True,
    )
    return codes, scales


def _check_gate(logits: Tensor, bias: Tensor, valid: Tensor, top_k: int, scaling: float) -> None:
    op = "gate"
    expect(op, "logits", logits, torch.float32, (None, None))
    expect(op, "bias", bias, torch.float32, (logits.shape[1],))
    expect(op, "valid", valid, torch.bool, (logits.shape[0],))
    expect_that(0 < top_k <= logits.shape[1], op, f"top_k is {top_k} of {logits.shape[1]}")


def _fake_gate(
    logits: Tensor, bias: Tensor, valid: Tensor, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape)


def _call_gate(
    module: ModuleType, logits: Tensor, bias: Tensor, valid: Tensor, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    ids, weights = module.moe.moe_topk_gate_forward(
        logits,
        top_k,
        use_shared_as_routed=False,
        num_shared_experts=0,
        routed_scaling_factor=scaling,
        ep_rank=0,
        mask=valid,
        bias=bias,
    )
    return ids, weights


WRAPPERS = (
    Wrapper("cast_fp8(Tensor x) -> (Tensor, Tensor)", _check_cast, _call_cast, _fake_cast),
    Wrapper(
        "swiglu_cast(Tensor x, Tensor ends, Tensor weights, float limit) -> (Tensor, Tensor)",
        _check_swiglu, _call_swiglu, _fake_swiglu,
    ),
    Wrapper(
        "gate(Tensor logits, Tensor bias, Tensor valid, int top_k, float scaling) "
        "-> (Tensor, Tensor)",
        _check_gate, _call_gate, _fake_gate,
    ),
)  # fmt: skip
"""cast_fp8: codes and packed MN-major scales per 32; swiglu_cast: the same of the clamped
activation of gate and up, times a weight per row; gate: expert ids and weights."""

define(LIBRARY, WRAPPERS)


def bind_library(module: ModuleType) -> None:
    """Make the probed module's calls the CUDA implementations of these ops."""
    bind(LIBRARY, WRAPPERS, module)
