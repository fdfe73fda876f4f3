"""Products with weights that stay as a quantised checkpoint stores them, decoded on use.

Owns the ops and their plain torch forms: FP8 matrices (E4M3 codes, one E8M0 scale per tile of 32 x
32), FP8 table rows (one scale per 32 channels) and MXFP4 experts (E2M1 codes, two a byte, one scale
per 32 inputs). Does not own the number formats, nor who decides that a weight stays packed.

Numeric contract: each result is that of the same product with the expanded float32 weight converted
to the dtype of `x`, up to the order of summation.

Source: DeepSeek-V4.1-Flash `inference/kernel.py`; OCP Microscaling Formats v1.0.
"""

import torch
from torch import Tensor

from decodegrid.kernels.linear import grouped_linear, linear
from decodegrid.kernels.moe import routed_experts
from decodegrid.kernels.quant import Blocks, decode_e4m3, decode_e8m0, dequantise_q4x, dequantise_q8

SCALE_BLOCK = 32
"""Channels, and rows of a tile, that share a scale."""
EXPERTS_AT_ONCE = 32
"""Experts that the plain form holds expanded at a time."""

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define("packed_linear(Tensor x, Tensor codes, Tensor scales) -> Tensor")
LIBRARY.define("packed_grouped_linear(Tensor x, Tensor codes, Tensor scales) -> Tensor")
LIBRARY.define("packed_rows(Tensor index, Tensor codes, Tensor scales) -> Tensor")
LIBRARY.define(
    "packed_experts(Tensor x, Tensor ids, Tensor weights, Tensor w13_codes, Tensor w13_scales, "
    "Tensor w2_codes, Tensor w2_scales, float limit) -> Tensor"
)


