"""How many query tokens a decode step gets: all, a fixed number, or what the surface says pays.

Owns the survival rates of each slot over the last two steps and the run-time corrections of the
surface. Does not own the choice itself (`decodegrid.capture.budget`) nor the split of the total
over the rows, which the device makes by the freshest rates. Data flow: before a step the scheduler
asks for its total; after it the loop brings the confidences of the new drafts and the times.

Rates are those of the step before last: their drafts are verified and their tokens fixed. A total
from the newest rates would depend on drafts that it decides about, which under rejection sampling
changes the distribution of what is emitted. Coupled verification emits the same tokens for any
total, so `fresh_rates` is allowed there. While a row's last step is in flight its rates are not
known, and the newest known ones are those of the step before last; so a total comes from equally
old rates whether steps overlap or not, and `fresh_rates` changes nothing where they do.

Source: DeepInfer's verify schedule (budget rates, corrections from medians).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decodegrid.capture.budget import VerifyBudget
from decodegrid.capture.corrections import (
    DriftMonitor,
    LoadEstimator,
    SamplerEstimator,
    SlopeEstimator,
)
from decodegrid.capture.grid import GraphKey

SLOPE_WINDOW = 500
"""Steps that the slope remembers: what it is measured against, the load, is of recent steps too."""
DRIFT_WINDOW = 200
"""Steps over which prediction and measurement are compared."""
DRIFT_THRESHOLD = 0.25
"""Median error of the surface from which on it is called out of date, corrected or not."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a decode step, as far as a policy looks at them."""

    slots: Sequence[int]
    num_offered: Sequence[int]
    """Drafts that each row can verify, at most."""
    in_flight: Sequence[bool]
    """The row's last step is not committed: its rates are not recorded yet."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A decode step that ran."""

    key: GraphKey
    """The captured pair."""
    num_reqs: int
    """Live rows."""
    num_emitted: int
    """Tokens of all rows, before any request's end cut them."""
    step_s: float
    """Seconds of the step's graph alone."""
    host_s: float
    """Seconds of the step's period that were not the graph's: host work that nothing hid."""
    is_fused: bool = True
    """Ran in the variant that the surface was measured on."""


class VerifyPolicy(Protocol):
    """Chooses the total of query tokens of each decode step."""

    def total(self, rows: StepRows) -> int:
        """Query tokens of the next step, from one each to one each and all offered drafts."""

    def start(self, slot: int) -> None:
        """A request starts in a slot; nothing is known of its drafts."""

    def record_rates(self, slots: Sequence[int], confidence: NDArray[np.float32]) -> None:
        """Confidences (rows, K) of the drafts that a step made for its rows."""

    def record_step(self, done: StepDone) -> None:
        """What a step did and took."""

    def status(self) -> list[str]:
        """Lines for the report."""


class FixedVerify:
    """Verifies every offered draft, or as many as a limit on the total allows."""

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f'verify_tokens must be "all" or at least 1, got {limit}')
        self.limit = limit

    def total(self, rows: StepRows) -> int:
        """One for each row and all offered drafts, up to the limit."""
        total = len(rows.slots) + sum(rows.num_offered)
        return total if self.limit is None else min(total, max(self.limit, len(rows.slots)))

    def start(self, slot: int) -> None:
        """Nothing is kept."""

    def record_rates(self, slots: Sequence[int], confidence: NDArray[np.float32]) -> None:
        """Nothing is kept."""

    def record_step(self, done: StepDone) -> None:
        """Nothing is kept."""

    def status(self) -> list[str]:
        """What is verified."""
        if self.limit is None:
            return ["verify budget: everything"]
        return [f"verify budget: at most {self.limit} query tokens a step"]


