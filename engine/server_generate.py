"""A request over HTTP, whatever its protocol: from a body to an answer, whole or in pieces.

Owns one request's way: reading and checking, its place in the queue, the answer, and what ends it
early. A client that goes away ends its request within the step that runs, whether it streams or
not and wherever the request stands. Data flow: body -> ServedRequest -> AsyncLLM.stream -> bytes.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.request_output import RequestOutput, StreamOutput
from decodegrid.engine.server_errors import (
    CLIENT_GONE,
    ApiError,
    api_error,
    blame,
    context_error,
    error_body,
    request_failed,
    unavailable,
)
from decodegrid.engine.server_log import log_failure
from decodegrid.engine.server_prompts import merge_pieces, prompt_names
from decodegrid.engine.server_queue import Ticket
from decodegrid.engine.server_request import AnswerWriter, ServedRequest, encode
from decodegrid.engine.server_state import Json, ServerState, read_json
from decodegrid.engine.server_times import RequestTimes
from decodegrid.engine.server_tracing import EndedRequest, trace_headers
from decodegrid.engine.tokenizer import Tokenizer

_LOG = logging.getLogger("decodegrid.server")
REQUEST_ID: Final = "request_id"
"""Where the ASGI scope's state has the id that the client gave or was given."""
ANSWER_ID: Final = "answer_id"
"""Where the ASGI scope's state has the engine's name of a request, once it has one."""
_BODY_S: Final = 60.0
"""How long a body may be on its way."""
_LAST_WORDS_S: Final = 2.0
"""How long a client that does not read may hold up the end of its request."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One protocol's way to ask."""

    source: str
    """The field of the prompt."""
    read: Callable[[Json, str, Tokenizer, SamplingSection], ServedRequest]
    """From a body, the served model's name, the tokenizer and the defaults. Raises RequestError."""


async def generate(state: ServerState, dialect: Dialect, http: Request) -> Response:
    """Take a request; raises ApiError and RequestError where it is not taken."""
    try:
        try:
            return await _take(state, dialect, http)
        except RequestError as error:
            raise blame(error, dialect.source) from None
    except Exception as error:
        state.metrics.rejected(api_error(error).status)
        raise


async def _take(state: ServerState, dialect: Dialect, http: Request) -> Response:
    engine = state.health.require()
    # Before the body is read, which is work too.
    state.queue.check_room()
    data = await read_data(http)
    request = await state.read(_read, state, engine, dialect, data)
    try:
        await state.check_grammar(engine, request.params)
    except RequestError as error:
        raise BodyError(str(error), request.form_field) from None
    name = token_hex(12)
    # Again: it may have changed meanwhile.
    engine = state.health.require()
    prompts, params = request.prompts, request.params
    names = prompt_names(name, len(prompts))
    num_tokens = sum(map(len, prompts))
    ticket = state.queue.admit(name, params.n * len(prompts), num_tokens, names)
    http.scope["state"][ANSWER_ID] = name
    try:
        streams = [
            await state.read(partial(engine.stream, ids, params, request_id=part))
            for ids, part in zip(prompts, names, strict=True)
        ]
    except BaseException:
        ticket.close()
        raise
    for ids in prompts:
        state.metrics.accepted(len(ids), params)
    return AnswerResponse(state, request, merge_pieces(streams), ticket)


async def read_data(http: Request) -> bytes:
    """The body of a request; raises ApiError where the client takes too long to send it, and where
    it is said to be something else than JSON, as the forms of other sites' pages say."""
    given = http.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        message = f"the body must be application/json, got the content type {given!r}"
        raise ApiError(415, message, code="unsupported_media_type")
    try:
        async with asyncio.timeout(_BODY_S):
            return await http.body()
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "the client went away before its body ended") from None
    except TimeoutError:
        message = f"the body did not come within {_BODY_S:g} s"
        raise ApiError(408, message, code="timeout") from None


def _read(state: ServerState, engine: AsyncLLM, dialect: Dialect, data: bytes) -> ServedRequest:
    """A body as a request; raises ApiError and RequestError."""
    body = read_json(data)
    if isinstance(body, dict):
        state.check_model(body.get("model"))
    sampling = state.config.sampling
    request = dialect.read(body, state.model_name, engine.tokenizer, sampling)
    for ids in request.prompts:
        refusal = context_error(
            len(ids),
            request.num_asked,
            engine.limits.max_model_len,
            source=request.source,
            length_field=request.length_field,
        )
        if refusal is not None:
            raise refusal
    return request


