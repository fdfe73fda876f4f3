"""The budget benchmark's arithmetic and workloads. No times."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.budget import Plan, report_choice
from benchmarks.budget_serving import ServingPlan, _describe, mixed_workload
from benchmarks.generation import Run
from decodegrid.capture.total_scan import NumpyScan
from decodegrid.configs.load import load_config


@pytest.fixture
def deployment() -> Any:
    """As much of a deployment as prompts need."""
    return SimpleNamespace(loaded=load_config(None))


@pytest.mark.parametrize(("load", "count"), [(1, 4), (8, 16), (32, 32)])
def test_mixed_prompts_fill_the_load(deployment: Any, load: int, count: int) -> None:
    workload = mixed_workload(deployment, load, ServingPlan(1, 16, 4))
    assert (len(workload.prompts), workload.batch) == (count, load)
    assert len(set(workload.prompts)) == min(count, 16)
    # Both kinds in turns: a batch never holds one kind alone.
    assert workload.prompts[0] != workload.prompts[1]


def test_rounds_and_rates_are_pooled() -> None:
    runs = [
        Run(60, 5.0, 2.0, (10, 4), (7, 1), 20, ()),
        Run(30, 4.0, 2.0, (5, 1), (3, 1), 10, ()),
    ]
    assert _describe(runs) == {
        "tokens_per_s": 20.0,
        "tokens_per_round": 3.0,
        "verified_per_round": pytest.approx(20 / 30),
    }


def test_choice_is_measured_for_every_batch(capsys: pytest.CaptureFixture[str]) -> None:
    result = report_choice(Plan(1, None), NumpyScan)
    assert set(result["choice_us"]) == {"8", "64", "256"}
    assert all(np.isfinite(value) and value > 0 for value in result["choice_us"].values())
    assert "choice / sort" in capsys.readouterr().out
