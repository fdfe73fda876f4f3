"""Decides what the device does next: a chunk of a prompt or a decode step, and for whom.

Owns the queue, the slots, the blocks and the status of every request. Knows no tensor and runs
nothing: schedule() returns a plan, the loop runs it, and complete_chunk() or complete_decode()
brings the outcome back. One thread uses it; abort() may come between any two steps.

A request waits (the lowest priority number first, within one the first to come), is admitted with a
slot and blocks for its whole text, is prefilled one chunk at a time (one request at once), runs,
and ends; its slot and blocks are free again in the same call. When blocks run out the running
request with the longest output goes back to the front of the queue of its priority and is computed
again later, prompt and emitted tokens alike.
Source: scheduling rules of the reference engine, for one rank and without steps in flight.
"""

from collections import deque
from dataclasses import dataclass

from decodegrid.engine.admission import EngineLimits
from decodegrid.engine.block_manager import AllocStatus, BlockManager
from decodegrid.engine.request import Request, RequestStatus
from decodegrid.engine.runner_protocol import StepResult
from decodegrid.engine.verify_policy import FixedVerify, StepRows, VerifyPolicy


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Compute num_tokens tokens of request from position start."""

    request: Request
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Decode requests, in this order of rows, with num_query_tokens query tokens in all."""

    requests: tuple[Request, ...]
    num_query_tokens: int
    num_offered: tuple[int, ...]
    """Drafts that each row could have verified: 0 for a fresh one, fewer near its end or where the
    request set a limit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in this order; slots to stop come first (take_stopped_slots)."""

    started: tuple[Request, ...]
    """Requests that need no prefill and start decoding."""
    grown: tuple[Request, ...]
    """Running requests with a longer block table."""
    step: PrefillStep | DecodeStep | None
    """None when there is nothing to do."""


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """Tokens that a step committed to a request, which may have finished with them."""

    request: Request
    token_ids: tuple[int, ...]


