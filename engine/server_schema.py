"""The OpenAPI document of a server.

Owns which path answers what with which status. Bodies and answers are described by modules of their
own; a test holds the document to the routes and to what the parsers do. Data flow: schemas and a
server's settings -> the JSON of /openapi.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from decodegrid.engine.server_errors import MESSAGES_PATH
from decodegrid.engine.server_schema_answers import (
    CHAT_ANSWER,
    COMPLETION_ANSWER,
    ERROR,
    answer_schemas,
)
from decodegrid.engine.server_schema_bodies import (
    CHAT_REQUEST,
    COMPLETION_REQUEST,
    DETOKENIZE_REQUEST,
    PROFILE_REQUEST,
    TOKENIZE_REQUEST,
    body_schemas,
)
from decodegrid.engine.server_schema_fields import STRING, Schema, reference
from decodegrid.engine.server_schema_messages import (
    COUNT_ANSWER,
    COUNT_REQUEST,
    MESSAGE_ANSWER,
    MESSAGE_ERROR,
    MESSAGE_REQUEST,
    message_schemas,
)
from decodegrid.engine.server_schema_responses import (
    RESPONSE_ANSWER,
    RESPONSE_REQUEST,
    response_schemas,
)

Json = Any
"""What json.dumps takes."""

_EVERYWHERE: Final = (405, 413, 500)
"""A wrong method, a body that is too large, and a failure can meet every path."""
_WITH_BODY: Final = (400, 404, 408, 415, 503)
_GENERATING: Final = (*_WITH_BODY, 429, 504)
_JSON: Final = "application/json"
_SSE: Final = "text/event-stream"
_SECURITY: Final[Sequence[Json]] = ({"bearer": []}, {"apiKey": []})
_SCHEMES: Final[Mapping[str, Json]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_RETRY_AFTER: Final[Json] = {
    "Retry-After": {
        "description": "Seconds after which there may be room.",
        "schema": {"type": "integer", "minimum": 1},
    }
}


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of one path takes and answers."""

    path: str
    method: str
    summary: str
    answers: Mapping[str, Schema]
    """The body of status 200, by its media type."""
    body: str | None = None
    """The component that describes the request's body."""
    may_be_empty: bool = False
    """Whether the body may be left out."""
    statuses: tuple[int, ...] = ()
    """Of errors, beside those of every path."""
    is_open: bool = False
    """Whether it needs no key."""
    more: Mapping[str, Json] | None = None
    """Other parts of the operation, such as parameters."""
    error: str = ERROR
    """The component that describes the body of an error that its handler finds."""
    plain: Mapping[int, str] | None = None
    """Statuses other than 200 with a body of another component than an error's."""


def _answer(name: str, *, streams: bool = False) -> dict[str, Schema]:
    found = {_JSON: reference(name)}
    return {**found, _SSE: STRING} if streams else found


