"""One decode step as one function without host decisions.

Data flow: slot state -> verify lengths and token metadata -> target layers over Q tokens -> choice
per token -> accepted prefix and slot state -> drafter over B blocks -> new drafts in slot state.
The function only calls regions on buffers that never move, so it can be captured whole. The rich
variant is the same step cut after the logits, with regions that adjust and report them.
"""

from dataclasses import dataclass

from torch import Tensor

from decodegrid.graphs.regions import RegionTable
from decodegrid.graphs.rich_state import RichState
from decodegrid.graphs.step_buffers import (
    MIN_ROWS,
    RowBuffers,
    StepBuffers,
    TokenBuffers,
    slice_rows,
    slice_tokens,
)
from decodegrid.graphs.target_step import (
    HistorySource,
    StepModel,
    run_after_attention,
    run_attn_in,
    run_collapse,
    run_target_layers,
)
from decodegrid.kernels.products import as_flat_list


def _nothing(layer: int) -> None:
    """Decode reads and writes the rings in place."""


def ring_history(model: StepModel) -> HistorySource:
    """History in the rings themselves."""
    state = model.state
    return HistorySource(
        lambda layer: state.window_rings[layer],
        lambda layer: state.pools[layer].compressor,
        _nothing,
        _nothing,
    )


def decode_step(
    regions: RegionTable,
    model: StepModel,
    buffers: StepBuffers,
    draft_temperature: Tensor,
    num_reqs: int,
    num_query_tokens: int,
) -> None:
    """Run the step of the pair (num_reqs, num_query_tokens).

    Reads `buffers.rows.slots` (leading num_reqs rows), `buffers.total` and slot state; writes
    `buffers.rows` outputs and slot state. draft_temperature: (K,) divides confidence logits.
    """
    forward_half(regions, model, buffers, num_reqs, num_query_tokens)
    parts = slice_pair(buffers, num_reqs, num_query_tokens)
    choose_and_accept(regions, model, parts, parts.logits)
    if model.weights.draft_head is not None:
        run_drafter(regions, model, buffers, parts.rows, draft_temperature, num_reqs)


@dataclass(frozen=True, slots=True)
class PairBuffers:
    """What a pair's step sees of the buffers between its halves."""

    rows: RowBuffers
    tokens: TokenBuffers
    logits: Tensor
    chosen: Tensor


def slice_pair(buffers: StepBuffers, num_reqs: int, num_query_tokens: int) -> PairBuffers:
    """Views of the leading rows and tokens."""
    tokens = slice_tokens(buffers.target, max(num_query_tokens, MIN_ROWS))
    count = tokens.positions.shape[0]
    return PairBuffers(
        slice_rows(buffers.rows, max(num_reqs, MIN_ROWS)),
        tokens,
        buffers.output.logits[:count],
        buffers.output.chosen[:count],
    )


def forward_half(
    regions: RegionTable,
    model: StepModel,
    buffers: StepBuffers,
    num_reqs: int,
    num_query_tokens: int,
) -> None:
    """From slot state to logits and the drafter's context."""
    parts = slice_pair(buffers, num_reqs, num_query_tokens)
    rows, tokens, slots, weights = parts.rows, parts.tokens, model.state.slots, model.weights
    regions["decode_metadata"](
        rows.slots, buffers.total, slots.last_token, slots.seq_len, slots.history,
        slots.max_seq_len, slots.drafts, slots.num_drafts, slots.confidence, slots.block_table,
        weights.compressed_ids, rows.query_lens, rows.query_starts, *metadata_outputs(tokens),
    )
    pre = run_target_layers(regions, model, tokens, ring_history(model))
    regions["head"](tokens.stream, pre, weights.norm, weights.head, parts.logits)
    if weights.draft_head is not None:
        store_draft_context(regions, model, tokens)


def choose_and_accept(
    regions: RegionTable, model: StepModel, parts: PairBuffers, logits: Tensor
) -> None:
    """From logits, (Q, vocab), to emitted tokens and slot state."""
    rows, tokens, slots, chosen = parts.rows, parts.tokens, model.state.slots, parts.chosen
    asked = (slots.temperature, slots.top_p, slots.top_k, slots.min_p, slots.seed)
    in_rows = (
        rows.slots, rows.query_lens, rows.query_starts, slots.last_token, slots.seq_len,
        slots.history, slots.drafts, slots.num_drafts, slots.stop_token_ids, rows.token_ids,
        rows.num_emitted, rows.stopped,
    )
    if model.state.capacity.keeps_draft_distributions:
        regions["verify"](
            logits, tokens.token_slot, tokens.positions, *asked, slots.draft_log_probs, *in_rows
        )
    else:
        regions["choose"](logits, tokens.token_slot, tokens.positions, *asked, chosen)
        regions["accept"](chosen, *in_rows)


