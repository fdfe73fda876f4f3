"""The layers of a cached step, as a list of region calls: target layers and drafter layers.

Owns the order of the calls and which buffer each reads and writes. Decode and prefill differ only
in where window and compressor history live (`HistorySource`): the rings themselves, or a workspace
that holds the history and the chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions import RegionTable
from decodegrid.graphs.state import DecodeState
from decodegrid.graphs.step_buffers import TokenBuffers
from decodegrid.graphs.step_weights import LayerWeights, StepWeights
from decodegrid.kernels.select_entries import CandidateMode


@dataclass(frozen=True, slots=True)
class HistorySource:
    """Where a step finds keys of earlier tokens, and what to do around each use."""

    window: Callable[[int], Tensor]
    """Layer -> tensor that holds its window keys: read by index, written at `window_store`."""
    compressor: Callable[[int], Tensor]
    """Source layer -> tensor that holds its compressor rows."""
    load: Callable[[int], None]
    """Called before a layer's attention: brings the history in."""
    commit: Callable[[int], None]
    """Called after it: keeps what outlives the step."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """What every step of one engine shares."""

    config: ModelConfig
    weights: StepWeights
    state: DecodeState


def run_collapse(
    regions: RegionTable, tokens: TokenBuffers, layer: LayerWeights, pre: Tensor, pre_out: Tensor
) -> None:
    """Mixer and norm before the attention sublayer; writes x, pre_out, post_a and comb_a."""
    mix = layer.attn_mix
    regions["collapse"](
        tokens.stream, pre, mix.fn, mix.scale, mix.base, mix.norm,
        tokens.x, pre_out, tokens.post_a, tokens.comb_a,
    )


def run_attn_in(
    regions: RegionTable, tokens: TokenBuffers, layer: LayerWeights, window: Tensor
) -> None:
    """Queries, and window keys stored at `window_store`."""
    attn = layer.attention
    regions["attn_in"](
        tokens.x, tokens.positions, tokens.window_store, attn.w_in, attn.q_norm, attn.wq_b,
        attn.kv_norm, attn.frequencies, tokens.low_rank, tokens.query, window,
    )


def run_after_attention(
    regions: RegionTable, tokens: TokenBuffers, layer: LayerWeights, moe: str, pre: Tensor,
    pre_out: Tensor,
) -> None:
    """Attention's output projection and stream update, then the whole MoE sublayer."""
    attn, mix, ffn = layer.attention, layer.ffn_mix, layer.moe
    regions["attn_out"](
        tokens.attended, tokens.positions, attn.frequencies, attn.wo_a, attn.wo_b,
        tokens.stream, tokens.post_a, tokens.comb_a, pre, mix.fn, mix.scale, mix.base, mix.norm,
        tokens.x, pre_out, tokens.post_b, tokens.comb_b,
    )
    regions[moe](
        tokens.x, tokens.valid, ffn.gate, ffn.bias, ffn.w13, ffn.w2, ffn.shared_w13,
        ffn.shared_w2, tokens.post_b, tokens.comb_b, tokens.stream,
    )


def run_source(
    regions: RegionTable, model: StepModel, tokens: TokenBuffers, index: int, history: HistorySource
) -> None:
    """Compressed keys and index keys of a kv source layer, written to its pool."""
    layer, pool = model.weights.layers[index], model.state.pools[index]
    source, attn = layer.source, layer.attention
    assert source is not None
    if layer.ratio == 1:
        regions["source_one"](
            tokens.x, tokens.positions, tokens.entry_store_one, source.w_in, source.norm,
            source.wk, source.k_norm, attn.frequencies, pool.keys, pool.index_keys,
        )
        return
    rows = history.compressor(index)
    regions["source_two_in"](tokens.x, tokens.compressor_store, source.w_in, rows)
    regions["source_two"](
        tokens.positions, tokens.compressor_store, tokens.compressor_previous,
        tokens.entry_store_two, rows, source.norm, source.wk, source.k_norm, attn.frequencies,
        pool.keys, pool.index_keys,
    )


