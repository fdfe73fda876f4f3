"""One request: its tokens and where it stands, and the outputs that a caller sees.

Owns the token list, the status and the counters of a request. Holds slot and block ids but does
not hand them out (the scheduler does). Tokens come in through commit, are taken one at a time, and
the first reason to end wins; what stands behind it is neither kept nor counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from decodegrid.engine.output_text import OutputText
from decodegrid.engine.runner_protocol import HISTORY_LEN, MAX_STOP_TOKEN_IDS, SlotRequest

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
        "_stop_token_ids",
        "block_ids",
        "completion",
        "eos_token_id",
        "fresh",
        "max_drafts",
        "max_seq_len",
        "num_accepted",
        "num_computed",
        "num_drafted",
        "num_preemptions",
        "num_prompt_tokens",
        "num_verified",
        "order",
        "priority",
        "request_id",
        "seed",
        "slot",
        "status",
        "stop_reason",
        "stop_token_ids",
        "temperature",
        "text",
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
        eos_token_id: int | None = None,
        top_p: float = 1.0,
        top_k: int = -1,
        max_drafts: int | None = None,
    ) -> None:
        """max_seq_len: prompt and output tokens at which the request ends ("length").
        eos_token_id: the one of stop_token_ids that is the end of text. max_drafts: drafts that a
        step may verify for it; None for no limit.
        """
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_seq_len = max_seq_len
        self.temperature = temperature
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self._stop_token_ids = frozenset(stop_token_ids)
        self.eos_token_id = eos_token_id
        self.top_p = top_p
        self.top_k = top_k
        self.max_drafts = max_drafts
        self.text: OutputText | None = None
        """Decodes what is committed and looks for stop strings, where the request has text."""
        self.completion = 0
        """Place among the completions of one prompt."""
        self.priority = 0
        """Lower goes first among those that wait."""
        self.status = RequestStatus.WAITING
        self.stop_reason: str | int | None = None
        """Stop string or stop token id that ended it; None for the end of text and the rest."""
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

    def sibling(self, request_id: str, seed: int, completion: int) -> "Request":
        """A request for the same prompt with another seed, as it was before anything ran."""
        made = Request(
            request_id,
            self.token_ids[: self.num_prompt_tokens],
            max_seq_len=self.max_seq_len,
            temperature=self.temperature,
            seed=seed,
            stop_token_ids=self.stop_token_ids,
            eos_token_id=self.eos_token_id,
            top_p=self.top_p,
            top_k=self.top_k,
            max_drafts=self.max_drafts,
        )
        made.completion = completion
        made.priority = self.priority
        return made

    def commit(
        self, token_ids: Sequence[int], *, num_drafted: int, num_verified: int
    ) -> tuple[int, ...]:
        """Take what a decode step emitted, one id after another, up to the one that ends it.

        token_ids: accepted drafts, then the target's own token. num_drafted, num_verified: drafts
        of the step. Of a step that is cut, only the drafts for the ids that are kept count.
        Returns the ids that were kept.
        """
        kept = 0
        while kept < len(token_ids) and not self.is_finished:
            self._append(token_ids[kept])
            kept += 1
        most = kept if kept < len(token_ids) else num_drafted
        self.num_drafted += min(num_drafted, most)
        self.num_verified += min(num_verified, most)
        self.num_accepted += min(len(token_ids) - 1, most)
        return tuple(token_ids[:kept])

    def abort(self) -> None:
        """End it now."""
        self.status = RequestStatus.ABORTED
        if self.text is not None:
            self.text.finish()

    def _append(self, token_id: int) -> None:
        """Commit one id and finish the request if it ends it: stop string, stop token, length."""
        self.token_ids.append(token_id)
        stop_string = self.text.push(token_id) if self.text is not None else None
        if stop_string is None:
            if token_id in self._stop_token_ids:
                self.status = RequestStatus.STOPPED
                self.stop_reason = None if token_id == self.eos_token_id else token_id
            elif len(self.token_ids) >= self.max_seq_len:
                self.status = RequestStatus.LENGTH
            if self.is_finished and self.text is not None:
                stop_string = self.text.finish()
        if stop_string is not None:
            self.status = RequestStatus.STOPPED
            self.stop_reason = stop_string

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
            stop_token_ids=self.stop_token_ids[:MAX_STOP_TOKEN_IDS],
            top_p=self.top_p,
            top_k=self.top_k,
            max_drafts=self.max_drafts,
        )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """Place among the completions of the prompt, from 0."""
    text: str
    token_ids: tuple[int, ...]
    """Emitted ids, the stop token or the one that completed a stop string included."""
    finish_reason: FinishReason | None
    logprobs: None = None
    """Always None: this version refuses a request for logprobs."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for the end of text and all else."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The whole result of a request; its counts are sums over the completions.

    Drafts at positions behind the end of a completion are in no count.
    """

    request_id: str
    prompt: str | None
    """The prompt's text; None when it was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_drafted: int
    """Drafts that the drafter had made when a step of the request ran, whether it was allowed to
    verify them or not."""
    num_verified: int
    num_accepted: int
    """Drafts that became tokens of the output."""
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """What one step added to one completion of a stream."""

    index: int
    """Place of the prompt in the list given to stream()."""
    request_id: str
    text: str
    """Text that became certain: whole characters in which no stop string can begin; may be empty.
    """
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    """Why this completion ended, with its last piece."""
    output: RequestOutput | None
    """The whole result, with the last piece of the last completion only."""
    completion_index: int = 0
    """Which of the n completions the piece belongs to."""
    stop_reason: str | int | None = None
