"""A CUDA step's kernels, put together from a kernel table.

Owns the way from a choice to a callable: casts before products, the layout of what goes in and
comes out, and the order of kernels where several make one op. Every function here writes into
tensors that it makes from its arguments' shapes; none waits for the device or brings anything from
the host, so all can be captured.

Numerics: where a product takes FP8 activations, they are cast with one scale per 32 channels, as
the released model casts them; plain torch forms leave activations as they are.

Data flow: `KernelTable` -> `StepKernels` for the regions; `cuda_implementations` -> functions for
the dispatcher.
"""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decodegrid.kernels import products
from decodegrid.kernels.products import Matrix
from decodegrid.kernels.providers import cuda_experts, deep_gemm, flash_mla, laid_out, layouts
from decodegrid.kernels.providers.probe import Target
from decodegrid.kernels.providers.registry import KernelTable, Kind
from decodegrid.kernels.providers.tile_ops import kernel_name, tile_op
from decodegrid.kernels.records import RecordFormat
from decodegrid.kernels.select_entries import CandidateMode
from decodegrid.kernels.step_kernels import OPS, Attend, StepKernels, WeightForms

assert deep_gemm.WRAPPERS and flash_mla.WRAPPERS, "imported for their ops"

MAX_PAGE = 64
"""Rows of a page that flat records are viewed as for FlashMLA, at most."""


def cast_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes of rows and their scales, packed and MN-major.

    x: (T, D) bfloat16, D a multiple of 128. Returns (T, D) float8_e4m3fn and (T, D / 128) int32.
    """
    rows, dim = x.shape
    codes = torch.empty_like(x, dtype=torch.uint8)
    scales = x.new_empty((dim // 128, -(-rows // 4) * 4), dtype=torch.int32)
    name = kernel_name("cast_fp8_columns", dim=dim, block=32)
    tile_op("cast_fp8_columns")(name, x.contiguous(), codes, scales)
    return codes.view(torch.float8_e4m3fn), scales[:, :rows].t()


def bf16_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in bfloat16."""
    out = x.new_empty((x.shape[0], weight.shape[0]))
    torch.ops.decodegrid_gemm.bf16_gemm(x.contiguous(), weight, out)
    return out


