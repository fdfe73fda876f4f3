"""grid.pairs: the explicit list of captured pairs, and what is refused."""

import re

import pytest

from decodegrid.capture.grid import CoverageError, GraphKey, build_grid
from decodegrid.configs.load import ConfigError, load_config

LIMITS = ["scheduler.max_num_reqs=4", "speculation.num_draft_tokens=2"]


def test_pairs_are_the_grid() -> None:
    loaded = load_config(None, [*LIMITS, "grid.pairs=[[1, 1], [1, 3], [3, 7], [4, 12]]"])
    pairs = loaded.config.grid.pairs
    assert pairs == ((1, 1), (1, 3), (3, 7), (4, 12))
    grid = build_grid(4, 2, pairs=pairs)
    assert [(key.num_reqs, key.num_query_tokens) for key in grid.keys] == list(pairs)
    assert grid.select(2, 5) == GraphKey(3, 7)
    rows = {key: value for key, value, _ in loaded.rows()}
    assert rows["grid.pairs"] == "[[1, 1], [1, 3], [3, 7], [4, 12]]"


def test_a_file_of_pairs(tmp_path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("grid:\n  pairs: [\n    [1, 6],\n    [8, 48],\n  ]\n")
    assert load_config(path).config.grid.pairs == ((1, 6), (8, 48))
    path.write_text("grid:\n  pairs:\n    - [1, 6]\n    - [8, 48]\n")
    assert load_config(path).config.grid.pairs == ((1, 6), (8, 48))
    path.write_text("grid:\n  pairs:\n    - [1, x]\n    - [8, 48]\n")
    with pytest.raises(ConfigError, match=r"x\.yaml:3:11: grid\.pairs\[0\]\[1\]: must be a whole"):
        load_config(path)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ("[[4, 12], [1, 1]]", "grid.pairs: must be ascending without repeats; [1, 1] follows [4,"),
        ("[[1, 1], [1, 1], [4, 12]]", "must be ascending without repeats; [1, 1] follows [1, 1]"),
        ("[[1, 1]]", "must end with [4, 12] (scheduler.max_num_reqs = 4 and speculation.num_dra"),
        ("[[1, 4], [4, 12]]", "1..4 requests, each with 1..3 query tokens"),
        ("[[2, 1], [4, 12]]", "got [2, 1]"),
        ("[[4, 12], [5, 12]]", "got [5, 12]"),
        ("[[0, 1], [4, 12]]", "grid.pairs[0][0]: must be greater than or equal to 1"),
        ("[[1], [4, 12]]", "grid.pairs: must be a list of [requests, query tokens] pairs"),
        ("[[1, 1, 1], [4, 12]]", "must be a list of [requests, query tokens] pairs"),
        ("[1, 12]", "must be a list of [requests, query tokens] pairs"),
        ("5", "grid.pairs: must be a list"),
        ("[[1, 1.5], [4, 12]]", "grid.pairs[0][1]: must be a whole number"),
        ("[[1, true], [4, 12]]", "grid.pairs[0][1]: must be a whole number"),
    ],
)
def test_bad_pairs(pairs: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(None, [*LIMITS, f"grid.pairs={pairs}"])
    assert len(caught.value.errors) == 1


@pytest.mark.parametrize("other", ["num_reqs=[4]", "num_query_tokens_per_req=[3]"])
def test_pairs_stand_alone(other: str) -> None:
    with pytest.raises(ConfigError, match=r"grid\.num_\w+: must be empty with grid\.pairs, got \["):
        load_config(None, [*LIMITS, "grid.pairs=[[4, 12]]", f"grid.{other}"])


def test_a_grid_of_bad_pairs() -> None:
    assert build_grid(4, 2, pairs=[(1, 1)]).keys == (GraphKey(1, 1), GraphKey(4, 12))
    with pytest.raises(ValueError, match=r"graph key \(1, 4\): 1 requests with 2 drafts"):
        build_grid(4, 2, pairs=[(1, 4)])
    with pytest.raises(ValueError, match=r"graph key \(2, 1\)"):
        build_grid(4, 2, pairs=[(2, 1)])
    with pytest.raises(CoverageError):
        build_grid(4, 2, pairs=[(1, 1)]).select(5, 5)
