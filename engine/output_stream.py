"""Collects what the completions of one prompt emit and gives it out, piece by piece or as a whole.

Owns the undelivered pieces of one request and what its result looks like. Does not step the
engine: the stream table feeds it after each step, and whoever asked for the request takes from it.
"""

from collections import deque
from collections.abc import Sequence

from decodegrid.engine.logprobs import TokenLogprobs
from decodegrid.engine.request import Request
from decodegrid.engine.request_output import CompletionOutput, RequestOutput, StreamOutput


class OutputStream:
    """The output side of one prompt."""

    __slots__ = (
        "_num_logprobs_given",
        "_num_unfinished",
        "index",
        "pieces",
        "prompt",
        "request_id",
        "requests",
    )

    def __init__(
        self, index: int, request_id: str, prompt: str | None, requests: Sequence[Request]
    ) -> None:
        """index: place among the prompts that were given together. request_id: the caller's name
        for it. prompt: its text, if any. requests: one for each completion, with its text."""
        self.index = index
        self.request_id = request_id
        self.prompt = prompt
        self.requests = tuple(requests)
        self._num_logprobs_given = [0] * len(self.requests)
        self._num_unfinished = len(self.requests)
        self.pieces: deque[StreamOutput] = deque()
        """Pieces not yet taken, oldest first; streams that are read together may share one."""

    @property
    def is_finished(self) -> bool:
        """Whether the last piece of every completion is there, taken or not."""
        return self._num_unfinished == 0

    def add(self, request: Request, token_ids: tuple[int, ...]) -> None:
        """Take in ids just committed to one of the requests; its last piece when it has ended."""
        assert request.text is not None
        self._num_unfinished -= request.is_finished
        self.pieces.append(
            StreamOutput(
                index=self.index,
                request_id=self.request_id,
                text=request.text.take(),
                token_ids=token_ids,
                finish_reason=request.finish_reason,
                output=self.output() if self.is_finished else None,
                completion_index=request.completion,
                stop_reason=request.stop_reason,
                error=request.error,
                logprobs=self._take_logprobs(request, len(token_ids)),
            )
        )

    def take(self) -> StreamOutput | None:
        """The oldest piece not yet taken, or None."""
        return self.pieces.popleft() if self.pieces else None

    def output(self) -> RequestOutput:
        """The result so far, taken or not; the whole one when all have finished."""
        first = self.requests[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=tuple(first.token_ids[: first.num_prompt_tokens]),
            outputs=tuple(_completion(request) for request in self.requests),
            finished=self.is_finished,
            num_drafted=sum(request.num_drafted for request in self.requests),
            num_verified=sum(request.num_verified for request in self.requests),
            num_accepted=sum(request.num_accepted for request in self.requests),
            num_preemptions=sum(request.num_preemptions for request in self.requests),
            prompt_logprobs=(
                None if first.prompt_logprobs is None else tuple(first.prompt_logprobs.tokens)
            ),
            num_cached_tokens=first.num_cached_tokens or 0,
            admitted_at=first.admitted_at,
        )

    def _take_logprobs(self, request: Request, count: int) -> tuple[TokenLogprobs, ...] | None:
        """Those of the next `count` tokens of a request; None where it did not ask for any."""
        if request.logprobs is None:
            return None
        start = self._num_logprobs_given[request.completion]
        self._num_logprobs_given[request.completion] = start + count
        return tuple(request.logprobs.tokens[start : start + count])


def _completion(request: Request) -> CompletionOutput:
    assert request.text is not None
    return CompletionOutput(
        index=request.completion,
        text=request.text.whole,
        token_ids=tuple(request.output_token_ids),
        finish_reason=request.finish_reason,
        logprobs=None if request.logprobs is None else tuple(request.logprobs.tokens),
        cumulative_logprob=None if request.logprobs is None else request.logprobs.cumulative,
        stop_reason=request.stop_reason,
        error=request.error,
    )
