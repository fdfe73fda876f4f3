"""Where the engine's thread leaves the pieces of a request for whoever waits for them.

Owns the hand-over between threads. A Mailbox belongs to one asyncio event loop, a FutureSink to any
thread. The engine's thread never waits in either of them, and wakes an event loop once a step, not
once a reader: every wake-up may hand the interpreter to the other thread.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Protocol

from decodegrid.engine.request_output import RequestOutput, StreamOutput


class Sink(Protocol):
    """The reader's end of one request."""

    def put(self, piece: StreamOutput) -> bool:
        """Leave a piece; False when nobody can take it any more."""

    def fail(self, error: BaseException) -> None:
        """No more pieces come, for this reason."""


class WakeUps:
    """Readers that are to be woken; used by the engine's thread alone."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Have send() set the event, which belongs to that loop."""
        self._events.setdefault(loop, []).append(event)

    def send(self) -> None:
        """Wake all of them, with one call for each event loop."""
        if not self._events:
            return
        waiting, self._events = self._events, {}
        for loop, events in waiting.items():
            with suppress(RuntimeError):  # a loop that is closed; the next put() tells
                loop.call_soon_threadsafe(_set_all, events)


class Mailbox:
    """Pieces for a reader in an event loop, who may be slow and then gets them joined."""

    __slots__ = ("_error", "_event", "_is_woken", "_lock", "_loop", "_waiting", "_wakes")

    def __init__(self, loop: asyncio.AbstractEventLoop, wakes: WakeUps | None = None) -> None:
        """wakes: is told to wake the reader, and does so when it is sent; None does it at once."""
        self._loop, self._wakes = loop, wakes
        self._lock = threading.Lock()
        self._event = asyncio.Event()
        self._is_woken = False
        self._waiting: dict[int, list[StreamOutput]] = {}
        """Pieces that were not taken by completion; they are joined when they are taken, for
        joining at every step would cost ever more as they grow."""
        self._error: BaseException | None = None

    def put(self, piece: StreamOutput) -> bool:
        """See Sink; False when the event loop is closed."""
        index = piece.completion_index
        with self._lock:
            self._waiting.setdefault(index, []).append(piece)
            if piece.output is not None:
                # The whole result comes with the last piece of all.
                self._waiting[index] = self._waiting.pop(index)
            self._wake()
        return not self._loop.is_closed()

    def fail(self, error: BaseException) -> None:
        """See Sink; the reader gets what waits before the error."""
        with self._lock:
            self._error = error
            self._wake()

    async def get(self) -> StreamOutput:
        """The pieces that wait of one completion, as one; waits for one. Raises the error that
        ended the request."""
        while True:
            with self._lock:
                if self._waiting:
                    return _joined(self._waiting.pop(next(iter(self._waiting))))
                if self._error is not None:
                    raise self._error
                self._event.clear()
                self._is_woken = False
            await self._event.wait()

    def _wake(self) -> None:
        """Have the reader look again; called with the lock."""
        if self._is_woken:
            return
        self._is_woken = True
        if self._wakes is not None:
            self._wakes.add(self._loop, self._event)
            return
        with suppress(RuntimeError):  # a loop that is closed
            self._loop.call_soon_threadsafe(self._event.set)


class FutureSink:
    """Keeps the whole result and drops the pieces."""

    __slots__ = ("_future",)

    def __init__(self, future: "Future[RequestOutput]") -> None:
        self._future = future

    def put(self, piece: StreamOutput) -> bool:
        """See Sink; False when the future was cancelled."""
        if piece.output is None:
            return not self._future.cancelled()
        if self._future.set_running_or_notify_cancel():
            self._future.set_result(piece.output)
        return True

    def fail(self, error: BaseException) -> None:
        """See Sink."""
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


def _joined(pieces: Sequence[StreamOutput]) -> StreamOutput:
    """One piece for some of the same completion, oldest first."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    logprobs = None
    if last.logprobs is not None:
        logprobs = tuple(chain.from_iterable(piece.logprobs or () for piece in pieces))
    return replace(
        last,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=logprobs,
    )
