"""Proofs at capture time on compiled steps: they pass, and one wrong weight fails them."""

import pytest
import torch

from decodegrid.capture.grid import GraphKey
from decodegrid.engine.proofs import run_proofs

TEMPERATURES = (1.0,) * 5


def test_compiled_steps(compiled_run, capsys):
    """float32 through inductor and the native kernels, against plain torch."""
    report = run_proofs(compiled_run.runner, TEMPERATURES)
    assert report.ok, report.format()
    worst = max(graph.max_difference for graph in report.graphs)
    with capsys.disabled():
        ties = sum(graph.near_ties for graph in report.graphs)
        print(f"\nlargest difference {worst:.2g}, {ties} near ties")
    assert 0 < worst <= 1e-3


def test_compiled_steps_over_records(compiled_records_run):
    """Keys as FP8 and FP4 codes, where rounding flips codes."""
    report = run_proofs(compiled_records_run.runner, (1.0,))
    assert report.ok, report.format()


@pytest.mark.parametrize("layer", [1, 2])
def test_a_wrong_weight_in_the_captured_code_alone(compiled_run, monkeypatch, layer):
    """One number of one layer is off while the graph replays, as after a bad build."""
    runner = compiled_run.runner
    key, norm = GraphKey(3, 12), runner.model.weights.layers[layer].attention.q_norm
    graph, largest = runner.decode_graphs[key], GraphKey(3, 18)

    class Wrong:
        def replay(self):
            saved = norm.clone()
            norm[0] *= 1.5
            graph.replay()
            norm.copy_(saved)

    monkeypatch.setattr(runner, "prefill_graphs", {})
    graphs = {key: Wrong(), largest: runner.decode_graphs[largest]}
    monkeypatch.setattr(runner, "decode_graphs", graphs)
    report = run_proofs(runner, TEMPERATURES)
    (bad,) = (found for found in report.graphs if not found.ok)
    assert bad.graph == "(3, 12) fused" and bad.not_inert is None
    assert torch.isfinite(torch.tensor(bad.max_difference))
