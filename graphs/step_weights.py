"""Weights as the steps want them: flat tensors per kind of block.

Owns the parts and the dtype that matrices are stored in. Holds tensors only; does no arithmetic on
activations. How a model's parameters become these is in graphs/weight_packing.py.

A matrix is a float tensor, or [codes, scales] where it stays as a quantised checkpoint stores it.

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

from decodegrid.kernels.products import Matrix


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

    w_in: Matrix
    """(q_lora_rank + head_dim, D): low-rank query, then window key."""
    q_norm: Tensor
    wq_b: Matrix
    kv_norm: Tensor
    frequencies: Tensor
    wo_a: Matrix
    """(groups, o_lora_rank, heads * head_dim / groups)."""
    wo_b: Matrix
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

    wq_b: Matrix
    weights_proj: Tensor


@dataclass(frozen=True, slots=True)
class MoEWeights:
    """Router, routed experts and shared expert."""

    gate: Tensor
    bias: Tensor
    w13: Matrix
    """(E, D, 2 * I), gate half first. Stored narrow it is a transpose of dense (E, 2 * I, D);
    packed its codes are (E, 2 * I, D / 2)."""
    w2: Matrix
    """(E, I, D). Stored narrow it is a transpose of dense (E, D, I); packed its codes are
    (E, D, I / 2)."""
    shared_w13: Matrix
    """(2 * I, D)."""
    shared_w2: Matrix


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """Table, projection and hash constants of one Engram layer."""

    table: Matrix
    wkv: Matrix
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

    main_proj: Matrix
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


EXPERTS = ("w13", "w2")
MATRICES = (
    *EXPERTS, "w_in", "wq_b", "wo_a", "wo_b", "wk", "shared_w13", "shared_w2", "wkv", "main_proj",
    "markov_head", "head",
)
"""Fields that hold the weight of a product with many outputs, in whichever part they stand."""


def _named_parts(part: Any) -> Iterator[tuple[str, Any]]:
    """Field names and values of a part and of the parts below it, down to tensors and lists."""
    for item in fields(part):
        value = getattr(part, item.name)
        for inner in value if isinstance(value, tuple) else (value,):
            if is_dataclass(inner):
                yield from _named_parts(inner)
            else:
                yield item.name, inner


def _matrices(weights: StepWeights) -> Iterator[Tensor]:
    """Every float matrix."""
    for name, value in _named_parts(weights):
        if name in MATRICES and isinstance(value, Tensor):
            yield value


def _store_matrices(part: Any, storage: torch.dtype) -> Any:
    """The part with every float matrix in `storage`, each output's weights side by side."""
    changes: dict[str, Any] = {}
    for item in fields(part):
        value = getattr(part, item.name)
        if isinstance(value, list):
            continue  # packed: narrower than any float
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
    """The weights with all float matrices in `storage`, or as they are if that would change a
    value. Packed ones stay packed."""
    if any(not torch.equal(w.to(storage).to(w.dtype), w) for w in _matrices(weights)):
        return weights
    stored: StepWeights = _store_matrices(weights, storage)
    return stored


def storage_form(weights: StepWeights) -> str:
    """How the weights are stored, as one word for all float matrices and one for each field that is
    otherwise: code for one form does not serve another."""
    form = str(weights.head.dtype)
    parts = list(_named_parts(weights))
    packed = sorted({name for name, value in parts if isinstance(value, list)})
    tables = {str(v.dtype) for name, v in parts if name == "table" and isinstance(v, Tensor)}
    other = sorted(f"table {dtype}" for dtype in tables - {str(weights.embed.dtype)})
    return ", ".join((form, *(f"{name} packed" for name in packed), *other))