class Scheduler:
    """See the module; every method leaves blocks and slots consistent."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        decode_steps_per_prefill_chunk: int = 4,
        policy: VerifyPolicy | None = None,
    ) -> None:
        """decode_steps_per_prefill_chunk: decode steps after which a waiting prompt gets a chunk; 0
        prefills every prompt that has a slot before it decodes on.

        policy: chooses each decode step's total of query tokens; None verifies every draft.
        """
        if decode_steps_per_prefill_chunk < 0:
            raise ValueError(
                "decode_steps_per_prefill_chunk must be at least 0, "
                f"got {decode_steps_per_prefill_chunk}"
            )
        self.limits = limits
        self.blocks = BlockManager(limits.num_blocks)
        self.slots = BlockManager(limits.max_num_reqs + 1)
        self.waiting: deque[Request] = deque()
        self.prefilling: Request | None = None
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._steps_per_chunk = decode_steps_per_prefill_chunk
        self.policy: VerifyPolicy = FixedVerify() if policy is None else policy
        self._num_decode_steps_since_chunk = 0
        self._num_added = 0
        self._stopped_slots: list[int] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Put a checked request into the queue, at the end of its priority."""
        if request.request_id in self._requests:
            raise ValueError(f"a request with id {request.request_id!r} is already in the engine")
        request.order = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        place = len(self.waiting)
        while place and self.waiting[place - 1].priority > request.priority:
            place -= 1
        self.waiting.insert(place, request)

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it stands; None when no unfinished request has that id."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request is self.prefilling:
            self.prefilling = None
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.abort()
        self._finish(request)
        return request

    def take_stopped_slots(self) -> list[int]:
        """Slots given up since the last call; the device must forget them before it does more."""
        slots, self._stopped_slots = self._stopped_slots, []
        return slots

    def schedule(self) -> Plan:
        """Admit what fits and choose the next step."""
        started = self._start_single_tokens()
        due = not self.running or self._num_decode_steps_since_chunk >= self._steps_per_chunk
        if due and self.prefilling is None and self._can_admit_head():
            self.prefilling = self._admit_head()
        if due and self.prefilling is not None:
            return Plan(started, (), self._chunk_of(self.prefilling))
        if self.running:
            grown = self._grow_running()
            if self.running:
                return Plan(started, grown, self._decode_step())
            # The last running request gave way to the one being prefilled, which holds the blocks.
            assert self.prefilling is not None
            return Plan(started, (), self._chunk_of(self.prefilling))
        assert not self.waiting, "a request that fits an empty device was not admitted"
        return Plan(started, (), None)

    def complete_chunk(self, step: PrefillStep) -> Request | None:
        """Account for a prefill step that ran; return its request when decoding starts now."""
        request = step.request
        request.num_computed += step.num_tokens
        self._num_decode_steps_since_chunk = 0
        if request.num_computed < request.seq_len - 1:
            return None
        self.prefilling = None
        self._run(request)
        return request

    def complete_decode(self, step: DecodeStep, result: StepResult) -> list[TokenUpdate]:
        """Commit what a decode step emitted; tokens behind the end of a request are dropped."""
        self._num_decode_steps_since_chunk += 1
        updates = []
        num_emitted = result.num_emitted.tolist()
        num_verified = result.num_verified.tolist()
        emitted_ids = result.token_ids.tolist()
        for row, request in enumerate(step.requests):
            count = num_emitted[row]
            assert 1 <= count <= self.limits.num_draft_tokens + 1
            kept = request.commit(
                emitted_ids[row][:count],
                num_drafted=0 if request.fresh else self.limits.num_draft_tokens,
                num_verified=num_verified[row],
            )
            request.fresh = False
            request.num_computed = request.seq_len - 1
            updates.append(TokenUpdate(request, kept))
            if request.is_finished:
                self._finish(request)
        self.running = [request for request in self.running if not request.is_finished]
        return updates

    def _start_single_tokens(self) -> tuple[Request, ...]:
        """Start the heads of the queue that have one token: no prefill, so no turn to wait for."""
        started = []
        while (
            self.prefilling is None
            and self.waiting
            and self.waiting[0].seq_len == 1
            and self._can_admit_head()
        ):
            request = self._admit_head()
            self._run(request)
            started.append(request)
        return tuple(started)

    def _can_admit_head(self) -> bool:
        """Whether the head of the queue gets a slot, and blocks with room for its first step.

        Each running request keeps a free block in reserve: taking the last ones would push the
        longest of them out again at once.
        """
        if not self.waiting or self.slots.num_free == 0:
            return False
        num_needed = self._num_blocks_needed(self.waiting[0]) + len(self.running)
        return self.blocks.status(num_needed) is AllocStatus.OK

    def _admit_head(self) -> Request:
        request = self.waiting.popleft()
        request.slot = self.slots.allocate(1)[0]
        request.block_ids = self.blocks.allocate(self._num_blocks_needed(request))
        request.num_computed = 0
        request.status = RequestStatus.PREFILLING
        return request

    def _chunk_of(self, request: Request) -> PrefillStep:
        """The next chunk: all tokens but the last are prefilled, that one is decoded."""
        num_left = request.seq_len - 1 - request.num_computed
        size = min(num_left, self.limits.prefill_chunk_size)
        return PrefillStep(request, request.num_computed, size)

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        request.fresh = True
        self.running.append(request)

    def _num_blocks_needed(self, request: Request) -> int:
        """Blocks that cover everything the request's next decode step may write."""
        num_tokens = request.seq_len + self.limits.num_draft_tokens + 1
        return self.limits.num_blocks_for(min(num_tokens, request.max_seq_len))

    def _grow_running(self) -> tuple[Request, ...]:
        """Give every running request its blocks, shortest output first.

        When they run out, the longest output gives way (of equals, the last to arrive).
        """
        left = deque(sorted(self.running, key=lambda r: (-r.num_output_tokens, -r.order)))
        grown = []
        while left:
            request = left.pop()
            num_more = self._num_blocks_needed(request) - len(request.block_ids)
            if num_more <= 0:
                continue
            while num_more > self.blocks.num_free and left:
                self._preempt(left.popleft())
            if num_more > self.blocks.num_free:
                self._preempt(request)
            else:
                request.block_ids += self.blocks.allocate(num_more)
                grown.append(request)
        return tuple(grown)

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the front of its priority, to be computed again."""
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        place = 0
        while place < len(self.waiting) and self.waiting[place].priority < request.priority:
            place += 1
        self.waiting.insert(place, request)

    def _decode_step(self) -> DecodeStep:
        """All running requests, longest text first (ties in query tokens go to earlier rows)."""
        rows = sorted(self.running, key=lambda r: (-r.seq_len, r.order))
        num_offered = tuple(self._num_offered(request) for request in rows)
        total = self.policy.total(StepRows([request.slot for request in rows], num_offered))
        return DecodeStep(tuple(rows), total, num_offered)

    def _num_offered(self, request: Request) -> int:
        """Drafts of a running request that its next step can verify."""
        if request.fresh:
            return 0
        room = min(self.limits.num_draft_tokens, request.max_seq_len - request.seq_len - 1)
        return room if request.max_drafts is None else min(room, request.max_drafts)

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._release(request)

    def _release(self, request: Request) -> None:
        """Take slot and blocks back, if the request has them."""
        if request.slot:
            self._stopped_slots.append(request.slot)
            self.slots.free([request.slot])
            self.blocks.free(request.block_ids)
        request.slot = 0
        request.block_ids = []
        request.num_computed = 0
