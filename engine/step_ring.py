"""The last steps of the engine as the host knows them: what ran, for whom, what came back.

Owns the records. Copies little: numbers that change are copied, lists that only grow are kept with
the length that they had, results are kept as they came. Reads no device value, so that a launch
does not wait for it. Data flow: the loop brings each step before it runs and again with its result;
engine/replay_record.py makes a dump of what is here. Another thread may read at any moment.
"""

from collections import deque
from itertools import count
from time import perf_counter

from decodegrid.engine.request import Request
from decodegrid.engine.runner_protocol import StepResult
from decodegrid.engine.step_plan import DecodeStep, PrefillStep

MIN_STEPS = 2
"""A step and the one that drafted for it."""


class DecodeRecord:
    """One decode step; lists have an entry for each row."""

    __slots__ = (
        "began",
        "block_lists",
        "ended",
        "fresh",
        "index",
        "is_launched",
        "num_blocks",
        "num_preemptions",
        "num_query_tokens",
        "requests",
        "result",
        "seq_lens",
        "slots",
    )

    def __init__(self, index: int, step: DecodeStep) -> None:
        requests = step.requests
        self.index = index
        self.began = perf_counter()
        self.ended: float | None = None
        self.is_launched = False
        """The runner has taken it; from then on a failure is one of the device."""
        self.requests = requests
        self.num_query_tokens = step.num_query_tokens
        self.slots = step.slots
        self.num_preemptions = step.num_preemptions
        # Not through its property, nor by loops where map does: this is done for every step.
        self.seq_lens = [len(request.token_ids) for request in requests]
        """Committed lengths: at the launch, and once the step is done those right before it."""
        self.fresh = step.fresh
        self.block_lists = [request.block_ids for request in requests]
        self.num_blocks = list(map(len, self.block_lists))
        self.result: StepResult | None = None


class ChunkRecord:
    """One chunk of a prompt."""

    __slots__ = (
        "began",
        "block_ids",
        "ended",
        "index",
        "num_blocks",
        "num_preemptions",
        "num_tokens",
        "request",
        "slot",
        "start",
    )

    def __init__(self, index: int, step: PrefillStep) -> None:
        self.index = index
        self.began = perf_counter()
        self.ended: float | None = None
        self.request: Request = step.request
        self.slot = step.request.slot
        self.num_preemptions = step.request.num_preemptions
        self.start, self.num_tokens = step.start, step.num_tokens
        self.block_ids = step.request.block_ids
        self.num_blocks = len(self.block_ids)


StepRecord = DecodeRecord | ChunkRecord


class StepRing:
    """The last `num_steps` decode steps and as many chunks, numbered from 0 in the order of launch.

    Chunks have a ring of their own: a long prompt must not push out the decode step whose drafts
    the next one verifies.
    """

    def __init__(self, num_steps: int) -> None:
        """num_steps: at least MIN_STEPS."""
        if num_steps < MIN_STEPS:
            raise ValueError(f"a ring of {num_steps} steps is too short; at least {MIN_STEPS}")
        self._decodes: deque[DecodeRecord] = deque(maxlen=num_steps)
        self._chunks: deque[ChunkRecord] = deque(maxlen=num_steps)
        self._indices = count()

    def launch(self, step: DecodeStep) -> DecodeRecord:
        """Note a decode step right before the runner gets it."""
        record = DecodeRecord(next(self._indices), step)
        self._decodes.append(record)
        return record

    def finish(self, record: DecodeRecord, result: StepResult) -> None:
        """Note what it did, before the requests take the tokens."""
        # Steps end in order, so what is committed now is what this one started from.
        record.seq_lens = [len(request.token_ids) for request in record.requests]
        record.result = result
        record.ended = perf_counter()

    def launch_chunk(self, step: PrefillStep) -> ChunkRecord:
        """Note a chunk right before the runner gets it."""
        record = ChunkRecord(next(self._indices), step)
        self._chunks.append(record)
        return record

    def finish_chunk(self, record: ChunkRecord) -> None:
        record.ended = perf_counter()

    def records(self) -> list[StepRecord]:
        """All records, oldest first."""
        found: list[StepRecord] = [*self._decodes, *self._chunks]
        return sorted(found, key=lambda record: record.index)

    def unfinished(self) -> list[StepRecord]:
        """The steps that have not come back, oldest first."""
        return [record for record in self.records() if record.ended is None]

    def clear(self) -> None:
        """Let go of the requests."""
        self._decodes.clear()
        self._chunks.clear()
