"""Runs the scheduler's plans on a runner, one step a call.

Owns the order in which a runner is told things: slots given up, slots started, tables grown, then
the step. Owns no request state (the scheduler) and no text (the caller).

With async_scheduling a decode step is launched before the one ahead of it is collected, so that the
host works while the device runs: schedule and launch the next step, then collect and commit the
last one. One step is in flight between two calls. Anything but a decode step waits until it is
collected. A rich step is launched in two halves, and the last step is committed between them: its
masks need the committed text. Without async_scheduling the same calls come in the same order, and a
step is collected in the call that launched it.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from decodegrid.engine.grammar_queue import GrammarQueue
from decodegrid.engine.prefix_cache import MoveKind
from decodegrid.engine.request import Request
from decodegrid.engine.runner_protocol import LaunchedStep, StepResult, StepRunner
from decodegrid.engine.scheduler import Scheduler
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.step_masks import NoMasks, StepMasks
from decodegrid.engine.step_plan import DecodeStep, PrefillStep, TokenUpdate
from decodegrid.engine.step_ring import DecodeRecord
from decodegrid.engine.step_watch import StepWatch, plain_watch
from decodegrid.engine.verify_policy import StepDone

_GRAMMAR_WAIT_S = 0.005
"""How long a step waits for a grammar where there is no other work."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched decode step."""

    step: DecodeStep
    launched: LaunchedStep
    record: DecodeRecord
    is_rich: bool
    launch_s: float
    """Seconds from its scheduling to its launch; with the graph where the host runs that."""


