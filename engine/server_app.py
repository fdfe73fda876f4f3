"""The server's routes.

Owns the paths and what each answers; completions and chats have a file of their own. Data flow:
ServerState -> an ASGI application.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from decodegrid import __version__
from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.body_fields import BodyError, check_names
from decodegrid.engine.chat_body import CHAT_FIELDS, read_chat
from decodegrid.engine.messages_body import count_message, read_message
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.responses_body import read_response
from decodegrid.engine.sampling_checks import check_token_ids
from decodegrid.engine.server_errors import MESSAGES_PATH, ApiError, api_error, error_body
from decodegrid.engine.server_front import Front
from decodegrid.engine.server_generate import REQUEST_ID, Dialect, generate, read_data
from decodegrid.engine.server_openai import SOURCES, read_openai
from decodegrid.engine.server_profile import Profiler
from decodegrid.engine.server_schema import openapi_document
from decodegrid.engine.server_state import Json, ServerState, read_json

CHAT: Final = Dialect(SOURCES["chat"], partial(read_openai, "chat"))
RESPONSE: Final = Dialect("input", read_response)
MESSAGE: Final = Dialect("messages", read_message)
COMPLETION: Final = Dialect(SOURCES["completion"], partial(read_openai, "completion"))


def build_app(state: ServerState) -> ASGIApp:
    """The application of one server. Raises OSError for the directory of its traces."""
    # Without pages: they load their scripts from elsewhere.
    app = FastAPI(
        title="decodegrid",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        # The bodies are read by hand, of which FastAPI's document would say nothing.
        openapi_url=None,
        # It would follow an environment variable, and costs time for every message.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    _add_errors(app)
    _add_probes(app, state)
    _add_models(app, state)
    _add_tokens(app, state)
    _add_profile(app, state)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await generate(state, CHAT, request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(state, COMPLETION, request)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await generate(state, RESPONSE, request)

    @app.post(MESSAGES_PATH)
    async def messages(request: Request) -> Response:
        return await generate(state, MESSAGE, request)

    @app.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(request: Request) -> Response:
        engine = state.health.require()
        data = await read_data(request)
        return JSONResponse({"input_tokens": await state.read(_count, state, engine, data)})

    paths = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    return Front(app, state, paths)


def _add_errors(app: FastAPI) -> None:
    def answer(request: Request, error: ApiError, headers: Mapping[str, str] | None) -> Response:
        body = error_body(error, request.url.path, request.scope["state"][REQUEST_ID])
        return JSONResponse(body, error.status, headers=headers)

    async def own(request: Request, error: Exception) -> Response:
        found = api_error(error)
        return answer(request, found, found.headers())

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = "no such path" if error.status_code == 404 else str(error.detail)
        return answer(request, ApiError(error.status_code, what), error.headers)

    app.add_exception_handler(ApiError, own)
    app.add_exception_handler(RequestError, own)
    app.add_exception_handler(HTTPException, routing)
    # The rest: Front logs it.
    app.add_exception_handler(Exception, own)


def _add_probes(app: FastAPI, state: ServerState) -> None:
    @app.get("/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/ready")
    async def ready() -> Response:
        problem = state.health.problem()
        if problem is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": problem}, 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    document = openapi_document(__version__, needs_key=bool(state.keys))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(document)


def _add_models(app: FastAPI, state: ServerState) -> None:
    created = int(time.time())

    def model() -> dict[str, Json]:
        return {
            "id": state.model_name,
            "object": "model",
            "created": created,
            "owned_by": "decodegrid",
            "max_model_len": state.config.scheduler.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> dict[str, Any]:
        state.check_model(name)
        return model()


def _add_tokens(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        engine = state.health.require()
        data = await read_data(request)
        ids = await state.read(_tokenize, state, engine, data)
        body = {"count": len(ids), "max_model_len": engine.limits.max_model_len, "tokens": ids}
        return JSONResponse(body)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        engine = state.health.require()
        data = await read_data(request)
        return JSONResponse({"prompt": await state.read(_detokenize, state, engine, data)})


def _add_profile(app: FastAPI, state: ServerState) -> None:
    profiler = state.profiler = Profiler(state.profile_dir)

    @app.post("/profile")
    async def profile(request: Request) -> Response:
        return await profiler.answer(state, request)


def _count(state: ServerState, engine: AsyncLLM, data: bytes) -> int:
    """Tokens of the prompt of an Anthropic message request."""
    body = read_json(data)
    if isinstance(body, dict):
        state.check_model(body.get("model"))
    return count_message(body, engine.tokenizer)


def _tokenize(state: ServerState, engine: AsyncLLM, data: bytes) -> list[int]:
    """Ids of a prompt, or of a chat up to its answer, as a completion would have them."""
    fields = _fields(state, data, ("prompt", *CHAT_FIELDS))
    if "messages" in fields:
        if "prompt" in fields:
            raise BodyError("prompt and messages are both given", "prompt")
        ids, _ = read_chat(fields, engine.tokenizer)
        return ids
    for name in CHAT_FIELDS:
        if name in fields:
            raise BodyError(f"{name} is a field of chats, and messages are not given", name)
    prompt = fields.get("prompt")
    if not isinstance(prompt, str):
        raise BodyError("prompt must be a string", "prompt")
    return engine.tokenizer.encode(prompt)


def _detokenize(state: ServerState, engine: AsyncLLM, data: bytes) -> str:
    """Text of ids, special tokens spelled."""
    ids = _fields(state, data, ("tokens",)).get("tokens")
    vocab_size = engine.limits.vocab_size
    try:
        check_token_ids("tokens", ids)
        for index, token_id in enumerate(ids or ()):
            if token_id >= vocab_size:
                raise RequestError(
                    f"tokens[{index}] is {token_id}; the vocabulary has ids 0 to {vocab_size - 1}"
                )
    except RequestError as error:
        raise BodyError(str(error), "tokens") from None
    return engine.tokenizer.decode(ids or (), skip_special_tokens=False)


def _fields(state: ServerState, data: bytes, names: tuple[str, ...]) -> dict[str, Json]:
    """The fields of a body, without nulls; raises ApiError and BodyError for any other."""
    body = read_json(data)
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    check_names(body, (*names, "model"))
    state.check_model(body.get("model"))
    return {name: value for name, value in body.items() if value is not None}
