"""What every HTTP request passes before its handler: its id, its key, the size of its body.

Owns the access log and the answer to what a handler did not catch. Data flow: ASGI messages in and
out, counted and bounded on their way.
"""

import logging
import re
from secrets import token_hex
from time import monotonic
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decodegrid.engine.request_error import RequestError
from decodegrid.engine.server_errors import CLIENT_GONE, ApiError, api_error
from decodegrid.engine.server_generate import ANSWER_ID, REQUEST_ID, send_error
from decodegrid.engine.server_log import log_failure
from decodegrid.engine.server_state import ServerState

_LOG = logging.getLogger("decodegrid.access")
_FAILED = logging.getLogger("decodegrid.server")
PROBES: Final = frozenset({"/live", "/ready", "/metrics"})
"""Asked every few seconds: their lines are for level debug."""
OPEN_PATHS: Final = PROBES | {"/version"}
"""Need no key."""
_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")
_UNKNOWN_PATH: Final = "other"
_ID_HEADERS: Final = (b"x-request-id", b"request-id")


class Front:
    """The outermost ASGI application."""

    def __init__(self, app: ASGIApp, state: ServerState, paths: frozenset[str]) -> None:
        """paths: of the routes; others are counted under one name."""
        self._app, self._state, self._paths = app, state, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self._state, scope, receive, send)
        try:
            exchange.check()
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:  # the server goes on, whatever a handler did
            if not isinstance(error, (ApiError, RequestError)):
                log_failure(_FAILED, "a handler failed", error, exchange.fields)
            if exchange.status is None:
                await send_error(scope, exchange.send, api_error(error))
        finally:
            path = scope["path"]
            status = exchange.status or CLIENT_GONE
            known = path if path in self._paths else _UNKNOWN_PATH
            self._state.metrics.response(known, status)
            exchange.log(status)


class _Exchange:
    """One request and its answer."""

    def __init__(self, state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        self._state, self._scope = state, scope
        self._receive, self._send = receive, send
        self._began = monotonic()
        self._num_bytes = 0
        self._headers: dict[str, str] = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        given = self._headers.get("x-request-id", "")
        self._request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{token_hex(12)}"
        scope.setdefault("state", {})[REQUEST_ID] = self._request_id
        self.status: int | None = None
        """Of the answer; None before it began."""

    @property
    def fields(self) -> dict[str, object]:
        """What the log says of it; the query is left out, for it may hold anything."""
        found: dict[str, object] = {
            "request_id": self._request_id,
            "method": self._scope["method"],
            "path": self._scope["path"],
        }
        name = self._scope["state"].get(ANSWER_ID)
        return found if name is None else {**found, "id": name}

    def check(self) -> None:
        """Raise ApiError without a known key, or for a body that says that it is too large."""
        if self._scope["path"] not in OPEN_PATHS and not self._state.keys.accepts(self._headers):
            raise ApiError(
                401,
                "a known API key is needed, as `Authorization: Bearer KEY`",
                kind="authentication_error",
                code="invalid_api_key",
            )
        length = self._headers.get("content-length", "")
        if length.isascii() and length.isdigit():
            self._check_size(int(length))

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._check_size(self._num_bytes)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            # The second name is Anthropic's.
            names = [(name, self._request_id.encode()) for name in _ID_HEADERS]
            message = {**message, "headers": [*message.get("headers", ()), *names]}
        await self._send(message)

    def log(self, status: int) -> None:
        """The line of the access log."""
        level = logging.DEBUG if self._scope["path"] in PROBES else logging.INFO
        if _LOG.isEnabledFor(level):
            milliseconds = round((monotonic() - self._began) * 1e3, 1)
            fields = {**self.fields, "status": status, "ms": milliseconds}
            _LOG.log(level, "answered", extra={"fields": fields})

    def _check_size(self, num_bytes: int) -> None:
        most = int(self._state.config.server.max_body_bytes)
        if num_bytes > most:
            raise ApiError(
                413,
                f"the body has {num_bytes} bytes or more; at most {most} are allowed "
                "(server.max_body_bytes)",
                code="body_too_large",
            )
