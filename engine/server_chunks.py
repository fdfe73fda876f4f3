"""The chunks of a streamed answer, as OpenAI's API has them.

Owns what stands in which chunk: the role first, one chunk with the finish reason for each
completion, the usage last and only when it was asked for. Data flow: pieces of a stream -> bodies
of chunks.
"""

from collections.abc import Sequence
from typing import Any, Final

from decodegrid.engine.batch_body import AnswerUsage, BodyRequest, answer_id
from decodegrid.engine.batch_logprobs import chat_logprobs, completion_logprobs
from decodegrid.engine.chat_answer import AnswerParser
from decodegrid.engine.logprobs import TokenLogprobs
from decodegrid.engine.request_output import RequestOutput, StreamOutput
from decodegrid.engine.tokenizer import Tokenizer

Json = Any
"""What json.dumps takes."""

_CHAT_CHUNK: Final = "chat.completion.chunk"


class ChunkWriter:
    """The chunks of one request."""

    def __init__(
        self, request: BodyRequest, request_id: str, created: int, tokenizer: Tokenizer
    ) -> None:
        """created: seconds since 1970."""
        self._request = request
        self._head = {
            "id": answer_id(request.kind, request_id),
            "object": "text_completion" if request.kind == "completion" else _CHAT_CHUNK,
            "created": created,
            "model": request.model,
        }
        self._tokenizer = tokenizer
        self._completions = [
            _Completion(request, index, tokenizer)
            for index in range(request.params.n * len(request.prompts))
        ]

    def chunks(self, piece: StreamOutput) -> list[dict[str, Json]]:
        """The chunks that a piece makes."""
        number = piece.index * self._request.params.n + piece.completion_index
        completion = self._completions[number]
        choices = completion.choices(piece)
        usage = {"usage": None} if self._request.include_usage else {}
        return [{**self._head, "choices": [choice], **usage} for choice in choices]

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Json]:
        """The chunk behind all others, which has no choice. outputs: of the prompts."""
        completions = [completion for output in outputs for completion in output.outputs]
        usage = AnswerUsage(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(output.num_cached_tokens for output in outputs),
            sum(len(completion.token_ids) for completion in completions),
        )
        parsers = [c.parser for c in self._completions if c.parser is not None]
        if self._request.chat is not None and self._request.chat.is_thinking:
            usage.num_reasoning = sum(parser.num_reasoning_tokens for parser in parsers)
        return {**self._head, "choices": [], "usage": usage.body()}


class _Completion:
    """The chunks' choices of one completion."""

    def __init__(self, request: BodyRequest, index: int, tokenizer: Tokenizer) -> None:
        self._request, self._index, self._tokenizer = request, index, tokenizer
        chat = request.chat
        self.parser = None
        if chat is not None and chat.is_parsed:
            self.parser = AnswerParser(chat, tokenizer)
        self._has_begun = False
        self._offset = 0
        """Characters of the tokens whose logprobs are given."""
        self._logprobs: list[TokenLogprobs] = []
        """Not yet given."""

    def choices(self, piece: StreamOutput) -> list[dict[str, Json]]:
        self._logprobs += piece.logprobs or ()
        if self._request.kind == "completion":
            return self._text_choices(piece)
        found = []
        if not self._has_begun:
            found.append(self._choice({"role": "assistant", "content": ""}))
        self._has_begun = True
        reason: str | None = piece.finish_reason
        if self.parser is None:
            deltas = [{"content": piece.text}] if piece.text or self._logprobs else []
        else:
            deltas = self.parser.push(
                piece.text, piece.token_ids, piece.finish_reason, piece.stop_reason
            )
            reason = self.parser.finish_reason(piece.finish_reason)
        for number, delta in enumerate(deltas):
            choice = self._choice(delta)
            if number == 0:
                choice["logprobs"] = self._take_chat_logprobs()
            found.append(choice)
        if reason is not None:
            choice = self._choice({})
            choice["logprobs"] = self._take_chat_logprobs()
            choice |= {"finish_reason": reason, "stop_reason": piece.stop_reason}
            found.append(choice)
        return found

    def _text_choices(self, piece: StreamOutput) -> list[dict[str, Json]]:
        if not piece.text and not self._logprobs and piece.finish_reason is None:
            return []
        return [
            {
                "index": self._index,
                "text": piece.text,
                "logprobs": self._take_completion_logprobs(),
                "finish_reason": piece.finish_reason,
                "stop_reason": piece.stop_reason,
            }
        ]

    def _choice(self, delta: dict[str, Json]) -> dict[str, Json]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _take_chat_logprobs(self) -> Json:
        num_top = self._request.params.logprobs
        tokens, self._logprobs = self._logprobs, []
        if num_top is None or not tokens:
            return None
        return chat_logprobs(tokens, num_top, self._tokenizer)

    def _take_completion_logprobs(self) -> Json:
        tokens, self._logprobs = self._logprobs, []
        if not tokens:
            return None
        found = completion_logprobs(tokens, self._tokenizer)
        found["text_offset"] = [self._offset + offset for offset in found["text_offset"]]
        for entries in tokens:
            self._offset += len(next(iter(entries.values())).decoded_token or "")
        return found
