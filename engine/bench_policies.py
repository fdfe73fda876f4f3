"""The verify policies that the benchmark compares, by name.

Owns the names and what each means. Data flow: names and K -> `BenchPolicy`; the sweep makes a
`VerifyPolicy` of each.

  none, k1 .. k(K-1), all   every row verifies that many of its drafts, as far as it has them (none
                            is k0 and all is kK). The limit is the request's own (`speculation`).
  scheduled                 the engine's schedule, with its surface, corrections and rates.
  oracle                    the schedule with true rates: 1 for a draft that will be accepted with
                            all before it, else 0. The total and its split over the rows follow the
                            rates of the very drafts that they decide about.
  random                    the schedule with rates that say nothing: the confidences of each row
                            are those that the drafter gave in another place, drawn evenly from all
                            places of the repeat. Their distribution is right. Total and split
                            follow them as they do the oracle's.

Oracle and random come from a first pass over the same prompts and seeds (see bench_tables).
Rounding may depend on the captured pair, so now and then a draft differs after all; how many rows
ran as foreseen is counted and reported. Under rejection sampling at a temperature above 0 the text
depends on what is verified, and neither is offered.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from decodegrid.capture.budget import VerifyBudget
from decodegrid.engine.bench_tables import DraftTable, DraftTables, split_total, table_key
from decodegrid.engine.request import Request
from decodegrid.engine.runner_protocol import StepResult
from decodegrid.engine.step_plan import DecodeStep, TokenUpdate
from decodegrid.engine.verify_policy import ScheduledVerify, StepRows

TABLED = ("oracle", "random")
"""Policies that need a first pass."""
SCHEDULES = ("scheduled", *TABLED)
"""Policies that need a step-time surface."""

_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "scheduled": "the engine's own schedule",
        "oracle": "the schedule, its rates being what truly survives (known from a first pass)",
        "random": "the schedule, its rates being confidences of other places drawn at random",
    }
)

Speculation = Literal["auto", "off"] | int
"""As in SamplingParams."""
ConfidenceWriter = Callable[[Sequence[int], NDArray[np.float32]], None]
"""Puts conditional confidences (rows, K) into slots, where the next step's split reads them."""


@dataclass(frozen=True, slots=True)
class BenchPolicy:
    """A policy by its name."""

    name: str
    """As it was asked for."""
    num_drafts: int | None
    """Drafts that every row verifies; None where a schedule decides."""

    def speculation(self, num_draft_tokens: int) -> Speculation:
        """The request's own limit on drafts; "auto" where none is needed, because a limit costs the
        host a little work for each slot."""
        if self.num_drafts is None or self.num_drafts in (0, num_draft_tokens):
            return "auto"
        return self.num_drafts

    @property
    def meaning(self) -> str:
        """A phrase for the report."""
        if self.num_drafts is None:
            return _MEANINGS[self.name]
        if self.num_drafts == 0:
            return "no draft is verified; all are made"
        return f"every row verifies {self.num_drafts}, as far as it has them"


def parse_policies(names: Sequence[str], num_draft_tokens: int) -> tuple[BenchPolicy, ...]:
    """Policies by their names.

    Raises ValueError for one that is unknown, has too many drafts, is there twice, or needs a
    drafter where there is none.
    """
    found: dict[str | int, BenchPolicy] = {}
    for name in names:
        policy = _parse(name, num_draft_tokens)
        same = name if policy.num_drafts is None else policy.num_drafts
        if same in found:
            raise ValueError(
                f"--policies has {found[same].name} and {name}, which are the same policy"
            )
        found[same] = policy
    return tuple(found.values())


def policy_names(num_draft_tokens: int, *, schedules: Sequence[str]) -> list[str]:
    """A name for each number of drafts, and the schedules where there are drafts."""
    if num_draft_tokens == 0:
        return ["none"]
    return ["none", *(f"k{count}" for count in range(1, num_draft_tokens)), "all", *schedules]


def _parse(name: str, num_draft_tokens: int) -> BenchPolicy:
    if name in SCHEDULES:
        if num_draft_tokens == 0:
            raise ValueError(f"--policies has {name}, but speculation.num_draft_tokens is 0")
        return BenchPolicy(name, None)
    if name in ("none", "all"):
        return BenchPolicy(name, num_draft_tokens if name == "all" else 0)
    digits = name.removeprefix("k")
    if digits == name or not (digits.isascii() and digits.isdigit()):
        raise ValueError(
            f"--policies has {name!r}; known are none, all, k0 to k{num_draft_tokens}, "
            f"{', '.join(SCHEDULES)}"
        )
    if int(digits) > num_draft_tokens:
        raise ValueError(
            f"--policies has {name}; speculation.num_draft_tokens allows k0 to k{num_draft_tokens}"
        )
    return BenchPolicy(name, int(digits))


