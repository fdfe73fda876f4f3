"""The fit of confidence temperatures on data whose answer is known."""

import json
from pathlib import Path

import pytest
import torch

from decodegrid.graphs.model_config import load_model_config
from training.calibrate import (
    MODES,
    Observed,
    calibrate,
    calibration_error,
    coupled_acceptance,
    fit,
    keep_temperatures,
    survival_error,
)


def test_fit_finds_the_divisor_of_the_worst_part() -> None:
    logits = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0)) * 3
    live, ones = torch.ones(4000, 1, dtype=torch.bool), torch.ones(4000)
    for temperature in (0.5, 1.0, 2.5):
        accepted = {"coupled": (logits / temperature).sigmoid()}
        part = Observed(logits, live, accepted)
        found, survival = fit("coupled", [part], [ones], 0)
        assert found == pytest.approx(temperature, rel=0.02)
        assert float((survival[0] - accepted["coupled"][:, 0]).abs().max()) < 0.01
    # Two parts that want 1 and 2: between them, where both are equally wrong.
    parts = [Observed(logits, live, {"coupled": (logits / t).sigmoid()}) for t in (1.0, 2.0)]
    assert 1.2 < fit("coupled", parts, [ones, ones], 0)[0] < 1.7


def test_calibration_error_is_the_gap() -> None:
    predicted = torch.full((100,), 0.75)
    accepted = torch.full((100,), 0.6)
    assert calibration_error(predicted, accepted) == pytest.approx(0.15)
    assert calibration_error(predicted, predicted) == 0.0
    two = torch.cat((predicted, torch.full((100,), 0.15)))
    assert calibration_error(two, torch.cat((accepted, accepted))) == pytest.approx(0.3)


def test_coupled_acceptance_is_that_of_the_same_noise() -> None:
    """Against the exact probability that two Gumbel-max draws with one noise agree, the sum over
    tokens of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    generator = torch.Generator().manual_seed(1)
    drafted = torch.randn(1, 12, generator=generator) * 1.5
    wanted = drafted + torch.randn(1, 12, generator=generator)
    p, q = drafted[0].softmax(-1), wanted[0].softmax(-1)
    ratio = torch.maximum(p / p[:, None], q / q[:, None]).sum(1)
    exact = float((1 / ratio).sum())
    many = coupled_acceptance(drafted.expand(400, -1), wanted.expand(400, -1), 7)
    assert float(many.mean()) == pytest.approx(exact, abs=0.012)
    assert float(torch.minimum(p, q).sum()) > exact
    assert coupled_acceptance(wanted, wanted, 3).tolist() == [1.0]


def test_each_slot_and_mode_has_its_own_temperature() -> None:
    logits = torch.randn(3000, 2, generator=torch.Generator().manual_seed(2)) * 2
    truth = {"coupled": (2.0, 0.8), "rejection": (1.25, 0.5)}
    accepted = {
        mode: torch.stack([(logits[:, i] / truth[mode][i]).sigmoid() for i in range(2)], 1)
        for mode in MODES
    }
    live = torch.ones(3000, 2, dtype=torch.bool)
    live[:1000, 1] = False
    accepted["coupled"][:1000, 1] = 0.0  # what is not live does not count
    observed = Observed(logits, live, accepted)
    found = calibrate([observed])
    for mode in MODES:
        assert found[mode]["temperature"] == pytest.approx(truth[mode], rel=0.04)
        _, after = survival_error(observed, mode, found[mode]["temperature"])
        assert max(after) < 0.01


def test_survival_error_is_of_the_products() -> None:
    """Of one constant confidence a slot, the error is the gap of the products."""
    logits = torch.tensor([2.0, 1.0]).expand(500, 2)
    accepted = (logits / 2.0).sigmoid()
    observed = Observed(logits, torch.ones(500, 2, dtype=torch.bool), {"coupled": accepted})
    before, after = survival_error(observed, "coupled", [2.0, 2.0])
    first, second = logits[0].sigmoid(), accepted[0]
    assert before[0] == pytest.approx(float(first[0] - second[0]), abs=1e-4)
    assert before[1] == pytest.approx(float(first.prod() - second.prod()), abs=1e-4)
    assert after == [0.0, 0.0]


def test_temperatures_are_kept_in_the_checkpoint(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "configs" / "tiny-v41" / "config.json"
    path = tmp_path / "config.json"
    path.write_bytes(source.read_bytes())
    keep_temperatures(path, {"coupled": [1.5, 1.0, 0.75, 0.5, 2.0], "rejection": [1.0] * 5})
    kept = load_model_config(tmp_path).dspark_confidence_temperatures
    assert kept is not None and kept.coupled == (1.5, 1.0, 0.75, 0.5, 2.0)
    raw, before = json.loads(path.read_text()), json.loads(source.read_text())
    for text in (raw["text_config"], before["text_config"]):
        text.pop("dspark_confidence_temperatures", None)
    assert raw == before
