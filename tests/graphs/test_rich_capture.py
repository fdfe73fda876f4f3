"""What a deployment with the rich variant captures, and the order in which its steps are called."""

import numpy as np
import pytest
import torch

from decodegrid.engine import build
from decodegrid.engine.runner_protocol import (
    MASK_WORD_BITS,
    MAX_TOP_LOGPROBS,
    RichRequest,
    StepRunner,
    num_mask_words,
)
from decodegrid.graphs import rich_state
from decodegrid.graphs.regions import RegionTable, build_regions

NEUTRAL = RichRequest({}, 0.0, 0.0, 1.0, 0, (), (), ())
HEAVY = RichRequest({3: 1.5}, 0.5, 0.3, 1.2, 0, (), (4, 9, 9), (), 20, True)
RICH_REGIONS = {"adjust", "adjust_drafts", "count_tokens", "report", "report_prompt"}


@pytest.mark.parametrize("rich", [True, False])
def test_counters_equal_the_plan(rich_run, rich):
    """(pairs + prefill sizes) x variants; each pair once more, in two halves."""
    run = rich_run(rich=rich, req_sizes=(1, 4))
    runner: StepRunner = run.runner
    counters, keys = run.runner.counters, set(run.runner.grid.keys)
    variants = 2 if rich else 1
    assert runner.num_captured == counters.planned_captures == variants * (len(keys) + 2)
    graphs = run.runner._graphs
    assert runner.has_rich is rich
    assert set(graphs.fused) == keys and set(graphs.rich) == (keys if rich else set())
    assert set(graphs.prompt_reports) == ({4, 16} if rich else set())
    for key, graph in graphs.rich.items():
        first, second = graph.first.num_nodes, graph.second.num_nodes
        assert first + second == graphs.fused[key].num_nodes + 4
    assert (run.runner.model.state.rich is not None) is rich
    assert (run.runner.buffers.rich is not None) is rich


def test_without_the_variant_a_rich_request_is_refused(rich_run, make_prompt):
    run = rich_run(rich=False)
    with pytest.raises(ValueError, match=r"grid\.rich is off"):
        run.begin(1, make_prompt(5, 1), asked={"rich": NEUTRAL})
    assert not RICH_REGIONS & set(
        build_regions(run.model.config, run.runner.model.state.capacity, as_ops=False)
    )


def test_sizes_that_two_modules_state():
    """The request side works without torch, so it states them too."""
    assert rich_state.NUM_TOP_LOGPROBS == MAX_TOP_LOGPROBS
    assert rich_state.MASK_WORD_BITS == MASK_WORD_BITS
    for vocab in (1, 32, 33, 129280):
        assert num_mask_words(vocab) == rich_state.num_mask_words(vocab)


