"""Which tile kernels exist: ops, the functions they equal, and the sizes that are built.

Owns data alone and imports no TileLang. A `TileOp` is one kernel family as an op: its arguments are
the kernel's, in order, all tensors; what is written is preallocated by the caller and marked in the
schema. A `TileKernel` is an op at fixed sizes: one CUDA function. Rows, tokens, slots and pool
sizes are read from the tensors at the call.

Two models are built: V4.1-Flash as released, and the embedded one. Of the cut-down V4.1-Flash that
the deployment for one H200 serves, only the number of experts is another.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

Size = int | float | str

HOPPER, BLACKWELL = "sm_90a", "sm_100a"
ARCHS = (HOPPER, BLACKWELL)


@dataclass(frozen=True, slots=True)
class TileOp:
    """A kernel family in op form."""

    name: str
    factory: str
    """"module.function" of kernels/tile."""
    schema: str
    """Arguments and what is written, without the name and the empty result."""
    equals: str
    """The plain torch function that gives the same, and what is meant by the same."""
    flags: tuple[str, ...] = ()
    """For nvcc."""
    uses_tensor_cores: bool = False


@dataclass(frozen=True, slots=True)
class TileKernel:
    """One CUDA function: an op at fixed sizes."""

    op: str
    model: str
    """flash, tiny."""
    sizes: dict[str, Size] = field(hash=False)
    archs: tuple[str, ...] = ARCHS
    """What it is built for."""

    @property
    def name(self) -> str:
        """Unique name, the stem of its files: op and the sizes in order."""
        parts = (f"{key}{value}" for key, value in self.sizes.items())
        return "-".join((self.op, *parts)).replace(" ", "")


OPS: tuple[TileOp, ...] = (
    TileOp(
        "cast_fp8", "casts.cast_fp8", "Tensor x, Tensor(a!) codes, Tensor(b!) scales",
        "kernels.quant.quantise_q8, same bits",
    ),
    TileOp(
        "cast_fp8_columns", "casts.cast_fp8_columns",
        "Tensor x, Tensor(a!) codes, Tensor(b!) scales",
        "kernels.quant.quantise_q8 (block 128: its rule with that block), same bits",
    ),
    TileOp(
        "cast_fp4", "casts.cast_fp4", "Tensor x, Tensor(a!) codes, Tensor(b!) scales",
        "kernels.quant.quantise_q4x (block 32), quantise_q4n (block 16), same bits",
    ),
    TileOp(
        "store_records", "records.store_records",
        "Tensor x, Tensor slots, Tensor(a!) pool",
        "pool[slots] = kernels.records.encode_records(x), same bits; -1 stores nothing",
    ),
    TileOp(
        "take_records", "records.take_records", "Tensor pool, Tensor index, Tensor(a!) out",
        "kernels.records.take_records, same bits",
    ),
    TileOp(
        "store_hopper", "hopper_records.store_hopper",
        "Tensor x, Tensor slots, Tensor(a!) pool",
        "the 584-byte record; tests/kernels/tile states it in plain torch, same bits",
    ),
    TileOp(
        "take_hopper", "hopper_records.take_hopper",
        "Tensor pool, Tensor index, Tensor(a!) out",
        "the 584-byte record; tests/kernels/tile states it in plain torch, same bits",
    ),
    TileOp(
        "convert_index", "index.convert_index",
        "Tensor ids, Tensor block_table, Tensor token_slot, Tensor lengths, Tensor(a!) rows",
        "kernels.select_entries.entry_rows at the ids, equal",
    ),
    TileOp(
        "expand_ranges", "index.expand_ranges", "Tensor ranges, Tensor(a!) rows",
        "arange of each segment, equal",
    ),
    TileOp(
        "window_index", "index.window_index",
        "Tensor positions, Tensor token_slot, Tensor valid, Tensor(a!) rows",
        "window_index of the regions decode_metadata (reach: window) and draft_metadata "
        "(anchor positions; reach: window + 1, after: block - 1), equal",
    ),
    TileOp(
        "decode_tokens", "index.decode_tokens",
        "Tensor slots, Tensor query_lens, Tensor last_token, Tensor seq_len, Tensor history, "
        "Tensor drafts, Tensor block_table, Tensor compressed_ids, Tensor(a!) query_starts, "
        "Tensor(b!) input_ids, Tensor(c!) positions, Tensor(d!) token_slot, Tensor(e!) valid, "
        "Tensor(f!) lookback, Tensor(g!) ring_store, Tensor(h!) compressor_store, "
        "Tensor(i!) compressor_previous, Tensor(j!) entry_store_one, "
        "Tensor(k!) entry_store_two, Tensor(l!) length_one, Tensor(m!) length_two",
        "region decode_metadata after its split and without its window_index, equal",
    ),
    TileOp(
        "split_lengths", "verify.split_lengths",
        "Tensor rates, Tensor limits, Tensor live, Tensor total, Tensor(a!) query_lens",
        "kernels.verify.split_verify_lengths, equal",
    ),
    TileOp(
        "accept", "verify.accept",
        "Tensor chosen, Tensor slots, Tensor query_lens, Tensor query_starts, "
        "Tensor(a!) last_token, Tensor(b!) seq_len, Tensor(c!) history, Tensor drafts, "
        "Tensor(d!) num_drafts_out, Tensor stop_token_ids, Tensor(e!) token_ids, "
        "Tensor(f!) num_emitted, Tensor(g!) stopped",
        "region accept (kernels.verify.accept_prefix inside), equal",
    ),
    TileOp(
        "uniform_bits", "sampling.uniform_bits",
        "Tensor seed, Tensor position, Tensor(a!) bits",
        "kernels.sampling.uniform_bits, same 32 bits",
    ),
    TileOp(
        "gumbel_noise", "sampling.gumbel_noise",
        "Tensor seed, Tensor position, Tensor temperature, Tensor(a!) noise",
        "decodegrid::gumbel_noise, same bits as the native kernel",
        # A contracted multiplication and addition would round elsewhere than the CPU's.
        flags=("-fmad=false",),
    ),
    TileOp(
        "filter_logits", "filters.filter_logits",
        "Tensor logits, Tensor temperature, Tensor top_p, Tensor top_k, Tensor min_p, "
        "Tensor(a!) out",
        "kernels.filters.filter_logits, same tokens but where a sum meets its bound within "
        "float32 rounding",
    ),
    TileOp(
        "compress_pairs", "compress.compress_pairs",
        "Tensor joined, Tensor store, Tensor previous, Tensor(a!) ring, Tensor(b!) pooled",
        "regions source_two_in and source_two up to the norm, within float32 rounding",
    ),
    TileOp(
        "index_logits", "indexer.index_logits",
        "Tensor query, Tensor weights, Tensor pool, Tensor block_table, Tensor token_slot, "
        "Tensor lengths, Tensor(a!) scores",
        "kernels.indexer.index_scores over decoded records, within float32 rounding",
        uses_tensor_cores=True,
    ),
    TileOp(
        "block_scores", "indexer.block_scores",
        "Tensor scores, Tensor lengths, Tensor(a!) best",
        "first half of kernels.indexer.candidate_mask, equal",
    ),
    TileOp(
        "select_threshold", "indexer.select_threshold",
        "Tensor scores, Tensor lengths, Tensor(a!) level, Tensor(b!) bound",
        "kernels.indexer.top_k_mask as a lowest score and an index bound, equal",
    ),
    TileOp(
        "mark_blocks", "indexer.mark_blocks",
        "Tensor best, Tensor level, Tensor bound, Tensor lengths, Tensor(a!) candidates",
        "second half of kernels.indexer.candidate_mask, equal",
    ),
    TileOp(
        "mask_scores", "indexer.mask_scores",
        "Tensor candidates, Tensor lengths, Tensor(a!) scores",
        "scores.masked_fill_(~candidates, -inf) below the lengths, equal",
    ),
    TileOp(
        "select_top_k", "indexer.select_top_k",
        "Tensor scores, Tensor lengths, Tensor(a!) ids",
        "kernels.indexer.mask_to_indices(top_k_mask), equal",
    ),
    TileOp(
        "sinkhorn", "hyper_connection.sinkhorn", "Tensor logits, Tensor(a!) matrix",
        "kernels.hyper_connection.sinkhorn, within float32 rounding",
    ),
    TileOp(
        "hc_mix", "hyper_connection.hc_mix",
        "Tensor stream, Tensor fn, Tensor scale, Tensor base, Tensor(a!) pre, Tensor(b!) post, "
        "Tensor(c!) comb",
        "kernels.hyper_connection.hc_mix, within float32 rounding",
    ),
    TileOp(
        "grouped_fp4", "moe.grouped_fp4",
        "Tensor x, Tensor ends, Tensor codes, Tensor scales, Tensor(a!) y",
        "kernels.moe.grouped_product with dequantise_q4x weights, within bfloat16 rounding",
        uses_tensor_cores=True,
    ),
    TileOp(
        "sparse_mla", "sparse_mla.sparse_mla",
        "Tensor query, Tensor sink, Tensor near_pool, Tensor near_index, Tensor far_pool, "
        "Tensor far_index, Tensor(a!) out",
        "kernels.sparse_attention.gathered_attention over taken records, within bfloat16 "
        "rounding of the probabilities",
        uses_tensor_cores=True,
    ),
    TileOp(
        "sparse_mla_window", "sparse_mla.sparse_mla",
        "Tensor query, Tensor sink, Tensor near_pool, Tensor near_index, Tensor(a!) out",
        "as sparse_mla, window keys alone",
        uses_tensor_cores=True,
    ),
)


@dataclass(frozen=True, slots=True)
class _Model:
    """Numbers of a model and of the deployment that its kernels are built for."""

    name: str
    cast_dims: tuple[int, ...]
    dim: int
    heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_blocks: int
    window: int
    block_size: int
    vocab: int
    experts: tuple[tuple[int, int, int], ...]
    """(experts, outputs, inputs) of each grouped product."""
    cut_experts: tuple[tuple[int, int, int], ...] = ()
    """The same of a cut-down model, for Hopper alone: on Blackwell a library's kernel takes any."""
    row_dtype: str = "bfloat16"
    num_drafts: int = 5
    max_rows: int = 256

    @property
    def ring(self) -> int:
        """Slots of a window ring."""
        return self.window + self.num_drafts + 1


