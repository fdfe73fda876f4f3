"""From a loaded model to the weights of its steps, once at start.

Owns the re-arrangement: projections that read the same input are joined, experts are laid out for
the grouped product. Where the model's modules keep a quantised checkpoint's bytes
(graphs/packed_modules.py), bytes are joined as bytes and never expanded. Does not own the parts
that come out (graphs/step_weights.py).

Data flow: model -> `StepWeights` that share every tensor which is taken as it is.
"""

import torch
from torch import Tensor, nn

from decodegrid.graphs.attention import Attention
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model import Block, Experts, MoE
from decodegrid.graphs.packed_modules import PackedExperts, PackedLinear, PackedTable
from decodegrid.graphs.step_weights import (
    AttentionWeights,
    DraftHeadWeights,
    EngramWeights,
    IndexWeights,
    LayerWeights,
    MixWeights,
    MoEWeights,
    SourceWeights,
    StepWeights,
    store_matrices,
)
from decodegrid.kernels.packed import SCALE_BLOCK
from decodegrid.kernels.products import Matrix


def _mix(block: Block, part: str) -> MixWeights:
    return MixWeights(
        getattr(block, f"hc_{part}_fn").data,
        getattr(block, f"hc_{part}_scale").data,
        getattr(block, f"hc_{part}_base").data,
        getattr(block, f"{part}_norm").weight.data,
    )


def _matrix(module: nn.Module) -> Matrix:
    """A projection's or a table's weight, as the module keeps it."""
    if isinstance(module, PackedLinear | PackedTable):
        return [module.codes, module.scales]
    return module.get_parameter("weight").data


def _require_whole_tiles(rows: int, field: str) -> None:
    if rows % SCALE_BLOCK:
        raise ValueError(
            f"text_config.{field} is {rows}; packed weights need a multiple of {SCALE_BLOCK} "
            "(model.weights: expanded or packed_experts takes any)"
        )


def _joined(first: nn.Module, second: nn.Module, field: str) -> Matrix:
    """Two projections of the same input, one above the other.

    `field` of the config counts the outputs of the first; it is named where their tiles do not end
    with them.
    """
    above, below = _matrix(first), _matrix(second)
    if isinstance(above, Tensor):
        assert isinstance(below, Tensor)
        return torch.cat((above, below))
    _require_whole_tiles(above[0].shape[0], field)
    return [torch.cat(parts) for parts in zip(above, below, strict=True)]


def _grouped(module: nn.Module, groups: int, field: str) -> Matrix:
    """A projection's weight with its outputs in `groups` of `field` each."""
    weight = _matrix(module)
    if isinstance(weight, Tensor):
        return weight.unflatten(0, (groups, -1))
    _require_whole_tiles(weight[0].shape[0] // groups, field)
    return [part.unflatten(0, (groups, -1)) for part in weight]


def _attention(attn: Attention) -> AttentionWeights:
    return AttentionWeights(
        _joined(attn.wq_a, attn.wkv, "q_lora_rank"),
        attn.q_norm.weight.data,
        _matrix(attn.wq_b),
        attn.kv_norm.weight.data,
        attn.frequencies,
        _grouped(attn.wo_a, attn.config.o_groups, "o_lora_rank"),
        _matrix(attn.wo_b),
        attn.attn_sink.data,
    )


def _source(attn: Attention) -> SourceWeights | None:
    if not attn.is_source:
        return None
    compressor = attn.compressor
    w_in = compressor.wkv.weight.data
    if compressor.ratio > 1:
        w_in = torch.cat((compressor.wgate.weight.data, w_in))
    return SourceWeights(
        w_in,
        compressor.norm.weight.data,
        attn.indexer.wk.weight.data,
        attn.indexer.k_norm.weight.data,
    )


def _experts(experts: Experts | PackedExperts) -> tuple[Matrix, Matrix]:
    """Routed experts, both halves of the first product joined.

    The bytes of packed experts are most of a model: the module's own become views of the joined
    ones, so that they are held once.
    """
    if not isinstance(experts, PackedExperts):
        w13, w2 = experts.packed()
        return w13.data.contiguous(), w2.data.contiguous()
    inner = experts.w1_codes.shape[1]
    codes = torch.cat((experts.w1_codes, experts.w3_codes), 1)
    experts.w1_codes, experts.w3_codes = codes[:, :inner], codes[:, inner:]
    scales = torch.cat((experts.w1_scales, experts.w3_scales), 1)
    experts.w1_scales, experts.w3_scales = scales[:, :inner], scales[:, inner:]
    return [codes, scales], [experts.w2_codes, experts.w2_scales]


def _moe(ffn: MoE) -> MoEWeights:
    w13, w2 = _experts(ffn.experts)
    shared = ffn.shared_experts
    return MoEWeights(
        ffn.gate.weight.data,
        ffn.gate.bias.data,
        w13,
        w2,
        _joined(shared.w1, shared.w3, "moe_intermediate_size"),
        _matrix(shared.w2),
    )


def _layer(block: Block) -> LayerWeights:
    attn = block.attn
    index = None
    if attn.runs_indexer:
        indexer = attn.indexer
        scaled = indexer.weights_proj.weight.data * indexer.scale
        index = IndexWeights(_matrix(indexer.wq_b), scaled)
    engram = None
    if hasattr(block, "engram"):
        memory = block.engram
        engram = EngramWeights(
            _matrix(memory.embed),
            _matrix(memory.wkv),
            memory.q_weight.data,
            memory.k_weight.data,
            memory.multipliers,
            memory.primes,
            memory.offsets,
        )
    return LayerWeights(
        attn.ratio,
        _mix(block, "attn"),
        _mix(block, "ffn"),
        _attention(attn),
        _moe(block.ffn),
        _source(attn),
        index,
        engram,
    )


def pack_weights(
    model: DraftModel, *, with_drafter: bool, storage: torch.dtype | None = None
) -> StepWeights:
    """Pack a loaded model. Parameters that are not re-arranged stay shared with the model; the
    others are new, and of packed experts the model then holds views.

    storage: dtype to store float matrices in where that is exact (see above); None keeps the
    model's. Raises ValueError, with the config field, for packed matrices that cannot be joined
    because one of them does not end with a tile.
    """
    weights = _pack_wide(model, with_drafter=with_drafter)
    return weights if storage is None else store_matrices(weights, storage)


def _pack_wide(model: DraftModel, *, with_drafter: bool) -> StepWeights:
    """All tensors in the model's dtype."""
    draft_layers: tuple[LayerWeights, ...] = ()
    draft_head = None
    if with_drafter:
        first, last = model.draft_blocks[0], model.draft_blocks[-1]
        draft_layers = tuple(_layer(block) for block in model.draft_blocks)
        draft_head = DraftHeadWeights(
            _matrix(first.main_proj),
            first.main_norm.weight.data,
            last.norm.weight.data,
            last.markov_head.embed.weight.data,
            last.markov_head.head.weight.data,
            last.confidence_head.proj.weight.data,
        )
    return StepWeights(
        model.embed.weight.data,
        model.norm.weight.data,
        model.head.weight.data,
        model.compressed_ids,
        tuple(_layer(block) for block in model.blocks),
        draft_layers,
        draft_head,
    )
