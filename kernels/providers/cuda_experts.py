"""Routed experts on CUDA: DeepGEMM's fused kernel, its grouped products, or our FP4 product.

Owns the order of rows around grouped products. Tokens are sorted by expert on the device; no count
reaches the host, so the products' row counts are the worst case and experts without rows cost
nothing. "No expert" is the id E in steps and -1 in the fused kernel.
"""

import torch
from torch import Tensor

from decodegrid.kernels import products
from decodegrid.kernels.moe import swiglu
from decodegrid.kernels.products import Experts, Matrix
from decodegrid.kernels.providers import deep_gemm_experts
from decodegrid.kernels.providers.layouts import align, expert_ends
from decodegrid.kernels.providers.probe import Target
from decodegrid.kernels.providers.registry import KernelTable, Kind
from decodegrid.kernels.providers.tile_ops import kernel_name, tile_op

assert deep_gemm_experts.WRAPPERS, "imported for its ops"

ROW_ALIGNMENT = 128
"""Rows at whose multiples an expert's rows start in DeepGEMM's grouped products."""


def fused_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: list[Tensor], w2: list[Tensor], limit: float
) -> Tensor:
    """The whole of it in one launch. w13, w2: `layouts.mega_moe_weights`.

    The limit of the activation is the buffer's, which was made for this model.
    """
    rows, dim = x.shape
    codes = torch.empty_like(x, dtype=torch.uint8)
    scales = x.new_empty((rows, dim // 32), dtype=torch.uint8)
    name = kernel_name("cast_fp8", dim=dim)
    tile_op("cast_fp8")(name, x.contiguous(), codes, scales)
    none = torch.full_like(ids, -1)
    out = torch.empty_like(x)
    torch.ops.decodegrid_experts.mega_moe(
        codes.view(torch.float8_e4m3fn),
        scales.view(torch.int32),
        ids.where(ids < w13[0].shape[0], none),
        weights.to(torch.float32),
        *w13,
        *w2,
        out,
    )
    return out.to(torch.float32)


def sorted_rows(ids: Tensor, num_experts: int, alignment: int) -> tuple[Tensor, Tensor]:
    """Where each (token, expert) pair stands among rows sorted by expert, and where experts end.

    ids: (T, k) int64, `num_experts` for none. Returns places (T * k,) int64, -1 for none, and ends
    (E,) int32; an expert's rows start at multiples of `alignment`.
    """
    flat = ids.reshape(-1)
    member = flat.unsqueeze(1) == torch.arange(num_experts, device=ids.device)
    ends = expert_ends(member.sum(0, dtype=torch.int32), alignment)
    counts = member.sum(0, dtype=torch.int32)
    before = (member.cumsum(0) - 1).gather(1, flat.clamp(max=num_experts - 1).unsqueeze(1))
    start = (ends - counts).to(torch.int64)[flat.clamp(max=num_experts - 1)]
    places = start + before.squeeze(1)
    return places.where(flat < num_experts, torch.full_like(places, -1)), ends


def room(pairs: int, num_experts: int, alignment: int) -> int:
    """Rows that the sorted pairs take at most."""
    visited = min(pairs, num_experts)
    return pairs if alignment == 1 else align(pairs + visited * (alignment - 1), alignment)


def _scatter(x: Tensor, places: Tensor, top_k: int, rows: int) -> Tensor:
    """Tokens at their places; one more row takes the pairs without an expert."""
    sorted_x = x.new_zeros((rows + 1, x.shape[1]))
    index = places.where(places >= 0, torch.full_like(places, rows))
    return sorted_x.index_copy_(0, index, x.repeat_interleave(top_k, 0))[:rows]


def _gather(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Sum of each token's rows, in float32; rows were weighted before the second product."""
    found = y[places.clamp(min=0)].to(torch.float32)
    live = (places >= 0).unsqueeze(1)
    found = found.where(live, torch.zeros((), dtype=torch.float32, device=y.device))
    return found.unflatten(0, weights.shape).sum(1)


def _row_weights(weights: Tensor, places: Tensor, rows: int) -> Tensor:
    """Routing weight of each sorted row, 0 where there is none."""
    spread = weights.new_zeros((rows + 1,), dtype=torch.float32)
    index = places.where(places >= 0, torch.full_like(places, rows))
    return spread.index_copy_(0, index, weights.reshape(-1).to(torch.float32))[:rows]


def _grouped_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Matrix,
    w2: Matrix,
    limit: float,
    alignment: int,
) -> Tensor:
    """Products expert by expert, the activation between them."""
    num_experts = (w13 if isinstance(w13, Tensor) else w13[0]).shape[0]
    rows = room(ids.numel(), num_experts, alignment)
    places, ends = sorted_rows(ids, num_experts, alignment)
    both = _product(_scatter(x, places, ids.shape[1], rows), w13, ends)
    gate, up = both.chunk(2, -1)
    hidden = swiglu(gate, up, limit) * _row_weights(weights, places, rows).unsqueeze(1)
    return _gather(_product(hidden.to(x.dtype), w2, ends), places, weights)


def _product(x: Tensor, weight: Matrix, ends: Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        # Stored (E, inputs, outputs), a transpose of dense rows of outputs: that is what is read.
        out = x.new_empty((x.shape[0], weight.shape[2]))
        torch.ops.decodegrid_experts.grouped_bf16(x, weight.transpose(1, 2), ends, out)
        return out
    experts, outputs, half = weight[0].shape
    out = x.new_empty((x.shape[0], outputs))
    name = kernel_name("grouped_fp4", experts=experts, outputs_of=outputs, inputs=2 * half)
    tile_op("grouped_fp4")(name, x, ends, weight[0], weight[1], out)
    return out


def expert_runner(table: KernelTable) -> Experts:
    """The experts of a step on the table's device."""
    fused = table.device.target is Target.SM100 and table.uses("packed_experts", Kind.LIBRARY)
    tiled = table.uses("packed_experts", Kind.TILELANG)
    dense = table.uses("routed_experts", Kind.LIBRARY)

    def run(
        x: Tensor, ids: Tensor, weights: Tensor, w13: Matrix, w2: Matrix, limit: float
    ) -> Tensor:
        if isinstance(w13, Tensor) or isinstance(w2, Tensor):
            if dense and x.dtype == torch.bfloat16:
                return _grouped_experts(x, ids, weights, w13, w2, limit, ROW_ALIGNMENT)
        elif fused and w13[1].dtype == torch.int32:
            return fused_experts(x, ids, weights, w13, w2, limit)
        elif tiled and x.dtype == torch.bfloat16:
            return _grouped_experts(x, ids, weights, w13, w2, limit, 1)
        return products.run_experts_op(x, ids, weights, w13, w2, limit)

    return run
