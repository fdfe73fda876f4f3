"""Series of the training logs' picture."""

import csv
from pathlib import Path

import pytest

from training.curves import PICTURE, Series, draw, read_columns, smooth, tokens_per_round
from training.run_log import LOGS


def test_columns_are_read_over_tokens_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerows([("tokens", "a", "b"), (1_000_000, 3.0, "nan"), (2_500_000, 2.0, 0.5)])
    first, second = read_columns(path, ("a", "b"))
    assert (first.tokens, first.values) == ([1.0, 2.5], [3.0, 2.0])
    assert (second.name, second.tokens, second.values) == ("b", [2.5], [0.5])


def test_smoothing_looks_back_alone() -> None:
    series = Series("x", [1.0, 2.0, 3.0, 4.0], [4.0, 2.0, 0.0, 6.0])
    assert smooth(series, 2).values == [4.0, 3.0, 1.0, 3.0]
    assert smooth(series, 9).values == [4.0, 3.0, 2.0, 3.0]


def test_tokens_a_round_count_a_draft_where_all_before_it_were_accepted() -> None:
    slots = [Series(f"accept{n}", [1.0, 2.0], [0.5, 1.0]) for n in range(5)]
    found = tokens_per_round(slots).values
    assert found == pytest.approx([1 + 0.5 + 0.25 + 0.125 + 0.0625 + 0.03125, 6.0])


def test_the_committed_logs_are_drawn(tmp_path: Path) -> None:
    draw(LOGS, tmp_path / PICTURE)
    assert (tmp_path / PICTURE).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