def num_scales(channels: int) -> int:
    """Scales of an axis of `channels`; the last one may serve fewer than 32."""
    return -(-channels // SCALE_BLOCK)


def expand_tiles(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 matrices (..., N, K) of FP8 tiles, exact.

    codes: (..., N, K) uint8 E4M3; scales: (..., ceil(N / 32), ceil(K / 32)) uint8 E8M0.
    """
    tiles = decode_e8m0(scales)
    tiles = tiles.repeat_interleave(SCALE_BLOCK, -2).repeat_interleave(SCALE_BLOCK, -1)
    return decode_e4m3(codes) * tiles[..., : codes.shape[-2], : codes.shape[-1]]


def packed_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x @ W.T in the dtype of `x`, W being the FP8 matrix of `codes` and `scales`.

    x: (T, K) any float; codes: (N, K) uint8 E4M3; scales: (ceil(N / 32), ceil(K / 32)) uint8 E8M0.
    Returns (T, N), accumulated in at least float32. Raises ValueError for other shapes.
    """
    _require(
        x.dim() == codes.dim() == 2
        and x.shape[1] == codes.shape[1]
        and tuple(scales.shape) == tuple(map(num_scales, codes.shape)),
        "packed_linear",
        (x, codes, scales),
        "x (T, K), codes (N, K), scales (ceil(N / 32), ceil(K / 32))",
    )
    return linear(x, expand_tiles(codes, scales).to(x.dtype))


def packed_grouped_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x[:, g] @ W[g].T for every group g, in the dtype of `x`.

    x: (T, G, K) any float; codes: (G, N, K) uint8 E4M3; scales: (G, ceil(N / 32), ceil(K / 32))
    uint8 E8M0. Returns (T, G, N), accumulated in at least float32. Raises ValueError for other
    shapes.
    """
    _require(
        x.dim() == codes.dim() == 3
        and x.shape[1:] == (codes.shape[0], codes.shape[2])
        and tuple(scales.shape) == (codes.shape[0], *map(num_scales, codes.shape[1:])),
        "packed_grouped_linear",
        (x, codes, scales),
        "x (T, G, K), codes (G, N, K), scales (G, ceil(N / 32), ceil(K / 32))",
    )
    return grouped_linear(x, expand_tiles(codes, scales).to(x.dtype))


def packed_rows(index: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Rows `index` of an FP8 table as float32, exact; no other row is read.

    index: any shape, int64, each 0 .. R - 1; codes: (R, D) uint8 E4M3; scales: (R, D / 32) uint8
    E8M0, both dense in their last axis. Returns (*index.shape, D). Raises ValueError for other
    shapes.
    """
    _require(
        codes.dim() == scales.dim() == 2
        and codes.shape[0] == scales.shape[0]
        and codes.shape[1] == scales.shape[1] * SCALE_BLOCK,
        "packed_rows",
        (codes, scales),
        "codes (R, D), scales (R, D / 32)",
    )
    return dequantise_q8(Blocks(codes[index], scales[index]))


def packed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13_codes: Tensor,
    w13_scales: Tensor,
    w2_codes: Tensor,
    w2_scales: Tensor,
    limit: float,
) -> Tensor:
    """Sum of the routed experts' outputs, as `decodegrid.kernels.moe.routed_experts` with MXFP4.

    x: (T, D) any float; ids: (T, k) int64, E meaning "no expert"; weights: (T, k) in the island
    dtype. w13_codes: (E, 2 * I, D / 2) uint8, the even input in the low half, gate rows first;
    w13_scales: (E, 2 * I, D / 32) uint8 E8M0; w2_codes: (E, D, I / 2); w2_scales: (E, D, I / 32).
    Returns (T, D) in the island dtype. Raises ValueError for other shapes.

    This form expands min(T * k, E) experts, whatever the ids, so that it can be captured; the
    native one expands those that are visited.
    """
    operands = (x, ids, weights, w13_codes, w13_scales, w2_codes, w2_scales)
    _require(
        x.dim() == 2
        and ids.dim() == 2
        and ids.shape == weights.shape
        and ids.shape[0] == x.shape[0]
        and _are_experts(x.shape[1], w13_codes, w13_scales, w2_codes, w2_scales),
        "packed_experts",
        operands,
        "x (T, D), ids and weights (T, k), w13 (E, 2 * I, D / 2) and (E, 2 * I, D / 32), "
        "w2 (E, D, I / 2) and (E, D, I / 32)",
    )
    num_experts, pairs = w13_codes.shape[0], ids.numel()
    members = torch.arange(num_experts, device=ids.device)
    if pairs < num_experts:
        # Every (token, expert) pair has an expert of its own, so that few of them are expanded.
        own = torch.arange(pairs, device=ids.device).view_as(ids)
        members, ids = ids.reshape(-1).clamp(max=num_experts - 1), own.where(
            ids < num_experts, torch.full_like(ids, pairs)
        )
    out = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for first in range(0, min(pairs, num_experts), EXPERTS_AT_ONCE):
        part = members[first : first + EXPERTS_AT_ONCE]
        w13 = dequantise_q4x(Blocks(w13_codes[part], w13_scales[part])).to(x.dtype)
        w2 = dequantise_q4x(Blocks(w2_codes[part], w2_scales[part])).to(x.dtype)
        count = part.numel()
        inside = (ids >= first) & (ids < first + count)
        local = (ids - first).where(inside, torch.full_like(ids, count))
        out += routed_experts(x, local, weights, w13.transpose(1, 2), w2.transpose(1, 2), limit)
    return out


def _are_experts(
    dim: int, w13_codes: Tensor, w13_scales: Tensor, w2_codes: Tensor, w2_scales: Tensor
) -> bool:
    parts = (w13_codes, w13_scales, w2_codes, w2_scales)
    if any(part.dim() != 3 for part in parts) or dim % SCALE_BLOCK:
        return False
    count, inner = w13_codes.shape[0], 2 * w2_codes.shape[2]
    return [tuple(part.shape) for part in parts] == [
        (count, 2 * inner, dim // 2),
        (count, 2 * inner, dim // SCALE_BLOCK),
        (count, dim, inner // 2),
        (count, dim, inner // SCALE_BLOCK),
    ]


def _require(fits: bool, op: str, operands: tuple[Tensor, ...], allowed: str) -> None:
    if not fits:
        shapes = ", ".join(str(tuple(operand.shape)) for operand in operands)
        raise ValueError(f"{op}: shapes {shapes}; allowed: {allowed}")


def _contiguous_grouped_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return packed_grouped_linear(x, codes, scales).contiguous()


def _fake_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


def _fake_grouped_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0], codes.shape[1])


def _fake_rows(index: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return codes.new_empty((*index.shape, codes.shape[1]), dtype=torch.float32)


def _fake_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13_codes: Tensor,
    w13_scales: Tensor,
    w2_codes: Tensor,
    w2_scales: Tensor,
    limit: float,
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


# Not the CPU key: that one is for the native kernels, which then win.
LIBRARY.impl("packed_linear", packed_linear, "CompositeExplicitAutograd")
LIBRARY.impl("packed_grouped_linear", _contiguous_grouped_linear, "CompositeExplicitAutograd")
LIBRARY.impl("packed_rows", packed_rows, "CompositeExplicitAutograd")
LIBRARY.impl("packed_experts", packed_experts, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::packed_linear", _fake_linear, lib=LIBRARY)
torch.library.register_fake("decodegrid::packed_grouped_linear", _fake_grouped_linear, lib=LIBRARY)
torch.library.register_fake("decodegrid::packed_rows", _fake_rows, lib=LIBRARY)
torch.library.register_fake("decodegrid::packed_experts", _fake_experts, lib=LIBRARY)

packed_linear_op = torch.ops.decodegrid.packed_linear.default
packed_grouped_linear_op = torch.ops.decodegrid.packed_grouped_linear.default
packed_rows_op = torch.ops.decodegrid.packed_rows.default
packed_experts_op = torch.ops.decodegrid.packed_experts.default
"""The op forms, for traced code: a compiler would expand the whole weight into memory first."""