def test_the_next_step_is_launched_before_the_last_is_collected(rich_run, make_prompt):
    """Fused and rich in turn: every result is that of the step collected at once."""
    script = [("fused", [1, 2], 2), ("rich", [3, 1], 2), ("fused", [2, 1], 8), ("rich", [1, 3], 8)]
    script += [("rich", [3, 2], 5), ("fused", [2], 4), ("fused", [1], 4), ("rich", [2, 3], 8)]

    def play(runner, late):
        held, results = None, []
        for kind, slots, total in script:
            if kind == "fused":
                step = runner.launch(slots, total)
            else:
                step = runner.launch_forward(slots, total)
                if late and held is not None:
                    results.append(runner.collect(held))
                    held = None
                runner.launch_choice(step, None)
            if held is not None:
                results.append(runner.collect(held))
            held = step
            if not late:
                results.append(runner.collect(held))
                held = None
        return results if held is None else [*results, runner.collect(held)]

    found = []
    for late in (False, True):
        run = rich_run()
        for slot, rich in ((1, None), (2, None), (3, HEAVY)):
            run.begin(slot, make_prompt(5 + slot, slot), temperature=0.5, asked={"rich": rich})
        found.append(play(run.runner, late))
    assert len(found[0]) == len(found[1]) == len(script)
    for one, other in zip(*found, strict=True):
        assert one.key == other.key and one.num_query_tokens == other.num_query_tokens
        for name in ("token_ids", "num_emitted", "num_verified", "confidence", "drafts"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert (one.logprobs is None) is (other.logprobs is None)
        if one.logprobs is not None:
            assert np.array_equal(one.logprobs.top_ids, other.logprobs.top_ids)
            assert np.array_equal(one.logprobs.chosen, other.logprobs.chosen)


def test_masks_do_not_outlive_their_step(rich_run, make_prompt):
    run = rich_run()
    run.begin(1, make_prompt(6, 1), asked={"rich": HEAVY})
    words = np.zeros((1, 4, num_mask_words(96)), dtype=np.int32)
    words[..., 1] = 1 << 5  # id 37 alone
    for _ in range(2):
        run.decode([1], 1, words)
    assert run.emitted(1) == [37, 37]
    before = run.snapshot()
    run.decode([1], 1)
    free = run.emitted(1)[2]
    assert free != 37
    run.restore(before)
    words[...] = -1
    run.decode([1], 1, words)
    assert run.emitted(1)[2] == free


@pytest.fixture(scope="module")
def compiled_rich_run(make_model, new_run, tmp_path_factory, native_kernels):
    """float32; the regions of the rich variant are compiled, the others run as they are."""

    def make_regions(config, capacity, compiler, backend, kernels=None):
        calls = {}
        for name, item in build_regions(config, capacity, as_ops=True).items():
            if name in RICH_REGIONS:
                calls[name] = compiler.region(item.function, item.dynamic, name=name)
            else:
                calls[name] = compiler.opaque(item.function)
        return RegionTable(calls)

    changes = {"num_hidden_layers": 2, "compress_ratios": [0, 1, 0], "kv_source_layer_ids": [1]}
    changes |= {"index_source_layer_ids": [1], "candidate_source_layer_id": None}
    changes |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    changes |= {"num_nextn_predict_layers": 1, "dspark_target_layer_ids": [1]}
    model = make_model(dtype=torch.float32, **changes)
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_regions", make_regions)
        cache_dir = tmp_path_factory.mktemp("rich")
        asked = {"backend": "inductor", "cache_dir": cache_dir, "rich": True}
        runs.append(new_run(model, 2, 2, (1, 2), **asked))
    runs.append(new_run(model, 2, 2, (1, 2), rich=True))
    return runs


def test_compiled_once_for_all_sizes(compiled_rich_run, make_prompt):
    """One compilation a region; tokens, counts and reports of the plain functions in float32."""
    compiled, plain = compiled_rich_run
    assert compiled.runner.counters.compiled_by_region == dict.fromkeys(RICH_REGIONS, 1)
    found = []
    for run in (compiled, plain):
        state, results = run.runner.model.state, []
        run.begin(1, make_prompt(9, 1), temperature=0.6, seed=3, asked={"rich": HEAVY})
        run.begin(2, make_prompt(5, 2), temperature=0.6, seed=4)
        masks = np.full((2, 3, num_mask_words(96)), 0x7FFFFFF3, dtype=np.int32)
        for slots, total in (([1], 1), ([1, 2], 2), ([2, 1], 6), ([1, 2], 6), ([1], 3), ([1], 2)):
            results.append(run.decode(slots, total, masks[: len(slots)]))
        prompt = make_prompt(9, 5)
        report = run.runner.prefill(2, prompt[:8], 0, (-1,) * 3, run.blocks[2], prompt[1:])
        found.append((results, report, state.rich.counts[1].clone(), dict(run.texts)))
    (results, report, counts, texts), (wanted, wanted_report, wanted_counts, wanted_texts) = found
    assert texts == wanted_texts and torch.equal(counts, wanted_counts)
    assert compiled.accepted > 0
    reports = [(one.logprobs, two.logprobs) for one, two in zip(results, wanted, strict=True)]
    for one, two in [*reports, (report, wanted_report)]:
        assert np.array_equal(one.top_ids, two.top_ids)
        np.testing.assert_allclose(one.chosen, two.chosen, atol=1e-4)
        np.testing.assert_allclose(one.top_logprobs, two.top_logprobs, atol=1e-4)
