"""`decodegrid serve`: connections on which nothing goes on, and bodies that never end."""

import io
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from decodegrid.engine import server_connections
from decodegrid.engine.server_connections import Connection
from decodegrid.engine.server_health import Health

MARK = 65536
"""Bytes at which asyncio asks for no more, as its documentation has it."""


def test_a_client_that_takes_nothing_is_cut_off(start: Any, idle: Any) -> None:
    """Until then the server holds one buffer of its answer, and the engine and others go on."""
    server, llm, _ = start("server.send_timeout_s=3", max_num_reqs=4)
    # Connections inherit it, so that the answer does not fit into the system's buffers.
    server.server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    stopped = socket.socket()
    stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body: Any = {"prompt": [20], "max_tokens": 300, "n": 4, "logprobs": 20, "stream": True}
    server.send(body, connection=stopped)
    sizes = [0]

    def is_cut_off() -> bool:
        for connection in server.call(lambda: list(server.server.connections)):
            sizes.append(connection.transport.get_write_buffer_size())
        # Meanwhile others are served.
        body = {"prompt": [20], "max_tokens": 1}
        assert server.post("/v1/completions", body).status_code == 200
        return bool(server.metric("decodegrid_connections_dropped_total", reason="not reading"))

    server.wait_until(is_cut_off)
    # Every token says 21 log-probabilities, in about a kilobyte: the answer has more than one MiB.
    # Above the mark the server waits until a quarter is left; the system still takes some of it.
    assert MARK // 4 < max(sizes) < 4 * MARK
    server.wait_until(lambda: not server.state.queue.open_ids and idle(llm))
    with pytest.raises(OSError):
        while stopped.recv(65536):
            pass
        raise ConnectionResetError("it may have been told in time")
    assert server.stop().status == 0


class Stand:
    """A connection whose buffer and clock are the test's."""

    def __init__(self) -> None:
        self.size, self.is_closing, self.cycle = 0, False, SimpleNamespace(response_complete=False)
        self.made = Connection.__new__(Connection)
        self.made.transport = SimpleNamespace(  # type: ignore[assignment]
            get_write_buffer_size=lambda: self.size, is_closing=lambda: self.is_closing
        )
        self.made.flow = SimpleNamespace(  # type: ignore[assignment]
            write_paused=False, resume_writing=lambda: None
        )
        self.made.cycle = self.cycle  # type: ignore[assignment]

    def ask(self, now: float, size: int, *, paused: bool = False) -> str | None:
        self.size, self.made.flow.write_paused = size, paused
        return self.made.why_cut_off(now, 10.0)


def test_who_takes_something_now_and_then_stays() -> None:
    stand = Stand()
    for now in range(0, 100, 5):  # a byte in five seconds
        assert stand.ask(now, 1000 - now, paused=True) is None
    assert stand.ask(104.9, 905, paused=True) is None
    assert stand.ask(105.0, 905, paused=True) == "not reading"
    stand = Stand()
    for now in range(0, 100, 5):  # a stream that grows as it is read
        assert stand.ask(now, now) is None
    assert stand.made.why_cut_off(1000.0, 0.0) is None


def test_what_is_left_of_an_answer_at_its_end_counts_too() -> None:
    stand = Stand()
    assert stand.ask(0.0, 500) is None
    stand.is_closing = True
    assert stand.ask(9.0, 500) is None and stand.ask(20.0, 500) == "not reading"


def test_a_connection_without_a_request_is_cut_off() -> None:
    stand = Stand()
    assert stand.ask(0.0, 0) is None
    assert stand.ask(500.0, 0) is None, "its request may take as long as it likes"
    stand.cycle.response_complete = True
    assert stand.ask(559.0, 0) is None and stand.ask(560.0, 0) == "not asking"


def test_half_a_request_is_not_waited_for(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connections, "_ASK_S", 0.5)
    server, _, _ = start()
    for data in (b"", b"POST /v1/comple", b"GET /live HTTP/1.1\r\nHost: x\r\nA: "):
        with server.connect(data) as connection:
            assert connection.recv(100) == b""
    # However long it takes to ask for the metrics.
    monkeypatch.setattr(server_connections, "_ASK_S", 60.0)
    assert server.metric("decodegrid_connections_dropped_total", reason="not asking") == 3


def test_who_asks_for_another_protocol_gets_this_one(start: Any, log: io.StringIO) -> None:
    server, _, _ = start()
    lines = ["GET /live HTTP/1.1", "Host: x", "Connection: Upgrade, close", "Upgrade: websocket"]
    with server.connect("\r\n".join([*lines, "", ""]).encode()) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    assert server.stop().status == 0
    assert "pip install" not in log.getvalue() and "warning" not in log.getvalue()


def test_a_client_that_goes_in_its_body_is_no_error(
    start: Any, log: io.StringIO, idle: Any
) -> None:
    server, llm, _ = start()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    server.connect(head + b'{"prompt": ').close()
    server.wait_until(
        lambda: bool(server.metric("decodegrid_requests_rejected_total", status="499"))
    )
    assert idle(llm) and not server.state.queue.open_ids and server.stop().status == 0
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    (access,) = [line for line in lines if line["logger"] == "decodegrid.access"]
    assert access["status"] == 499 and {line["level"] for line in lines} == {"info"}


def test_a_dead_engine_is_not_ready() -> None:
    health = Health(stall_s=1.0)
    assert "warming" in (health.problem() or "")
    engine: Any = SimpleNamespace(error=None, busy_s=0.0)
    health.ready(engine)
    assert health.problem() is None
    engine.error = OSError("the card\nfell out")
    assert health.problem() == "failed: OSError: the card fell out"
    health.fail("why")
    health.drain()
    assert health.problem() == "failed: why"
