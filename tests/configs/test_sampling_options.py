"""How a deployment asks for filters, for a way to verify, and for calibrated confidences."""

from pathlib import Path

import pytest

from decodegrid.configs.load import ConfigError, load_config
from decodegrid.configs.schema import DeploymentConfig, SpeculationSection


def load(tmp_path: Path, text: str, *overrides: str) -> DeploymentConfig:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return load_config(path, overrides).config


def test_filters(tmp_path: Path) -> None:
    plain = load(tmp_path, "").sampling
    assert (plain.top_p, plain.top_k) == (1.0, -1)
    given = load(tmp_path, "sampling: {top_p: 0.9, top_k: 40}").sampling
    assert (given.top_p, given.top_k) == (0.9, 40)
    assert load(tmp_path, "sampling: {top_p: 1}", "sampling.top_k=-1").sampling == plain


def test_limits_are_allowed(tmp_path: Path) -> None:
    for text, value in (("0", 0.0), ("1e-5", 1e-5), ("100", 100.0)):
        assert load(tmp_path, "", f"sampling.temperature={text}").sampling.temperature == value
    assert load(tmp_path, "", "cache.num_blocks=16777216").num_blocks == 2**24
    assert load(tmp_path, "", "surface.max_age_s=315360000").surface.max_age_s == 3650 * 86400


def test_confidence_temperatures_of_the_chosen_mode(tmp_path: Path) -> None:
    text = """
speculation:
  num_draft_tokens: 3
  confidence_temperatures:
    coupled: [1.5, 2, 0.5]
    rejection: [1e-9, 0.25, 1.0]
"""
    assert load(tmp_path, text).speculation.draft_temperatures() == (1.5, 2.0, 0.5)
    other = load(tmp_path, text, "speculation.verify=rejection").speculation
    assert other.draft_temperatures() == (1e-5, 0.25, 1.0)
    half = load(tmp_path, "", "speculation.confidence_temperatures.coupled=[1, 2, 3, 4, 5]")
    assert half.speculation.draft_temperatures() == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert half.speculation.draft_temperatures((9.0,) * 5) == (1.0, 2.0, 3.0, 4.0, 5.0)
    plain = SpeculationSection(num_draft_tokens=2, verify="rejection")
    assert plain.draft_temperatures((0.5, 1e-9, 4.0)) == (0.5, 1e-5)
    assert plain.draft_temperatures() == (1.0, 1.0)
    assert SpeculationSection(num_draft_tokens=0).draft_temperatures() == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.top_p=0", "sampling.top_p: must be greater than 0, got 0"),
        ("sampling.top_p=1.01", "sampling.top_p: must be less than or equal to 1, got 1.01"),
        ("sampling.top_p=.nan", "sampling.top_p: must be a finite number, got NaN"),
        ("sampling.top_k=0", "sampling.top_k: must be -1 (all tokens) or at least 1, got 0"),
        ("sampling.top_k=-7", "sampling.top_k: must be -1 (all tokens) or at least 1, got -7"),
        ("sampling.top_k=1.0", "sampling.top_k: must be a whole number, got 1.0"),
        (
            "sampling.temperature=1e-6",
            "sampling.temperature: must be 0 (greedy) or 1e-05 to 100, got",
        ),
        (
            "sampling.temperature=101",
            "sampling.temperature: must be 0 (greedy) or 1e-05 to 100, got",
        ),
        (
            "cache.num_blocks=16777217",
            "cache.num_blocks: must be less than or equal to 16777216, got 16777217",
        ),
        (
            "surface.max_age_s=315360001",
            "surface.max_age_s: must be less than or equal to 315360000, got 315360001",
        ),
        ("speculation.verify=both", "speculation.verify: must be 'coupled' or 'rejection', got"),
        (
            "speculation.confidence_temperatures.coupled=[1, 1]",
            "speculation.confidence_temperatures.coupled: must be empty or have "
            "speculation.num_draft_tokens = 5 or more, got 2",
        ),
        (
            "speculation.confidence_temperatures.rejection=[1, 1, 0, 1, 1]",
            "speculation.confidence_temperatures.rejection[2]: must be greater than 0, got 0",
        ),
        (
            "speculation.confidence_temperatures.rejection=1",
            "speculation.confidence_temperatures.rejection: must be a list, got 1",
        ),
        (
            "speculation.confidence_temperatures.couple=[]",
            "speculation.confidence_temperatures.couple: unknown key; did you mean 'coupled'?",
        ),
        (
            "speculation.confidence_temperatures=[1]",
            "speculation.confidence_temperatures: a section; set one of its keys: coupled, ",
        ),
    ],
)
def test_refused_with_value_and_limit(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "", override)
    (error,) = caught.value.errors
    assert message in error


def test_the_first_k_temperatures_count(tmp_path: Path) -> None:
    """So that fewer drafts, or none, need no other calibration."""
    text = "speculation: {num_draft_tokens: %d, confidence_temperatures: {coupled: [1, 2.0, 3]}}"
    for drafts, temperatures in ((0, ()), (2, (1.0, 2.0)), (3, (1.0, 2.0, 3.0))):
        settings = load(tmp_path, text % drafts).speculation
        assert settings.draft_temperatures() == temperatures
    with pytest.raises(ConfigError, match="num_draft_tokens = 4 or more, got 3"):
        load(tmp_path, text % 4)
