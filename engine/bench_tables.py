"""What the drafts of known texts are worth, place by place.

Owns the notes of a first pass and the tables made from them. Greedy and coupled decoding emit the
same text whatever is verified, and drafts follow from the text; so a pass that verifies nothing
makes the drafts of every length, and its own text tells which of them are right. Data flow: steps
of the first pass -> notes -> a `DraftTable` for each request -> the rates of a policy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from decodegrid.engine.request import Request
from decodegrid.engine.runner_protocol import StepResult
from decodegrid.engine.step_plan import DecodeStep, TokenUpdate

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
TableKey = tuple[int, ...]
"""Seed and prompt: what a text follows from, with the same sampling parameters."""


@dataclass(frozen=True, slots=True)
class DraftTable:
    """What a request's drafts are worth, by its committed length."""

    start: int
    """Prompt tokens: the length at which decoding starts, where there are no drafts."""
    num_right: Ints
    """(n,) leading drafts at length start + i that equal the text which follows; n output tokens.
    """
    confidence: Floats
    """(n, K) conditional confidences of those drafts; 0 where there are none."""

    @property
    def end(self) -> int:
        """Length at which the text ends; no draft there is of use."""
        return self.start + len(self.num_right)


DraftTables = Mapping[TableKey, DraftTable]


def table_key(request: Request) -> TableKey:
    """The key of a request's table."""
    return (request.seed, *request.token_ids[: request.num_prompt_tokens])


class DraftNotes:
    """A StepObserver that writes down the drafts made at each length of each request."""

    def __init__(self) -> None:
        self._notes: dict[str, dict[int, tuple[Ints, Floats]]] = {}
        self._requests: dict[str, Request] = {}

    def __call__(
        self, step: DecodeStep, result: StepResult, updates: Sequence[TokenUpdate]
    ) -> None:
        """See StepObserver; the drafts follow the text that was just committed."""
        for update in updates:
            request, row = update.request, update.row
            self._requests[request.request_id] = request
            notes = self._notes.setdefault(request.request_id, {})
            if not request.is_finished:
                drafts, confidence = result.drafts[row].copy(), result.confidence[row].copy()
                notes[request.seq_len] = (drafts, confidence)

    def tables(self, num_draft_tokens: int) -> dict[TableKey, DraftTable]:
        """Of all requests, with the confidences that the drafter gave.

        Raises ValueError where the drafts of a length are missing: the pass verified some.
        """
        return {
            table_key(request): _table_of(request, self._notes[name], num_draft_tokens)
            for name, request in self._requests.items()
        }


def _table_of(
    request: Request, notes: Mapping[int, tuple[Ints, Floats]], num_draft_tokens: int
) -> DraftTable:
    text, start, count = request.token_ids, request.num_prompt_tokens, request.num_output_tokens
    right = np.zeros(count, dtype=np.int64)
    confidence = np.zeros((count, num_draft_tokens), dtype=np.float32)
    for place in range(1, count):
        length = start + place
        if length not in notes:
            raise ValueError(f"no drafts were made at length {length}: the pass verified some")
        drafts, confidence[place] = notes[length]
        follows = text[length : length + num_draft_tokens]
        for draft, token in zip(drafts.tolist(), follows, strict=False):
            if draft != token:
                break
            right[place] += 1
    return DraftTable(start, right, confidence)


def oracle_tables(tables: DraftTables) -> dict[TableKey, DraftTable]:
    """The same drafts with confidence 1 for those that survive and 0 for the others."""
    found = {}
    for key, table in tables.items():
        column = np.arange(table.confidence.shape[1])
        true = (column < table.num_right[:, None]).astype(np.float32)
        found[key] = replace(table, confidence=true)
    return found


def random_tables(tables: DraftTables, seed: int) -> dict[TableKey, DraftTable]:
    """The same drafts, each place with the confidences of a place drawn evenly from all that have
    drafts; the same for the same seed."""
    pool = np.concatenate([table.confidence[1:] for table in tables.values()])
    rng = np.random.default_rng(seed)
    found = {}
    for key, table in tables.items():
        drawn = np.zeros_like(table.confidence)
        if len(drawn) > 1:
            drawn[1:] = pool[rng.integers(len(pool), size=len(drawn) - 1)]
        found[key] = replace(table, confidence=drawn)
    return found


def split_total(confidence: NDArray[np.floating], limits: Sequence[int], total: int) -> list[int]:
    """Drafts of each row that a step of `total` query tokens verifies, as the device splits them.

    confidence: (rows, K) conditional, 0..1, in the device's dtype. limits: drafts that each row can
    verify. The largest survival rates win; ties go to the lower row, then to the lower draft.
    """
    num_rows, width = confidence.shape
    rates = np.multiply.accumulate(confidence, axis=1)
    usable = np.arange(width) < np.array(limits, dtype=np.int64)[:, None]
    flat = np.where(usable, rates, -1.0).reshape(-1)
    winners = np.argsort(-flat, kind="stable")[: total - num_rows]
    winners = winners[flat[winners] >= 0]
    counts = np.bincount(winners // width, minlength=num_rows)
    return [int(count) for count in counts]
