"""Records which batches a live run had, for `decodegrid plan`.

Owns the counts of one run. Data flow: the loop's counters tell of every decode step -> GridRecorder
-> `GridTrace` -> a file. A library user takes `llm.stats.grid.trace()`.
"""

from collections import Counter
from pathlib import Path

from decodegrid.capture.grid import GraphKey
from decodegrid.capture.plan_trace import (
    GridTrace,
    PairUse,
    TraceError,
    read_trace,
    write_trace,
)


class GridRecorder:
    """Counts decode steps by rows, wanted query tokens and captured pair."""

    def __init__(self, max_num_reqs: int, num_draft_tokens: int) -> None:
        self.max_num_reqs, self.num_draft_tokens = max_num_reqs, num_draft_tokens
        self._steps: Counter[tuple[int, int, int, int]] = Counter()
        self._num_used: Counter[tuple[int, int]] = Counter()

    def record(self, num_reqs: int, num_wanted: int, key: GraphKey, num_used: int) -> None:
        """A step of num_reqs rows that was scheduled with num_wanted query tokens, ran in a
        captured pair, and had num_used query tokens that belonged to a row."""
        pair = (key.num_reqs, key.num_query_tokens)
        self._steps[num_reqs, num_wanted, *pair] += 1
        self._num_used[pair] += num_used

    @property
    def num_steps(self) -> int:
        """Decode steps so far."""
        return self._steps.total()

    def trace(self, source: str = "a run") -> GridTrace:
        """What was recorded so far. Raises TraceError before the first decode step."""
        batches: Counter[tuple[int, int]] = Counter()
        pad_rows: Counter[GraphKey] = Counter()
        replays: Counter[GraphKey] = Counter()
        for (num_reqs, num_wanted, *pair), steps in self._steps.items():
            key = GraphKey(*pair)
            batches[num_reqs, num_wanted] += steps
            replays[key] += steps
            pad_rows[key] += steps * (key.num_reqs - num_reqs)
        uses = {
            key: PairUse(
                steps,
                pad_rows[key],
                steps * key.num_query_tokens - self._num_used[key.num_reqs, key.num_query_tokens],
            )
            for key, steps in replays.items()
        }
        return GridTrace(self.max_num_reqs, self.num_draft_tokens, source, batches, uses)


def check_trace_target(path: Path | None) -> None:
    """Raise ValueError where no file of that name can be made, or one would be lost that is no
    older trace and not empty; None is no file."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"--trace is {path}, which is a directory; a file is needed")
    if not path.parent.is_dir():
        raise ValueError(f"--trace is {path}; there is no directory {path.parent}")
    if _has_content(path):
        try:
            read_trace(path)
        except TraceError as error:
            raise ValueError(
                f"--trace is {path}, which exists and is no trace, so it is not replaced ({error})"
            ) from None


def _has_content(path: Path) -> bool:
    """Whether something would be lost: a terminal or a pipe keeps nothing."""
    return path.is_file() and path.stat().st_size > 0


def save_trace(recorder: GridRecorder, path: Path | None, source: str) -> str:
    """Write what was recorded, if a file is asked for; says in a line what became of it.

    Raises OSError.
    """
    if path is None:
        return ""
    if not recorder.num_steps:
        return f"no trace: no decode step ran, {path} is not written"
    note = " (an older trace was replaced)" if _has_content(path) else ""
    write_trace(recorder.trace(source), path)
    return f"trace of {recorder.num_steps} decode steps: {path}{note}"
