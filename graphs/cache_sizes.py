"""Bytes of the caches: of one record, a token, a request and a block, for any model config.

Owns the arithmetic of both cache formats, in two layouts: that of the reference engine, whose
figures are published for the released model, and that of graphs/state.py. Allocates nothing.

Data flow: model config, format, drafts -> records -> sums over layers and kv sources.

Source: DeepInfer's cache engine (records, paged blocks, state of a request).
"""

import math
from dataclasses import dataclass, replace

import torch

from decodegrid.graphs.kv_cache import KvCache, check_channels, key_columns, key_dtype
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import (
    Capacity,
    allocate_state,
    compressor_ring_len,
    window_ring_len,
)
from decodegrid.kernels.records import RecordFormat

REFERENCE_BLOCK_TOKENS = 128
"""Tokens that a block of the reference engine covers."""

_SECTION_ALIGNMENT = 32
_BLOCK_ALIGNMENT = 128
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class RecordSizes:
    """Bytes of one stored key of each kind."""

    window: int
    """One token of one layer's window."""
    main: int
    """One compressed entry of a kv source."""
    index: int
    """The index key of one entry."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Bytes in the layout of the reference engine."""

    records: RecordSizes
    token: float
    """Paged bytes a token: entries and index keys of all kv sources."""
    request: int
    """State of one request: windows of all layers and compressor rings, rounded up to whole window
    records and sections."""
    persisted: int
    """The part of it that a prefix store keeps: the windows of the encoder's layers."""
    block: int
    """A block of REFERENCE_BLOCK_TOKENS tokens, its alignment included."""


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes of the tensors of graphs/state.py; counts include the null slot and the null block."""

    windows: int
    compressors: int
    pools: int
    slots: int
    """Facts of the slots; the block table, kept draft distributions and the rows of the rich
    variant are among them."""
    request: int
    """What one more slot adds."""

    @property
    def total(self) -> int:
        """All state tensors together."""
        return self.windows + self.compressors + self.pools + self.slots


def record_sizes(config: ModelConfig, kv_cache: KvCache, dtype: torch.dtype) -> RecordSizes:
    """Bytes of the records; `dtype` counts for "compute" only.

    A model without kv sources has window records alone. Raises ValueError where the records of
    "v41" cannot hold the config's dimensions.
    """
    check_channels(config, kv_cache)
    item = key_dtype(kv_cache, dtype).itemsize
    window = item * key_columns(kv_cache, RecordFormat.Q8, config.head_dim)
    if not config.kv_source_layer_ids:
        return RecordSizes(window, 0, 0)
    return RecordSizes(
        window,
        item * key_columns(kv_cache, RecordFormat.Q4N, config.head_dim),
        item * key_columns(kv_cache, RecordFormat.Q4X, config.index_head_dim),
    )


def token_bytes(config: ModelConfig, records: RecordSizes) -> float:
    """Paged bytes a token; a source of ratio 2 has one entry for two tokens."""
    entry = records.main + records.index
    return sum(entry / config.compress_ratios[layer] for layer in config.kv_source_layer_ids)


def block_bytes(config: ModelConfig, records: RecordSizes, block_size: int) -> int:
    """Bytes that one block of `block_size` tokens takes in the pools of graphs/state.py."""
    entry = records.main + records.index
    return sum(
        block_size // config.compress_ratios[layer] * entry for layer in config.kv_source_layer_ids
    )


def cache_sizes(
    config: ModelConfig, kv_cache: KvCache, dtype: torch.dtype, num_draft_tokens: int
) -> CacheSizes:
    """Sizes as the reference engine lays its cache out; `dtype` counts for "compute" only.

    Without drafts there are no drafter windows. Raises ValueError as `record_sizes` does.
    """
    records = record_sizes(config, kv_cache, dtype)
    backtracking = num_draft_tokens + 1
    window = (config.sliding_window + backtracking) * records.window
    ring = 2 + backtracking - 1
    compressor = ring * 2 * config.head_dim * _FLOAT32_BYTES
    num_layers = config.num_layers_total if num_draft_tokens else config.num_hidden_layers
    state = num_layers * window + _num_pooled(config) * compressor
    return CacheSizes(
        records,
        token_bytes(config, records),
        _round_up(state, math.lcm(_SECTION_ALIGNMENT, records.window)),
        config.num_prefill_layers * window,
        _reference_block(config, records),
    )


def state_sizes(config: ModelConfig, capacity: Capacity, dtype: torch.dtype) -> StateSizes:
    """What `allocate_state` takes, tensor for tensor, without taking it."""
    records = record_sizes(config, capacity.kv_cache, dtype)
    drafts = capacity.num_draft_tokens
    num_layers = config.num_layers_total if drafts else config.num_hidden_layers
    ring_len = window_ring_len(config, drafts, capacity.window_slack)
    windows = num_layers * ring_len * records.window
    row = 2 * config.head_dim * torch.promote_types(dtype, torch.float32).itemsize
    compressors = _num_pooled(config) * compressor_ring_len(drafts) * row
    num_unpooled = len(config.kv_source_layer_ids) - _num_pooled(config)
    slots = _slot_bytes(config, capacity, dtype)
    return StateSizes(
        capacity.num_slots * windows,
        # A source of ratio 1 has no state, but a tensor of two rows that stands for it.
        capacity.num_slots * compressors + num_unpooled * 2 * row,
        capacity.num_blocks * block_bytes(config, records, capacity.block_size),
        capacity.num_slots * slots,
        windows + compressors + slots,
    )


def _num_pooled(config: ModelConfig) -> int:
    """Kv sources that pool two tokens, whose pairs are kept in compressor rings."""
    return sum(config.compress_ratios[layer] > 1 for layer in config.kv_source_layer_ids)


def _slot_bytes(config: ModelConfig, capacity: Capacity, dtype: torch.dtype) -> int:
    """Facts of one slot, counted on tensors without memory."""
    one = replace(capacity, num_slots=1, num_blocks=1)
    state = allocate_state(config, one, dtype, "meta")
    facts = ("slots.", "rich.")
    return sum(tensor.nbytes for name, tensor in state.tensors() if name.startswith(facts))


def _reference_block(config: ModelConfig, records: RecordSizes) -> int:
    """Of each source an index section and a main section, each padded, the sum padded again."""
    if not config.kv_source_layer_ids:
        return 0
    total = 0
    for layer in config.kv_source_layer_ids:
        entries = REFERENCE_BLOCK_TOKENS // config.compress_ratios[layer]
        for record in (records.index, records.main):
            total += _round_up(entries * record, _SECTION_ALIGNMENT)
    return _round_up(total, math.lcm(_BLOCK_ALIGNMENT, records.main))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
