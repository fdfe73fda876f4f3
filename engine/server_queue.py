"""How many requests the server takes at once.

Owns the bound on what waits, in requests and in prompt tokens, and the list of what is open. Used
from the event loop only. Data flow: a request asks for a ticket, says when its first token is
there, and gives the ticket back; whoever finds no room is told when to come again.
"""

import math
from collections.abc import Callable
from time import monotonic
from typing import Final

from decodegrid.engine.server_errors import ApiError

_MAX_RETRY_S: Final = 60
_WEIGHT: Final = 0.2
"""Of the newest request in the mean of durations."""


class Ticket:
    """One open request; release() and close() may be called again."""

    __slots__ = (
        "_queue",
        "began_at",
        "has_room",
        "has_started",
        "num_completions",
        "num_tokens",
        "parts",
        "request_id",
    )

    def __init__(
        self,
        queue: "RequestQueue",
        request_id: str,
        parts: tuple[str, ...],
        num_completions: int,
        num_tokens: int,
    ) -> None:
        self._queue = queue
        self.request_id = request_id
        self.parts = parts
        """The engine's names of its prompts."""
        self.num_completions = num_completions
        self.num_tokens = num_tokens
        self.has_started = False
        self.has_room = True
        self.began_at = monotonic()

    def start(self) -> None:
        """Its first token is there."""
        if not self.has_started:
            self.has_started = True
            self._queue.num_waiting_tokens -= self.num_tokens

    def release(self) -> None:
        """The engine is done with it: a client that is slow to read takes nobody's place."""
        if self.has_room:
            self.start()
            self.has_room = False
            self._queue.num_open -= self.num_completions

    def close(self) -> None:
        """Its answer is sent, or nobody wants it any more."""
        self.release()
        self._queue.remove(self)


class RequestQueue:
    """The open requests and their bounds."""

    def __init__(
        self,
        num_slots: int,
        max_queued: int,
        max_queued_tokens: int,
        is_running: Callable[[str], bool],
    ) -> None:
        """num_slots: completions that run at once. max_queued: completions that may wait beside
        them. max_queued_tokens: prompt tokens of requests without a first token. is_running:
        whether the engine has a request that it was given."""
        self._is_running = is_running
        self._num_slots = num_slots
        self._max_open = num_slots + max_queued
        self._max_tokens = max_queued_tokens
        self._tickets: dict[str, Ticket] = {}
        self._mean_s = 1.0
        """How long a request takes, of late."""
        self.num_open = 0
        """Completions that wait or run in the engine."""
        self.num_waiting_tokens = 0

    @property
    def open_parts(self) -> list[str]:
        """The engine's names of all prompts of the requests whose answers are not sent."""
        return [part for ticket in self._tickets.values() for part in ticket.parts]

    @property
    def open_ids(self) -> list[str]:
        """Names of the requests whose answers are not sent, oldest first."""
        return list(self._tickets)

    def check_room(self) -> None:
        """Raise ApiError where not even the smallest request could be taken."""
        if not self._has_room(1):
            raise self._full(f"{self.num_open} requests are open, of at most {self._max_open}")

    def admit(
        self,
        request_id: str,
        num_completions: int,
        num_tokens: int,
        parts: tuple[str, ...] | None = None,
    ) -> Ticket:
        """Take a request with so many completions and prompt tokens; raises ApiError. parts: the
        engine's names of its prompts; None for one prompt with the request's name."""
        parts = (request_id,) if parts is None else parts
        if num_completions > self._max_open:
            is_many = len(parts) > 1
            what = "n times the number of prompts" if is_many else "n"
            raise ApiError(
                400,
                f"{what} must be at most {self._max_open} (scheduler.max_num_reqs plus "
                f"server.max_queued_requests), got {num_completions}",
                param="prompt" if is_many else "n",
            )
        if not self._has_room(num_completions):
            raise self._full(f"{self.num_open} requests are open, of at most {self._max_open}")
        waiting = self.num_waiting_tokens
        if waiting and waiting + num_tokens > self._max_tokens:
            raise self._full(
                f"{waiting} prompt tokens wait and {num_tokens} would come to them, "
                f"of at most {self._max_tokens}"
            )
        ticket = Ticket(self, request_id, parts, num_completions, num_tokens)
        self._tickets[request_id] = ticket
        self.num_open += num_completions
        self.num_waiting_tokens += num_tokens
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Forget a ticket that was released."""
        if self._tickets.pop(ticket.request_id, None) is None:
            return
        self._mean_s += _WEIGHT * (monotonic() - ticket.began_at - self._mean_s)

    def _has_room(self, num_completions: int) -> bool:
        if self.num_open + num_completions > self._max_open:
            # Their last pieces wait for clients that do not read.
            for ticket in self._tickets.values():
                if ticket.has_started and not any(map(self._is_running, ticket.parts)):
                    ticket.release()
        return self.num_open + num_completions <= self._max_open

    def _full(self, why: str) -> ApiError:
        """Come again when about half of what waits has had its turn."""
        rounds = max(1.0, (self.num_open - self._num_slots) / self._num_slots / 2)
        seconds = min(_MAX_RETRY_S, max(1, math.ceil(rounds * self._mean_s)))
        return ApiError(
            429,
            f"the server is full: {why}; try again in {seconds} s",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after_s=seconds,
        )
