"""Traces: how many decode steps had which batch, and what their captured pairs wasted.

Owns the numbers and their two file forms. Does not record (the engine does) and plans nothing. Data
flow: a run or a simulation counts steps -> `GridTrace` -> file -> `decodegrid.capture.plan`.

A file is one JSON object, or JSON lines: the object without `batches` and `pairs`, and then one
batch a line. A batch that is there twice counts twice.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decodegrid.capture.grid import GraphKey
from decodegrid.configs.file_errors import first_problem
from decodegrid.configs.strict_json import load_json

WRITTEN_BY = "decodegrid generate --trace"
MAX_FILE_BYTES = 64 * 2**20
MAX_STEPS = 2**53
"""Most steps of a trace: all sums over them are exact in a double."""
MAX_NUM_REQS = 1024
MAX_DRAFT_TOKENS = 16


class TraceError(ValueError):
    """A trace that cannot be read, or that no run of its limits can have made."""


class _BatchFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    num_reqs: int
    num_query_tokens: int
    steps: int = Field(default=1, ge=1, le=MAX_STEPS)


class _PairFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    num_reqs: int
    num_query_tokens: int
    steps: int = Field(ge=1, le=MAX_STEPS)
    pad_rows: int = Field(ge=0, le=MAX_STEPS)
    surplus_tokens: int = Field(ge=0, le=MAX_STEPS)


class _TraceFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    format: Literal[1]
    source: str = Field(max_length=1000)
    max_num_reqs: int = Field(ge=1, le=MAX_NUM_REQS)
    num_draft_tokens: int = Field(ge=0, le=MAX_DRAFT_TOKENS)
    batches: list[_BatchFile] = Field(default_factory=list)
    pairs: list[_PairFile] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PairUse:
    """What one captured pair did in a run."""

    steps: int
    """Replays, 1 or more."""
    pad_rows: int
    """Rows without a request, over all replays."""
    surplus_tokens: int
    """Query tokens that belonged to no request, over all replays."""


@dataclass(frozen=True, slots=True)
class GridTrace:
    """The batches of a run, by size."""

    max_num_reqs: int
    num_draft_tokens: int
    """K of the run."""
    source: str
    """Where it comes from, for people."""
    batches: Mapping[tuple[int, int], int]
    """Decode steps by (requests, query tokens that the step was scheduled with); at least one."""
    pairs: Mapping[GraphKey, PairUse] = field(default_factory=dict)
    """What the captured pairs of the run did; empty where nothing is known of them."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_reqs <= MAX_NUM_REQS:
            raise TraceError(f"max_num_reqs is {self.max_num_reqs}; allowed are 1..{MAX_NUM_REQS}")
        if not 0 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise TraceError(
                f"num_draft_tokens is {self.num_draft_tokens}; allowed are 0..{MAX_DRAFT_TOKENS}"
            )
        if not self.batches:
            raise TraceError("the trace is empty: it holds no decode step")
        for batch, steps in self.batches.items():
            self._check_batch("batch", *batch)
            if steps < 1:
                raise TraceError(f"batch {batch} has {steps} steps; at least 1 is needed")
        if self.num_steps > MAX_STEPS:
            raise TraceError(f"the trace has {self.num_steps} steps; at most {MAX_STEPS}")
        for key in self.pairs:
            self._check_batch("pair", key.num_reqs, key.num_query_tokens)
        replays = sum(use.steps for use in self.pairs.values())
        if self.pairs and replays != self.num_steps:
            raise TraceError(
                f"the trace has {self.num_steps} steps in its batches and {replays} in its pairs"
            )
        object.__setattr__(self, "batches", MappingProxyType(dict(sorted(self.batches.items()))))
        object.__setattr__(self, "pairs", MappingProxyType(dict(sorted(self.pairs.items()))))

    @property
    def num_steps(self) -> int:
        """Decode steps."""
        return sum(self.batches.values())

    def check_fits(self, max_num_reqs: int, num_draft_tokens: int) -> None:
        """Refuse a trace of other limits: its batches are not what this grid will see.

        Raises:
            TraceError: names both sides.
        """
        if self.num_draft_tokens != num_draft_tokens:
            raise TraceError(
                f"the trace was made with speculation.num_draft_tokens = {self.num_draft_tokens}; "
                f"the deployment has {num_draft_tokens}"
            )
        if self.max_num_reqs != max_num_reqs:
            raise TraceError(
                f"the trace was made with scheduler.max_num_reqs = {self.max_num_reqs}; "
                f"the deployment has {max_num_reqs}"
            )

    def as_json(self) -> dict[str, Any]:
        """What `read_trace` reads, as plain objects."""
        return {
            "format": 1,
            "source": self.source,
            "max_num_reqs": self.max_num_reqs,
            "num_draft_tokens": self.num_draft_tokens,
            "batches": [
                {"num_reqs": rows, "num_query_tokens": tokens, "steps": steps}
                for (rows, tokens), steps in self.batches.items()
            ],
            "pairs": [
                {"num_reqs": key.num_reqs, "num_query_tokens": key.num_query_tokens} | asdict(use)
                for key, use in self.pairs.items()
            ],
        }

    def _check_batch(self, what: str, num_reqs: int, num_query_tokens: int) -> None:
        most = self.num_draft_tokens + 1
        if not 1 <= num_reqs <= self.max_num_reqs:
            raise TraceError(
                f"{what} ({num_reqs}, {num_query_tokens}): allowed are 1..{self.max_num_reqs} "
                "requests (max_num_reqs of the trace)"
            )
        if not num_reqs <= num_query_tokens <= num_reqs * most:
            raise TraceError(
                f"{what} ({num_reqs}, {num_query_tokens}): {num_reqs} requests with "
                f"{self.num_draft_tokens} drafts have {num_reqs}..{num_reqs * most} query tokens"
            )


