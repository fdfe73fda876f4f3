"""What a caller gets for a request: the whole result, and the pieces of a stream.

Owns the public fields and their meaning; the output stream fills them in. Field names follow vLLM.
"""

from dataclasses import dataclass, field
from typing import Literal

from decodegrid.engine.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """Place among the completions of the prompt, from 0."""
    text: str
    token_ids: tuple[int, ...]
    """Emitted ids, the stop token or the one that completed a stop string included."""
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """For each id its log-probability and those of the most probable tokens at its place, by token
    id; None where they were not asked for."""
    cumulative_logprob: float | None = None
    """Sum of the ids' own log-probabilities."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for the end of text and all else."""
    error: str | None = None
    """Why it ended with finish reason "error"."""


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
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """For each prompt token what `CompletionOutput.logprobs` gives for an output token, None for
    the first; None where they were not asked for. Of a request that was aborted, those of the
    tokens that had been computed."""
    num_cached_tokens: int = 0
    """Prompt tokens of the first completion that came from the prefix cache and were not computed
    again, as it was admitted; 0 without the cache and for a request that was never admitted."""
    admitted_at: float | None = field(default=None, compare=False)
    """When the first completion got a slot, by time.monotonic(); None for one that never did."""


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
    error: str | None = None
    """Why this completion ended with finish reason "error"."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """For each of token_ids, as in CompletionOutput."""
