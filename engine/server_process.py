"""A server from its socket to its end.

Owns the order of a life: listen, build the engine beside the probes, serve, drain, close; and what
ends it early. Data flow: a deployment -> a running server -> an exit status.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import uvicorn

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.llm import LLM
from decodegrid.engine.server_app import build_app
from decodegrid.engine.server_connections import Connection, guard_connections
from decodegrid.engine.server_health import describe
from decodegrid.engine.server_keys import read_keys
from decodegrid.engine.server_state import ServerState

_LOG = logging.getLogger("decodegrid.server")

EXIT_CLEAN: Final = 0
EXIT_CUT_OFF: Final = 1
"""Requests were still open when the time to drain was over."""
EXIT_ENGINE: Final = 3
"""The engine failed, or hung."""

_TICK_S: Final = 0.05
_LAST_ANSWERS_S: Final = 2.0
"""For answers to be sent once their requests were ended."""
_CLOSE_S: Final = 10.0
"""For the engine to close; one that hangs never does."""


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """How a server ended."""

    status: int
    is_stuck: bool
    """A thread of the engine still runs, so that the process cannot end in the usual way."""


class _Web(uvicorn.Server):
    """uvicorn without its own signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One server; run() serves until stop()."""

    def __init__(self, loaded: LoadedConfig, build_llm: Callable[[LoadedConfig], LLM]) -> None:
        """Bind the socket and read the keys. Raises OSError, and ValueError for either."""
        self._loaded, self._build_llm = loaded, build_llm
        server = loaded.config.server
        self._drain_s, self._stall_exit_s = server.drain_timeout_s, server.stall_exit_s
        self.state = ServerState(loaded, read_keys(loaded.api_keys_path))
        self.listener = _listen(server.host, server.port)
        host, port = self.listener.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._num_stops = 0
        self._web = _Web(
            uvicorn.Config(
                build_app(self.state),
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(_LAST_ANSWERS_S) + 1,
            )
        )

    def stop(self) -> None:
        """Drain and end; a second call ends at once. Any thread and signal handler may call it."""
        self._num_stops += 1

    async def run(self) -> ServerEnd:
        """Serve. Raises what the engine's start-up raises."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        _LOG.info("listening on %s", self.address)
        self._warn_if_open()
        serving = asyncio.create_task(self._web.serve(sockets=[self.listener]))
        send_s = self._loaded.config.server.send_timeout_s
        guard = asyncio.create_task(
            guard_connections(lambda: self.connections, send_s, self.state.metrics)
        )
        try:
            engine = await self._start_engine(loop)
            if engine is None:
                return ServerEnd(EXIT_CLEAN, is_stuck=True)
            status = await self._watch(engine, serving)
            if status == EXIT_CLEAN:
                status = await self._drain(engine)
        finally:
            self._web.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            guard.cancel()
            self.state.close()
        report = engine.report().splitlines()
        _LOG.info("what was done", extra={"fields": {"report": report}})
        is_stuck = not await _close(engine)
        status = EXIT_ENGINE if is_stuck else status
        _LOG.info("ended with status %d", status)
        return ServerEnd(status, is_stuck)

    @property
    def connections(self) -> set[Any]:
        """The open ones."""
        return self._web.server_state.connections

    def _warn_if_open(self) -> None:
        host = self.listener.getsockname()[0]
        if not self.state.keys and not host.startswith("127.") and host != "::1":
            _LOG.warning(
                "anybody who reaches %s may use the server: server.api_keys_file is empty", host
            )

    async def _start_engine(self, loop: asyncio.AbstractEventLoop) -> AsyncLLM | None:
        """The engine, built in a thread; None when the server was stopped meanwhile."""
        made: asyncio.Future[AsyncLLM] = loop.create_future()

        def settle(engine: AsyncLLM | None, error: BaseException | None) -> None:
            if made.cancelled():
                return
            if engine is not None:
                made.set_result(engine)
            elif error is not None:
                made.set_exception(error)

        def build() -> None:
            engine, failure = None, None
            try:
                llm = self._build_llm(self._loaded)
                # Takes seconds, for which the first request with a form would wait.
                llm.stream_table.prepare_grammars()
                engine = AsyncLLM(llm)
            except BaseException as error:  # it is raised where the start-up is waited for
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
                loop.call_soon_threadsafe(settle, engine, failure)

        # A daemon: a start-up takes minutes, and the server may be stopped in it.
        threading.Thread(target=build, name="decodegrid-start", daemon=True).start()
        while not made.done():
            if self._num_stops:
                made.cancel()
                _LOG.info("stopped before the engine was ready")
                return None
            await asyncio.wait({made}, timeout=_TICK_S)
        engine = made.result()
        self.state.health.ready(engine)
        _LOG.info("ready: %s", self.address)
        return engine

    async def _watch(self, engine: AsyncLLM, serving: "asyncio.Task[None]") -> int:
        """Wait until something ends the server; the status if nothing else goes wrong."""
        was_stalled = False
        while not self._num_stops:
            if self._has_failed(engine) or serving.done():
                return EXIT_ENGINE
            problem = self.state.health.problem()
            if (problem is not None) != was_stalled:
                was_stalled = problem is not None
                _LOG.warning("ready again" if problem is None else "not ready: %s", *_args(problem))
            await asyncio.sleep(_TICK_S)
        return EXIT_CLEAN

    def _has_failed(self, engine: AsyncLLM) -> bool:
        """Whether the engine serves nobody any more; says so the first time."""
        health = self.state.health
        if engine.error is not None:
            health.fail(describe(engine.error))
            return True
        if self._stall_exit_s and engine.busy_s >= self._stall_exit_s:
            health.fail(
                f"no step has finished for {engine.busy_s:.1f} s "
                f"(server.stall_exit_s = {self._stall_exit_s:g})"
            )
            return True
        return False

    async def _drain(self, engine: AsyncLLM) -> int:
        """Let open requests end, and end those that take too long; the exit status."""
        queue, health = self.state.queue, self.state.health
        health.drain()
        deadline = monotonic() + self._drain_s
        _LOG.info("draining: %d requests are open", len(queue.open_ids))
        while queue.open_ids and monotonic() < deadline and self._num_stops < 2:
            if self._has_failed(engine):
                return EXIT_ENGINE
            await asyncio.sleep(_TICK_S)
        if engine.error is not None:
            return EXIT_ENGINE
        if not queue.open_ids:
            return EXIT_CLEAN
        _LOG.warning("drained too long: %d requests are ended", len(queue.open_ids))
        for request_id in queue.open_parts:
            self.state.metrics.aborted("drain")
            engine.abort(request_id)
        deadline = monotonic() + _LAST_ANSWERS_S
        while queue.open_ids and monotonic() < deadline:
            await asyncio.sleep(_TICK_S)
        return EXIT_CUT_OFF


def _args(problem: str | None) -> tuple[str, ...]:
    return () if problem is None else (problem,)


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError, and ValueError naming the address for one of no interface."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ValueError(f"server.host {host!r}: {error.strerror}") from None
    family, _, _, _, address = found[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        # Python's own words name the address a second time.
        what = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(error.errno, what, f"{host}:{port}") from None


async def _close(engine: AsyncLLM) -> bool:
    """Close the engine; False when it does not end."""
    thread = threading.Thread(target=engine.close, name="decodegrid-close", daemon=True)
    thread.start()
    deadline = monotonic() + _CLOSE_S
    while thread.is_alive() and monotonic() < deadline:
        await asyncio.sleep(_TICK_S)
    return not thread.is_alive()
