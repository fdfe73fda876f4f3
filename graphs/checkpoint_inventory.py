"""Every tensor that a checkpoint of a given config holds, from the config alone.

Owns the shapes of all weights, the image path's included, the parts that they belong to, and what
their counts say of the model. Builds no module and reads no tensor file, so that it answers for the
released model in a second. Which weights are quantised, and how, stands in quant_layout.py.

Data flow: config -> (name, shape) of each weight -> stored names, dtypes and shapes -> sums.

Source: safetensors inventory of deepseek-ai/DeepSeek-V4.1-Flash.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from decodegrid.graphs.checkpoint_names import FLOAT_DTYPES
from decodegrid.graphs.model import is_wide_parameter
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.model_config_checks import ConfigFieldError, bad_field
from decodegrid.graphs.quant_layout import (
    CODE_DTYPES,
    SCALE_DTYPE,
    StoredKind,
    scale_name,
    stored_kind,
    stored_shapes,
)

MAX_TENSORS = 1_000_000
"""Most tensors that are enumerated; the released model has 96,085."""

Weight = tuple[str, tuple[int, ...]]
"""Checkpoint name and logical shape of a weight."""

_PARTS = (
    (re.compile(r"(vision|aligner)\.|image_"), "vision"),
    (re.compile(r"mtp\."), "drafter"),
    (re.compile(r"layers\.\d+\.ffn\.experts\."), "routed experts"),
    (re.compile(r"layers\.\d+\.engram\.embed\."), "engram tables"),
    (re.compile(r"layers\.\d+\.engram\."), "engram projections"),
    (re.compile(r"layers\.\d+\.ffn\.(shared|gate)"), "shared experts and routers"),
    (re.compile(r"layers\.\d+\.attn\."), "attention"),
    (re.compile(r"(embed|head)\."), "embedding and head"),
)
PARTS = (*(part for _, part in _PARTS), "norms and mixers")
"""What the bytes of a checkpoint are split into."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """What decides the shapes of the image path, named as in config.json."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """One tensor as the format asks for it."""

    name: str
    dtype: str
    """Safetensors dtype in which it is written."""
    shape: tuple[int, ...]
    allowed: tuple[str, ...]
    """All dtypes in which it may be stored."""


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Numbers of weights, scales not counted."""

    total: int
    experts: int
    """Routed experts of the target."""
    engram: int
    """Engram tables."""
    drafter: int
    vision: int
    active: int
    """Of the target, what one decoded token is multiplied with or looks up."""


def read_vision_config(raw: dict[str, Any]) -> VisionConfig | None:
    """The image path's sizes in a parsed config.json; None without a vision_config.

    Raises ConfigFieldError for a field that is missing or no positive integer.
    """
    vision = raw.get("vision_config")
    if vision is None:
        return None
    if not isinstance(vision, dict):
        raise bad_field("vision_config", vision, "must be an object")
    values = {}
    for field in fields(VisionConfig):
        where = f"vision_config.{field.name}"
        if field.name not in vision:
            raise ConfigFieldError(f"config.json: {where} is missing")
        value = vision[field.name]
        if type(value) is not int or not 0 < value < 2**31:
            raise bad_field(where, value, "must be an integer from 1 to 2**31 - 1")
        values[field.name] = value
    return VisionConfig(**values)