def read_trace(path: Path) -> GridTrace:
    """Read a trace, JSON or JSON lines.

    Raises:
        TraceError: names the file and what of it is wrong.
        OSError: the file cannot be read.
    """
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is not a file")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise TraceError(f"{path}: {size} bytes; a trace has at most {MAX_FILE_BYTES}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: byte {error.start} is not UTF-8 text") from None
    if not text.strip():
        raise TraceError(f"{path}: the file is empty")
    try:
        return _from_parts(*_parts(text))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def write_trace(trace: GridTrace, path: Path) -> None:
    """Write a trace as JSON, a batch a line; an older file is replaced. Raises OSError."""
    data = trace.as_json()
    lists = {name: data.pop(name) for name in ("batches", "pairs")}
    head = json.dumps(data, indent=1, ensure_ascii=False).removesuffix("\n}")
    tail = [
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(item)}" for item in items) + "\n ]"
        if items
        else f' "{name}": []'
        for name, items in lists.items()
    ]
    path.write_text(",\n".join([head, *tail]) + "\n}\n", encoding="utf-8")


def _parts(text: str) -> tuple[Any, list[tuple[int, Any]]]:
    """The object of a file, and for JSON lines the (line number, value) of each batch."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    first_number, first = lines[0]
    try:
        head = load_json(first)
    except ValueError:
        head = None
    if isinstance(head, dict) and "batches" not in head and len(lines) > 1:
        return head, [(number, _parse(line, number)) for number, line in lines[1:]]
    if isinstance(head, dict) and len(lines) == 1:
        return head, []
    return _parse("\n" * (first_number - 1) + text.lstrip(), 1), []


def _parse(text: str, first_line: int) -> Any:
    try:
        return load_json(text, first_line)
    except ValueError as error:
        raise TraceError(f"{error} (line {first_line} on)") from None


def _from_parts(head: Any, lines: list[tuple[int, Any]]) -> GridTrace:
    try:
        file = _TraceFile.model_validate(head)
    except ValidationError as error:
        raise TraceError(first_problem(error, "the object", WRITTEN_BY)) from None
    batches = list(file.batches)
    for number, value in lines:
        try:
            batches.append(_BatchFile.model_validate(value))
        except ValidationError as error:
            raise TraceError(f"line {number}: {first_problem(error, 'the object')}") from None
    return GridTrace(
        file.max_num_reqs,
        file.num_draft_tokens,
        file.source,
        _counted(batches),
        _pairs(file.pairs),
    )


def _counted(batches: Iterable[_BatchFile]) -> Counter[tuple[int, int]]:
    counts: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        counts[batch.num_reqs, batch.num_query_tokens] += batch.steps
    return counts


def _pairs(items: Iterable[_PairFile]) -> dict[GraphKey, PairUse]:
    found: dict[GraphKey, PairUse] = {}
    for item in items:
        try:
            key = GraphKey(item.num_reqs, item.num_query_tokens)
        except ValueError as error:
            raise TraceError(f"pairs: {error}") from None
        if key in found:
            raise TraceError(f"pairs: {key} is there twice")
        found[key] = PairUse(item.steps, item.pad_rows, item.surplus_tokens)
    return found
