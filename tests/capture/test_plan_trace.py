"""Traces on disk: both forms, and one clear error for every kind of bad file."""

import json
from pathlib import Path

import pytest

from decodegrid.capture import plan_costs, plan_trace
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.plan_costs import CostError, PairCost, read_costs
from decodegrid.capture.plan_trace import GridTrace, PairUse, TraceError, read_trace, write_trace

HEAD = '{"format": 1, "source": "s", "max_num_reqs": 8, "num_draft_tokens": 5}'


def head(**changes) -> str:
    return json.dumps(json.loads(HEAD) | changes)


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    trace = GridTrace(
        8,
        5,
        'a \u00e9 "run"',
        {(3, 7): 5, (1, 1): 2**52},
        {GraphKey(4, 8): PairUse(5, 5, 5), GraphKey(1, 1): PairUse(2**52, 0, 0)},
    )
    write_trace(trace, tmp_path / "t.json")
    assert read_trace(tmp_path / "t.json") == trace
    assert list(trace.batches) == [(1, 1), (3, 7)]
    bare = GridTrace(2, 0, "", {(1, 1): 1})
    write_trace(bare, tmp_path / "t.json")
    assert read_trace(tmp_path / "t.json") == bare
    json.loads((tmp_path / "t.json").read_text())


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_json_lines_add_up(tmp_path: Path, end: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        f'{HEAD}\n{{"num_reqs": 2, "num_query_tokens": 12}}\n\n'
        '{"num_reqs": 1, "num_query_tokens": 1, "steps": 4}\n'
        f'{{"num_reqs": 2, "num_query_tokens": 12, "steps": 2}}{end}'
    )
    assert read_trace(path).batches == {(1, 1): 4, (2, 12): 3}


def batch(rows: object, tokens: object, steps: object = 1) -> str:
    return json.dumps({"num_reqs": rows, "num_query_tokens": tokens, "steps": steps})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (" \n \n", "the file is empty"),
        (HEAD, "the trace is empty: it holds no decode step"),
        (head(batches=[]), "the trace is empty"),
        ("nonsense", "not JSON at line 1, column 1"),
        ('{"format": 1,\n "source": }', "not JSON at line 2, column 12"),
        (f"{HEAD}\n{batch(1, 1)}\n{{", "not JSON at line 3, column 2"),
        ("[1, 2]", "the object: Input should be"),
        (f"{HEAD}\n{batch(0, 1)}", r"batch \(0, 1\): allowed are 1\.\.8 requests"),
        (f"{HEAD}\n{batch(9, 9)}", r"batch \(9, 9\): allowed are 1\.\.8 requests"),
        (f"{HEAD}\n{batch(2, 1)}", r"batch \(2, 1\): 2 requests with 5 drafts have 2\.\.12"),
        (f"{HEAD}\n{batch(2, 13)}", r"batch \(2, 13\): 2 requests with 5 drafts have 2\.\.12"),
        (f"{HEAD}\n{batch(2, 2, 0)}", "line 2: steps: Input should be greater than or equal to 1"),
        (f"{HEAD}\n{batch(2, 2, -3)}", "line 2: steps"),
        (f"{HEAD}\n{batch(2, 2, 2**60)}", "line 2: steps: Input should be less than or equal"),
        (f"{HEAD}\n{batch(2, 2, 2.5)}", "line 2: steps: Input should be a valid integer"),
        (f"{HEAD}\n{batch(True, 2)}", "line 2: num_reqs: Input should be a valid integer"),
        (f"{HEAD}\n{batch('2', 2)}", "line 2: num_reqs"),
        (f"{HEAD}\n[1, 1, 1]", "line 2: the object"),
        (f'{HEAD}\n{{"num_reqs": 1}}', "line 2: num_query_tokens: Field required"),
        (f"{HEAD}\n{batch(2, 2, float('nan'))}", "NaN is no JSON number"),
        (head(batches=[]).replace("[]", "-Infinity"), "-Infinity is no JSON number"),
        (f"{HEAD}\n{batch(2, 2)[:-2]}{'9' * 5000}}}", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON|not JSON"),
        (head(format=2), "format: Input should be 1"),
        (head(rows=2), "rows: Extra inputs are not permitted"),
        (head(max_num_reqs=0), "max_num_reqs: Input should be greater"),
        (head(max_num_reqs=2000), "max_num_reqs: Input should be less"),
        (head(num_draft_tokens=17), "num_draft_tokens: Input should be less"),
        (f"{HEAD}\n" + "\n".join([batch(1, 1, 2**53)] * 2), "at most 9007199254740992"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


PAIR = {"num_reqs": 1, "num_query_tokens": 1, "steps": 3, "pad_rows": 0, "surplus_tokens": 0}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([PAIR], "4 steps in its batches and 3 in its pairs"),
        ([PAIR | {"num_reqs": 2}], r"pairs: graph key \(2, 1\)"),
        ([PAIR | {"num_query_tokens": 7}], r"pair \(1, 7\): 1 requests with 5 drafts"),
        ([PAIR, PAIR], r"pairs: \(1, 1\) is there twice"),
        ([PAIR | {"pad_rows": -1}], r"pairs\.0\.pad_rows"),
    ],
)
def test_bad_pairs(tmp_path: Path, pairs: list[dict[str, int]], message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(head(batches=[json.loads(batch(1, 1, 4))], pairs=pairs))
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_files_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'{"source": "\xff"}')
    with pytest.raises(TraceError, match="byte 12 is not UTF-8 text"):
        read_trace(path)
    monkeypatch.setattr(plan_trace, "MAX_FILE_BYTES", 10)
    with pytest.raises(TraceError, match="15 bytes; a trace has at most 10"):
        read_trace(path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.json")


def test_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    item = {"num_reqs": 1, "num_query_tokens": 1, "memory_bytes": 5, "capture_s": 0.5}
    path.write_text(json.dumps({"format": 1, "pairs": [item]}))
    assert read_costs(path) == {GraphKey(1, 1): PairCost(5, 0.5)}
    bad = [
        ({"format": 1, "pairs": []}, "pairs: List should have at least 1"),
        ({"format": 1, "pairs": [item, item]}, r"pairs\.1: \(1, 1\) is there twice"),
        ({"format": 1, "pairs": [item | {"num_reqs": 2}]}, r"pairs\.0: graph key \(2, 1\)"),
        ({"format": 1, "pairs": [item | {"capture_s": -1}]}, r"pairs\.0\.capture_s: .* 0, got -1"),
        ({"format": 1, "pairs": [item | {"capture_s": 1e308}]}, r"1000000000, got 1e\+308"),
        ({"format": 1, "pairs": [item | {"memory_bytes": 1e308}]}, r"memory_bytes: .*, got 1e"),
        ({"format": 1, "pairs": [item | {"capture_s": float("nan")}]}, "NaN is no JSON number"),
        ({"format": 3, "pairs": [item]}, "format: Input should be 1"),
        ([], "the file: Input should be"),
    ]
    for data, message in bad:
        path.write_text(json.dumps(data))
        with pytest.raises(CostError, match=message):
            read_costs(path)
    path.write_text("{")
    with pytest.raises(CostError, match="not JSON at line 1, column 2"):
        read_costs(path)
    monkeypatch.setattr(plan_costs, "MAX_FILE_BYTES", 0)
    with pytest.raises(CostError, match="bytes; at most 0 are read"):
        read_costs(path)
