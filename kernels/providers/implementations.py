"""Every op of a step and the ways to run it, in order of preference.

Owns the list alone: which call serves which op on which device, and the sizes that it takes. The
rule by which one is chosen is `registry.py`'s; the calls themselves are in the modules of this
folder that carry the libraries' names.

Source: the libraries' host-side checks; spec of what runs on which architecture.
"""

from decodegrid.kernels.native import OPS
from decodegrid.kernels.providers import tile_needs
from decodegrid.kernels.providers.packages import (
    CUDA_PYTHON,
    DEEP_EP,
    DEEP_GEMM,
    DEEP_SELECT,
    FLASH_MLA,
)
from decodegrid.kernels.providers.probe import Package, Target
from decodegrid.kernels.providers.registry import (
    Fit,
    Implementation,
    Kind,
    Needs,
    StepShape,
    fits_always,
    needs_nothing,
)
from decodegrid.kernels.records import RecordFormat
from decodegrid.kernels.tile.table import Size, TileKernel, kernels

ANY = frozenset(Target)
CPU = frozenset({Target.CPU})
CUDA = frozenset({Target.SM90, Target.SM100})
SM90 = frozenset({Target.SM90})
SM100 = frozenset({Target.SM100})

ATTENTION_HEADS = (64, 128)
ATTENTION_DIM = 512
INDEX_DIM = 128
MAX_INDEX_HEADS = 32
_Q8, _Q4X = int(RecordFormat.Q8), int(RecordFormat.Q4X)


def fits_bfloat16(shape: StepShape) -> str:
    """Activations in bfloat16."""
    return "" if shape.dtype == "bfloat16" else f"activations are {shape.dtype}, not bfloat16"


def _fits_matrices(shape: StepShape) -> str:
    return fits_bfloat16(shape) or _multiple("hidden_size", shape.hidden_size, 128)


def _fits_experts(shape: StepShape) -> str:
    return _fits_matrices(shape) or _multiple("moe_intermediate_size", shape.moe_inner, 128)


def _fits_attention(shape: StepShape) -> str:
    if not shape.kv_records:
        return "keys are not kept as records (cache.kv_cache)"
    if shape.head_dim != ATTENTION_DIM:
        return f"head_dim {shape.head_dim}, not {ATTENTION_DIM}"
    if shape.num_heads not in ATTENTION_HEADS:
        return f"{shape.num_heads} heads, not 64 or 128"
    if shape.index_topk % 64:
        return f"index_topk {shape.index_topk} is no multiple of 64"
    return fits_bfloat16(shape)


def _fits_hopper_attention(shape: StepShape) -> str:
    return _fits_attention(shape) or "its 584-byte records round other channels than the model's"


def _fits_index(shape: StepShape) -> str:
    if not shape.kv_records:
        return "keys are not kept as records (cache.kv_cache)"
    if shape.index_dim != INDEX_DIM or shape.index_heads > MAX_INDEX_HEADS:
        return (
            f"{shape.index_heads} index heads of {shape.index_dim}, "
            f"not up to {MAX_INDEX_HEADS} of {INDEX_DIM}"
        )
    return fits_bfloat16(shape)


def _fits_unordered_index(shape: StepShape) -> str:
    return _fits_index(shape) or "it does not promise the lower of equal scores"


def _fits_records(shape: StepShape) -> str:
    return "" if shape.kv_records else "keys are not kept as records (cache.kv_cache)"


def _built(op: str, **sizes: Size) -> str:
    """ "" where there is a kernel of ours at these sizes."""
    if TileKernel(op, "", sizes).name in {kernel.name for kernel in kernels()}:
        return ""
    words = ", ".join(f"{name} {value}" for name, value in sizes.items() if name != "page")
    return f"no kernel is built for {words}"


def _fits_tile_attention(shape: StepShape) -> str:
    return (
        _fits_records(shape)
        or fits_bfloat16(shape)
        or _built("sparse_mla", heads=shape.num_heads, dim=shape.head_dim, page=0)
    )


def _fits_tile_experts(shape: StepShape) -> str:
    experts, inner, hidden = shape.num_experts, shape.moe_inner, shape.hidden_size
    return (
        fits_bfloat16(shape)
        or _built("grouped_fp4", experts=experts, outputs_of=2 * inner, inputs=hidden)
        or _built("grouped_fp4", experts=experts, outputs_of=hidden, inputs=inner)
    )


def _fits_tile_index(shape: StepShape) -> str:
    paged: dict[str, Size] = {"block_size": shape.block_size, "ratio": 1}
    return (
        _fits_records(shape)
        or fits_bfloat16(shape)
        or _built("index_logits", heads=shape.index_heads, dim=shape.index_dim, form=_Q4X, **paged)
        or _built("select_top_k", k=shape.index_topk)
        or _built("convert_index", top_k=shape.index_topk, **paged)
    )


def _fits_tile_records(shape: StepShape) -> str:
    return (
        _fits_records(shape)
        or fits_bfloat16(shape)
        or _built("store_records", form=_Q8, dim=shape.head_dim)
        or _built("store_records", form=_Q4X, dim=shape.index_dim)
    )


def _fits_sinkhorn(shape: StepShape) -> str:
    sizes: dict[str, Size] = {"copies": shape.hc_mult, "iters": shape.hc_iters}
    return _fits_float32(shape) or _built("sinkhorn", **sizes, eps=shape.hc_eps)


def _fits_noise(shape: StepShape) -> str:
    return _fits_float32(shape) or _built("gumbel_noise", vocab=shape.vocab_size)


