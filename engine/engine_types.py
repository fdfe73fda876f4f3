"""Engines that do half of the work: prefill prompts and hand them over, or take them and decode.

Owns what differs from a whole engine: a prompt engine schedules no decode step and gives a request
up as soon as its prompt is computed; a completion engine schedules no prefill, takes the state of a
prompt instead, and admits a request only with blocks for its full length, since it could not
compute it again. Knows nothing of what a state consists of (engine/hand_over.py).
Source: PROMPT and COMPLETION of DeepInfer's engine types; its completion engine ends a request that
it has to preempt, this one never has to.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from decodegrid.engine.engine_loop import EngineLoop
from decodegrid.engine.request import Request
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.scheduler import Scheduler
from decodegrid.engine.step_plan import Plan, PrefillStep

EngineType = Literal["normal", "prompt", "completion"]
State = TypeVar("State")
Load = Callable[[int, Sequence[int]], None]
"""Writes the state of a prompt to a slot and its blocks."""


class PromptScheduler(Scheduler):
    """Prefills one prompt after another, each up to its last token, and decodes nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As for Scheduler."""
        super().__init__(*args, **options)
        self._prefilled: list[Request] = []

    def schedule(self) -> Plan:
        """The next chunk of the prompt in work, or the first of the head of the queue."""
        if self.prefilling is None and self._can_admit_head():
            self.prefilling = self._admit_head()
            self._pass_on_prefilled(self.prefilling)
        step = None if self.prefilling is None else self._chunk_of(self.prefilling)
        return Plan((), (), step)

    def complete_chunk(self, step: PrefillStep) -> Request | None:
        """Account for a chunk that ran; nothing ever starts decoding."""
        request = step.request
        request.num_computed += step.num_tokens
        if self.prefix is not None:
            self.prefix.computed(request)
        self._pass_on_prefilled(request)
        return None

    def take_prefilled(self) -> list[Request]:
        """Requests whose prompt is computed; each still has slot and blocks until release()."""
        done, self._prefilled = self._prefilled, []
        return done

    def release(self, request: Request) -> None:
        """Let go of a request that was taken; it counts as aborted, having no end of its own."""
        request.abort()
        self._finish(request)

    def _pass_on_prefilled(self, request: Request) -> None:
        if request.num_computed == request.seq_len - 1:
            self.prefilling = None
            self._prefilled.append(request)


class CompletionScheduler(Scheduler):
    """Starts every request as one whose prompt is computed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As for Scheduler; prompts never come in chunks, so they wait for no turn."""
        super().__init__(*args, **{**options, "decode_steps_per_prefill_chunk": 0})
        self.prefix = None

    def _admit_head(self) -> Request:
        request = super()._admit_head()
        request.num_computed = request.seq_len - 1
        return request

    def _num_blocks_needed(self, request: Request) -> int:
        return self.limits.num_blocks_for(request.max_seq_len)


class PromptLoop(EngineLoop):
    """Computes prompts and gives their states away."""

    def add(self, request: Request) -> None:
        raise RequestError(
            "this engine only prefills (scheduler.engine_type is prompt); use prefill()"
        )

    def prefill(
        self, requests: Sequence[Request], export: Callable[[Request], State]
    ) -> list[State]:
        """Compute the prompts of requests and export each while it has its slot."""
        scheduler = self.scheduler
        assert isinstance(scheduler, PromptScheduler)
        found: dict[str, State] = {}
        try:
            for request in requests:
                super().add(request)
            while self.has_unfinished:
                self.step()
                for request in scheduler.take_prefilled():
                    found[request.request_id] = export(request)
                    scheduler.release(request)
        finally:
            for request in requests:
                if not request.is_finished:
                    self.abort(request.request_id)
            self._stop_slots()
        return [found[request.request_id] for request in requests]


class CompletionLoop(EngineLoop):
    """Decodes requests whose prompts came from elsewhere."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As for EngineLoop."""
        super().__init__(*args, **options)
        self._loads: dict[str, Load] = {}

    def expect(self, request: Request, load: Load) -> None:
        """Say before add() where a request's state comes from."""
        self._loads[request.request_id] = load

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop what was expected for requests that never started."""
        for request in requests:
            self._loads.pop(request.request_id, None)

    def add(self, request: Request) -> None:
        if request.request_id not in self._loads:
            raise RequestError(
                "this engine only decodes (scheduler.engine_type is completion); use resume() "
                "with what a prompt engine exported"
            )
        super().add(request)

    def _start(self, request: Request) -> None:
        self._loads.pop(request.request_id)(request.slot, request.block_ids)
        super()._start(request)


SCHEDULERS: Mapping[EngineType, type[Scheduler]] = MappingProxyType(
    {"normal": Scheduler, "prompt": PromptScheduler, "completion": CompletionScheduler}
)
LOOPS: Mapping[EngineType, type[EngineLoop]] = MappingProxyType(
    {"normal": EngineLoop, "prompt": PromptLoop, "completion": CompletionLoop}
)
