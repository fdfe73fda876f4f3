"""Work grows with what is live: expert rows with tokens, index work with live length.

Counted, not timed: rows that reach an expert, and entries whose keys are gathered for scoring.
"""

import pytest
import torch

from decodegrid.graphs import regions
from decodegrid.kernels import moe
from decodegrid.kernels import select_entries as selection

ROWS = 3


@pytest.fixture
def expert_rows(monkeypatch):
    """(rows that belong to an expert, rows handed over) of every grouped product."""
    seen, grouped_product = [], moe.grouped_product

    def counting(rows, weights, ends):
        seen.append((int(ends[-1]), rows.shape[0]))
        return grouped_product(rows, weights, ends)

    monkeypatch.setattr(moe, "grouped_product", counting)
    return seen


def test_expert_work_does_not_depend_on_the_number_of_experts(make_run, make_prompt, expert_rows):
    """Live tokens x experts per token, at 8 and at 64 experts; pads and surplus tokens add none."""
    counts = {}
    for experts in (8, 64):
        counts_of_experts = {"n_routed_experts": experts, "dspark_n_routed_experts": experts}
        run = make_run(max_num_reqs=4, req_sizes=(4,), **counts_of_experts)
        for slot in range(1, ROWS + 1):
            run.begin(slot, make_prompt(5 + slot, slot))
        run.decode([1, 2, 3], ROWS)
        for total in (3, 7, 18):
            del expert_rows[:]
            result = run.decode([1, 2, 3], total)
            counts[experts, total] = list(expert_rows)
            check_expert_rows(run.runner.model.config, result, expert_rows)
            assert result.num_query_tokens == total < result.key.num_query_tokens
    for total in (3, 7, 18):
        assert counts[8, total] == counts[64, total]


def check_expert_rows(config, result, expert_rows):
    """Two products a layer; target layers over the query tokens, drafter layers over the blocks."""
    target = expert_rows[: 2 * config.num_hidden_layers]
    draft = expert_rows[2 * config.num_hidden_layers :]
    wanted = result.num_query_tokens * config.num_experts_per_tok
    captured = result.key.num_query_tokens * config.num_experts_per_tok
    assert target == [(wanted, captured)] * (2 * config.num_hidden_layers)
    per_row = config.dspark_block_size * config.dspark_num_experts_per_tok
    wanted, captured = ROWS * per_row, result.key.num_reqs * per_row
    assert draft == [(wanted, captured)] * (2 * config.num_nextn_predict_layers)


@pytest.fixture
def scored_entries(monkeypatch):
    """Number of entries of one request that are gathered, for every request and indexer layer."""
    seen = []
    plain = selection.entry_rows

    def counting(block_table, num_entries, ratio, block_size):
        rows = plain(block_table, num_entries, ratio, block_size)
        seen.append(rows.numel())
        return rows

    monkeypatch.setattr(selection, "entry_rows", counting)
    return seen


def indexer_args(lengths, num_blocks, ratio=2, block_size=8):
    """One decode token a slot, each with its own visible length."""
    generator = torch.Generator().manual_seed(0)
    slots = len(lengths) + 1
    per_slot = 1000 // block_size + 1
    table = (1 + torch.arange(slots * per_slot)).reshape(slots, per_slot)
    rows = num_blocks * block_size // ratio
    count = len(lengths)
    keys = torch.randn(512 * block_size // ratio, 8, generator=generator)
    pool = torch.zeros(rows, 8)
    pool[: keys.shape[0]] = keys
    return [
        torch.randn(count, 4, 8, generator=generator),
        torch.randn(count, 4, generator=generator),
        pool,
        table,
        torch.arange(1, slots),
        torch.tensor(lengths),
        ratio,
        block_size,
        0,
        2,
        2,
        torch.zeros(count, 512, dtype=torch.bool),
        torch.zeros(count, 6, dtype=torch.int64),
    ]


def test_index_work_follows_each_requests_own_length(scored_entries):
    """Context 64 and 1000 at ratio 2: 32 and 500 entries, a pad none; pool x16 the same."""
    results = []
    for num_blocks in (512, 16 * 512):
        args = indexer_args([32, 500, 0, 7], num_blocks)
        del scored_entries[:]
        selection.select_entries(*args)
        assert scored_entries == [32, 500, 7]
        results.append(args[-1])
    assert torch.equal(*results)


def test_index_work_of_a_step(make_run, make_prompt, scored_entries, monkeypatch):
    """A decode step gathers what its rows see, at every indexer layer; capacity plays no part."""
    # The plain function, also where a native kernel stands behind the op.
    monkeypatch.setattr(regions, "select_entries_op", selection.select_entries)
    run = make_run(max_num_reqs=2, req_sizes=(1, 2))
    run.begin(1, make_prompt(60, 1))
    run.begin(2, make_prompt(8, 2))
    del scored_entries[:]
    run.decode([1, 2], 2)
    config = run.runner.model.config
    ratios = [config.compress_ratios[layer] for layer in config.index_source_layer_ids]
    want = [length // ratio for ratio in ratios for length in (60, 8)]
    assert scored_entries == want