class EngineLoop:
    """One runner, one scheduler, one thread."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        stats: EngineStats,
        watch: StepWatch | None = None,
        *,
        async_scheduling: bool = False,
        masks: StepMasks | None = None,
        grammars: GrammarQueue | None = None,
    ) -> None:
        """watch: is told of every step before it is launched and when it is back; None checks what
        comes back and writes no dumps. async_scheduling: see the module. masks: of the rich steps;
        None allows everything. grammars: where requests with a grammar wait for it; None takes
        none."""
        self.runner = runner
        self.scheduler = scheduler
        self.stats = stats
        self.watch = plain_watch(runner) if watch is None else watch
        self.async_scheduling = async_scheduling
        self.masks: StepMasks = NoMasks() if masks is None else masks
        self._grammars = grammars
        self._in_flight: _InFlight | None = None
        self._uncommitted: deque[DecodeStep] = deque()
        """Scheduled steps, oldest first: the one in flight and the one that is being launched."""
        self._rich_slots: set[int] = set()
        self._drafts: dict[int, NDArray[np.int64]] = {}
        """Of the slots of the last committed step, where that was a rich one."""

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has something to do: a request, or a step in flight."""
        is_waiting = self._grammars is not None and self._grammars.has_waiting
        return is_waiting or self.scheduler.has_unfinished or self._in_flight is not None

    def add(self, request: Request) -> None:
        """Queue a checked request, behind the compilation of its grammar if it has one."""
        if request.grammar is None or request.grammar.has_begun:
            self.scheduler.add(request)
            return
        if self._grammars is None:
            raise ValueError("the loop was made without a queue for grammars")
        self._grammars.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None when no unfinished request has that id."""
        waiting = None if self._grammars is None else self._grammars.remove(request_id)
        if waiting is not None:
            waiting.abort()
            return waiting
        request = self.scheduler.abort(request_id)
        self._stop_slots()
        return request

    def step(self) -> list[TokenUpdate]:
        """Run the next step, if there is one; return what was committed."""
        failed = self._take_grammars()
        with self._recovery():
            return failed + self._step()

    def settle(self) -> None:
        """Collect the step in flight if no request is left, so that all its rows are late."""
        if not self.scheduler.has_unfinished and self._in_flight is not None:
            with self._recovery():
                self._commit()

    @contextmanager
    def _recovery(self) -> Iterator[None]:
        """What is done in it may fail: the tokens of steps that were not committed are lost, and
        their requests wait again, to be computed again from their committed text."""
        with self.watch:
            try:
                yield
            except BaseException:
                self._in_flight = None
                while self._uncommitted:
                    self.scheduler.take_back(self._uncommitted.popleft())
                raise

    def _step(self) -> list[TokenUpdate]:
        began = perf_counter()
        plan = self.scheduler.schedule()
        self._stop_slots()
        for request in plan.started:
            self._start(request)
        for request in plan.grown:
            self.runner.set_blocks(request.slot, request.block_ids)
        if isinstance(plan.step, DecodeStep):
            return self._decode(plan.step, began)
        if self._in_flight is not None:
            updates = self._commit()
            self._stop_slots()
            return updates
        if plan.step is not None:
            self._prefill(plan.step)
        return []

    def _take_grammars(self) -> list[TokenUpdate]:
        """Queue the requests whose grammars are ready; those that failed. With nothing else to do,
        wait for one a moment."""
        if self._grammars is None or not self._grammars.has_waiting:
            return []
        if not self.scheduler.has_unfinished and self._in_flight is None:
            self._grammars.wait(_GRAMMAR_WAIT_S)
        failed = []
        for request in self._grammars.take():
            if request.is_finished:
                failed.append(TokenUpdate(request, (), 0, 0))
            else:
                self.scheduler.add(request)
        return failed

    def _prefill(self, step: PrefillStep) -> None:
        request = step.request
        began = perf_counter()
        record = self.watch.launch_chunk(step)
        keep_tokens = self.scheduler.limits.keep_tokens
        if keep_tokens:
            self.runner.bound_prefill(max(0, request.seq_len - keep_tokens))
        wanted = request.prompt_logprobs
        logprobs = self.runner.prefill(
            request.slot,
            request.token_ids[step.start : step.start + step.num_tokens],
            step.start,
            request.history(step.start),
            request.block_ids,
            None if wanted is None else wanted.following(step.start, step.num_tokens),
        )
        self.watch.finish_chunk(record)
        if wanted is not None and logprobs is not None:
            wanted.add(step.start, logprobs)
        self.stats.record_prefill(step.num_tokens, perf_counter() - began)
        started = self.scheduler.complete_chunk(step)
        if started is not None:
            self._start(started)

    def _decode(self, step: DecodeStep, began: float) -> list[TokenUpdate]:
        """Launch a decode step and commit one; `began`: when the scheduling began."""
        self._uncommitted.append(step)
        is_rich = not self._rich_slots.isdisjoint(step.slots)
        launch = self.runner.launch_forward if is_rich else self.runner.launch
        record = self.watch.launch(step)
        launched = launch(step.slots, step.num_query_tokens)
        self.watch.launched(record)
        launch_s = perf_counter() - began
        masks = None
        try:
            updates = self._commit()
            began = perf_counter()
            if is_rich:
                drafts = [
                    None if fresh else self._drafts.get(slot)
                    for slot, fresh in zip(step.slots, step.fresh, strict=True)
                ]
                masks = self.masks.fill(step.requests, drafts)
        finally:
            if is_rich:  # a failure must not leave the runner with half a step
                self.runner.launch_choice(launched, masks)
        launch_s += perf_counter() - began
        self._in_flight = _InFlight(step, launched, record, is_rich, launch_s)
        if not self.async_scheduling:
            updates = self._commit()
        # Not before: nothing may come between the halves of a step.
        self._stop_slots()
        return updates

    def _commit(self) -> list[TokenUpdate]:
        """Collect the step in flight, if there is one, and commit it."""
        done, self._in_flight = self._in_flight, None
        if done is None:
            return []
        began = perf_counter()
        result = self.runner.collect(done.launched)
        self.watch.finish(done.record, result)
        updates = self.scheduler.complete_decode(done.step, result)
        self._uncommitted.popleft()
        rows = [update.row for update in updates]
        # The slot of a late row may have a new owner.
        slots = [done.step.slots[row] for row in rows]
        self._drafts = dict(zip(slots, result.drafts[rows], strict=True)) if done.is_rich else {}
        self.scheduler.policy.record_rates(slots, result.confidence[rows])
        seconds = done.launch_s + perf_counter() - began
        self.stats.record_decode(done.step, result, updates, seconds)
        self._record_times(done, result, seconds)
        return updates

    def _record_times(self, launched: _InFlight, result: StepResult, seconds: float) -> None:
        """Bring a step's period to the policy: what its graph took, and what the host added."""
        if result.graph_s:
            emitted = int(result.num_emitted.sum())
            host_s = max(0.0, seconds - result.graph_s)
            num_reqs, is_fused = len(launched.step.slots), not launched.is_rich
            done = StepDone(result.key, num_reqs, emitted, result.graph_s, host_s, is_fused)
            self.scheduler.policy.record_step(done)

    def _start(self, request: Request) -> None:
        slot_request = request.slot_request()
        self.runner.start(request.slot, slot_request, request.block_ids)
        self.scheduler.policy.start(request.slot)
        if slot_request.rich is not None:
            self._rich_slots.add(request.slot)

    def _stop_slots(self) -> None:
        for move in self.scheduler.take_window_moves():
            save = move.kind is MoveKind.SAVE
            copy = self.runner.save_window if save else self.runner.load_window
            copy(move.slot, move.snapshot, move.position)
        for slot in self.scheduler.take_stopped_slots():
            self.runner.stop(slot)
            self._rich_slots.discard(slot)
