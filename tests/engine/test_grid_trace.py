"""`--trace FILE`: what is refused before start-up, and what is told of an older file."""

from pathlib import Path

import pytest

from decodegrid.capture.grid import GraphKey
from decodegrid.capture.plan_trace import read_trace
from decodegrid.engine.grid_trace import GridRecorder, check_trace_target, save_trace


def recorder(num_steps: int) -> GridRecorder:
    made = GridRecorder(2, 1)
    for _ in range(num_steps):
        made.record(1, 2, GraphKey(1, 2), 2)
    return made


@pytest.mark.parametrize(
    "content", ["thesis\n", "{}", '{"format": 9}', "[1, 2]", "\0\xff", "model: {dtype: float64}\n"]
)
def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="which exists and is no trace") as caught:
        check_trace_target(path)
    assert str(caught.value).startswith(f"--trace is {path}, ")
    assert path.read_text(encoding="latin-1") == content


def test_an_older_trace_is_replaced_and_the_note_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    check_trace_target(path)
    assert save_trace(recorder(3), path, "a run") == f"trace of 3 decode steps: {path}"
    check_trace_target(path)
    note = save_trace(recorder(5), path, "a run")
    assert note == f"trace of 5 decode steps: {path} (an older trace was replaced)"
    assert read_trace(path).num_steps == 5
    # A run without a decode step leaves the older one.
    assert "is not written" in save_trace(recorder(0), path, "a run")
    assert read_trace(path).num_steps == 5


def test_empty_files_and_devices_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    check_trace_target(path)
    assert "replaced" not in save_trace(recorder(1), path, "a run")
    check_trace_target(Path("/dev/null"))
    check_trace_target(None)
    for wrong, words in ((tmp_path, "is a directory"), (tmp_path / "no" / "x", "no directory")):
        with pytest.raises(ValueError, match=words):
            check_trace_target(wrong)
