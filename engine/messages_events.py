"""The events of an answer in Anthropic's messages API.

Owns the usage and why an answer ended; the sequence of events and the blocks of the content are
deepseek-recipe's. Data flow: pieces of a completion -> the recipe's events -> bytes, or one
message.
"""

import json
from collections.abc import Sequence
from typing import Any

import deepseek_recipe as recipe

from decodegrid.engine.answer_feed import AnswerFeed, Chunk
from decodegrid.engine.conversations import ChatForm
from decodegrid.engine.request_output import RequestOutput, StreamOutput
from decodegrid.engine.server_errors import ApiError, messages_error, unavailable
from decodegrid.engine.server_request import event
from decodegrid.engine.tokenizer import Tokenizer

Json = Any
"""What json.dumps takes."""


class MessagesWriter:
    """See AnswerWriter; of one request."""

    def __init__(
        self,
        form: ChatForm,
        model: str,
        answer_id: str,
        created: int,
        tokenizer: Tokenizer,
        num_prompt: int,
    ) -> None:
        """created: seconds since 1970. num_prompt: tokens of the prompt."""
        generator = recipe.MessagesRequest.chunk_generator(form.request, answer_id, model)
        usage = recipe.PromptUsage(prompt_tokens=num_prompt)
        self._feed = AnswerFeed(generator, form, tokenizer, usage)
        self._message = recipe.MessagesResponse(answer_id, model, created, num_prompt, 0)
        self._num_prompt = num_prompt

    def events(self, piece: StreamOutput) -> bytes:
        if piece.finish_reason == "abort":
            raise unavailable("the server is ending and had to end the request")
        chunks = self._feed.push(
            piece.text, piece.token_ids, piece.finish_reason, piece.stop_reason
        )
        found = [self._event(chunk, piece.stop_reason, piece.output) for chunk in chunks]
        return b"".join(event(body, body["type"]) for body in found)

    def end(self) -> bytes:
        return b""

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (output,) = outputs
        (done,) = output.outputs
        for chunk in self._feed.push(
            done.text, done.token_ids, done.finish_reason, done.stop_reason
        ):
            self._message.accumulate(chunk)  # type: ignore[arg-type]
        message: dict[str, Json] = json.loads(self._message.to_json())
        self._end(message, done.stop_reason)
        message["usage"] = self._usage(output)
        return message

    def error(self, error: ApiError, request_id: str) -> bytes:
        return event(messages_error(error, request_id), "error")

    def _event(
        self, chunk: Chunk, stop_reason: str | int | None, output: RequestOutput | None
    ) -> dict[str, Json]:
        body: dict[str, Json] = json.loads(chunk.to_json())
        if body["type"] == "message_delta":
            assert output is not None, "an answer ends with its last piece"
            self._end(body["delta"], stop_reason)
            body["usage"] = self._usage(output)
        return body

    def _end(self, part: dict[str, Json], stop_reason: str | int | None) -> None:
        """Say in a message, or in the last change of one, which stop sequence ended it."""
        part.setdefault("stop_sequence", None)
        if isinstance(stop_reason, str):
            part |= {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}

    def _usage(self, output: RequestOutput) -> dict[str, Json]:
        """Tokens that came from the prefix cache are counted apart from those that did not."""
        cached = output.num_cached_tokens
        return {
            "input_tokens": self._num_prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._feed.num_tokens,
            "service_tier": "standard",
            "output_tokens_details": {"thinking_tokens": self._feed.num_reasoning_tokens},
        }
