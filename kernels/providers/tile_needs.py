"""Which kernels of ours an implementation launches, by name, at the sizes of a deployment.

Owns the lists alone, each the other side of a function of `cuda_step.py` or `cuda_experts.py`: that
one launches the kernels, this one says which they are before anything runs, so that a missing cubin
is known when an implementation is chosen, and all are loaded before a capture.

Data flow: `StepShape` -> names of `decodegrid.kernels.tile.table`.
"""

from decodegrid.kernels.providers.registry import StepShape
from decodegrid.kernels.records import RecordFormat
from decodegrid.kernels.tile.table import Size, TileKernel

_Q8, _Q4N, _Q4X = (int(item) for item in (RecordFormat.Q8, RecordFormat.Q4N, RecordFormat.Q4X))


def _name(op: str, **sizes: Size) -> str:
    return TileKernel(op, "", sizes).name


def column_casts(shape: StepShape) -> tuple[str, ...]:
    """Casts of activations before FP8 projections."""
    return tuple(_name("cast_fp8_columns", dim=dim, block=32) for dim in shape.packed_inputs)


def group_casts(shape: StepShape) -> tuple[str, ...]:
    """The same before the grouped FP8 projection."""
    if not shape.group_inputs:
        return ()
    return (_name("cast_fp8_columns", dim=shape.group_inputs, block=32),)


def row_casts(shape: StepShape) -> tuple[str, ...]:
    """The cast before the fused experts."""
    return (_name("cast_fp8", dim=shape.hidden_size),)


def experts(shape: StepShape) -> tuple[str, ...]:
    """Both grouped products, of the target and of the drafter."""
    counts = dict.fromkeys(count for count in (shape.num_experts, shape.draft_experts) if count)
    sides = (
        (2 * shape.moe_inner, shape.hidden_size),
        (shape.hidden_size, shape.moe_inner),
    )
    return tuple(
        _name("grouped_fp4", experts=count, outputs_of=outputs, inputs=inputs)
        for count in counts
        for outputs, inputs in sides
    )


def attention(shape: StepShape) -> tuple[str, ...]:
    """Window layers, and those that read compressed keys."""
    sizes: dict[str, Size] = {"heads": shape.num_heads, "dim": shape.head_dim, "page": 0}
    window = _name("sparse_mla_window", **sizes, has_far=0)
    return (window, _name("sparse_mla", **sizes)) if shape.ratios else (window,)


def selection(shape: StepShape) -> tuple[str, ...]:
    """Scores, candidate blocks, top-k and rows of the pool; nothing without compressed keys."""
    if not shape.ratios:
        return ()
    found = [_name("select_top_k", k=shape.index_topk)]
    for ratio in shape.ratios:
        paged: dict[str, Size] = {"block_size": shape.block_size, "ratio": ratio}
        found += [
            _name("index_logits", heads=shape.index_heads, dim=shape.index_dim, form=_Q4X, **paged),
            _name("convert_index", top_k=shape.index_topk, **paged),
        ]
    if shape.candidate_block:
        found += [
            _name("block_scores", block=shape.candidate_block),
            _name("select_threshold", k=shape.candidate_count, unit=shape.candidate_block),
            _name("mark_blocks", block=shape.candidate_block),
            _name("mask_scores"),
        ]
    return tuple(found)


def stores(shape: StepShape) -> tuple[str, ...]:
    """Window keys, compressed keys and index keys."""
    return _records("store_records", shape, [(_Q4X, shape.index_dim)])


def gathers(shape: StepShape) -> tuple[str, ...]:
    """Window keys and compressed keys."""
    return _records("take_records", shape, [])


def _records(op: str, shape: StepShape, more: list[tuple[int, int]]) -> tuple[str, ...]:
    kinds = [(_Q8, shape.head_dim)]
    if shape.ratios:
        kinds += [(_Q4N, shape.head_dim), *more]
    return tuple(_name(op, form=form, dim=dim) for form, dim in kinds)


def sinkhorn(shape: StepShape) -> tuple[str, ...]:
    """The rounds of a mix."""
    sizes: dict[str, Size] = {"copies": shape.hc_mult, "iters": shape.hc_iters}
    return (_name("sinkhorn", **sizes, eps=shape.hc_eps),)


def noise(shape: StepShape) -> tuple[str, ...]:
    """Noise over the vocabulary."""
    return (_name("gumbel_noise", vocab=shape.vocab_size),)


def filters(shape: StepShape) -> tuple[str, ...]:
    """Filters over the vocabulary."""
    return (_name("filter_logits", vocab=shape.vocab_size),)
