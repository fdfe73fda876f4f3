"""Counts of bytes and operations: against torch's own counter on an eager step, brute force, and
what a packed weight takes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from decodegrid.capture.grid import GraphKey
from decodegrid.engine.ledger_work import (
    KeyBytes,
    Span,
    StepShape,
    StepWork,
    experts_touched,
    prefill_work,
    report_work,
    step_work,
)
from decodegrid.engine.runner import Runner
from decodegrid.engine.surface_run import SurfaceRun
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.weight_packing import pack_weights

CONTEXT = 40
"""More than the window of 8 and more entries than the 6 that are selected, at either ratio."""


@pytest.fixture(scope="module")
def runner(
    make_model: Callable[..., DraftModel], make_eager_runner: Callable[..., Runner]
) -> Runner:
    return make_eager_runner(make_model(hc_sinkhorn_iters=1), rich=True)


def index_flops(runner: Runner, tokens: int, ends: int) -> int:
    """Of the selection, an opaque op that torch's counter does not look into: every layer with an
    indexer scores its entries with 16 heads of 16 channels, and weighs the heads."""
    config = runner.model.config
    total = 0
    for layer in config.index_source_layer_ids:
        total += 2 * tokens * (ends // config.compress_ratios[layer]) * 16 * (16 + 1)
    return total


@pytest.mark.parametrize("num_reqs", [2, 3])
def test_a_step_s_products_are_those_that_torch_counts(runner: Runner, num_reqs: int) -> None:
    key = GraphKey(num_reqs, num_reqs)
    work = SurfaceRun(runner, CONTEXT)
    work.prepare(key)
    with FlopCounterMode(display=False) as counter:
        work.run(key)
    work.restore()
    shape = StepShape(num_reqs, num_reqs, CONTEXT, 2)
    model = runner.model
    found = step_work(model.weights, model.config, shape, KeyBytes.of_state(model.state))
    head = model.weights.draft_head
    assert head is not None
    # A product with one output is written as a sum; two drafts a request.
    confidence = 2 * num_reqs * 2 * head.confidence.numel()
    counted = counter.get_total_flops() + index_flops(runner, num_reqs, CONTEXT) + confidence
    assert found.flops == counted


def test_more_query_tokens_see_more(runner: Runner) -> None:
    """The first token of a request is its last committed one; those behind it see more entries."""
    model, keys = runner.model, KeyBytes.of_state(runner.model.state)
    one, three = (
        step_work(model.weights, model.config, StepShape(1, tokens, CONTEXT, 2), keys)
        for tokens in (1, 3)
    )
    spans = [Span(CONTEXT - 1, 1), Span(CONTEXT, 1), Span(CONTEXT + 1, 1)]
    scored = [sum(index_flops(runner, 1, span.end) for span in spans[:n]) for n in (1, 3)]
    per_token = one.flops - three.flops - (scored[0] - scored[1])
    # What is left grows by two equal tokens: windows and selections are full.
    two = step_work(model.weights, model.config, StepShape(1, 2, CONTEXT, 2), keys)
    middle = two.flops - sum(index_flops(runner, 1, span.end) for span in spans[:2])
    assert 2 * (middle - (one.flops - scored[0])) == -per_token


def test_a_chunk_s_products_are_those_that_torch_counts(runner: Runner) -> None:
    """Chunk behind a long context: all tokens see full windows and selections, as the eager chunk
    computes them for every token."""
    start, size = 30, 8
    with FlopCounterMode(display=False) as counter:
        runner.prefill(1, list(range(5, 5 + size)), start, (2, 3, 4), range(1, 6))
    runner.stop(1)
    model = runner.model
    found = prefill_work(
        model.weights, model.config, Span(start, size), KeyBytes.of_state(model.state)
    )
    config = model.config
    scored = sum(
        2 * ((position + 1) // config.compress_ratios[layer]) * 16 * 17
        for layer in config.index_source_layer_ids
        for position in range(start, start + size)
    )
    assert found.flops == counter.get_total_flops() + scored
    short = prefill_work(model.weights, model.config, Span(0, size), KeyBytes.of_state(model.state))
    assert short.flops < found.flops and short.state_bytes < found.state_bytes
    assert short.weight_bytes == found.weight_bytes


def test_a_report_is_the_head(runner: Runner) -> None:
    weights = runner.model.weights
    found = report_work(weights, 16)
    assert found.flops == 2 * 16 * weights.head.shape[0] * weights.head.shape[1]
    assert found.weight_bytes == weights.head.nbytes + weights.norm.nbytes
    assert found.state_bytes == 0


@pytest.mark.parametrize("span", [Span(0, 1), Span(0, 9), Span(3, 2), Span(5, 40), Span(11, 3)])
def test_spans_by_brute_force(span: Span) -> None:
    seen = range(span.start + 1, span.end + 1)
    for limit in (1, 6, 8, 100):
        assert span.keys_seen(limit) == sum(min(tokens, limit) for tokens in seen)
        for ratio in (1, 2):
            entries = [tokens // ratio for tokens in seen]
            assert span.entries_seen(ratio) == sum(entries)
            assert span.entries_seen(ratio, limit) == sum(min(e, limit) for e in entries)


def test_state_by_hand(make_model: Callable[..., DraftModel]) -> None:
    """One window layer in float64: 8 keys of 16 channels before a token, its own written and read;
    of a chunk at the start of a text none before, its own written and read."""
    model = make_model(
        num_hidden_layers=1,
        compress_ratios=[0],
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=None,
        engram_layer_ids=[],
        engram_num_embeddings=[],
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=[],
    )
    weights, keys = pack_weights(model, with_drafter=False), KeyBytes.of_model(model.config, 8)
    step = step_work(weights, model.config, StepShape(2, 2, 20, 0))
    assert step.state_bytes == 2 * (8 + 2) * 16 * 8
    chunk = prefill_work(weights, model.config, Span(0, 6), keys)
    assert chunk.state_bytes == 2 * 6 * 16 * 8
    assert prefill_work(weights, model.config, Span(3, 6), keys).state_bytes == (3 + 12) * 16 * 8


def test_state_is_counted_by_live_length(
    make_model: Callable[..., DraftModel], make_eager_runner: Callable[..., Runner]
) -> None:
    """Neither a larger pool nor a longer limit changes the bytes; the context does."""
    model = make_model()
    works = []
    for length, context in ((64, 20), (128, 20), (128, 40)):
        made = make_eager_runner(model, num_reqs=1, max_model_len=length)
        shape, keys = StepShape(1, 1, context, 2), KeyBytes.of_state(made.model.state)
        works.append(step_work(made.model.weights, model.config, shape, keys))
    assert works[0] == works[1]
    assert works[2].state_bytes > works[1].state_bytes
    assert works[2].weight_bytes == works[1].weight_bytes


def test_records_count_by_their_bytes(
    make_model: Callable[..., DraftModel], make_eager_runner: Callable[..., Runner]
) -> None:
    model = make_model(head_dim=64, qk_rope_head_dim=16, index_head_dim=32)
    plain = KeyBytes.of_state(make_eager_runner(model, num_reqs=1).model.state)
    assert plain == KeyBytes.of_model(model.config, 8) == KeyBytes(64 * 8, 64 * 8, 32 * 8)
    state = make_eager_runner(model, num_reqs=1, kv_cache="v41").model.state
    pool = next(iter(state.pools.values()))
    assert KeyBytes.of_state(state) == KeyBytes(
        state.window_rings[0].shape[1], pool.keys.shape[1], pool.index_keys.shape[1]
    )


def test_packed_weights_have_the_same_products_in_fewer_bytes(
    make_model: Callable[..., DraftModel],
) -> None:
    """Two 4-bit weights a byte for experts, one 8-bit weight for other matrices, and scales."""
    model = make_model(dtype=torch.float32)
    weights = pack_weights(model, with_drafter=False)
    shape, config = StepShape(1, 1, 20, 0), model.config
    plain = step_work(weights, config, shape)

    def packed(tensor: torch.Tensor, per_byte: int) -> list[torch.Tensor]:
        # Experts stand transposed; what counts is the number of codes and of scales.
        codes = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] // per_byte), dtype=torch.uint8)
        return [codes, torch.zeros((tensor.shape[0], 3), dtype=torch.uint8)]

    def pack(layer: Any) -> Any:
        moe = replace(layer.moe, w13=packed(layer.moe.w13, 2), w2=packed(layer.moe.w2, 2))
        attention = replace(layer.attention, wo_b=packed(layer.attention.wo_b, 1))
        return replace(layer, moe=moe, attention=attention)

    found = step_work(replace(weights, layers=tuple(map(pack, weights.layers))), config, shape)
    assert found.flops == plain.flops and found.state_bytes == plain.state_bytes
    saved = 0.0
    touched = experts_touched(8, 3, 1)
    for layer in weights.layers:
        for matrix in (layer.moe.w13, layer.moe.w2):
            assert isinstance(matrix, torch.Tensor)
            saved += touched * (matrix.numel() * (4 - 0.5) / 8 - 3)
        assert isinstance(layer.attention.wo_b, torch.Tensor)
        saved += layer.attention.wo_b.numel() * (4 - 1) - 3 * layer.attention.wo_b.shape[0]
    assert plain.weight_bytes - found.weight_bytes == pytest.approx(saved)


def test_the_floor_is_the_longer_of_both() -> None:
    work = StepWork(60.0, 40.0, 500.0)
    assert work.num_bytes == 100.0
    assert work.floor_seconds(bytes_per_s=10.0, flops_per_s=100.0) == 10.0
    assert work.floor_seconds(bytes_per_s=100.0, flops_per_s=100.0) == 5.0
