"""Looks after the steps of an engine: results that cannot be right, failures, and steps that hang.

Owns the ring of the last steps, the checks of what a step returns, the thread that notices a hang,
and when a dump is written. Owns no step and stops none. Data flow: the loop enters the watch around
each of its steps and brings what it launches and gets; a fault becomes a dump and a StepFaultError,
an exception gets the dump's path as a note, a hang a line in the log.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import numpy as np

from decodegrid.engine.replay_dump import Key
from decodegrid.engine.replay_file import write_dump
from decodegrid.engine.replay_record import EngineFacts, Reason, engine_facts, make_dump
from decodegrid.engine.runner_protocol import StepResult, StepRunner
from decodegrid.engine.step_plan import DecodeStep, PrefillStep
from decodegrid.engine.step_ring import (
    MIN_STEPS,
    ChunkRecord,
    DecodeRecord,
    StepRecord,
    StepRing,
)

_LOG = logging.getLogger("decodegrid.watch")


class StepFaultError(RuntimeError):
    """A step returned what no step can: the message names the step, the value and the dump."""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How a watch looks after an engine; the deployment's `dumps` section with its path."""

    directory: Path
    keep: int
    num_steps: int
    token_ids: bool
    limit_s: float
    """Seconds that one call of the loop may take; 0 for no limit."""


FinitePromise = Callable[[], bool]
"""Waits for the device and says whether every logit of a step was finite."""


@dataclass(frozen=True, slots=True)
class RunnerProbes:
    """What a watch may ask a runner beside the protocol, each None where it cannot be asked."""

    select_key: Callable[[int, int], Any] | None = None
    """(rows, query tokens) -> the captured pair that would run them."""
    check_logits: Callable[[int], FinitePromise] | None = None
    """Called after the launch of that many query tokens, without waiting for them."""


