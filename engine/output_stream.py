"""Collects what a request emits and gives it out as text, piece by piece or as a whole.

Owns the detokenizer and the undelivered pieces of one request. Does not step the engine: the LLM
feeds it after each step, and whoever asked for the request takes from it.
"""

from collections import deque

from decodegrid.engine.request import CompletionOutput, Request, RequestOutput, StreamOutput
from decodegrid.engine.tokenizer import Tokenizer


class OutputStream:
    """The output side of one request."""

    __slots__ = ("_detokenizer", "_pending", "_text", "index", "prompt", "request")

    def __init__(
        self, index: int, prompt: str | None, request: Request, tokenizer: Tokenizer
    ) -> None:
        """index: place among the prompts that were given together. prompt: its text, if any."""
        self.index = index
        self.prompt = prompt
        self.request = request
        self._detokenizer = tokenizer.detokenizer()
        self._text: list[str] = []
        self._pending: deque[StreamOutput] = deque()

    @property
    def is_drained(self) -> bool:
        """Whether the request has ended and every piece was taken."""
        return self.request.is_finished and not self._pending

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Take in tokens just committed; the last piece when the request has finished."""
        text = self._detokenizer.push(token_ids)
        if self.request.is_finished:
            text += self._detokenizer.flush()
        self._text.append(text)
        self._pending.append(
            StreamOutput(
                index=self.index,
                request_id=self.request.request_id,
                text=text,
                token_ids=token_ids,
                finish_reason=self.request.finish_reason,
                output=self.output() if self.request.is_finished else None,
            )
        )

    def take(self) -> StreamOutput | None:
        """The oldest piece not yet taken, or None."""
        return self._pending.popleft() if self._pending else None

    def output(self) -> RequestOutput:
        """The result so far, taken or not; the whole one when the request has finished."""
        request = self.request
        completion = CompletionOutput(
            index=0,
            text="".join(self._text),
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=tuple(request.token_ids[: request.num_prompt_tokens]),
            outputs=(completion,),
            finished=request.is_finished,
            num_drafted=request.num_drafted,
            num_verified=request.num_verified,
            num_accepted=request.num_accepted,
            num_preemptions=request.num_preemptions,
        )
