"""What the scheduler asks for and what comes of it: one step, and the tokens that it committed.

Owns no state. A decode step may be committed after the next one was scheduled, so it writes down
what its rows were when it was made: a request may have ended, or lost its slot, meanwhile.
"""

from dataclasses import dataclass

from decodegrid.engine.request import Request, RequestStatus


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
    slots: tuple[int, ...]
    """Of each row when the step was scheduled, as are the next three."""
    fresh: tuple[bool, ...]
    """The row has no draft."""
    num_offered: tuple[int, ...]
    """Most drafts that each row can verify: 0 for a fresh one, fewer near its end or where the
    request set a limit. What a step in flight emits may leave it fewer."""
    num_preemptions: tuple[int, ...]
    """How often each row's request had been preempted."""
    num_query_tokens: int
    """Total over the rows; tokens that no row can use become pads."""

    def is_late(self, row: int) -> bool:
        """Whether the row's request ended, or was sent back to wait, after the scheduling."""
        request = self.requests[row]
        return (
            request.status is not RequestStatus.RUNNING
            or request.num_preemptions != self.num_preemptions[row]
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in this order; slots to stop come first (take_stopped_slots)."""

    started: tuple[Request, ...]
    """Requests that need no prefill and start decoding."""
    grown: tuple[Request, ...]
    """Running requests with a longer block table."""
    step: PrefillStep | DecodeStep | None
    """None when there is nothing to do before the step in flight is committed, or at all."""


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """Tokens that a decode step committed to a request, which may have finished with them."""

    request: Request
    token_ids: tuple[int, ...]
    row: int
    """Of the request in the step."""
    num_offered: int
    """Drafts that the row could really verify."""
