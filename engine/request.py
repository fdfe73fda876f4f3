"""One request: its tokens and where it stands.

Owns the token list, the status and the counters of a request. Holds slot and block ids but does
not hand them out (the scheduler does). Tokens come in through commit, are taken one at a time, and
the first reason to end wins; what stands behind it is neither kept nor counted, and its logprobs
are not either.
"""

from collections.abc import Sequence
from enum import Enum

from decodegrid.engine.grammar_matcher import RequestGrammar, TokenVerdict
from decodegrid.engine.logprobs import OutputLogprobs, PromptLogprobList, RowLogprobs
from decodegrid.engine.output_text import OutputText
from decodegrid.engine.request_output import FinishReason
from decodegrid.engine.rich_params import NEUTRAL, RichParams
from decodegrid.engine.runner_protocol import HISTORY_LEN, MAX_STOP_TOKEN_IDS, SlotRequest


class RequestStatus(Enum):
    """Where a request stands; the finished ones keep their reason as the value."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    STOPPED = "stop"
    LENGTH = "length"
    ABORTED = "abort"
    FAILED = "error"


_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.STOPPED: "stop",
    RequestStatus.LENGTH: "length",
    RequestStatus.ABORTED: "abort",
    RequestStatus.FAILED: "error",
}


class Request:
    """A checked request. Only the scheduler writes status, slot, block_ids, num_computed,
    fresh and num_in_flight."""

    __slots__ = (
        "_stop_token_ids",
        "admitted_at",
        "block_ids",
        "completion",
        "eos_token_id",
        "error",
        "fresh",
        "grammar",
        "logprobs",
        "max_drafts",
        "max_seq_len",
        "min_p",
        "num_accepted",
        "num_cached_tokens",
        "num_computed",
        "num_drafted",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_verified",
        "order",
        "priority",
        "prompt_logprobs",
        "request_id",
        "rich",
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
        min_p: float = 0.0,
        rich: RichParams = NEUTRAL,
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
        self.min_p = min_p
        self.rich = rich
        self.text: OutputText | None = None
        """Decodes what is committed and looks for stop strings, where the request has text."""
        self.grammar: RequestGrammar | None = None
        """Advanced by every committed token, and the first to be asked whether it is the last."""
        num_top = rich.num_logprobs
        self.logprobs = None if num_top is None else OutputLogprobs(num_top)
        """By output token; None where they were not asked for."""
        self.prompt_logprobs: PromptLogprobList | None = None
        """Where they were asked for: filled by the first prefill, which may skip no position."""
        self.completion = 0
        """Place among the completions of one prompt."""
        self.priority = 0
        """Lower goes first among those that wait."""
        self.status = RequestStatus.WAITING
        self.stop_reason: str | int | None = None
        """Stop string or stop token id that ended it; None for the end of text and the rest."""
        self.error: str | None = None
        """Why it failed."""
        self.order = 0
        """Place in the order of arrival; ties are broken with it."""
        self.slot = 0
        self.block_ids: list[int] = []
        self.num_computed = 0
        """Tokens whose state the device has."""
        self.fresh = True
        """No draft exists yet: the next decode step to be scheduled runs one query token."""
        self.num_in_flight = 0
        """Tokens that steps which are scheduled and not committed may add; 0 when there is none."""
        self.num_drafted = 0
        self.num_verified = 0
        self.num_accepted = 0
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the prefix cache had when it was admitted first; None before."""
        self.admitted_at: float | None = None
        """When it was admitted first, by the monotonic clock; None before."""

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
            min_p=self.min_p,
            rich=self.rich,
        )
        made.grammar = None if self.grammar is None else self.grammar.sibling()
        made.completion = completion
        made.priority = self.priority
        return made

    def commit(
        self,
        token_ids: Sequence[int],
        *,
        num_drafted: int,
        num_verified: int,
        logprobs: RowLogprobs | None = None,
    ) -> tuple[int, ...]:
        """Take what a decode step emitted, one id after another, up to the one that ends it.

        token_ids: accepted drafts, then the target's own token. num_drafted, num_verified: drafts
        of the step. logprobs: the row's, which a request that asked for logprobs needs. Of a step
        that is cut, only the drafts for the ids that are kept count. Returns the ids that were
        kept.
        """
        kept = 0
        while kept < len(token_ids) and not self.is_finished:
            verdict = TokenVerdict.OPEN
            if self.grammar is not None:
                verdict = self.grammar.advance(token_ids[kept])
                if verdict is TokenVerdict.REFUSED:
                    self.fail(str(self.grammar.failure))
                    break
            if self.logprobs is not None:
                assert logprobs is not None, "a request that asked for logprobs ran without them"
                text_of = None if self.text is None else self.text.peek
                self.logprobs.add(token_ids[kept], logprobs, kept, text_of)
            self._append(token_ids[kept], is_complete=verdict is TokenVerdict.COMPLETE)
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

    def fail(self, error: str) -> None:
        """End it now, for a reason that is nobody else's."""
        self.status = RequestStatus.FAILED
        self.error = error
        if self.text is not None:
            self.text.finish()

    def _append(self, token_id: int, *, is_complete: bool) -> None:
        """Commit one id and finish the request if it ends it: grammar, stop string, stop token,
        length. is_complete: the grammar ends with it."""
        self.token_ids.append(token_id)
        # A stop string that ends with the grammar's text does not cut it.
        may_stop = not is_complete and self.num_output_tokens > self.rich.min_tokens
        stop_string = self._push_text(token_id, may_stop)
        if is_complete:
            self.status = RequestStatus.STOPPED
        elif stop_string is None:
            if token_id in self._stop_token_ids:
                self.status = RequestStatus.STOPPED
                self.stop_reason = None if token_id == self.eos_token_id else token_id
            elif len(self.token_ids) >= self.max_seq_len:
                self.status = RequestStatus.LENGTH
        if self.is_finished and self.text is not None:
            stop_string = self.text.finish(may_stop=may_stop)
        if stop_string is not None:
            self.status = RequestStatus.STOPPED
            self.stop_reason = stop_string

    def _push_text(self, token_id: int, may_stop: bool) -> str | None:
        """Decode one id; the stop string that its text completes, or None."""
        return None if self.text is None else self.text.push(token_id, may_stop=may_stop)

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
            min_p=self.min_p,
            rich=self.rich.slot_request(
                self.token_ids[: self.num_prompt_tokens],
                self.output_token_ids,
                has_grammar=self.grammar is not None,
            ),
        )