def fp8_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x @ W.T, both in FP8. codes, scales: `layouts.pack_matrix`."""
    a, a_scales = cast_columns(x)
    out = x.new_empty((x.shape[0], codes.shape[0]))
    torch.ops.decodegrid_gemm.fp8_gemm(a, a_scales, codes, scales, 32, out)
    return out


def bf16_groups(x: Tensor, weight: Tensor) -> Tensor:
    """x[:, g] @ weight[g].T in bfloat16."""
    out = x.new_empty((x.shape[0], weight.shape[0], weight.shape[1]))
    torch.ops.decodegrid_gemm.grouped_bf16_gemm(x.contiguous(), weight, out)
    return out


def fp8_groups(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x[:, g] @ W[g].T, both in FP8."""
    tokens, groups, inner = x.shape
    # Group by group, because that is how the library reads the scales; whole columns of each.
    padded = layouts.column_rows(tokens, 4)
    by_group = x.new_zeros((groups, padded, inner))
    by_group[:, :tokens] = x.transpose(0, 1)
    a, found = cast_columns(by_group.flatten(0, 1))
    a = a.view(groups, padded, inner)[:, :tokens].transpose(0, 1)
    joined = found.t().view(inner // 128, groups, padded).transpose(0, 1).contiguous()
    out = x.new_empty((tokens, groups, codes.shape[1]))
    a_scales = joined[:, :, :tokens].permute(2, 0, 1)
    torch.ops.decodegrid_gemm.grouped_fp8_gemm(a, a_scales, codes, scales, out)
    return out


def _projection(
    dense: Callable[[Tensor, Tensor], Tensor] | None,
    packed: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
    otherwise: products.Projection,
) -> products.Projection:
    """The product of a weight's form and dtype; plain torch for float32 work."""

    def project(x: Tensor, weight: Matrix) -> Tensor:
        if x.dtype != torch.bfloat16:
            return otherwise(x, weight)
        if isinstance(weight, Tensor):
            fits = dense is not None and weight.dtype == torch.bfloat16
            return dense(x, weight) if fits and dense is not None else otherwise(x, weight)
        if packed is None or weight[1].dtype != torch.int32:
            return otherwise(x, weight)
        return packed(x, weight[0], weight[1])

    return project


def store_records(rows: Tensor, index: Tensor, keys: Tensor, format: int) -> None:
    """Write the records of keys (T, dim) to rows[index]."""
    name = kernel_name("store_records", form=int(format), dim=keys.shape[-1])
    tile_op("store_records")(name, keys.contiguous(), index, rows)


def tile_attend(
    query: Tensor,
    window: Tensor,
    window_index: Tensor,
    pool: Tensor | None,
    entry_index: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """Sparse attention by our kernel, over records as they are stored."""
    out, sink = torch.empty_like(query), sink.to(torch.float32)
    heads, dim = query.shape[1:]
    if pool is None or entry_index is None:
        name = kernel_name("sparse_mla_window", heads=heads, dim=dim, page=0, has_far=0)
        tile_op("sparse_mla_window")(name, query, sink, window, window_index, out)
        return out
    name = kernel_name("sparse_mla", heads=heads, dim=dim, page=0)
    tile_op("sparse_mla")(name, query, sink, window, window_index, pool, entry_index, out)
    return out


def pages_of(rows: Tensor) -> Tensor:
    """Records (rows, bytes) as pages (pages, page, 1, bytes), without a copy.

    An index of a record is its row, whatever the page: rows of a page follow each other.
    """
    page = MAX_PAGE
    while rows.shape[0] % page:
        page //= 2
    return rows.view(rows.shape[0] // page, page, 1, rows.shape[1])


def _padded_index(index: Tensor) -> Tensor:
    """(T, N) rows as FlashMLA reads them: (T, 1, N padded to 64) int32, -1 where there is none."""
    missing = flash_mla.index_columns(index.shape[1]) - index.shape[1]
    return F.pad(index.to(torch.int32), (0, missing), value=-1).unsqueeze(1)


def library_attend(
    query: Tensor,
    window: Tensor,
    window_index: Tensor,
    pool: Tensor | None,
    entry_index: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """Sparse attention by FlashMLA, over records as they are stored."""
    extra = None if pool is None else pages_of(pool)
    extra_index = None if entry_index is None else _padded_index(entry_index)
    out: Tensor = torch.ops.decodegrid_mla.sparse_decode(
        query.unsqueeze(1),
        pages_of(window),
        _padded_index(window_index),
        None,
        sink.to(torch.float32),
        query.shape[-1] ** -0.5,
        extra,
        extra_index,
        None,
        False,
    )
    return out.squeeze(1)


def _attend(table: KernelTable) -> Attend | None:
    if table.uses("attention", Kind.LIBRARY):
        return library_attend
    return tile_attend if table.uses("attention", Kind.TILELANG) else None


def make_kernels(table: KernelTable) -> StepKernels:
    """The kernels of a step on the table's device; the CPU's opaque ops where it is the CPU."""
    if table.device.target is Target.CPU:
        return OPS
    blackwell = table.device.target is Target.SM100

    def library(op: str) -> bool:
        return table.uses(op, Kind.LIBRARY)

    dense = bf16_linear if library("linear") else None
    groups = bf16_groups if library("grouped_linear") else None
    packed = fp8_linear if blackwell and library("packed_linear") else None
    packed_groups = fp8_groups if blackwell and library("packed_grouped_linear") else None
    return replace(
        OPS,
        project=_projection(dense, packed, products.project_op),
        project_groups=_projection(groups, packed_groups, products.project_groups_op),
        run_experts=cuda_experts.expert_runner(table),
        store=store_records if table.uses("encode_records", Kind.TILELANG) else None,
        attend=_attend(table),
    )


def weight_forms(table: KernelTable) -> WeightForms:
    """What the table's kernels read of packed weights: bfloat16 on Hopper, FP8 on Blackwell."""
    blackwell = table.device.target is Target.SM100
    laid = laid_out.pack if blackwell else laid_out.widen

    def form(op: str) -> laid_out.Form:
        return laid if table.uses(op, Kind.LIBRARY) else laid_out.keep

    matrix, stack = form("packed_linear"), form("packed_grouped_linear")
    fused = blackwell and table.uses("packed_experts", Kind.LIBRARY)
    return WeightForms(
        lambda weight: (matrix if weight[0].dim() == 2 else stack)(weight),
        laid_out.fuse_experts if fused else laid_out.keep_experts,
    )


def take_records(
    records: Tensor, index: Tensor, format: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """`decodegrid::take_records` by our kernel."""
    out = records.new_empty((*index.shape, dim), dtype=torch.bfloat16)
    name = kernel_name("take_records", form=int(format), dim=dim)
    tile_op("take_records")(name, records, index, out)
    return out.to(dtype)


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """`decodegrid::sinkhorn` by our kernel. logits: (T, n, n) float32."""
    copies = logits.shape[-1]
    flat = logits.reshape(logits.shape[0], copies * copies)
    matrix = torch.empty_like(flat)
    name = kernel_name("sinkhorn", copies=copies, iters=iters, eps=eps)
    tile_op("sinkhorn")(name, flat, matrix)
    return matrix.view(logits.shape)


def gumbel_noise(seed: Tensor, position: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    """`decodegrid::gumbel_noise` by our kernel."""
    noise = seed.new_empty((seed.shape[0], vocab_size), dtype=torch.float32)
    name = kernel_name("gumbel_noise", vocab=vocab_size)
    tile_op("gumbel_noise")(name, seed, position, temperature.to(torch.float32), noise)
    return noise


def filter_logits(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor
) -> Tensor:
    """`decodegrid::filter_logits` by our kernel. logits: (N, vocab) float32."""
    out = torch.empty_like(logits)
    name = kernel_name("filter_logits", vocab=logits.shape[1])
    floats = (value.to(torch.float32) for value in (temperature, top_p))
    tile_op("filter_logits")(
        name, logits.contiguous(), *floats, top_k, min_p.to(torch.float32), out
    )
    return out


def select_entries(
    query: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    token_slot: Tensor,
    lengths: Tensor,
    ratio: int,
    block_size: int,
    candidate_mode: int,
    candidate_block: int,
    candidate_count: int,
    candidates: Tensor,
    entry_out: Tensor,
) -> None:
    """`decodegrid::select_entries` by our kernels: scores, candidate blocks, top-k, pool rows."""
    tokens, capacity = candidates.shape
    scores = query.new_empty((tokens, capacity), dtype=torch.float32)
    heads, dim = query.shape[1:]
    name = kernel_name(
        "index_logits",
        heads=heads,
        dim=dim,
        form=int(RecordFormat.Q4X),
        block_size=block_size,
        ratio=ratio,
    )
    tile_op("index_logits")(
        name, query, weights, index_keys, block_table, token_slot, lengths, scores
    )
    if candidate_mode == CandidateMode.WRITE:
        best = scores.new_empty((tokens, -(-capacity // candidate_block)))
        level, bound = best.new_empty((tokens,)), best.new_empty((tokens,), dtype=torch.int32)
        tile_op("block_scores")(
            kernel_name("block_scores", block=candidate_block), scores, lengths, best
        )
        name = kernel_name("select_threshold", k=candidate_count, unit=candidate_block)
        tile_op("select_threshold")(name, best, lengths, level, bound)
        name = kernel_name("mark_blocks", block=candidate_block)
        tile_op("mark_blocks")(name, best, level, bound, lengths, candidates)
    elif candidate_mode == CandidateMode.READ:
        tile_op("mask_scores")(kernel_name("mask_scores"), candidates, lengths, scores)
    top_k = entry_out.shape[1]
    ids = lengths.new_empty((tokens, top_k), dtype=torch.int32)
    tile_op("select_top_k")(kernel_name("select_top_k", k=top_k), scores, lengths, ids)
    name = kernel_name("convert_index", top_k=top_k, block_size=block_size, ratio=ratio)
    tile_op("convert_index")(name, ids, block_table, token_slot, lengths, entry_out)


SAME_SCHEMA: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "take_records": take_records,
        "sinkhorn": sinkhorn,
        "gumbel_noise": gumbel_noise,
        "filter_logits": filter_logits,
        "select_entries": select_entries,
    }
)
"""Implementations by our kernels of ops that regions call by name; they take the CUDA place of the
plain form in the dispatcher."""