_PARAMETER: Final[Json] = {
    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
}
OPERATIONS: Final = (
    Operation(
        "/v1/chat/completions",
        "post",
        "Answer a conversation, whole or in pieces",
        _answer(CHAT_ANSWER, streams=True),
        CHAT_REQUEST,
        statuses=_GENERATING,
    ),
    Operation(
        "/v1/completions",
        "post",
        "Continue a prompt, whole or in pieces",
        _answer(COMPLETION_ANSWER, streams=True),
        COMPLETION_REQUEST,
        statuses=_GENERATING,
    ),
    Operation(
        "/v1/responses",
        "post",
        "Answer an input, whole or in pieces",
        _answer(RESPONSE_ANSWER, streams=True),
        RESPONSE_REQUEST,
        statuses=_GENERATING,
    ),
    Operation(
        MESSAGES_PATH,
        "post",
        "Answer messages, whole or in pieces",
        _answer(MESSAGE_ANSWER, streams=True),
        MESSAGE_REQUEST,
        statuses=_GENERATING,
        error=MESSAGE_ERROR,
    ),
    Operation(
        f"{MESSAGES_PATH}/count_tokens",
        "post",
        "Tokens of the prompt that messages make",
        _answer(COUNT_ANSWER),
        COUNT_REQUEST,
        statuses=_WITH_BODY,
        error=MESSAGE_ERROR,
    ),
    Operation("/v1/models", "get", "The model that is served", _answer("ModelList")),
    Operation(
        "/v1/models/{name}",
        "get",
        "The model of a name",
        _answer("Model"),
        statuses=(404,),
        more=_PARAMETER,
    ),
    Operation(
        "/tokenize",
        "post",
        "Token ids of a prompt, or of a conversation up to its answer",
        _answer("Tokens"),
        TOKENIZE_REQUEST,
        statuses=_WITH_BODY,
    ),
    Operation(
        "/detokenize",
        "post",
        "Text of token ids, special tokens spelled",
        _answer("Text"),
        DETOKENIZE_REQUEST,
        statuses=_WITH_BODY,
    ),
    Operation(
        "/profile",
        "post",
        "Trace the next steps of the engine",
        _answer("Profile"),
        PROFILE_REQUEST,
        statuses=(*_WITH_BODY, 409, 504),
        may_be_empty=True,
    ),
    Operation("/live", "get", "Whether the process answers", _answer("Status"), is_open=True),
    Operation(
        "/ready",
        "get",
        "Whether requests are taken, and why not",
        _answer("Status"),
        is_open=True,
        plain={503: "Status"},
    ),
    Operation("/version", "get", "The server's version", _answer("Version"), is_open=True),
    Operation("/metrics", "get", "Prometheus' metrics", {"text/plain": STRING}, is_open=True),
)
"""What the server does; a test compares them with its routes."""


def openapi_document(version: str, *, needs_key: bool) -> dict[str, Json]:
    """The document of OpenAPI 3.1. version: of the server. needs_key: whether it has API keys."""
    paths: dict[str, dict[str, Json]] = {}
    for operation in OPERATIONS:
        made = _operation(operation, needs_key=needs_key)
        paths.setdefault(operation.path, {})[operation.method] = made
    schemas = {**body_schemas(), **answer_schemas(), **response_schemas(), **message_schemas()}
    components: dict[str, Json] = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = dict(_SCHEMES)
    return {
        "openapi": "3.1.0",
        "info": {"title": "decodegrid", "version": version},
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, *, needs_key: bool) -> dict[str, Json]:
    asks_key = needs_key and not operation.is_open
    statuses = {*operation.statuses, *_EVERYWHERE, *((401,) if asks_key else ())}
    content = {kind: {"schema": schema} for kind, schema in operation.answers.items()}
    responses: dict[str, Json] = {"200": {"description": "OK", "content": content}}
    for status in sorted(statuses):
        responses[str(status)] = _error(status, operation.error)
    for status, name in (operation.plain or {}).items():
        responses[str(status)] = _response(status, name)
    found: dict[str, Json] = {
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        **(operation.more or {}),
        "responses": responses,
    }
    if operation.body is not None:
        schema = reference(operation.body)
        content = {_JSON: {"schema": schema}}
        found["requestBody"] = {"required": not operation.may_be_empty, "content": content}
    if asks_key:
        found["security"] = list(_SECURITY)
    return found


def _error(status: int, name: str) -> dict[str, Json]:
    found = _response(status, name)
    if status in (429, 503):
        found["headers"] = _RETRY_AFTER
    return found


def _response(status: int, name: str) -> dict[str, Json]:
    content = {_JSON: {"schema": reference(name)}}
    return {"description": HTTPStatus(status).phrase, "content": content}


def _operation_id(operation: Operation) -> str:
    words = operation.path.strip("/").replace("{", "").replace("}", "").split("/")
    return "_".join([operation.method, *words])
