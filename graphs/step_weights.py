"""Weights as the steps want them: flat tensors per kind of block, packed once at load.

Owns the re-arrangement of a model's parameters (projections that read the same input are joined,
experts are laid out for the grouped product) and the dtype that matrices are stored in. Holds
tensors only; does no arithmetic on activations.

Storage: the matrices of products may be stored narrower than the model computes (bfloat16 under
float32), which halves what a step reads, and only where no value changes. One choice holds for the
whole model, all matrices or none, so that every region is compiled for one dtype. Tables, norms,
mHC mixers, the router, index head weights, sinks and other small tensors keep the model's dtype.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decodegrid.graphs.attention import Attention
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model import Block


@dataclass(frozen=True, slots=True)
class MixWeights:
    """One mHC mixer and the norm after its collapse."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Projections of one layer's attention."""

    w_in: Tensor
    """(q_lora_rank + head_dim, D): low-rank query, then window key."""
    q_norm: Tensor
    wq_b: Tensor
    kv_norm: Tensor
    frequencies: Tensor
    wo_a: Tensor
    """(groups, o_lora_rank, heads * head_dim / groups)."""
    wo_b: Tensor
    sink: Tensor


@dataclass(frozen=True, slots=True)
class SourceWeights:
    """Compressor and index key projection of a kv source."""

    w_in: Tensor
    """(head_dim or 2 * head_dim, D): gate first where the ratio is 2, then the latent."""
    norm: Tensor
    wk: Tensor
    k_norm: Tensor


@dataclass(frozen=True, slots=True)
class IndexWeights:
    """Index query projection and head weights, the constant factor included."""

    wq_b: Tensor
    weights_proj: Tensor


@dataclass(frozen=True, slots=True)
class MoEWeights:
    """Router, routed experts and shared expert."""

    gate: Tensor
    bias: Tensor
    w13: Tensor
    """(E, D, 2 * I), gate half first. Stored narrow it is a transpose of dense (E, 2 * I, D)."""
    w2: Tensor
    """(E, I, D). Stored narrow it is a transpose of dense (E, D, I)."""
    shared_w13: Tensor
    """(2 * I, D)."""
    shared_w2: Tensor


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """Table, projection and hash constants of one Engram layer."""

    table: Tensor
    wkv: Tensor
    q_weight: Tensor
    k_weight: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One target or drafter layer; parts that a layer does not have are None."""

    ratio: int
    attn_mix: MixWeights
    ffn_mix: MixWeights
    attention: AttentionWeights
    moe: MoEWeights
    source: SourceWeights | None
    index: IndexWeights | None
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True)
class DraftHeadWeights:
    """What the drafter has beside its layers."""

    main_proj: Tensor
    main_norm: Tensor
    norm: Tensor
    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Everything a step reads of the model."""

    embed: Tensor
    norm: Tensor
    head: Tensor
    compressed_ids: Tensor
    layers: tuple[LayerWeights, ...]
    draft_layers: tuple[LayerWeights, ...]
    draft_head: DraftHeadWeights | None


def _mix(block: Block, part: str) -> MixWeights:
    return MixWeights(
        getattr(block, f"hc_{part}_fn").data,
        getattr(block, f"hc_{part}_scale").data,
        getattr(block, f"hc_{part}_base").data,
        getattr(block, f"{part}_norm").weight.data,
    )


def _attention(attn: Attention) -> AttentionWeights:
    groups = attn.config.o_groups
    return AttentionWeights(
        torch.cat((attn.wq_a.weight.data, attn.wkv.weight.data)),
        attn.q_norm.weight.data,
        attn.wq_b.weight.data,
        attn.kv_norm.weight.data,
        attn.frequencies,
        attn.wo_a.weight.data.unflatten(0, (groups, -1)),
        attn.wo_b.weight.data,
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


def _layer(block: Block) -> LayerWeights:
    attn, ffn = block.attn, block.ffn
    w13, w2 = ffn.experts.packed()
    shared = ffn.shared_experts
    moe = MoEWeights(
        ffn.gate.weight.data,
        ffn.gate.bias.data,
        w13.data.contiguous(),
        w2.data.contiguous(),
        torch.cat((shared.w1.weight.data, shared.w3.weight.data)),
        shared.w2.weight.data,
    )
    index = None
    if attn.runs_indexer:
        indexer = attn.indexer
        scaled = indexer.weights_proj.weight.data * indexer.scale
        index = IndexWeights(indexer.wq_b.weight.data, scaled)
    engram = None
    if hasattr(block, "engram"):
        memory = block.engram
        engram = EngramWeights(
            memory.embed.weight.data,
            memory.wkv.weight.data,
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
        moe,
        _source(attn),
        index,
        engram,
    )


EXPERTS = ("w13", "w2")
MATRICES = (
    *EXPERTS, "w_in", "wq_b", "wo_a", "wo_b", "wk", "shared_w13", "shared_w2", "wkv", "main_proj",
    "markov_head", "head",
)
"""Fields that hold the weight of a product with many outputs, in whichever part they stand."""


def _matrices(part: Any) -> Iterator[Tensor]:
    """Every matrix of a part and of the parts below it."""
    for item in fields(part):
        value = getattr(part, item.name)
        if item.name in MATRICES:
            yield value
        else:
            for inner in value if isinstance(value, tuple) else (value,):
                if is_dataclass(inner):
                    yield from _matrices(inner)


def _store_matrices(part: Any, storage: torch.dtype) -> Any:
    """The part with every matrix in `storage`, each output's weights side by side."""
    changes: dict[str, Any] = {}
    for item in fields(part):
        value = getattr(part, item.name)
        if item.name in EXPERTS:
            changes[item.name] = value.to(storage).transpose(1, 2).contiguous().transpose(1, 2)
        elif item.name in MATRICES:
            changes[item.name] = value.to(storage)
        elif isinstance(value, tuple):
            changes[item.name] = tuple(_store_matrices(inner, storage) for inner in value)
        elif is_dataclass(value):
            changes[item.name] = _store_matrices(value, storage)
    return replace(part, **changes)


def store_matrices(weights: StepWeights, storage: torch.dtype) -> StepWeights:
    """The weights with all matrices in `storage`, or as they are if that would change a value."""
    if any(not torch.equal(w.to(storage).to(w.dtype), w) for w in _matrices(weights)):
        return weights
    stored: StepWeights = _store_matrices(weights, storage)
    return stored


def pack_weights(
    model: DraftModel, *, with_drafter: bool, storage: torch.dtype | None = None
) -> StepWeights:
    """Pack a loaded model. Unpacked parameters stay shared with the model; packed ones are new.

    storage: dtype to store matrices in where that is exact (see above); None keeps the model's.
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
            first.main_proj.weight.data,
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
