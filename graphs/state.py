"""Slot-indexed state that never moves: rings, paged pools and the facts of each live request.

Owns every tensor that one step leaves for the next. Slot 0 and block 0 are the null slot and the
null block: pads write there and nothing live reads from it. Rings are long enough that what a
rejected draft wrote is overwritten or masked before it can be read, so nothing is ever undone.
The host writes slot rows when a request starts, grows or stops; steps write everything else.

Source: DeepInfer's cache engine (ring lengths, paging); design: roll-back by construction.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from decodegrid.graphs.kv_cache import KvCache, key_columns, key_dtype
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.rich_state import RichState, allocate_rich_state
from decodegrid.kernels.records import RecordFormat

MAX_STOP_TOKEN_IDS = 8
"""Stop tokens a slot can hold; -1 fills the rest."""


VerifyMode = Literal["coupled", "rejection"]
"""How drafts are verified: equal noise on both sides, or rejection sampling."""

BoundedReplay = Literal["off", "mask", "compact"]
"""How a prefill treats all but the last tokens in the decoder's layers: as the others, with no
window, or not at all."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a deployment chooses about state. Counts include the null slot and the null block."""

    num_slots: int
    num_blocks: int
    block_size: int
    """Tokens a block covers; even."""
    max_model_len: int
    num_draft_tokens: int
    verify: VerifyMode = "coupled"
    kv_cache: KvCache = "compute"
    """What rings and pools hold: keys in the model's dtype, or their records."""
    window_slack: int = 0
    """Positions that a window ring keeps beyond what steps read, for snapshots of a window that
    ended a while ago."""
    rich: bool = False
    """Whether steps have the rich variant."""
    bounded_replay: BoundedReplay = "off"
    keep_tokens: int = 0
    """Last tokens of a text that a bounded replay keeps in the decoder's layers."""

    @property
    def keeps_draft_distributions(self) -> bool:
        """Rejection sampling needs what a draft was drawn from; without drafts both modes draw
        from the target alone."""
        return self.verify == "rejection" and self.num_draft_tokens > 0

    @property
    def max_blocks_per_slot(self) -> int:
        """Block table width: blocks of a request at the length limit."""
        return -(-self.max_model_len // self.block_size)


def window_ring_len(config: ModelConfig, num_draft_tokens: int, window_slack: int = 0) -> int:
    """Slots of a window ring: a step writes ahead of the window and may be rolled back."""
    ahead = num_draft_tokens
    if num_draft_tokens > 0:
        ahead = max(ahead, config.dspark_block_size)
    return config.sliding_window + ahead + 1 + window_slack


def compressor_ring_len(num_draft_tokens: int) -> int:
    """Slots of the ratio-2 compressor ring: the pair plus the tokens that may be rolled back."""
    return 2 + num_draft_tokens


@dataclass(frozen=True, slots=True)
class SourcePool:
    """Paged entries of one kv source layer, rows addressed as block * (block_size / ratio) + i.

    With `kv_cache` v41 the columns are the bytes of a record instead of channels.
    """

    keys: Tensor
    """(num_blocks * block_size / ratio, head_dim)."""
    index_keys: Tensor
    """(num_blocks * block_size / ratio, index_head_dim)."""
    compressor: Tensor
    """(num_slots * ring, 2 * head_dim) gate scores and latents; one row for ratio 1."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """Facts of each slot, first dimension num_slots."""

    last_token: Tensor
    """(S,) int64, the golden token at position seq_len - 1."""
    seq_len: Tensor
    """(S,) int64 committed length: prompt and emitted tokens."""
    history: Tensor
    """(S, 3) int64 raw ids at positions seq_len - 4 .. seq_len - 2, -1 before the start."""
    max_seq_len: Tensor
    """(S,) int64 length at which the request ends."""
    drafts: Tensor
    """(S, K) int64; K is at least 1 so that the tensor exists."""
    num_drafts: Tensor
    """(S,) int64, 0 for a fresh slot."""
    confidence: Tensor
    """(S, K) island dtype, conditional acceptance estimates in 0..1."""
    temperature: Tensor
    """(S,) island dtype, 0 means greedy."""
    top_p: Tensor
    """(S,) island dtype, 1 keeps every token."""
    top_k: Tensor
    """(S,) int64, -1 keeps every token."""
    min_p: Tensor
    """(S,) island dtype, 0 keeps every token."""
    seed: Tensor
    """(S,) int64, non-negative."""
    stop_token_ids: Tensor
    """(S, MAX_STOP_TOKEN_IDS) int64, -1 for none."""
    draft_log_probs: Tensor
    """(S, K, vocab) island dtype, what each draft was drawn from; (S, 0, vocab) where drafts are
    not verified by rejection."""
    block_table: Tensor
    """(S, max_blocks_per_slot) int64, 0 for none."""


@dataclass(frozen=True, slots=True)
class DecodeState:
    """All state of one engine."""

    capacity: Capacity
    ring_len: int
    compressor_len: int
    slots: SlotState
    window_rings: tuple[Tensor, ...]
    """Per layer, drafter layers last: (num_slots * ring_len, head_dim or bytes of a record)."""
    pools: dict[int, SourcePool]
    """By kv source layer."""
    rich: RichState | None = None
    """Only where the capacity has the rich variant."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with a name, for proofs that look at all of them."""
        for name in SlotState.__slots__:
            yield f"slots.{name}", getattr(self.slots, name)
        if self.rich is not None:
            for name in RichState.__slots__:
                yield f"rich.{name}", getattr(self.rich, name)
        for layer, ring in enumerate(self.window_rings):
            yield f"window_rings.{layer}", ring
        for layer, pool in self.pools.items():
            for name in SourcePool.__slots__:
                yield f"pools.{layer}.{name}", getattr(pool, name)

    def num_bytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors())


