"""One prefill chunk: the same layers over the prompt's tokens, from any position.

A prompt's last token is not prefilled: it is the golden token of the first decode step, so a chunk
needs neither head nor sampling. Window keys of the chunk and of the `window` positions before it
stand in a workspace; what a later step may read is copied to the rings after each layer.
"""

from decodegrid.graphs.decode_step import metadata_outputs, store_draft_context
from decodegrid.graphs.regions import RegionTable
from decodegrid.graphs.step_buffers import MIN_ROWS, StepBuffers, TokenBuffers, slice_tokens
from decodegrid.graphs.target_step import HistorySource, StepModel, run_target_layers


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
    run_target_layers(regions, model, tokens, workspace_history(regions, model, buffers, tokens))
    if model.weights.draft_head is not None:
        store_draft_context(regions, model, tokens)