def run_indexer(
    regions: RegionTable, model: StepModel, tokens: TokenBuffers, index: int
) -> None:
    """Selection of one indexer layer, left in `entry_index` for it and its reuse layers."""
    config, state, layer = model.config, model.state, model.weights.layers[index]
    assert layer.index is not None
    regions["index_in"](
        tokens.x, tokens.low_rank, tokens.positions, layer.index.wq_b, layer.index.weights_proj,
        layer.attention.frequencies, tokens.index_query, tokens.index_weight,
    )
    candidate_source = config.candidate_source_layer_id
    mode = CandidateMode.IGNORE
    if candidate_source is not None and index >= candidate_source:
        mode = CandidateMode.WRITE if index == candidate_source else CandidateMode.READ
    regions["select_entries"](
        tokens.index_query, tokens.index_weight,
        state.pools[config.kv_source_of(index)].index_keys, state.slots.block_table,
        tokens.token_slot, tokens.length_one if layer.ratio == 1 else tokens.length_two,
        layer.ratio, state.capacity.block_size, int(mode), config.candidate_block_size,
        config.candidate_topk_blocks, tokens.candidates, tokens.entry_index,
    )


def run_target_layers(
    regions: RegionTable, model: StepModel, tokens: TokenBuffers, history: HistorySource
) -> Tensor:
    """All target layers over `tokens`; returns the buffer that holds the last `pre`."""
    regions["embed"](tokens.input_ids, model.weights.embed, tokens.stream, tokens.pre_a)
    run_layers(regions, model, tokens, history, range(len(model.weights.layers)))
    return tokens.pre_a


def run_layers(
    regions: RegionTable, model: StepModel, tokens: TokenBuffers, history: HistorySource,
    layers: range,
) -> None:
    """Some target layers, whose first finds stream and `pre` (in pre_a) in the buffers."""
    for index in layers:
        layer = model.weights.layers[index]
        if layer.engram is not None:
            memory = layer.engram
            regions["engram"](
                tokens.stream, tokens.lookback, memory.table, memory.wkv, memory.q_weight,
                memory.k_weight, memory.multipliers, memory.primes, memory.offsets,
            )
        run_tap(regions, model, tokens, index)
        run_collapse(regions, tokens, layer, tokens.pre_a, tokens.pre_b)
        history.load(index)
        if layer.source is not None:
            run_source(regions, model, tokens, index, history)
        run_collapsed(regions, model, tokens, index, history)


def run_tap(
    regions: RegionTable, model: StepModel, tokens: TokenBuffers, index: int
) -> None:
    """What the drafter is given of a layer's input, if it taps it."""
    taps = model.config.dspark_target_layer_ids
    if tokens.taps and index in taps:
        regions["tap"](tokens.stream, tokens.taps[taps.index(index)])


def run_collapsed(
    regions: RegionTable, model: StepModel, tokens: TokenBuffers, index: int,
    history: HistorySource,
) -> None:
    """A layer behind its first mixer, the load of its history and, if it has one, its source."""
    layer = model.weights.layers[index]
    window = history.window(index)
    run_attn_in(regions, tokens, layer, window)
    if layer.index is not None:
        run_indexer(regions, model, tokens, index)
    sink = layer.attention.sink
    if layer.ratio == 0:
        regions["attend_window"](
            tokens.query, window, tokens.window_index, sink, tokens.attended
        )
    else:
        regions["attend_both"](
            tokens.query, window, tokens.window_index,
            model.state.pools[model.config.kv_source_of(index)].keys, tokens.entry_index, sink,
            tokens.attended,
        )
    history.commit(index)
    # The attention mixer's `pre` (pre_b) serves the MoE sublayer; the MoE mixer's goes on.
    run_after_attention(regions, tokens, layer, "moe", tokens.pre_b, tokens.pre_a)
