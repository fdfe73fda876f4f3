"""Chats and completions of OpenAI's API in a server.

Owns their way from a body to a ServedRequest and the writer of their answers. What the fields mean
and what stands in an answer have files of their own. Data flow: body -> BodyRequest ->
ServedRequest; pieces -> chunks -> bytes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.engine.batch_body import BodyRequest, Kind, answer_body, answer_id, read_body
from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.request_output import RequestOutput, StreamOutput
from decodegrid.engine.server_chunks import ChunkWriter
from decodegrid.engine.server_errors import ApiError
from decodegrid.engine.server_request import ServedRequest, event
from decodegrid.engine.tokenizer import Tokenizer

Json = Any
"""What json.loads makes."""

SOURCES: Final[dict[Kind, str]] = {"chat": "messages", "completion": "prompt"}
"""The field of the prompt."""
_DONE: Final = b"data: [DONE]\n\n"


def read_openai(
    kind: Kind, body: Json, model: str, tokenizer: Tokenizer, sampling: SamplingSection
) -> ServedRequest:
    """A checked body. model: the name that answers have. Raises RequestError."""
    request = read_body(kind, body, tokenizer, sampling, may_stream=True, may_be_many=True)
    if request.stream and request.params.prompt_logprobs is not None:
        message = "prompt_logprobs is not supported in a stream"
        raise BodyError(message, "prompt_logprobs")
    request = replace(request, model=model)
    return ServedRequest(
        kind=kind,
        model=model,
        prompts=[
            tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in request.prompts
        ],
        params=request.params,
        write=lambda name, created: _Writer(request, name, created, tokenizer),
        answer_id=lambda name: answer_id(kind, name),
        source=SOURCES[kind],
        stream=request.stream,
        num_asked=request.num_asked,
        length_field=request.length_field,
        form_field=request.form_field,
    )


class _Writer:
    """See AnswerWriter."""

    def __init__(self, request: BodyRequest, name: str, created: int, tokenizer: Tokenizer) -> None:
        self._request, self._created, self._tokenizer = request, created, tokenizer
        self._chunks = ChunkWriter(request, name, created, tokenizer)
        self._name = name
        self._outputs: list[RequestOutput] = []
        """Of the prompts that have ended."""

    def events(self, piece: StreamOutput) -> bytes:
        chunks = self._chunks.chunks(piece)
        if piece.output is not None:
            self._outputs.append(piece.output)
            is_last = len(self._outputs) == len(self._request.prompts)
            if is_last and self._request.include_usage:
                chunks.append(self._chunks.usage_chunk(self._outputs))
        return b"".join(map(event, chunks))

    def end(self) -> bytes:
        return _DONE

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        bodies = [
            answer_body(self._request, output, self._created, self._tokenizer) for output in outputs
        ]
        if len(bodies) == 1:
            return bodies[0]
        choices = [choice for body in bodies for choice in body["choices"]]
        for index, choice in enumerate(choices):
            choice["index"] = index
        sums = {name: _sum([body[name] for body in bodies]) for name in ("usage", "speculation")}
        own_id = answer_id(self._request.kind, self._name)
        return {**bodies[0], "id": own_id, "choices": choices, **sums}

    def error(self, error: ApiError, request_id: str) -> bytes:
        return event(error.body())


def _sum(parts: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """Objects of counts, some of them in objects, added up."""
    return {
        name: _sum([part[name] for part in parts])
        if isinstance(value, dict)
        else sum(part[name] for part in parts)
        for name, value in parts[0].items()
    }