class ScheduledVerify:
    """Verifies what the surface and the rates say emits most tokens a millisecond.

    Args:
        budget: the choice, with its surface; without one everything is verified.
        num_slots: slots of the runner, the null slot included.
        fresh_rates: use the rates of the last step instead of those of the one before; only where
            what is emitted does not depend on the total.
        note: where the surface came from, or why there is none; for the status.
    """

    def __init__(
        self, budget: VerifyBudget, num_slots: int, *, fresh_rates: bool = False, note: str = ""
    ) -> None:
        self.budget = budget
        self.note = note
        self.fresh_rates = fresh_rates
        shape = (num_slots, budget.num_draft_tokens)
        self._older = np.ones(shape, dtype=np.float32)
        self._latest = np.ones(shape, dtype=np.float32)
        self.slope = SlopeEstimator(SLOPE_WINDOW)
        self.sampler, self.load = SamplerEstimator(), LoadEstimator()
        self.drift = DriftMonitor(DRIFT_WINDOW, DRIFT_THRESHOLD)
        self.expected_tokens = 0.0
        self.predicted_ms = 0.0
        self.all_tokens = self.all_ms = self.none_tokens = self.none_ms = 0.0
        """Sums over the steps, of the choice and of what the two simple rules would have had."""
        self.num_steps = self.measured_tokens = 0

    def total(self, rows: StepRows) -> int:
        """See `VerifyPolicy.total`."""
        slots = list(rows.slots)
        rates = self._latest[slots]
        if not self.fresh_rates:
            known = np.array(rows.in_flight, dtype=np.bool_)
            rates = np.where(known[:, None], rates, self._older[slots])
        num_usable = np.array(rows.num_offered, dtype=np.int64)
        load = self.load.factor
        # A factor on all times changes no choice, so the other corrections are divided by it.
        choice = self.budget.choose(
            rates,
            num_usable,
            slope_ms_per_token=self.slope.ms_per_token / load,
            extra_ms=self.sampler.ms(len(rows.slots)) / load,
        )
        self.expected_tokens += choice.expected_tokens
        self.all_tokens += choice.all_tokens
        self.none_tokens += len(rows.slots)
        self.predicted_ms += (choice.step_ms or 0.0) * load
        self.all_ms += (choice.all_ms or 0.0) * load
        self.none_ms += (choice.none_ms or 0.0) * load
        return choice.num_query_tokens

    def start(self, slot: int) -> None:
        """Until real rates are two steps old, a slot's drafts count as certain."""
        self._older[slot] = self._latest[slot] = 1.0

    def record_rates(self, slots: Sequence[int], confidence: NDArray[np.float32]) -> None:
        """Confidences are conditional; NaN counts as 0 and all are clamped to 0..1."""
        rows = list(slots)
        self._older[rows] = self._latest[rows]
        clean = np.minimum(np.fmax(confidence, np.float32(0.0)), np.float32(1.0))
        self._latest[rows] = np.multiply.accumulate(clean, axis=1)

    def record_step(self, done: StepDone) -> None:
        """Bring corrections and drift up to date; without a surface no time is kept."""
        self.num_steps += 1
        self.measured_tokens += done.num_emitted
        surface = self.budget.surface
        if surface is None or not done.is_fused:
            return
        surface_ms, measured_ms = surface.ms(done.key), done.step_s * 1e3
        self.drift.record(surface_ms, measured_ms)
        self.load.record(done.key, measured_ms, surface_ms)
        self.slope.record(done.key, measured_ms, surface_ms * self.load.factor)
        self.sampler.record(done.num_reqs, done.host_s * 1e3)

    def _drift_words(self) -> str:
        count, least = len(self.drift), self.drift.min_samples
        if count < least:
            return f"not judged yet, median of {count} steps; it needs {least}"
        word = "DRIFTED: run decodegrid profile" if self.drift.drifted else "no drift"
        return f"{word}, median of {count} steps"

    def status(self) -> list[str]:
        """Surface, corrections, drift and gains."""
        if self.budget.surface is None:
            return [f"verify budget: no step-time surface, everything is verified ({self.note})"]
        which = "last step" if self.fresh_rates else "step before last"
        lines = [
            f"verify budget: scheduled on {len(self.budget.surface.points)} measured pairs "
            f"(context {self.budget.surface.context_len}; {self.note}) with rates of the {which}",
            f"  corrections: load x{self.load.factor:.2f}, "
            f"{self.slope.ms_per_token * 1e3:.1f} us a query token, "
            f"host {self.sampler.ms(1) * 1e3:.0f} us a step",
        ]
        if self.drift.ratio is not None:
            lines.append(
                f"  step time over the surface's: {self.drift.ratio:.2f} ({self._drift_words()})"
            )
        if self.num_steps:
            lines.append(
                f"  tokens a step: expected {self.expected_tokens / self.num_steps:.2f}, "
                f"measured {self.measured_tokens / self.num_steps:.2f}"
            )
        if self.none_ms:
            speed = self.expected_tokens / self.predicted_ms
            lines.append(
                f"  predicted speed: {speed / (self.all_tokens / self.all_ms):.2f} times that of "
                f"verifying all drafts, {speed / (self.none_tokens / self.none_ms):.2f} times that "
                "of verifying none"
            )
        return lines