def allocate_state(
    config: ModelConfig, capacity: Capacity, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DecodeState:
    """Zeroed state; keys and rings in `dtype` or uint8 records, confidences, temperatures and
    compressor rings at least fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    num_slots, drafts = capacity.num_slots, max(capacity.num_draft_tokens, 1)
    ring_len = window_ring_len(config, capacity.num_draft_tokens, capacity.window_slack)
    compressor_len = compressor_ring_len(capacity.num_draft_tokens)

    def ints(*shape: int, fill: int = 0) -> Tensor:
        return torch.full((num_slots, *shape), fill, dtype=torch.int64, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.zeros((num_slots, *shape), dtype=wide, device=device)

    slots = SlotState(
        last_token=ints(),
        seq_len=ints(fill=1),
        history=ints(3, fill=-1),
        max_seq_len=ints(fill=1),
        drafts=ints(drafts),
        num_drafts=ints(),
        confidence=floats(drafts),
        temperature=floats(),
        top_p=floats().fill_(1.0),
        top_k=ints(fill=-1),
        min_p=floats(),
        seed=ints(),
        stop_token_ids=ints(MAX_STOP_TOKEN_IDS, fill=-1),
        draft_log_probs=floats(
            capacity.num_draft_tokens if capacity.keeps_draft_distributions else 0,
            config.vocab_size,
        ),
        block_table=ints(capacity.max_blocks_per_slot),
    )
    num_layers = config.num_hidden_layers
    if capacity.num_draft_tokens > 0:
        num_layers = config.num_layers_total

    def keys(rows: int, form: RecordFormat, dim: int) -> Tensor:
        columns = key_columns(capacity.kv_cache, form, dim)
        return torch.zeros(rows, columns, dtype=key_dtype(capacity.kv_cache, dtype), device=device)

    rings = tuple(
        keys(num_slots * ring_len, RecordFormat.Q8, config.head_dim) for _ in range(num_layers)
    )
    pools = {}
    for layer in config.kv_source_layer_ids:
        ratio = config.compress_ratios[layer]
        rows = capacity.num_blocks * capacity.block_size // ratio
        state_rows = num_slots * compressor_len if ratio > 1 else 2
        pools[layer] = SourcePool(
            keys(rows, RecordFormat.Q4N, config.head_dim),
            keys(rows, RecordFormat.Q4X, config.index_head_dim),
            torch.zeros(state_rows, 2 * config.head_dim, dtype=wide, device=device),
        )
    rich = None
    if capacity.rich:
        rich = allocate_rich_state(num_slots, config.vocab_size, wide, device)
    return DecodeState(capacity, ring_len, compressor_len, slots, rings, pools, rich)