def _fits_filters(shape: StepShape) -> str:
    return _fits_float32(shape) or _built("filter_logits", vocab=shape.vocab_size)


def _fits_float32(shape: StepShape) -> str:
    return "steps are in float64" if shape.dtype == "float64" else ""


def _fits_several_ranks(shape: StepShape) -> str:
    return "" if shape.num_ranks > 1 else "one rank has nothing to exchange"


def _fits_one_rank(shape: StepShape) -> str:
    return "" if shape.num_ranks == 1 else f"{shape.num_ranks} ranks exchange tokens"


def _multiple(name: str, value: int, of: int) -> str:
    return f"{name} {value} is no multiple of {of}" if value % of else ""


def _library(
    op: str, call: str, targets: frozenset[Target], package: Package, fit: Fit,
    needs: Needs = needs_nothing,
) -> Implementation:  # fmt: skip
    return Implementation(op, Kind.LIBRARY, call, targets, package, fit, needs)


def _tile(
    op: str, call: str, fit: Fit, needs: Needs, targets: frozenset[Target] = CUDA
) -> Implementation:
    return Implementation(op, Kind.TILELANG, call, targets, CUDA_PYTHON, fit, needs)


def _plain(op: str, call: str, fit: Fit = fits_always) -> Implementation:
    return Implementation(op, Kind.REFERENCE, call, ANY, None, fit)


_CUDA_FIRST: tuple[Implementation, ...] = (
    _library("linear", "DeepGEMM bf16_gemm_nt", CUDA, DEEP_GEMM, _fits_matrices),
    _library("grouped_linear", "DeepGEMM einsum", CUDA, DEEP_GEMM, fits_bfloat16),
    _library(
        "packed_linear", "DeepGEMM fp8_fp4_gemm_nt", SM100, DEEP_GEMM, _fits_matrices,
        tile_needs.column_casts,
    ),
    _library(
        "packed_linear", "DeepGEMM bf16_gemm_nt, weights widened at load", SM90, DEEP_GEMM,
        _fits_matrices,
    ),
    _library(
        "packed_grouped_linear", "DeepGEMM fp8_einsum", SM100, DEEP_GEMM, fits_bfloat16,
        tile_needs.group_casts,
    ),
    _library(
        "packed_grouped_linear", "DeepGEMM einsum, weights widened at load", SM90, DEEP_GEMM,
        fits_bfloat16,
    ),
    _library(
        "routed_experts", "DeepGEMM m_grouped_bf16_gemm_nt_contiguous", CUDA, DEEP_GEMM,
        _fits_experts,
    ),
    _library(
        "packed_experts", "DeepGEMM fp8_fp4_mega_moe", SM100, DEEP_GEMM, _fits_experts,
        tile_needs.row_casts,
    ),
    _tile(
        "packed_experts", "grouped FP4 product", _fits_tile_experts, tile_needs.experts, SM90
    ),
    _library(
        "attention", "FlashMLA flash_mla_with_kvcache", SM100, FLASH_MLA, _fits_attention
    ),
    _library(
        "attention", "FlashMLA flash_mla_with_kvcache, legacy", SM90, FLASH_MLA,
        _fits_hopper_attention,
    ),
    _tile("attention", "sparse MLA decode", _fits_tile_attention, tile_needs.attention),
    _library(
        "select_entries", "DeepGEMM fp8_fp4_paged_mqa_logits, DeepSelect topk", SM100, DEEP_SELECT,
        _fits_unordered_index,
    ),
    _tile(
        "select_entries", "index logits, top-k, candidate blocks", _fits_tile_index,
        tile_needs.selection,
    ),
    _tile("encode_records", "store of records", _fits_tile_records, tile_needs.stores),
    _tile("take_records", "gather of records", _fits_tile_records, tile_needs.gathers),
    _tile("sinkhorn", "Sinkhorn rounds", _fits_sinkhorn, tile_needs.sinkhorn),
    _tile("gumbel_noise", "coupled noise", _fits_noise, tile_needs.noise),
    _tile("filter_logits", "sampling filters", _fits_filters, tile_needs.filters),
    _library("expert_exchange", "DeepEP dispatch and combine", CUDA, DEEP_EP, _fits_several_ranks),
)  # fmt: skip

_PLAIN: tuple[Implementation, ...] = (
    _plain("linear", "torch linear"),
    _plain("grouped_linear", "torch bmm"),
    _plain("packed_linear", "torch linear, expands the weight at each call"),
    _plain("packed_grouped_linear", "torch bmm, expands the weight at each call"),
    _plain("routed_experts", "torch grouped product"),
    _plain("packed_experts", "torch grouped product, expands experts at each call"),
    _plain("packed_rows", "torch gather and decode"),
    _plain("attention", "torch gather, product and softmax, inside its region"),
    _plain("select_entries", "torch, request by request"),
    _plain("encode_records", "torch"),
    _plain("take_records", "torch gather and decode"),
    _plain("round_records", "torch"),
    _plain("sinkhorn", "torch"),
    _plain("gumbel_noise", "torch"),
    _plain("uniform_noise", "torch"),
    _plain("filter_logits", "torch sort"),
    _plain("top_logits", "torch topk"),
    _plain("expert_exchange", "identity", _fits_one_rank),
)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *_CUDA_FIRST,
    *(Implementation(op, Kind.NATIVE, f"C++ {op}", CPU) for op in OPS),
    *_PLAIN,
)
"""What `registry.choose` chooses from; an op's plain form stands last."""
