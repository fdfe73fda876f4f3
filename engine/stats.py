"""Counts what the engine did, and says it in a closing report.

Owns the counters. Drafts are counted as the device saw them, those behind the end of a request in
its last step included; tokens as the requests kept them, with what was dropped beside it. Late rows
(of requests that ended after the step was scheduled) are counted apart and in nothing else but the
query tokens. Reads no clock (the loop passes seconds) and no tensor beyond a step's result. Counts
only grow; compilations are the difference to what the runner had when it was ready.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from decodegrid.engine.grid_trace import GridRecorder
from decodegrid.engine.runner_protocol import StepResult, StepRunner
from decodegrid.engine.step_plan import DecodeStep, TokenUpdate


@dataclass(frozen=True, slots=True)
class _LastCounts:
    """What a runner that is gone had counted."""

    num_compilations: int
    num_captured: int


class EngineStats:
    """Counters since the runner was ready."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner: StepRunner | _LastCounts = runner
        self._num_compilations_at_ready = runner.num_compilations
        self._num_captured_at_ready = runner.num_captured
        width = runner.num_draft_tokens + 1
        # Rows by their number of drafts, 0 to K; position j counts the rows with more than j.
        self._drafted_rows = [0] * width
        self._offered_rows = [0] * width
        self._verified_rows = [0] * width
        self._accepted_rows = [0] * width
        self._reached_rows = [0] * width
        self.num_prefill_steps = 0
        self.num_prefill_tokens = 0
        self.prefill_seconds = 0.0
        self.num_decode_steps = 0
        self.num_decode_rows = 0
        self.num_emitted = 0
        """Tokens committed to requests."""
        self.num_dropped = 0
        """Tokens that the device emitted behind the end of a request, in the step that ended it."""
        self.num_late_rows = 0
        self.num_late_query_tokens = 0
        """Query tokens that went into late rows."""
        self.decode_seconds = 0.0
        """Of the decode steps, with the host's work that was not hidden behind another step."""
        self.graph_seconds = 0.0
        """Of the graphs of the decode steps alone; 0 where the runner does not measure them."""
        self.graph_hits: Counter[tuple[int, int]] = Counter()
        """Replays by (num_reqs, num_query_tokens) of the captured pair."""
        self.grid = GridRecorder(runner.max_num_reqs, runner.num_draft_tokens)
        """The batches of the decode steps, for `decodegrid plan`."""
        self.num_query_tokens = 0
        self.num_captured_rows = 0
        self.num_captured_query_tokens = 0

    @property
    def num_compilations_after_ready(self) -> int:
        return self._runner.num_compilations - self._num_compilations_at_ready

    @property
    def num_captured_after_ready(self) -> int:
        return self._runner.num_captured - self._num_captured_at_ready

    @property
    def drafted_per_position(self) -> list[int]:
        """Drafts that existed when their step ran, by draft position (K of them)."""
        return _rows_reaching(self._drafted_rows)

    @property
    def offered_per_position(self) -> list[int]:
        """Of those, drafts that the row's remaining length, and its own limit, left room for."""
        return _rows_reaching(self._offered_rows)

    @property
    def verified_per_position(self) -> list[int]:
        """Of those, drafts that were given a query token."""
        return _rows_reaching(self._verified_rows)

    @property
    def accepted_per_position(self) -> list[int]:
        return _rows_reaching(self._accepted_rows)

    @property
    def reached_per_position(self) -> list[int]:
        """Of the verified drafts, those whose predecessors were all accepted."""
        return _rows_reaching(self._reached_rows)

    @property
    def tokens_per_round(self) -> float:
        """Tokens a request gains in one decode step, on average; 0 before the first."""
        return self.num_emitted / self.num_decode_rows if self.num_decode_rows else 0.0

    @property
    def pad_row_share(self) -> float:
        """Share of replayed rows that held no request, not even one that had ended."""
        num_rows = self.num_decode_rows + self.num_late_rows
        return _share(self.num_captured_rows - num_rows, self.num_captured_rows)

    @property
    def surplus_token_share(self) -> float:
        """Share of replayed query tokens that belonged to no request."""
        num_surplus = self.num_captured_query_tokens - self.num_query_tokens
        return _share(num_surplus, self.num_captured_query_tokens)

    def let_go(self) -> None:
        """Keep what the runner counted, and hold the runner no longer."""
        self._runner = _LastCounts(self._runner.num_compilations, self._runner.num_captured)

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        self.num_prefill_steps += 1
        self.num_prefill_tokens += num_tokens
        self.prefill_seconds += seconds

    def record_decode(
        self, step: DecodeStep, result: StepResult, updates: Sequence[TokenUpdate], seconds: float
    ) -> None:
        """updates: of the rows that were not late. seconds: the step's period, see
        decode_seconds."""
        num_drafts = len(self._drafted_rows) - 1
        verified, emitted = result.num_verified.tolist(), result.num_emitted.tolist()
        self.num_decode_steps += 1
        self.num_decode_rows += len(updates)
        self.num_late_rows += len(step.requests) - len(updates)
        self.num_late_query_tokens += sum(verified) + len(verified)
        self.decode_seconds += seconds
        self.graph_seconds += result.graph_s
        self.graph_hits[result.key.num_reqs, result.key.num_query_tokens] += 1
        num_wanted, num_used = step.num_query_tokens, result.num_query_tokens
        self.grid.record(len(step.slots), num_wanted, result.key, num_used)
        self.num_query_tokens += result.num_query_tokens
        self.num_captured_rows += result.key.num_reqs
        self.num_captured_query_tokens += result.key.num_query_tokens
        for update in updates:
            row, num_kept = update.row, len(update.token_ids)
            self.num_emitted += num_kept
            self.num_dropped += emitted[row] - num_kept
            self.num_late_query_tokens -= verified[row] + 1
            self._drafted_rows[0 if step.fresh[row] else num_drafts] += 1
            self._offered_rows[update.num_offered] += 1
            self._verified_rows[verified[row]] += 1
            self._accepted_rows[emitted[row] - 1] += 1
            self._reached_rows[min(verified[row], emitted[row])] += 1

    def report(self) -> str:
        """The closing report, one fact a line, without a line end after the last."""
        seconds = self.prefill_seconds + self.decode_seconds
        lines = [
            f"emitted tokens: {self.num_emitted} "
            f"({_rate(self.num_emitted, self.decode_seconds)} in decode steps, "
            f"{_rate(self.num_emitted, seconds)} with prefill)",
            f"prefill: {self.num_prefill_tokens} tokens in {self.num_prefill_steps} chunks "
            f"({_rate(self.num_prefill_tokens, self.prefill_seconds)})",
            f"decode steps: {self.num_decode_steps}, tokens a round: {self.tokens_per_round:.2f}",
        ]
        if self.num_dropped:
            lines.append(f"dropped behind an end: {self.num_dropped} tokens")
        if self.num_late_rows:
            lines.append(
                f"ends found late: {self.num_late_rows} rows with "
                f"{self.num_late_query_tokens} query tokens"
            )
        if self.graph_seconds:
            ratio = self.decode_seconds / self.graph_seconds
            lines.append(f"step period over graph time: {ratio:.3f}")
        lines += self._draft_lines()
        hits = ", ".join(f"({b},{q}) x{n}" for (b, q), n in sorted(self.graph_hits.items()))
        lines += [
            f"graph hits: {hits or 'none'}",
            f"padding: {self.pad_row_share:.1%} of rows, "
            f"{self.surplus_token_share:.1%} of query tokens",
            f"compilations after ready: {self.num_compilations_after_ready}",
        ]
        return "\n".join(lines)

    def _draft_lines(self) -> list[str]:
        drafted = self.drafted_per_position
        if not any(drafted):
            return ["drafts: none"]
        lines = [
            "drafts by position: drafted / offered / verified / accepted "
            "(of verified; of those whose predecessors were accepted)"
        ]
        counts = zip(
            drafted,
            self.offered_per_position,
            self.verified_per_position,
            self.accepted_per_position,
            self.reached_per_position,
            strict=True,
        )
        for position, (made, offered, verified, accepted, reached) in enumerate(counts, start=1):
            share = f" ({accepted / verified:.1%}; {accepted / reached:.1%})" if reached else ""
            lines.append(f"  {position}: {made} / {offered} / {verified} / {accepted}{share}")
        return lines


def _rows_reaching(rows_by_count: list[int]) -> list[int]:
    """Rows with at least j drafts for j = 1 .. K, from the rows by number of drafts."""
    return [sum(rows_by_count[j:]) for j in range(1, len(rows_by_count))]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f} tokens/s" if seconds > 0 else "no time measured"
