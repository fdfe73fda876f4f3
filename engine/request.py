"""One request: its tokens and where it stands, and the outputs that a caller sees.

Owns the token list, the status and the counters of a request. Holds slot and block ids but does
not hand them out (the scheduler does). Tokens come in through append_token, one at a time, and the
first reason to end wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from decodegrid.engine.runner_protocol import HISTORY_LEN, SlotRequest

FinishReason = Literal["stop", "length", "abort"]


class RequestStatus(Enum):
    """Where a request stands; the finished ones keep their reason as the value."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    STOPPED = "stop"
    LENGTH = "length"
    ABORTED = "abort"


_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.STOPPED: "stop",
    RequestStatus.LENGTH: "length",
    RequestStatus.ABORTED: "abort",
}


class Request:
    """A checked request. Only the scheduler writes status, slot, block_ids and num_computed."""

    __slots__ = (
        "block_ids",
        "fresh",
        "max_seq_len",
        "num_accepted",
        "num_computed",
        "num_drafted",
        "num_preemptions",
        "num_prompt_tokens",
        "num_verified",
        "order",
        "request_id",
        "seed",
        "slot",
        "status",
        "stop_token_ids",
        "temperature",
        "token_ids",
        "top_k",
        "top_p",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        max_seq_len: int,
        temperature: float,
        seed: int,
        stop_token_ids: tuple[int, ...],
        top_p: float = 1.0,
        top_k: int = -1,
    ) -> None:
        """max_seq_len: prompt and output tokens at which the request ends ("length")."""
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_seq_len = max_seq_len
        self.temperature = temperature
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.top_p = top_p
        self.top_k = top_k
        self.status = RequestStatus.WAITING
        self.order = 0
        """Place in the order of arrival; ties are broken with it."""
        self.slot = 0
        self.block_ids: list[int] = []
        self.num_computed = 0
        """Tokens whose state the device has."""
        self.fresh = True
        """No draft exists yet: the next decode step runs one query token."""
        self.num_drafted = 0
        self.num_verified = 0
        self.num_accepted = 0
        self.num_preemptions = 0

    @property
    def seq_len(self) -> int:
        """Committed length: prompt and emitted tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status in _REASONS

    @property
    def finish_reason(self) -> FinishReason | None:
        return _REASONS.get(self.status)

    def append_token(self, token_id: int) -> None:
        """Commit one emitted token and finish the request if it ends it; stop before length."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            self.status = RequestStatus.STOPPED
        elif len(self.token_ids) >= self.max_seq_len:
            self.status = RequestStatus.LENGTH

    def history(self, position: int) -> tuple[int, int, int]:
        """Token ids at position-3, position-2, position-1; -1 before the start."""
        before = self.token_ids[max(0, position - HISTORY_LEN) : position]
        first, second, third = [-1] * (HISTORY_LEN - len(before)) + before
        return first, second, third

    def slot_request(self) -> SlotRequest:
        """The slot row with which decoding starts, at the present committed length."""
        last = len(self.token_ids) - 1
        return SlotRequest(
            last_token=self.token_ids[last],
            seq_len=last + 1,
            history=self.history(last),
            max_seq_len=self.max_seq_len,
            temperature=self.temperature,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            top_p=self.top_p,
            top_k=self.top_k,
        )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Emitted ids, the stop token included."""
    finish_reason: FinishReason | None
    logprobs: None = None
    """Always None: this version refuses a request for logprobs."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The whole result of a request."""

    request_id: str
    prompt: str | None
    """The prompt's text; None when it was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_drafted: int
    """Drafts the drafter had made for this request when its steps ran."""
    num_verified: int
    num_accepted: int
    """Drafts that the device accepted, those after a stop token included."""
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """What one step added to one request of a stream."""

    index: int
    """Place of the prompt in the list given to stream()."""
    request_id: str
    text: str
    """Text that became complete; whole characters only, may be empty."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    output: RequestOutput | None
    """The whole result, with the last piece only."""
