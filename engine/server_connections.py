"""Connections of the server, and which of them are cut off.

Owns two rules. A client that takes nothing of an answer that waits for it is cut off after
server.send_timeout_s; until then uvicorn holds one buffer of it, and its request no more than its
own output. A connection on which no whole request comes is cut off after a minute. Both bound what
clients that stand still can hold of memory and file descriptors, however many there are.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from decodegrid.engine.server_metrics import ServerMetrics

_LOG = logging.getLogger("decodegrid.server")
_CHECK_S: Final = 1.0
_ASK_S: Final = 60.0
"""How long a connection may be open without a request."""


class Connection(H11Protocol):
    """uvicorn's protocol, which tells how long its client has stood still."""

    _written_at = _asked_at = 0.0
    _last_size = 0
    """Bytes that waited to be sent when it was looked at last."""

    def connection_made(  # type: ignore[override]  # as uvicorn's own
        self, transport: asyncio.Transport
    ) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self.access_log = False  # its lines have the query in them, which may hold a key
        self._written_at = self._asked_at = monotonic()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        super().resume_writing()
        self._written_at = monotonic()

    def why_cut_off(self, now: float, send_timeout_s: float) -> str | None:
        """Why it has to go, or None; to be asked about once a second.

        now: of the monotonic clock. send_timeout_s: 0 for never.
        """
        size = self.transport.get_write_buffer_size()
        # Unless it is full or about to be closed, a buffer may grow while the client reads.
        stands = size and (self.flow.write_paused or self.transport.is_closing())
        if not stands or size < self._last_size:
            self._written_at = now
        self._last_size = size
        if self.cycle is not None and not self.cycle.response_complete:
            self._asked_at = now
        if send_timeout_s and now - self._written_at >= send_timeout_s:
            return "not reading"
        return "not asking" if now - self._asked_at >= _ASK_S else None


async def guard_connections(
    connections: Callable[[], Iterable[object]], send_timeout_s: float, metrics: ServerMetrics
) -> None:
    """Cut off who stands still; runs until it is cancelled. send_timeout_s: 0 for never."""
    while True:
        await asyncio.sleep(min(_CHECK_S, send_timeout_s / 4) if send_timeout_s else _CHECK_S)
        now = monotonic()
        for connection in list(connections()):
            assert isinstance(connection, Connection)
            reason = connection.why_cut_off(now, send_timeout_s)
            if reason is not None:
                metrics.dropped(reason)
                state = connection.scope["state"] if connection.scope else {}
                fields = {"request_id": state.get("request_id")}
                _LOG.info("connection cut off: %s", reason, extra={"fields": fields})
                connection.transport.abort()