class TableVerify(ScheduledVerify):
    """The schedule with rates from tables instead of the drafter's.

    While a row's last step is in flight, the length that it will have is foreseen from the table
    and the split, so that the rates are those of the drafts that the step verifies.
    """

    def __init__(
        self,
        budget: VerifyBudget,
        num_slots: int,
        running: Callable[[], Sequence[Request]],
        write: ConfidenceWriter,
        *,
        wide: bool = False,
    ) -> None:
        """running: the requests that decode now, each with its slot. write: called once a step.
        wide: the device's rates are float64 instead of float32."""
        super().__init__(budget, num_slots, fresh_rates=True, note="rates from a table")
        self._running, self._write = running, write
        self._dtype = np.float64 if wide else np.float32
        self._tables: DraftTables = {}
        self._table_of_slot: dict[int, tuple[Request, DraftTable]] = {}
        self._foreseen: deque[tuple[tuple[int, ...], list[int], list[int]]] = deque()
        """Of the steps on their way: slots, and of each row drafts verified and drafts accepted."""
        self.num_rows = self.num_as_foreseen = 0
        """Rows that ran, and those of them that verified and accepted what was foreseen."""

    def set_tables(self, tables: DraftTables) -> None:
        """Take the tables of the requests to come; every request needs one."""
        self._tables = tables
        self._table_of_slot.clear()
        self._foreseen.clear()

    def record_rates(self, slots: Sequence[int], confidence: NDArray[np.float32]) -> None:
        """The drafter's own confidences are not looked at."""

    def total(self, rows: StepRows) -> int:
        """See VerifyPolicy; puts the rows' confidences into their slots, too."""
        requests = {request.slot: request for request in self._running()}
        flying = self._accepted_in_flight()
        count, width = len(rows.slots), self.budget.num_draft_tokens
        values = np.zeros((count, width), dtype=np.float32)
        limits, right = [0] * count, [0] * count
        for row, slot in enumerate(rows.slots):
            request = requests[slot]
            table = self._table(slot, request)
            length = request.seq_len
            if rows.in_flight[row]:
                length += 1 + flying[slot]
            if request.fresh or not table.start <= length < table.end:
                continue
            place = length - table.start
            limits[row] = max(0, min(width, request.max_seq_len - length - 1))
            # The last tokens of a text are right, too, where there is no room to verify them.
            values[row, : limits[row]] = table.confidence[place, : limits[row]]
            right[row] = int(table.num_right[place])
        super().record_rates(rows.slots, values)
        total = super().total(rows)
        self._write(rows.slots, values)
        verified = split_total(values.astype(self._dtype), limits, total)
        accepted = [min(pair) for pair in zip(verified, right, strict=True)]
        self._foreseen.append((tuple(rows.slots), verified, accepted))
        return total

    def observe(self, step: DecodeStep, result: StepResult, updates: Sequence[TokenUpdate]) -> None:
        """A StepObserver that compares what a step did with what was foreseen."""
        slots, verified, accepted = self._foreseen.popleft()
        assert slots == step.slots, "steps are committed in the order of their totals"
        for update in updates:
            row = update.row
            # What is accepted behind the end of a text is in no table, and dropped.
            is_right = update.request.is_finished or result.num_emitted[row] - 1 == accepted[row]
            self.num_rows += 1
            self.num_as_foreseen += bool(is_right and result.num_verified[row] == verified[row])

    def _table(self, slot: int, request: Request) -> DraftTable:
        """The table of a slot's request; making the key of a long prompt takes a while."""
        known = self._table_of_slot.get(slot)
        if known is None or known[0] is not request:
            known = (request, self._tables[table_key(request)])
            self._table_of_slot[slot] = known
        return known[1]

    def _accepted_in_flight(self) -> dict[int, int]:
        """By slot the drafts that the step on its way will accept."""
        if not self._foreseen:
            return {}
        slots, _, accepted = self._foreseen[-1]
        return dict(zip(slots, accepted, strict=True))
