"""Where the engine's thread leaves the pieces of a request for whoever waits for them.

Owns the hand-over between threads. A Mailbox belongs to one asyncio event loop, a FutureSink to any
thread. The engine's thread never waits in either of them.
"""

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from decodegrid.engine.request_output import RequestOutput, StreamOutput


class Sink(Protocol):
    """The reader's end of one request."""

    def put(self, piece: StreamOutput) -> bool:
        """Leave a piece; False when nobody can take it any more."""

    def fail(self, error: BaseException) -> None:
        """No more pieces come, for this reason."""


class Mailbox:
    """Pieces for a reader in an event loop, who may be slow.

    Pieces that were not taken are joined, so that no more than one a completion waits here.
    """

    __slots__ = ("_error", "_event", "_is_woken", "_lock", "_loop", "_pieces")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._event = asyncio.Event()
        self._is_woken = False
        self._pieces: deque[StreamOutput] = deque()
        self._error: BaseException | None = None

    def put(self, piece: StreamOutput) -> bool:
        """See Sink; False when the event loop is closed."""
        with self._lock:
            waiting = (i for i, p in enumerate(self._pieces) if _same_completion(p, piece))
            place = next(waiting, None)
            if place is None:
                self._pieces.append(piece)
            elif piece.output is None:
                self._pieces[place] = _joined(self._pieces[place], piece)
            else:
                # The whole result comes with the last piece of all.
                older = self._pieces[place]
                del self._pieces[place]
                self._pieces.append(_joined(older, piece))
            return self._wake()

    def fail(self, error: BaseException) -> None:
        """See Sink; the reader gets what waits before the error."""
        with self._lock:
            self._error = error
            self._wake()

    async def get(self) -> StreamOutput:
        """The oldest piece; waits for one. Raises the error that ended the request."""
        while True:
            with self._lock:
                if self._pieces:
                    return self._pieces.popleft()
                if self._error is not None:
                    raise self._error
                self._event.clear()
                self._is_woken = False
            await self._event.wait()

    def _wake(self) -> bool:
        """Have the reader look again; called with the lock."""
        if self._is_woken:
            return not self._loop.is_closed()
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:  # raised by a closed loop, and by nothing else there
            return False
        self._is_woken = True
        return True


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


def _same_completion(waiting: StreamOutput, piece: StreamOutput) -> bool:
    return waiting.completion_index == piece.completion_index


def _joined(older: StreamOutput, newer: StreamOutput) -> StreamOutput:
    """One piece for two of the same completion."""
    return replace(
        newer,
        text=older.text + newer.text,
        token_ids=older.token_ids + newer.token_ids,
        logprobs=None if newer.logprobs is None else (older.logprobs or ()) + newer.logprobs,
    )
