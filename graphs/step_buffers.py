"""Static buffers of the steps: allocated once at full size, handed out as leading slices.

Owns the tensors between regions. A captured pair (B, Q) sees the leading B rows and Q tokens of
the same storage, so that buffers cost as much as the largest pair. Nothing here survives a step.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from decodegrid.graphs.bounded_replay import num_kept_rows
from decodegrid.graphs.kv_cache import key_columns, key_dtype
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.rich_state import RichBuffers, allocate_rich_buffers
from decodegrid.graphs.state import Capacity
from decodegrid.kernels.records import RecordFormat

MIN_ROWS = 2
"""Physical rows and tokens are never fewer: symbolic sizes start at 2; the rest are pads."""


@dataclass(frozen=True, slots=True)
class TokenBuffers:
    """One entry per token, first dimension T."""

    input_ids: Tensor
    positions: Tensor
    token_slot: Tensor
    """Slot of the token's request, 0 for pads and surplus tokens."""
    valid: Tensor
    lookback: Tensor
    """(T, ngram) compressed ids, newest first."""
    window_store: Tensor
    """Row of the window source that the token writes."""
    window_index: Tensor
    """(T, window) rows that it reads, -1 for none."""
    ring_store: Tensor
    """Row of the ring for what outlives the step; the null row where it does not."""
    compressor_store: Tensor
    compressor_previous: Tensor
    compressor_ring: Tensor
    entry_store_one: Tensor
    """Pool row of the entry that the token completes, ratio 1; a row of the null block if none."""
    entry_store_two: Tensor
    length_one: Tensor
    """Entries that the token sees, ratio 1."""
    length_two: Tensor
    stream: Tensor
    pre_a: Tensor
    pre_b: Tensor
    post_a: Tensor
    post_b: Tensor
    comb_a: Tensor
    comb_b: Tensor
    x: Tensor
    low_rank: Tensor
    query: Tensor
    attended: Tensor
    index_query: Tensor
    index_weight: Tensor
    entry_index: Tensor
    """(T, index_topk) pool rows selected by the latest indexer layer."""
    candidates: Tensor
    """(T, max entries) bool."""
    taps: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """One entry per request row, first dimension B, and what the host reads after a step."""

    slots: Tensor
    """Input: slot of each row, 0 for pads."""
    query_lens: Tensor
    query_starts: Tensor
    token_ids: Tensor
    """(B, K + 1) output: the target's choice after each query token."""
    num_emitted: Tensor
    """Output: leading entries of token_ids that are emitted; 0 for pads."""
    stopped: Tensor
    """(B,) bool: an emitted token is one of the row's stop tokens."""


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Logits and choices of a decode step, first dimension T."""

    logits: Tensor
    chosen: Tensor


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """What the host writes before a chunk."""

    token_ids: Tensor
    """(T,) int64."""
    facts: Tensor
    """(6,) int64: slot, start position, number of tokens, then the three ids before the start."""
    lower: Tensor
    """(1,) int64: the first position that a bounded replay keeps in the decoder's layers."""


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Full-size buffers of one engine."""

    target: TokenBuffers
    draft: TokenBuffers | None
    rows: RowBuffers
    output: TargetOutput
    draft_logits: Tensor | None
    """(B, block, vocab): base logits, then logits with the Markov bias of the offered drafts."""
    draft_hidden: Tensor | None
    """(B, block, D)."""
    draft_previous: Tensor | None
    """(B,) int64: the token before the draft that is being chosen."""
    draft_steps: Tensor
    """(block,) int64 constants 0, 1, ..; views of it are the step numbers."""
    total: Tensor
    """(1,) int64 input: query tokens to hand out in a decode step."""
    prefill: PrefillInputs
    window_workspace: Tensor
    """(window + largest chunk, columns of a window ring): history, then the chunk."""
    compressor_workspace: Tensor
    """(1 + largest chunk, 2 * head_dim)."""
    history_index: Tensor
    """(window,) ring rows of the history before a chunk."""
    compressor_history: Tensor
    """(2,) compressor ring row before a chunk, twice: symbolic sizes start at 2."""
    late: TokenBuffers | None = None
    """What the decoder's layers of a bounded chunk run over."""
    rich: RichBuffers | None = None
    """Only where the capacity has the rich variant."""