class AnswerResponse(Response):
    """The answer to a request that was taken; gives its ticket back whatever happens."""

    def __init__(
        self,
        state: ServerState,
        request: ServedRequest,
        pieces: AsyncGenerator[StreamOutput, None],
        ticket: Ticket,
    ) -> None:
        super().__init__()
        self._state, self._request = state, request
        self._pieces, self._ticket = pieces, ticket
        self._times = [RequestTimes(state.metrics) for _ in request.prompts]
        self._num_left = len(request.prompts)
        self._writer: AnswerWriter = request.write(ticket.request_id, int(time.time()))
        self._has_begun = False
        """Whether the client was sent the status."""
        self._failure: str | None = None
        """What ended it before its time, in a word."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._answer(scope, send))
        gone = asyncio.ensure_future(client_gone(receive))
        limit = self._state.config.server.request_timeout_s
        cause: str | None = "cancelled"
        try:
            await asyncio.wait(
                {work, gone}, timeout=limit or None, return_when=asyncio.FIRST_COMPLETED
            )
            cause = None if work.done() else "client" if gone.done() else "timeout"
        finally:
            # Cancelling the reader of the pieces aborts the request.
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._ticket.close()
            self._make_span(scope, cause)
        if cause is None:
            work.result()
            return
        self._state.metrics.aborted(cause)
        fields = {"request_id": scope["state"][REQUEST_ID], "id": self._ticket.request_id}
        _LOG.info("request ended early: %s", cause, extra={"fields": fields})
        if cause == "timeout":
            message = f"the request took longer than server.request_timeout_s = {limit:g} s"
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    error = ApiError(504, message, kind="server_error", code="timeout")
                    await self._send_error(scope, send, error)

    def _make_span(self, scope: Scope, cause: str | None) -> None:
        tracer = self._state.tracer
        if tracer is None:
            return
        headers = trace_headers(scope["headers"])
        for index, times in enumerate(self._times):
            tracer.ended(
                EndedRequest(
                    headers=headers,
                    request=self._request,
                    times=times,
                    request_id=scope["state"][REQUEST_ID],
                    name=self._ticket.parts[index],
                    num_prompt_tokens=len(self._request.prompts[index]),
                    failure=cause or self._failure,
                )
            )

    async def _answer(self, scope: Scope, send: Send) -> None:
        try:
            if self._request.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        except Exception as error:  # of the engine: whatever it is, the client is told
            if not isinstance(error, ApiError):
                log_failure(_LOG, "a request failed", error, {"id": self._ticket.request_id})
            self._failure = type(error).__name__ if not isinstance(error, ApiError) else error.kind
            await self._send_error(scope, send, api_error(error))
        finally:
            await self._pieces.aclose()

    async def _whole(self, send: Send) -> None:
        found: dict[int, RequestOutput] = {}
        async for piece in self._pieces:
            self._note(piece)
            if piece.output is not None:
                found[piece.index] = piece.output
        outputs = [found[index] for index in range(len(self._request.prompts))]
        completions = [completion for output in outputs for completion in output.outputs]
        failed = [completion.error for completion in completions if completion.error]
        if failed:
            raise request_failed(failed[0], self._request.form_field)
        if any(completion.finish_reason == "abort" for completion in completions):
            raise unavailable("the server is ending and had to end the request")
        body = await self._state.read(self._body, outputs)
        await self._begin(send, "application/json", len(body))
        await send({"type": "http.response.body", "body": body})

    def _body(self, outputs: Sequence[RequestOutput]) -> bytes:
        return encode(self._writer.whole(outputs))

    async def _stream(self, send: Send) -> None:
        async for piece in self._pieces:
            self._note(piece)
            if piece.error is not None:
                raise request_failed(piece.error, self._request.form_field)
            data = self._writer.events(piece)
            # Not before: until there is something to say the status can still be another one.
            if not self._has_begun:
                await self._begin(send, "text/event-stream", None)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": self._writer.end()})

    def _note(self, piece: StreamOutput) -> None:
        self._times[piece.index].piece(piece)
        if piece.token_ids:
            self._ticket.start()
        self._num_left -= piece.output is not None
        if not self._num_left:
            self._ticket.release()

    async def _begin(self, send: Send, content_type: str, length: int | None) -> None:
        headers = [(b"content-type", content_type.encode())]
        if length is None:
            headers.append((b"cache-control", b"no-store"))
        else:
            headers.append((b"content-length", str(length).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._has_begun = True

    async def _send_error(self, scope: Scope, send: Send, error: ApiError) -> None:
        """The error as the answer, or as the last event of one that has begun."""
        if not self._has_begun:
            self._has_begun = True
            await send_error(scope, send, error)
        elif self._request.stream:
            data = self._writer.error(error, scope["state"][REQUEST_ID])
            await send({"type": "http.response.body", "body": data})


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """An error as a whole answer, in the protocol of the path."""
    body = encode(error_body(error, scope["path"], scope["state"][REQUEST_ID]))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), text.encode()) for name, text in error.headers().items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def client_gone(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
