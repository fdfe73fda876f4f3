"""Runs the scheduler's plans on a runner, one step a call.

Owns the order in which a runner is told things: slots given up, slots started, tables grown, then
the step. Owns no request state (the scheduler) and no text (the caller).
"""

from time import perf_counter

from decodegrid.engine.request import Request
from decodegrid.engine.runner_protocol import StepRunner
from decodegrid.engine.scheduler import DecodeStep, PrefillStep, Scheduler, TokenUpdate
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.verify_policy import StepDone


class EngineLoop:
    """One runner, one scheduler, one thread."""

    def __init__(self, runner: StepRunner, scheduler: Scheduler, stats: EngineStats) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.stats = stats

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None when no unfinished request has that id."""
        request = self.scheduler.abort(request_id)
        self._stop_slots()
        return request

    def step(self) -> list[TokenUpdate]:
        """Run the next step, if there is one; return what it committed."""
        began = perf_counter()
        plan = self.scheduler.schedule()
        self._stop_slots()
        for request in plan.started:
            self._start(request)
        for request in plan.grown:
            self.runner.set_blocks(request.slot, request.block_ids)
        if isinstance(plan.step, PrefillStep):
            self._prefill(plan.step)
            return []
        if isinstance(plan.step, DecodeStep):
            return self._decode(plan.step, began)
        return []

    def _prefill(self, step: PrefillStep) -> None:
        request = step.request
        began = perf_counter()
        self.runner.prefill(
            request.slot,
            request.token_ids[step.start : step.start + step.num_tokens],
            step.start,
            request.history(step.start),
            request.block_ids,
        )
        self.stats.record_prefill(step.num_tokens, perf_counter() - began)
        started = self.scheduler.complete_chunk(step)
        if started is not None:
            self._start(started)

    def _decode(self, step: DecodeStep, step_began: float) -> list[TokenUpdate]:
        """Run a decode step; `step_began`: when its scheduling began."""
        slots = [request.slot for request in step.requests]
        fresh = [request.fresh for request in step.requests]
        began = perf_counter()
        result = self.runner.decode(slots, step.num_query_tokens)
        ended = perf_counter()
        seconds = ended - began
        updates = self.scheduler.complete_decode(step, result)
        self._stop_slots()
        num_emitted = sum(len(update.token_ids) for update in updates)
        self.stats.record_decode(result, step.num_offered, fresh, num_emitted, seconds)
        policy = self.scheduler.policy
        policy.record_rates(slots, result.confidence)
        host_seconds = began - step_began + perf_counter() - ended
        emitted = int(result.num_emitted.sum())
        policy.record_step(StepDone(result.key, len(slots), emitted, seconds, host_seconds))
        return updates

    def _start(self, request: Request) -> None:
        self.runner.start(request.slot, request.slot_request(), request.block_ids)
        self.scheduler.policy.start(request.slot)

    def _stop_slots(self) -> None:
        for slot in self.scheduler.take_stopped_slots():
            self.runner.stop(slot)
