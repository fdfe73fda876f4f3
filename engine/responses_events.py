"""The events of an answer in OpenAI's responses API.

Owns what the server knows of an answer beside its text: the settings that are repeated, times and
usage. The sequence of events and the items of the output are deepseek-recipe's. Data flow: pieces
of a completion -> the recipe's events -> bytes; the last of them holds the whole answer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import deepseek_recipe as recipe

from decodegrid.engine.answer_feed import AnswerFeed, Chunk
from decodegrid.engine.conversations import ChatForm
from decodegrid.engine.request_output import RequestOutput, StreamOutput
from decodegrid.engine.server_errors import ApiError, unavailable
from decodegrid.engine.server_request import event
from decodegrid.engine.tokenizer import Tokenizer

Json = Any
"""What json.dumps takes."""

_WITH_USAGE: Final = frozenset({"response.completed", "response.incomplete"})
_STATIC: Final[Mapping[str, Json]] = {
    "background": False,
    "store": False,
    "previous_response_id": None,
    "truncation": "disabled",
    "service_tier": "default",
}
"""Of every answer."""


_EMPTY: Final = ("encrypted_content", "phase")
"""What the recipe's items have and this engine has nothing to say in."""


class ResponsesWriter:
    """See AnswerWriter; of one request."""

    def __init__(
        self,
        form: ChatForm,
        echo: Mapping[str, Json],
        model: str,
        answer_id: str,
        created: int,
        tokenizer: Tokenizer,
        num_prompt: int,
    ) -> None:
        """echo: fields of the body that the answer repeats. created: seconds since 1970."""
        generator = recipe.ResponsesRequest.chunk_generator(form.request, answer_id, model)
        self._feed = AnswerFeed(generator, form, tokenizer)
        self._known = {**_STATIC, **echo, "created_at": created}
        self._num_prompt = num_prompt
        self._number = -1
        """Of the last event."""

    def events(self, piece: StreamOutput) -> bytes:
        if piece.finish_reason == "abort":
            raise unavailable("the server is ending and had to end the request")
        chunks = self._feed.push(
            piece.text, piece.token_ids, piece.finish_reason, piece.stop_reason
        )
        found = [self._event(chunk, piece.output) for chunk in chunks]
        return b"".join(event(body, body["type"]) for body in found)

    def end(self) -> bytes:
        return b""

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (output,) = outputs
        (done,) = output.outputs
        chunks = self._feed.push(done.text, done.token_ids, done.finish_reason, done.stop_reason)
        return self._event(chunks[-1], output)["response"]

    def error(self, error: ApiError, request_id: str) -> bytes:
        detail = error.body()["error"]
        # As the API describes it, and as its clients look for it.
        body = {"type": "error", **detail, "error": detail, "sequence_number": self._number + 1}
        return event({**body, "type": "error"}, "error")

    def _event(self, chunk: Chunk, output: RequestOutput | None) -> dict[str, Json]:
        body: dict[str, Json] = json.loads(chunk.to_json())
        self._number = body.get("sequence_number", self._number + 1)
        for item in (body.get("item", {}), *body.get("response", {}).get("output", ())):
            for name in _EMPTY:
                item.pop(name, None)
        if "response" in body:
            body["response"] |= self._known
            if body["type"] in _WITH_USAGE:
                assert output is not None, "an answer ends with its last piece"
                body["response"]["usage"] = self._usage(output)
        return body

    def _usage(self, output: RequestOutput) -> dict[str, Json]:
        return {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
            "output_tokens": self._feed.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._feed.num_reasoning_tokens},
            "total_tokens": self._num_prompt + self._feed.num_tokens,
        }
