"""Cache sizes: the published figures of the released model, and what our own state really takes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decodegrid.graphs.cache_sizes import (
    block_bytes,
    cache_sizes,
    record_sizes,
    state_sizes,
    token_bytes,
)
from decodegrid.graphs.kv_cache import KvCache
from decodegrid.graphs.model_config import ModelConfig, parse_model_config
from decodegrid.graphs.state import Capacity, DecodeState, allocate_state

MakeRaw = Callable[..., dict[str, Any]]


def test_the_released_model_has_the_published_figures(released_config: ModelConfig) -> None:
    sizes = cache_sizes(released_config, "v41", torch.bfloat16, 5)
    records = sizes.records
    assert (records.window, records.main, records.index) == (528, 288, 68)
    assert sizes.token == 890
    assert sizes.request == 3_128_928
    assert sizes.persisted == 1_415_040
    assert sizes.block == 114_048


def test_the_released_model_in_its_own_dtype(released_config: ModelConfig) -> None:
    """Two bytes for each of 512 and 128 channels; 134 slots, 43 layers, 3 rings of 7 pairs."""
    sizes = cache_sizes(released_config, "compute", torch.bfloat16, 5)
    assert (sizes.records.window, sizes.records.main, sizes.records.index) == (1024, 1024, 256)
    assert sizes.token == 3 * 1280 / 2 + 1280
    unrounded = 43 * 134 * 1024 + 3 * 7 * 2 * 512 * 4
    assert sizes.request == -(-unrounded // 1024) * 1024
    assert sizes.persisted == 20 * 134 * 1024
    assert sizes.block == 3 * 64 * 1280 + 128 * 1280


def test_drafts_lengthen_the_rings_and_none_leaves_the_drafter_out(
    released_config: ModelConfig,
) -> None:
    for drafts, layers in ((0, 40), (1, 43), (3, 43)):
        sizes = cache_sizes(released_config, "v41", torch.bfloat16, drafts)
        unrounded = layers * (129 + drafts) * 528 + 3 * (2 + drafts) * 2 * 512 * 4
        assert 0 <= sizes.request - unrounded < 1056 and sizes.request % 1056 == 0
        assert sizes.persisted == 20 * (129 + drafts) * 528


def test_the_small_published_config(tiny_config: ModelConfig) -> None:
    records = record_sizes(tiny_config, "v41", torch.float32)
    assert (records.window, records.main, records.index) == (66, 36, 17)
    assert token_bytes(tiny_config, records) == 106
    assert block_bytes(tiny_config, records, 64) == 64 * 106


def allocated(state: DecodeState, part: str) -> int:
    tensors = [tensor for name, tensor in state.tensors() if part in name]
    assert tensors
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


CHANGES: tuple[dict[str, Any], ...] = (
    {"head_dim": 64, "index_head_dim": 32},
    # One source, of ratio 1, and so no compressor ring.
    {
        "head_dim": 32,
        "index_head_dim": 96,
        "num_hidden_layers": 4,
        "compress_ratios": [0, 1, 1, 1, 0],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": 1,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [184],
        "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [2, 3],
    },
    # Windows only.
    {
        "head_dim": 32,
        "num_hidden_layers": 3,
        "compress_ratios": [0, 0, 0, 0],
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": None,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [184],
        "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [1, 2],
    },
)


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kv_cache", ["compute", "v41"])
def test_what_our_state_takes(
    make_raw: MakeRaw, changes: dict[str, Any], dtype: torch.dtype, kv_cache: KvCache
) -> None:
    config = parse_model_config(make_raw(**changes))
    for drafts in (0, 1, 5):
        for verify in ("coupled", "rejection"):
            capacity = Capacity(4, 7, 6, 40, drafts, verify, kv_cache, rich=drafts == 1)
            state = allocate_state(config, capacity, dtype)
            sizes = state_sizes(config, capacity, dtype)
            assert sizes.total == state.num_bytes()
            assert sizes.windows == allocated(state, "window_rings")
            rich = allocated(state, "rich.") if capacity.rich else 0
            assert sizes.slots == allocated(state, "slots.") + rich
            if config.kv_source_layer_ids:
                assert sizes.pools == allocated(state, "keys")
                assert sizes.compressors == allocated(state, "compressor")
            else:
                assert sizes.pools == sizes.compressors == 0
            more = allocate_state(config, replace(capacity, num_slots=5), dtype)
            assert sizes.request == more.num_bytes() - state.num_bytes()


def test_one_more_block(tiny_config: ModelConfig) -> None:
    for kv_cache in ("compute", "v41"):
        counts = []
        for num_blocks in (9, 10):
            capacity = Capacity(3, num_blocks, 16, 64, 2, kv_cache=kv_cache)
            counts.append(allocate_state(tiny_config, capacity, torch.float32).num_bytes())
        records = record_sizes(tiny_config, kv_cache, torch.float32)
        assert counts[1] - counts[0] == block_bytes(tiny_config, records, 16)
        assert block_bytes(tiny_config, records, 16) == 16 * token_bytes(tiny_config, records)


def test_dimensions_that_records_cannot_hold(make_raw: MakeRaw) -> None:
    for name, changes in (
        ("head_dim", {"head_dim": 48, "index_head_dim": 32}),
        ("index_head_dim", {"head_dim": 64, "index_head_dim": 16}),
    ):
        config = parse_model_config(make_raw(**changes))
        with pytest.raises(ValueError, match=f"{name} is {changes[name]}$"):
            record_sizes(config, "v41", torch.float32)
        assert record_sizes(config, "compute", torch.float32).window == config.head_dim * 4