def _token_buffers(
    config: ModelConfig,
    num_tokens: int,
    window: int,
    max_entries: int,
    num_taps: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> TokenBuffers:
    wide = torch.promote_types(dtype, torch.float32)
    n, dim, top_k = config.hc_mult, config.head_dim, max(config.index_topk, 1)

    def make(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(num_tokens, *shape, dtype=kind, device=device)

    return TokenBuffers(
        input_ids=make(),
        positions=make(),
        token_slot=make(),
        valid=make(kind=torch.bool),
        lookback=make(max(config.engram_max_ngram_size, 1)),
        window_store=make(),
        window_index=make(window),
        ring_store=make(),
        compressor_store=make(),
        compressor_previous=make(),
        compressor_ring=make(),
        entry_store_one=make(),
        entry_store_two=make(),
        length_one=make(),
        length_two=make(),
        stream=make(n, config.hidden_size, kind=dtype),
        pre_a=make(n, kind=wide),
        pre_b=make(n, kind=wide),
        post_a=make(n, kind=wide),
        post_b=make(n, kind=wide),
        comb_a=make(n, n, kind=wide),
        comb_b=make(n, n, kind=wide),
        x=make(config.hidden_size, kind=dtype),
        low_rank=make(config.q_lora_rank, kind=dtype),
        query=make(config.num_attention_heads, dim, kind=dtype),
        attended=make(config.num_attention_heads, dim, kind=dtype),
        index_query=make(config.index_n_heads, config.index_head_dim, kind=dtype),
        index_weight=make(config.index_n_heads, kind=dtype),
        entry_index=make(top_k),
        candidates=make(max_entries, kind=torch.bool),
        taps=tuple(make(config.hidden_size, kind=dtype) for _ in range(num_taps)),
    )


def slice_tokens(buffers: TokenBuffers, num_tokens: int) -> TokenBuffers:
    """Views of the leading `num_tokens` entries."""
    parts: dict[str, Any] = {}
    for item in fields(buffers):
        value = getattr(buffers, item.name)
        if isinstance(value, tuple):
            parts[item.name] = tuple(tensor[:num_tokens] for tensor in value)
        else:
            parts[item.name] = value[:num_tokens]
    return TokenBuffers(**parts)


def slice_rows(buffers: RowBuffers, num_rows: int) -> RowBuffers:
    """Views of the leading `num_rows` rows."""
    return RowBuffers(*(getattr(buffers, item.name)[:num_rows] for item in fields(buffers)))


def allocate_buffers(
    config: ModelConfig,
    capacity: Capacity,
    max_chunk: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> StepBuffers:
    """Buffers for `capacity.num_slots - 1` rows and chunks of up to `max_chunk` tokens."""
    wide = torch.promote_types(dtype, torch.float32)
    drafts = capacity.num_draft_tokens
    num_rows = max(capacity.num_slots - 1, MIN_ROWS)
    num_query = num_rows * (drafts + 1)
    num_tokens = max(num_query, max_chunk, MIN_ROWS)
    window, block = config.sliding_window, config.dspark_block_size
    max_entries = capacity.max_blocks_per_slot * capacity.block_size
    num_taps = len(config.dspark_target_layer_ids) if drafts else 0
    target = _token_buffers(config, num_tokens, window, max_entries, num_taps, dtype, device)
    draft, draft_logits, draft_hidden, draft_previous = None, None, None, None
    if drafts:
        draft_previous = torch.zeros(num_rows, dtype=torch.int64, device=device)
        draft_hidden = torch.zeros(
            num_rows, block, config.hidden_size, dtype=dtype, device=device
        )
        draft = _token_buffers(config, num_rows * block, window + block, 1, 0, dtype, device)
        draft_logits = torch.zeros(num_rows, block, config.vocab_size, dtype=wide, device=device)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    rows = RowBuffers(
        slots=ints(num_rows),
        query_lens=ints(num_rows),
        query_starts=ints(num_rows),
        token_ids=ints(num_rows, drafts + 1),
        num_emitted=ints(num_rows),
        stopped=torch.zeros(num_rows, dtype=torch.bool, device=device),
    )
    chunk, vocab = max(max_chunk, MIN_ROWS), config.vocab_size
    rich = None
    if capacity.rich:
        rich = allocate_rich_buffers(num_rows, drafts, chunk, vocab, wide, device)
    late = None
    if capacity.bounded_replay != "off":
        kept = max(MIN_ROWS, num_kept_rows(capacity.bounded_replay, capacity.keep_tokens, chunk))
        late = _token_buffers(config, kept, window, max_entries, num_taps, dtype, device)
    logits = torch.zeros(num_query, config.vocab_size, dtype=wide, device=device)
    return StepBuffers(
        target=target,
        draft=draft,
        rows=rows,
        output=TargetOutput(logits, ints(num_query)),
        draft_logits=draft_logits,
        draft_hidden=draft_hidden,
        draft_previous=draft_previous,
        draft_steps=torch.arange(max(block, 1), device=device),
        total=ints(1),
        prefill=PrefillInputs(ints(chunk), ints(6), ints(1)),
        window_workspace=torch.zeros(
            window + chunk,
            key_columns(capacity.kv_cache, RecordFormat.Q8, config.head_dim),
            dtype=key_dtype(capacity.kv_cache, dtype),
            device=device,
        ),
        compressor_workspace=torch.zeros(
            1 + chunk, 2 * config.head_dim, dtype=wide, device=device
        ),
        history_index=ints(window),
        compressor_history=ints(2),
        late=late,
        rich=rich,
    )
