"""One prefill chunk: the same layers over the prompt's tokens, from any position.

A prompt's last token is not prefilled: it is the golden token of the first decode step, so a chunk
needs neither head nor sampling. Window keys of the chunk and of the `window` positions before it
stand in a workspace; what a later step may read is copied to the rings after each layer.
"""

from decodegrid.graphs.bounded_replay import KEPT_FIELDS, num_kept_rows
from decodegrid.graphs.decode_step import metadata_outputs, store_draft_context
from decodegrid.graphs.regions import RegionTable
from decodegrid.graphs.step_buffers import MIN_ROWS, StepBuffers, TokenBuffers, slice_tokens
from decodegrid.graphs.target_step import (
    HistorySource,
    StepModel,
    run_collapse,
    run_collapsed,
    run_layers,
    run_source,
    run_tap,
    run_target_layers,
)


def workspace_history(
    regions: RegionTable, model: StepModel, buffers: StepBuffers, tokens: TokenBuffers
) -> HistorySource:
    """History loaded from the rings before a layer, committed to them after it."""
    state, window = model.state, model.config.sliding_window
    space, compressor = buffers.window_workspace, buffers.compressor_workspace

    def load(layer: int) -> None:
        regions["load_window"](state.window_rings[layer], buffers.history_index, space[:window])
        pool = state.pools.get(layer)
        if pool is not None and model.weights.layers[layer].ratio == 2:
            # Two equal rows, so that the copied size is never 1; the second is overwritten.
            regions["load_compressor"](pool.compressor, buffers.compressor_history, compressor[:2])

    def commit(layer: int) -> None:
        regions["copy_window"](
            space, tokens.window_store, state.window_rings[layer], tokens.ring_store
        )
        pool = state.pools.get(layer)
        if pool is not None and model.weights.layers[layer].ratio == 2:
            regions["copy_compressor"](
                compressor, tokens.compressor_store, pool.compressor, tokens.compressor_ring
            )

    return HistorySource(lambda layer: space, lambda layer: compressor, load, commit)


def prefill_step(
    regions: RegionTable, model: StepModel, buffers: StepBuffers, chunk_size: int
) -> None:
    """Run a chunk of up to `chunk_size` tokens.

    Reads `buffers.prefill`; writes pools, rings and compressor rings of the slot. Several tokens
    may store to the null row; what it holds is never read by a live token.
    """
    tokens = slice_tokens(buffers.target, max(chunk_size, MIN_ROWS))
    count = tokens.positions.shape[0]
    inputs, slots = buffers.prefill, model.state.slots
    regions["prefill_metadata"](
        inputs.token_ids[:count], inputs.facts, slots.block_table, model.weights.compressed_ids,
        buffers.history_index, buffers.compressor_history, *metadata_outputs(tokens),
    )
    history = workspace_history(regions, model, buffers, tokens)
    if buffers.late is None:
        run_target_layers(regions, model, tokens, history)
    else:
        tokens = run_bounded_layers(regions, model, buffers, tokens, history)
    if model.weights.draft_head is not None:
        store_draft_context(regions, model, tokens)


def run_bounded_layers(
    regions: RegionTable, model: StepModel, buffers: StepBuffers, tokens: TokenBuffers,
    history: HistorySource,
) -> TokenBuffers:
    """All target layers, the decoder's over the rows that are kept; returns their buffers.

    The first decoder layer writes its entries from all rows before the others are dropped.
    """
    capacity, split = model.state.capacity, model.config.num_prefill_layers
    assert buffers.late is not None
    kept = num_kept_rows(
        capacity.bounded_replay, capacity.keep_tokens, tokens.positions.shape[0]
    )
    late = slice_tokens(buffers.late, max(kept, MIN_ROWS))
    regions["embed"](tokens.input_ids, model.weights.embed, tokens.stream, tokens.pre_a)
    run_layers(regions, model, tokens, history, range(split))
    run_collapse(regions, tokens, model.weights.layers[split], tokens.pre_a, tokens.pre_b)
    run_source(regions, model, tokens, split, history)
    regions["keep_rows"](
        buffers.prefill.lower,
        *(getattr(tokens, name) for name in KEPT_FIELDS),
        *(getattr(late, name) for name in KEPT_FIELDS),
    )
    run_tap(regions, model, late, split)
    late_history = workspace_history(regions, model, buffers, late)
    late_history.load(split)
    run_collapsed(regions, model, late, split, late_history)
    rest = range(split + 1, model.config.num_hidden_layers)
    run_layers(regions, model, late, late_history, rest)
    return late


def report_prompt(
    regions: RegionTable, model: StepModel, buffers: StepBuffers, chunk_size: int
) -> None:
    """Log-probabilities at the positions of the chunk that `prefill_step` has just run.

    Reads `buffers.rich.following` and what the last layer left; writes `buffers.rich.prompt_*`. The
    head runs over slices that fit the logits of a decode step, which are free meanwhile.
    """
    rich, weights = buffers.rich, model.weights
    assert rich is not None
    tokens = slice_tokens(buffers.target, max(chunk_size, MIN_ROWS))
    count = tokens.positions.shape[0]
    size = min(count, buffers.output.logits.shape[0])
    logits = buffers.output.logits[:size]
    for begin in range(0, count, size):
        # The last slice overlaps the one before it, so that all have one size.
        part = slice(min(begin, count - size), min(begin, count - size) + size)
        # After the last layer its `pre` is where the first one's was.
        regions["head"](tokens.stream[part], tokens.pre_a[part], weights.norm, weights.head, logits)
        regions["report_prompt"](
            logits, rich.following[part], rich.prompt_chosen[part], rich.prompt_top_ids[part],
            rich.prompt_top_logprobs[part],
        )
