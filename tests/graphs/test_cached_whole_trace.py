"""decode_step, the second half of a rich step and prefill_step are one function each: traced
whole, without a graph break."""

import pytest
import torch

from decodegrid.engine.runner_protocol import RichRequest
from decodegrid.graphs.decode_step import choice_half, decode_step, forward_half
from decodegrid.graphs.prefill_step import prefill_step, report_prompt
from decodegrid.graphs.regions import build_regions, plain_regions


def written(run):
    """Slot state, rings, pools and the outputs that the host reads."""
    rows = run.runner.buffers.rows
    outputs = {"token_ids": rows.token_ids.clone(), "num_emitted": rows.num_emitted.clone()}
    return {**{name: t.clone() for name, t in run.runner.model.state.tensors()}, **outputs}


@pytest.fixture
def traced():
    """traced(step) -> (compiled step, list that gets one graph per traced frame)."""
    torch.compiler.reset()

    def make(step):
        graphs = []

        def backend(module, inputs):
            graphs.append(module)
            return module.forward

        return torch.compile(step, backend=backend, fullgraph=True), graphs

    yield make
    torch.compiler.reset()


@pytest.mark.parametrize("four_layer_run", ["coupled", "rejection"], indirect=True)
def test_decode_step_is_one_graph(four_layer_run, make_prompt, traced):
    run = four_layer_run
    for slot, length in ((1, 11), (2, 4), (3, 18)):
        run.begin(slot, make_prompt(length, length), temperature=0.7 * (slot > 1), seed=slot)
    run.runner.model.state.slots.top_p[3] = 0.8
    run.decode([1, 2, 3], 3)
    before = run.snapshot()
    model, buffers = run.runner.model, run.runner.buffers
    specs = build_regions(model.config, model.state.capacity, as_ops=True)
    regions, divisors = plain_regions(specs), torch.ones(5, dtype=torch.float64)

    def step():
        decode_step(regions, model, buffers, divisors, 3, 18)

    compiled, graphs = traced(step)
    buffers.rows.slots[:3] = torch.tensor([1, 2, 3])
    buffers.total[0] = 14
    with torch.no_grad():
        step()
        want = written(run)
        run.restore(before)
        compiled()
    assert len(graphs) == 1
    assert len([n for n in graphs[0].graph.nodes if n.op == "call_function"]) > 500
    assert want["num_emitted"][:3].min() >= 1
    assert not torch.equal(want["slots.seq_len"], before.tensors["slots.seq_len"])
    for name, tensor in written(run).items():
        assert torch.equal(tensor, want[name]), name


def test_the_second_half_of_a_rich_step_is_one_graph(rich_run, make_prompt, traced):
    """And the report behind a chunk. The first half is a part of decode_step."""
    run = rich_run()
    rich = RichRequest({3: 1.5}, 0.5, 0.3, 1.2, 20, (4, 9), (1, 9), (), 20)
    for slot, asked in ((1, None), (2, rich)):
        run.begin(slot, make_prompt(5 + slot, slot), temperature=0.5, asked={"rich": asked})
    run.decode([1, 2], 2)
    model, buffers = run.runner.model, run.runner.buffers
    regions = plain_regions(build_regions(model.config, model.state.capacity, as_ops=True))
    divisors, sizes = torch.ones(3, dtype=torch.float64), (4, 16)
    parts = regions, model, buffers
    steps = [lambda: choice_half(*parts, divisors, *sizes), lambda: report_prompt(*parts, 16)]
    buffers.rows.slots[:4] = torch.tensor([1, 2, 0, 0])
    buffers.total[0] = 8
    before, found = run.snapshot(), []
    with torch.no_grad():
        for compiled in (False, True):
            run.restore(before)
            graphs = []
            forward_half(*parts, *sizes)
            for step in steps:
                call, traces = traced(step) if compiled else (step, [None])
                call()
                graphs.append(len(traces))
            outputs = {name: getattr(buffers.rich, name).clone() for name in buffers.rich.__slots__}
            found.append({**written(run), **outputs})
            assert graphs == [1, 1]
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, found[0][name], rtol=0, atol=1e-12, msg=name)


def test_prefill_step_is_one_graph(four_layer_run, make_prompt, traced):
    run = four_layer_run
    run.begin(1, make_prompt(30, 2), (16, 13))
    want = run.readable(1)
    model, buffers = run.runner.model, run.runner.buffers
    regions = plain_regions(build_regions(model.config, model.state.capacity, as_ops=False))
    compiled, graphs = traced(lambda: prefill_step(regions, model, buffers, 16))
    for name, tensor in model.state.tensors():
        if not name.startswith("slots."):
            tensor.zero_()
    with torch.no_grad():
        for start, count in ((0, 16), (16, 13)):
            before = run.history(run.texts[1], start)
            buffers.prefill.facts.copy_(torch.tensor([1, start, count, *before]))
            buffers.prefill.token_ids[:count] = torch.tensor(run.texts[1][start : start + count])
            compiled()
    assert len(graphs) == 1
    run.assert_equal(run.readable(1), want)