_FLASH = _Model(
    "flash", (1280, 2304, 4096, 5120, 6144, 8192, 15360), 5120, 64, 512, 32, 128, 512, 2048, 128,
    128, 129280, ((384, 4608, 5120), (384, 5120, 2304), (128, 4608, 5120), (128, 5120, 2304)),
    ((64, 4608, 5120), (64, 5120, 2304)),
)
_TINY = _Model(
    "tiny", (128, 256, 384, 768), 256, 8, 64, 16, 32, 64, 24, 64, 64, 2048,
    ((8, 256, 256), (8, 256, 128), (4, 256, 256), (4, 256, 128)),
)
_Q8, _Q4N, _Q4X = 0, 1, 2
"""RecordFormat, as numbers: its module imports torch."""


def _kernels(model: _Model) -> Iterator[TileKernel]:
    def make(op: str, **sizes: Size) -> TileKernel:
        return TileKernel(op, model.name, sizes)

    for dim in model.cast_dims:
        yield make("cast_fp8_columns", dim=dim, block=32)
    yield TileKernel(
        "cast_fp8_columns", model.name, {"dim": model.cast_dims[-1], "block": 128}, (HOPPER,)
    )
    yield make("cast_fp8", dim=model.dim)
    for form, dim in ((_Q8, model.head_dim), (_Q4N, model.head_dim), (_Q4X, model.index_dim)):
        yield make("store_records", form=form, dim=dim)
        yield make("take_records", form=form, dim=dim)
    yield make("cast_fp4", dim=model.index_dim, block=32)
    yield make("cast_fp4", dim=model.head_dim, block=16)
    if model.head_dim == 512:
        for page in (model.block_size, model.block_size // 2):
            yield TileKernel("store_hopper", model.name, {"page": page}, (HOPPER,))
            yield TileKernel("take_hopper", model.name, {"page": page}, (HOPPER,))
    for ratio in (1, 2):
        paged: dict[str, Size] = {"block_size": model.block_size, "ratio": ratio}
        yield make("convert_index", top_k=model.index_topk, **paged)
        yield make(
            "index_logits", heads=model.index_heads, dim=model.index_dim, form=_Q4X, **paged
        )
    yield make("window_index", reach=model.window, after=0, ring=model.ring)
    yield make(
        "window_index", reach=model.window + 1, after=model.num_drafts - 1, ring=model.ring
    )
    yield make("expand_ranges", width=model.window + model.index_topk)
    yield make(
        "decode_tokens", num_drafts=model.num_drafts, ring=model.ring,
        compressor_ring=model.num_drafts + 2, block_size=model.block_size, vocab=model.vocab,
        ngram=4, pad_id=2, max_rows=model.max_rows,
    )
    yield make("split_lengths", num_drafts=model.num_drafts, max_rows=model.max_rows)
    yield make("accept", num_drafts=model.num_drafts, stop_ids=8)
    for op in ("uniform_bits", "gumbel_noise", "filter_logits"):
        yield make(op, vocab=model.vocab)
    yield make("compress_pairs", dim=model.head_dim)
    yield make("block_scores", block=8)
    yield make("select_threshold", k=model.candidate_blocks, unit=8)
    yield make("mark_blocks", block=8)
    yield make("mask_scores")
    yield make("select_top_k", k=model.index_topk)
    yield make("sinkhorn", copies=4, iters=20, eps=1e-6)
    yield make("hc_mix", dim=model.dim, copies=4, iters=20, norm_eps=1e-20, hc_eps=1e-6)
    for group, archs in ((model.experts, ARCHS), (model.cut_experts, (HOPPER,))):
        for experts, outputs, inputs in group:
            product: dict[str, Size] = {"experts": experts, "outputs_of": outputs, "inputs": inputs}
            yield TileKernel("grouped_fp4", model.name, product, archs)
    pages = (0, model.block_size) if model.head_dim == 512 else (0,)
    for page in pages:
        archs = ARCHS if page == 0 else (HOPPER,)
        sizes: dict[str, Size] = {"heads": model.heads, "dim": model.head_dim, "page": page}
        yield TileKernel("sparse_mla", model.name, sizes, archs)
        yield TileKernel("sparse_mla_window", model.name, {**sizes, "has_far": 0}, archs)


def kernels() -> tuple[TileKernel, ...]:
    """All kernels, each name once."""
    made: dict[str, TileKernel] = {}
    for model in (_FLASH, _TINY):
        for kernel in _kernels(model):
            made.setdefault(kernel.name, kernel)
    return tuple(made.values())


def find_op(name: str) -> TileOp:
    """The op of a name. Raises ValueError for a name that is none."""
    for op in OPS:
        if op.name == name:
            return op
    raise ValueError(f"no tile op {name!r}; there are {', '.join(op.name for op in OPS)}")