def choice_half(
    regions: RegionTable,
    model: StepModel,
    buffers: StepBuffers,
    draft_temperature: Tensor,
    num_reqs: int,
    num_query_tokens: int,
) -> None:
    """The rich variant behind `forward_half` of the same pair; reads `buffers.rich.masks` too."""
    rich, state = buffers.rich, model.state.rich
    assert rich is not None and state is not None
    parts, slots = slice_pair(buffers, num_reqs, num_query_tokens), model.state.slots
    rows, tokens = parts.rows, parts.tokens
    count, num_rows = tokens.positions.shape[0], rows.slots.shape[0]
    regions["adjust"](
        parts.logits, tokens.token_slot, tokens.positions, rows.slots, slots.seq_len,
        slots.drafts, rich.masks[:num_rows], *state.adjusting(), rich.adjusted[:count],
    )
    choose_and_accept(regions, model, parts, rich.adjusted[:count])
    regions["count_tokens"](
        rows.slots, rows.token_ids, rows.num_emitted, state.enabled, state.counts
    )
    regions["report"](
        parts.logits, tokens.token_slot, rows.query_starts, rows.token_ids, state.enabled,
        state.wants_logprobs, rich.chosen[:num_rows], rich.top_ids[:num_rows],
        rich.top_logprobs[:num_rows],
    )
    if model.weights.draft_head is not None:
        run_drafter(regions, model, buffers, rows, draft_temperature, num_reqs, rich=state)


def metadata_outputs(tokens: TokenBuffers) -> tuple[Tensor, ...]:
    """The fields that both metadata regions write, in their argument order."""
    return (
        tokens.input_ids, tokens.positions, tokens.token_slot, tokens.valid, tokens.lookback,
        tokens.window_store, tokens.window_index, tokens.ring_store, tokens.compressor_store,
        tokens.compressor_previous, tokens.compressor_ring, tokens.entry_store_one,
        tokens.entry_store_two, tokens.length_one, tokens.length_two,
    )


def store_draft_context(regions: RegionTable, model: StepModel, tokens: TokenBuffers) -> None:
    """Context keys of all target tokens into the drafter's rings, accepted or not."""
    weights = model.weights
    head = weights.draft_head
    assert head is not None
    rings = model.state.window_rings[model.config.num_hidden_layers :]
    regions["draft_context"](
        list(tokens.taps), tokens.positions, tokens.ring_store, head.main_proj, head.main_norm,
        as_flat_list([layer.attention.w_in for layer in weights.draft_layers]),
        [layer.attention.kv_norm for layer in weights.draft_layers],
        [layer.attention.frequencies for layer in weights.draft_layers],
        list(rings),
    )


def run_drafter(
    regions: RegionTable,
    model: StepModel,
    buffers: StepBuffers,
    rows: RowBuffers,
    draft_temperature: Tensor,
    num_reqs: int,
    rich: RichState | None = None,
) -> None:
    """Draft block of every row after acceptance; installs drafts and confidences in the slots.

    The layers run over the blocks of `num_reqs` rows. A single row has a pad beside it in `rows`;
    that row's block is left as it is, and the heads drop what they make of it.
    """
    config, weights, slots = model.config, model.weights, model.state.slots
    head = weights.draft_head
    assert head is not None and buffers.draft is not None
    block = config.dspark_block_size
    tokens = slice_tokens(buffers.draft, max(num_reqs * block, MIN_ROWS))
    regions["draft_metadata"](
        rows.slots, slots.last_token, slots.seq_len, tokens.input_ids, tokens.positions,
        tokens.token_slot, tokens.valid, tokens.window_store, tokens.window_index,
    )
    regions["embed"](tokens.input_ids, weights.embed, tokens.stream, tokens.pre_a)
    pre, spare = tokens.pre_a, tokens.pre_b
    for index, layer in enumerate(weights.draft_layers):
        ring = model.state.window_rings[config.num_hidden_layers + index]
        run_collapse(regions, tokens, layer, pre, spare)
        run_attn_in(regions, tokens, layer, ring)
        regions["attend_window"](
            tokens.query, ring, tokens.window_index, layer.attention.sink, tokens.attended
        )
        run_after_attention(regions, tokens, layer, "draft_moe", spare, pre)
    whole = slice_tokens(buffers.draft, rows.slots.shape[0] * block)
    run_draft_heads(regions, model, buffers, rows, whole, draft_temperature, rich)


def run_draft_heads(
    regions: RegionTable,
    model: StepModel,
    buffers: StepBuffers,
    rows: RowBuffers,
    tokens: TokenBuffers,
    draft_temperature: Tensor,
    rich: RichState | None,
) -> None:
    """Base logits of the block in parallel, then the Markov chain, one draft after another."""
    head, slots = model.weights.draft_head, model.state.slots
    logits, hidden, previous = buffers.draft_logits, buffers.draft_hidden, buffers.draft_previous
    assert head is not None and logits is not None and hidden is not None and previous is not None
    count = rows.slots.shape[0]
    logits, hidden, previous = logits[:count], hidden[:count], previous[:count]
    regions["draft_base"](
        tokens.stream,
        tokens.pre_a,
        head.norm,
        model.weights.head,
        rows.slots,
        rows.stopped,
        slots.last_token,
        slots.num_drafts,
        hidden,
        logits,
        previous,
    )
    if rich is not None:
        regions["adjust_drafts"](rows.slots, slots.seq_len, *rich.adjusting(), logits)
    keeps = model.state.capacity.keeps_draft_distributions
    for step in range(model.state.capacity.num_draft_tokens):
        regions["draft_sample" if keeps else "draft_choose"](
            hidden[:, step],
            previous,
            head.markov_embed,
            head.markov_head,
            head.confidence,
            rows.slots,
            rows.stopped,
            slots.seq_len,
            slots.temperature,
            slots.top_p,
            slots.top_k,
            slots.min_p,
            slots.seed,
            buffers.draft_steps[step : step + 1],
            draft_temperature[step : step + 1],
            logits[:, step],
            slots.drafts[:, step],
            slots.confidence[:, step],
            *([slots.draft_log_probs[:, step]] if keeps else []),
        )