def released_tensors(
    config: ModelConfig, vision: VisionConfig | None, float_dtype: str = "BF16"
) -> Iterator[StoredSpec]:
    """Every stored tensor of the text model, and of the image path if there is one.

    float_dtype: the safetensors dtype of weights that are stored as floats and need not be wide;
    wide ones are F32, or F64 with it. Raises ValueError for a weight that the config wants
    quantised and whose shape cannot be.
    """
    wide = "F64" if float_dtype == "F64" else "F32"
    for name, shape in text_weights(config):
        kind = stored_kind(name) if config.quantized else StoredKind.FLOAT
        if kind is StoredKind.FLOAT:
            is_wide = is_wide_parameter(name)
            allowed = tuple(d for d in FLOAT_DTYPES if not (is_wide and d == "BF16"))
            yield StoredSpec(name, wide if is_wide else float_dtype, shape, allowed)
            continue
        try:
            codes, scales = stored_shapes(kind, shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        yield StoredSpec(name, CODE_DTYPES[kind][0], codes, CODE_DTYPES[kind])
        yield StoredSpec(scale_name(name), SCALE_DTYPE, scales, (SCALE_DTYPE,))
    if vision is not None:
        for name, shape in vision_weights(vision, config.hidden_size):
            yield StoredSpec(name, float_dtype, shape, tuple(FLOAT_DTYPES))


def num_tensors_bound(config: ModelConfig, vision: VisionConfig | None) -> int:
    """A count that `released_tensors` does not pass, without enumerating anything."""
    experts = config.num_hidden_layers * config.n_routed_experts
    experts += config.num_nextn_predict_layers * config.dspark_n_routed_experts
    blocks = 0 if vision is None else vision.num_hidden_layers
    return 6 * experts + 64 * (config.num_layers_total + blocks + 1)


def part_of(name: str) -> str:
    """Which of PARTS the tensor `name` belongs to."""
    return next((part for pattern, part in _PARTS if pattern.match(name)), PARTS[-1])


def count_parameters(config: ModelConfig, vision: VisionConfig | None) -> ParameterCounts:
    """Numbers of weights of the model that a config describes."""
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in text_weights(config):
        counts[part_of(name)] += math.prod(shape)
    if vision is not None:
        for _, shape in vision_weights(vision, config.hidden_size):
            counts["vision"] += math.prod(shape)
    looked_up = len(config.engram_layer_ids) * config.engram_columns * config.engram_head_dim
    unvisited = (config.vocab_size - 1) * config.hidden_size  # rows of the embedding
    rest = ("vision", "drafter", "routed experts", "engram tables")
    active = sum(count for part, count in counts.items() if part not in rest) - unvisited
    active += counts["routed experts"] * config.num_experts_per_tok // config.n_routed_experts
    return ParameterCounts(
        total=sum(counts.values()),
        experts=counts["routed experts"],
        engram=counts["engram tables"],
        drafter=counts["drafter"],
        vision=counts["vision"],
        active=active + looked_up,
    )


def text_weights(config: ModelConfig) -> Iterator[Weight]:
    """Weights of target and drafter: checkpoint names and logical shapes, none of them packed."""
    table = (config.vocab_size, config.hidden_size)
    yield "embed.weight", table
    for layer in range(config.num_layers_total):
        index = layer - config.num_hidden_layers
        prefix = f"layers.{layer}." if index < 0 else f"mtp.{index}."
        yield from _named(prefix + "attn.", _attention(config, layer))
        yield from _named(prefix + "ffn.", _experts(config, is_drafter=index >= 0))
        yield from _named(prefix, _rest_of_layer(config, layer))
        if index >= 0:
            yield from _named(prefix, _drafter_only(config, index))
    yield "norm.weight", (config.hidden_size,)
    yield "head.weight", table


def vision_weights(vision: VisionConfig, hidden_size: int) -> Iterator[Weight]:
    """Weights of the image path; hidden_size: that of the text model."""
    dim, inner = vision.hidden_size, vision.intermediate_size
    for name in ("image_start", "image_end", "image_newline"):
        yield name, (hidden_size,)
    yield "vision.patch_embed.proj.weight", (dim, 3 * vision.patch_size**2)
    yield "vision.patch_embed.proj.bias", (dim,)
    for block in range(vision.num_hidden_layers):
        layout: tuple[Weight, ...] = (
            ("norm1.weight", (dim,)),
            ("norm2.weight", (dim,)),
            ("attn.wqkv.weight", (3 * dim, dim)),
            ("attn.wqkv.bias", (3 * dim,)),
            ("attn.wo.weight", (dim, dim)),
            ("attn.wo.bias", (dim,)),
            ("mlp.w1.weight", (2 * inner, dim)),
            ("mlp.w2.weight", (dim, inner)),
        )
        yield from _named(f"vision.blocks.{block}.", layout)
    yield "vision.norm.weight", (dim,)
    yield "aligner.w1.weight", (hidden_size, dim * vision.downsample_ratio**2)
    yield "aligner.w1.bias", (hidden_size,)
    yield "aligner.w2.weight", (hidden_size, hidden_size)
    yield "aligner.w2.bias", (hidden_size,)


def _named(prefix: str, weights: Iterator[Weight] | tuple[Weight, ...]) -> Iterator[Weight]:
    for name, shape in weights:
        yield prefix + name, shape


def _attention(config: ModelConfig, layer: int) -> Iterator[Weight]:
    hidden, dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    yield "wq_a.weight", (config.q_lora_rank, hidden)
    yield "q_norm.weight", (config.q_lora_rank,)
    yield "wq_b.weight", (heads * dim, config.q_lora_rank)
    yield "wkv.weight", (dim, hidden)
    yield "kv_norm.weight", (dim,)
    yield "wo_a.weight", (config.o_groups * config.o_lora_rank, heads * dim // config.o_groups)
    yield "wo_b.weight", (hidden, config.o_groups * config.o_lora_rank)
    yield "attn_sink", (heads,)
    is_source = layer in config.kv_source_layer_ids
    if is_source:
        yield "compressor.wkv.weight", (dim, hidden)
        if config.compress_ratios[layer] > 1:
            yield "compressor.wgate.weight", (dim, hidden)
        yield "compressor.norm.weight", (dim,)
    if layer in config.index_source_layer_ids:
        index_dim = config.index_head_dim
        yield "indexer.wq_b.weight", (config.index_n_heads * index_dim, config.q_lora_rank)
        yield "indexer.weights_proj.weight", (config.index_n_heads, hidden)
        if is_source:
            yield "indexer.wk.weight", (index_dim, dim)
            yield "indexer.k_norm.weight", (index_dim,)


def _experts(config: ModelConfig, is_drafter: bool) -> Iterator[Weight]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    count = config.dspark_n_routed_experts if is_drafter else config.n_routed_experts
    yield "gate.weight", (count, hidden)
    yield "gate.bias", (count,)
    yield "gate.bias_vl", (count,)
    places = [f"experts.{expert}" for expert in range(count)]
    for place in (*places, "shared_experts"):
        yield f"{place}.w1.weight", (inner, hidden)
        yield f"{place}.w3.weight", (inner, hidden)
        yield f"{place}.w2.weight", (hidden, inner)


def _rest_of_layer(config: ModelConfig, layer: int) -> Iterator[Weight]:
    """Norms, mHC mixers and Engram."""
    hidden, copies = config.hidden_size, config.hc_mult
    mixes = copies * (copies + 2)
    for part in ("attn", "ffn"):
        yield f"{part}_norm.weight", (hidden,)
        yield f"hc_{part}_fn", (mixes, copies * hidden)
        yield f"hc_{part}_scale", (3,)
        yield f"hc_{part}_base", (mixes,)
    if layer in config.engram_layer_ids:
        rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        width = config.engram_columns * config.engram_head_dim
        yield "engram.embed.weight", (rows, config.engram_head_dim)
        yield "engram.wkv.weight", ((copies + 1) * hidden, width)
        yield "engram.q_weight", (copies, hidden)
        yield "engram.k_weight", (copies, hidden)


def _drafter_only(config: ModelConfig, index: int) -> Iterator[Weight]:
    """What the first and the last drafter layer have beside a layer's weights."""
    hidden, rank = config.hidden_size, config.dspark_markov_rank
    if index == 0:
        yield "main_proj.weight", (hidden, len(config.dspark_target_layer_ids) * hidden)
        yield "main_norm.weight", (hidden,)
    if index == config.num_nextn_predict_layers - 1:
        yield "norm.weight", (hidden,)
        yield "markov_head.embed.weight", (config.vocab_size, rank)
        yield "markov_head.head.weight", (config.vocab_size, rank)
        yield "confidence_head.proj.weight", (1, hidden + rank)
