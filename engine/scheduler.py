"""Decides what the device does next: a chunk of a prompt or a decode step, and for whom.

Owns the queue, the slots, the blocks and the status of every request. Knows no tensor and runs
nothing: schedule() returns a plan, the loop runs it, and complete_chunk() or complete_decode()
brings the outcome back. One thread uses it; abort() may come between any two steps.

A request waits (the lowest priority number first, within one the first to come), is admitted with a
slot and blocks for its whole text, is prefilled one chunk at a time (one request at once), runs,
and ends; its slot and blocks are free again in the same call. When blocks run out a running request
goes back to the front of the queue of its priority and is computed again later, prompt and emitted
tokens alike: the one with the largest priority number, of those the one with the longest output, of
those the last to arrive.

The next step may be scheduled while one decode step is in flight, that is, scheduled and not yet
committed. Until then a request has its committed tokens and num_in_flight more at most: blocks are
given for the most, drafts are offered for the least, and a row whose request is sure to end in the
step in flight is left out. A request that turns out to have ended earlier has one late row in the
next step, which is dropped whole. Nobody is preempted before the step in flight is committed.

Why a late row needs no slot or block of its own: the device does everything in the order in which
it is launched. What a late row writes stands behind the committed text, and whoever gets its slot
or blocks is started after it and writes every position before reading it.
Source: scheduling rules of the reference engine, for one rank.
"""

from collections import deque
from time import monotonic