class StepWatch:
    """A context manager around each call of the loop; close() ends its thread."""

    def __init__(
        self,
        engine: EngineFacts,
        settings: WatchSettings | None = None,
        probes: RunnerProbes | None = None,
    ) -> None:
        """settings: None checks results and writes nothing."""
        self._settings, self._engine = settings, engine
        self._probes = RunnerProbes() if probes is None else probes
        self._ring = StepRing(MIN_STEPS if settings is None else settings.num_steps)
        self._promises: dict[int, FinitePromise] = {}
        self._busy_since: float | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Held while a dump is written: a hang may end in an exception meanwhile."""
        if settings is not None and settings.limit_s > 0:
            # A daemon: a step that hangs must not keep the process from ending.
            threading.Thread(
                target=self._guard, args=(settings.limit_s,), name="decodegrid-watch", daemon=True
            ).start()

    def __enter__(self) -> Self:
        self._busy_since = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._busy_since = None
        # What a user stops is no failure, and a fault has its dump.
        if isinstance(error, Exception) and not isinstance(error, StepFaultError):
            self._note_crash(error)

    def launch(self, step: DecodeStep) -> DecodeRecord:
        """Note a decode step; call it right before the runner gets it."""
        return self._ring.launch(step)

    def launched(self, record: DecodeRecord) -> None:
        """Call it as soon as the runner has taken the step."""
        record.is_launched = True
        check = self._probes.check_logits
        if check is not None:
            self._promises[record.index] = check(record.num_query_tokens)

    def finish(self, record: DecodeRecord, result: StepResult) -> None:
        """Note what a step did; call it before the requests take the tokens.

        Raises StepFaultError for a result that cannot be right.
        """
        self._ring.finish(record, result)
        problem = find_fault(result, self._engine.sizes.vocab_size)
        promise = self._promises.pop(record.index, None)
        if problem is None and promise is not None and not promise():
            problem = "a logit is not finite"
        if problem is not None:
            message = f"{_describe(record)}: {problem}"
            raise StepFaultError(f"{message}; {self._dump('fault', message, record)}")

    def launch_chunk(self, step: PrefillStep) -> ChunkRecord:
        """Note a chunk of a prompt; call it right before the runner gets it."""
        return self._ring.launch_chunk(step)

    def finish_chunk(self, record: ChunkRecord) -> None:
        """Call it when the runner is done with it, or has it on its way."""
        self._ring.finish_chunk(record)

    def close(self) -> None:
        """End the thread and let go of requests and runner; may be called again."""
        self._closed.set()
        self._ring.clear()
        self._promises.clear()
        self._probes = RunnerProbes()

    def _note_crash(self, error: Exception) -> None:
        unfinished = self._ring.unfinished()
        # The one that the runner would not take; else the oldest on its way, which errors are of.
        refused = [
            record
            for record in unfinished
            if isinstance(record, ChunkRecord) or not record.is_launched
        ]
        culprit = next(iter(refused[-1:] or unfinished[:1] or self._ring.records()[-1:]), None)
        what = f"{type(error).__name__}: {error}"
        place = "the loop" if culprit is None else _describe(culprit)
        error.add_note(f"{place}: {self._dump('crash', f'{place}: {what}', culprit)}")

    def _guard(self, limit: float) -> None:
        """The watching thread: a dump for each call of the loop that takes too long."""
        told = None
        while not self._closed.wait(min(limit / 4, 1.0)):
            since = self._busy_since
            if since is None or since == told or perf_counter() - since < limit:
                continue
            told = since
            unfinished = self._ring.unfinished()
            culprit = unfinished[0] if unfinished else None
            place = "no step was launched" if culprit is None else _describe(culprit)
            message = f"no step has ended for {limit:g} s; {place}"
            _LOG.error("%s; %s", message, self._dump("stall", message, culprit))

    def _dump(self, reason: Reason, message: str, record: StepRecord | None) -> str:
        """Write a dump; a phrase that names it, or says why there is none."""
        settings = self._settings
        if settings is None:
            return "the deployment keeps no dumps"
        try:
            with self._lock:
                dump = make_dump(
                    self._ring,
                    self._engine,
                    reason=reason,
                    message=message,
                    step=None if record is None else record.index,
                    with_token_ids=settings.token_ids,
                    keys=self._keys(),
                )
                content = dump.model_dump_json().encode()
                path = write_dump(settings.directory, content, settings.keep)
        except Exception as error:  # whatever it is, the failure itself must be told
            return f"no dump was written: {type(error).__name__}: {error}"
        return f"`decodegrid replay {path}` runs it again"

    def _keys(self) -> dict[int, Key]:
        found = {}
        select = self._probes.select_key
        for record in self._ring.records():
            if isinstance(record, ChunkRecord):
                continue
            key = None if record.result is None else record.result.key
            if key is None and select is not None:
                key = select(len(record.slots), record.num_query_tokens)
            if key is not None:
                found[record.index] = Key(
                    num_reqs=key.num_reqs, num_query_tokens=key.num_query_tokens
                )
        return found


def plain_watch(runner: StepRunner) -> StepWatch:
    """A watch that checks what steps return and writes no dumps."""
    return StepWatch(engine_facts(runner, None))


def find_fault(result: StepResult, vocab_size: int) -> str | None:
    """What in a result cannot be right, in words; None for a result that may be."""
    if _looks_sound(result, vocab_size):
        return None
    emitted, width = result.num_emitted, result.token_ids.shape[1]
    if emitted.min() < 1 or emitted.max() > width:
        row = int(np.argmax((emitted < 1) | (emitted > width)))
        return f"row {row} emitted {emitted[row]} tokens; allowed are 1..{width}"
    # False for NaN, too.
    sound = (result.confidence >= 0.0) & (result.confidence <= 1.0)
    if not sound.all():
        row, place = np.argwhere(~sound)[0].tolist()
        return f"row {row} has confidence {result.confidence[row, place]} for draft {place}"
    live = np.arange(width) < emitted[:, None]
    ids = result.token_ids
    if ((ids < 0) | (ids >= vocab_size))[live].any():
        row, place = np.argwhere(live & ((ids < 0) | (ids >= vocab_size)))[0].tolist()
        return f"row {row} emitted token id {ids[row, place]}; allowed are 0..{vocab_size - 1}"
    if result.logprobs is not None and not (result.logprobs.chosen[live] <= 1e-3).all():
        row, place = np.argwhere(live & ~(result.logprobs.chosen <= 1e-3))[0].tolist()
        return f"row {row} has log-probability {result.logprobs.chosen[row, place]} at {place}"
    return None


_ONE = int(np.float32(1.0).view(np.uint32))


def _looks_sound(result: StepResult, vocab_size: int) -> bool:
    """Whether there is no need to look closer; a few microseconds, for this is done every step.

    Negative integers, negative floats and NaN are large when their bits are read as unsigned.
    """
    emitted = result.num_emitted.tolist()
    rates = result.confidence
    return (
        min(emitted) >= 1
        and max(emitted) <= result.token_ids.shape[1]
        and int(np.maximum.reduce(result.token_ids.view(np.uint64), axis=None)) < vocab_size
        and (rates.size == 0 or int(np.maximum.reduce(rates.view(np.uint32), axis=None)) <= _ONE)
        and result.logprobs is None
    )


def _describe(record: StepRecord) -> str:
    if isinstance(record, ChunkRecord):
        end = record.start + record.num_tokens
        return f"step {record.index} (prefill of positions {record.start}..{end - 1})"
    rows, tokens = len(record.slots), record.num_query_tokens
    return f"step {record.index} (decode of {rows} rows with {tokens} query tokens)"
