"""The prefix benchmark's arithmetic. No times."""

from typing import Any

import pytest

from benchmarks.prefix import main, report_samples
from decodegrid.engine.prefix_cache import PrefixStats


def test_ratios_are_taken_inside_a_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    samples = {"hit": [0.2, 0.1, 0.4], "miss": [1.0, 1.0, 2.0], "off": [1.0, 0.8, 2.5]}
    warm, last = PrefixStats(), PrefixStats()
    warm.num_tokens, warm.num_tokens_hit = 1000, 100
    last.num_tokens, last.num_tokens_hit = 4000, 1600
    result: dict[str, Any] = report_samples(samples, warm, last)
    assert result["hit_saves"] == pytest.approx(0.8)
    assert result["miss_costs"] == pytest.approx(0.0)
    assert (result["tokens_a_hit"], result["hit_rate"]) == (500, 0.5)
    assert result["first_token_ms"] == {"hit": 200.0, "miss": 1000.0, "off": 1000.0}
    assert "a hit saves 80.0%; the cache costs a miss +0.0%" in capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--repeats", "--prefix", "--suffix"])
def test_counts_are_positive(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([argument, "0"])
    assert f"{argument} must be at least 1, got 0" in capsys.readouterr().err