from decodegrid.engine.admission import EngineLimits
from decodegrid.engine.block_manager import AllocStatus, BlockManager
from decodegrid.engine.logprobs import RowLogprobs
from decodegrid.engine.prefix_cache import PrefixCache, WindowMove
from decodegrid.engine.request import Request, RequestStatus
from decodegrid.engine.runner_protocol import StepResult
from decodegrid.engine.step_plan import DecodeStep, Plan, PrefillStep, TokenUpdate
from decodegrid.engine.verify_policy import FixedVerify, StepRows, VerifyPolicy


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
        self.prefix: PrefixCache | None = None
        if limits.num_snapshots:
            self.prefix = PrefixCache(
                self.blocks,
                limits.block_size,
                limits.num_snapshots,
                tail=max(1, limits.keep_tokens),
            )
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

    def take_window_moves(self) -> list[WindowMove]:
        """Copies between slots and snapshots since the last call, before slots are stopped."""
        return [] if self.prefix is None else self.prefix.take_moves()

    def schedule(self) -> Plan:
        """Admit what fits and choose the next step; one decode step may be in flight."""
        started = self._start_single_tokens()
        rows = [request for request in self.running if self._may_go_on(request)]
        due = not rows or self._num_decode_steps_since_chunk >= self._steps_per_chunk
        if due and self.prefilling is None and self._can_admit_head():
            request = self._admit_head()
            if request.num_computed < request.seq_len - 1:
                self.prefilling = request
            else:  # cached to its last token
                self._run(request)
                started = (*started, request)
                rows.append(request)
        if due and self.prefilling is not None:
            return Plan(started, (), self._chunk_of(self.prefilling))
        if any(request.num_in_flight for request in rows) and self._lacks_blocks(rows):
            # What is in flight may end requests or need fewer blocks than it might have.
            return Plan(started, (), None)
        grown = self._grow(rows)
        if rows:
            return Plan(started, grown, self._decode_step(rows))
        if self.prefilling is not None:
            # The last running request gave way to the one being prefilled, which holds the blocks.
            return Plan(started, (), self._chunk_of(self.prefilling))
        assert self.running or not self.waiting, (
            "a request that fits an empty device was not admitted"
        )
        return Plan(started, (), None)

    def complete_chunk(self, step: PrefillStep) -> Request | None:
        """Account for a prefill step that ran; return its request when decoding starts now."""
        request = step.request
        request.num_computed += step.num_tokens
        self._num_decode_steps_since_chunk = 0
        if self.prefix is not None:
            self.prefix.computed(request)
        if request.num_computed < request.seq_len - 1:
            return None
        self.prefilling = None
        self._run(request)
        return request

    def complete_decode(self, step: DecodeStep, result: StepResult) -> list[TokenUpdate]:
        """Commit what a decode step emitted; an update for each row that is not late.

        Steps are committed in the order in which they were scheduled. Tokens behind the end of a
        request are dropped.
        """
        updates = []
        num_emitted = result.num_emitted.tolist()
        num_verified = result.num_verified.tolist()
        emitted_ids, logprobs = result.token_ids.tolist(), result.logprobs
        for row, request in enumerate(step.requests):
            if step.is_late(row):
                continue
            count = num_emitted[row]
            assert 1 <= count <= 1 + step.num_offered[row]
            request.num_in_flight -= 1 + step.num_offered[row]
            fresh = step.fresh[row]
            num_offered = 0 if fresh else self._num_usable_drafts(request, request.seq_len)
            kept = request.commit(
                emitted_ids[row][:count],
                num_drafted=0 if fresh else self.limits.num_draft_tokens,
                num_verified=num_verified[row],
                logprobs=None if logprobs is None else RowLogprobs.of(logprobs, row),
            )
            request.num_computed = request.seq_len - 1
            updates.append(TokenUpdate(request, kept, row, num_offered))
            if request.is_finished:
                self._finish(request)
        self.running = [request for request in self.running if not request.is_finished]
        return updates

    def take_back(self, step: DecodeStep) -> None:
        """Preempt the requests of a step whose result is lost; the text so far stays."""
        for row, request in enumerate(step.requests):
            if not step.is_late(row):
                self._preempt(request)

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
        head = self.waiting[0]
        num_needed = self._num_blocks_needed(head)
        if self.prefix is not None:
            num_needed = self.prefix.num_blocks_taken(head, num_needed)
        return self.blocks.status(num_needed + len(self.running)) is AllocStatus.OK

    def _admit_head(self) -> Request:
        request = self.waiting.popleft()
        request.slot = self.slots.allocate(1)[0]
        request.num_computed = 0
        if self.prefix is not None:
            self.prefix.admit(request, self._num_blocks_needed(request))
        else:
            request.block_ids = self.blocks.allocate(self._num_blocks_needed(request))
        request.status = RequestStatus.PREFILLING
        if request.admitted_at is None:
            request.admitted_at = monotonic()
        return request

    def _chunk_of(self, request: Request) -> PrefillStep:
        """The next chunk: all tokens but the last are prefilled, that one is decoded."""
        num_left = request.seq_len - 1 - request.num_computed
        size = min(num_left, self.limits.prefill_chunk_size)
        if self.prefix is not None:
            size = self.prefix.chunk_size(request, size)
        return PrefillStep(request, request.num_computed, size)

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        request.fresh = True
        self.running.append(request)

    def _num_blocks_needed(self, request: Request) -> int:
        """Blocks that cover everything the request's next decode step may write."""
        most = request.seq_len + request.num_in_flight
        num_tokens = most + self.limits.num_draft_tokens + 1
        return self.limits.num_blocks_for(min(num_tokens, request.max_seq_len))

    def _may_go_on(self, request: Request) -> bool:
        """Whether a running request can have tokens to come behind the step in flight."""
        return self._least_seq_len(request) < request.max_seq_len

    def _least_seq_len(self, request: Request) -> int:
        """Length behind the step in flight, which emits one token for each row at least."""
        return request.seq_len + (request.num_in_flight > 0)

    def _lacks_blocks(self, rows: list[Request]) -> bool:
        """Whether some of these requests would have to give way."""
        needs = (self._num_blocks_needed(row) - len(row.block_ids) for row in rows)
        return sum(max(0, need) for need in needs) > self.blocks.num_free

    def _grow(self, rows: list[Request]) -> tuple[Request, ...]:
        """Give rows their blocks, the lowest priority number first, then the shortest output.

        When they run out, the one that would come last gives way and leaves `rows`.
        """
        left = deque(sorted(rows, key=lambda r: (-r.priority, -r.num_output_tokens, -r.order)))
        grown = []
        while left:
            request = left.pop()
            num_more = self._num_blocks_needed(request) - len(request.block_ids)
            if num_more <= 0:
                continue
            while num_more > self.blocks.num_free and left:
                rows.remove(left[0])
                self._preempt(left.popleft())
            if num_more > self.blocks.num_free:
                rows.remove(request)
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

    def _decode_step(self, running: list[Request]) -> DecodeStep:
        """One row each, longest text first (ties in query tokens go to earlier rows)."""
        rows = sorted(running, key=lambda r: (-r.seq_len, r.order))
        slots = tuple(row.slot for row in rows)
        fresh = tuple(row.fresh for row in rows)
        num_offered = tuple(
            0 if row.fresh else self._num_usable_drafts(row, self._least_seq_len(row))
            for row in rows
        )
        in_flight = tuple(row.num_in_flight > 0 for row in rows)
        total = self.policy.total(StepRows(slots, num_offered, in_flight))
        for row, offered in zip(rows, num_offered, strict=True):
            row.fresh = False
            row.num_in_flight += 1 + offered
        self._num_decode_steps_since_chunk += 1
        preemptions = tuple(row.num_preemptions for row in rows)
        return DecodeStep(tuple(rows), slots, fresh, num_offered, preemptions, total)

    def _num_usable_drafts(self, request: Request, seq_len: int) -> int:
        """Drafts of a request of that length that a step can verify."""
        room = min(self.limits.num_draft_tokens, request.max_seq_len - seq_len - 1)
        return room if request.max_drafts is None else min(room, request.max_drafts)

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._release(request)

    def _release(self, request: Request) -> None:
        """Take slot and blocks back, if the request has them."""
        if self.prefix is not None:
            self.prefix.leave(request)
        if request.slot:
            self._stopped_slots.append(request.slot)
            self.slots.free([request.slot])
            self.blocks.free(request.block_ids)
        request.slot = 0
        request.block_ids = []
        request.num_computed = 0
        request.num_in_flight = 0
