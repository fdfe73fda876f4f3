"""Soak over HTTP: clients of all kinds against one server, good ones among bad ones.

The toy model answers, so that thousands of requests fit into a minute and every rule of the runner
protocol is watched. Every answer that came whole is compared with what an engine in this process
gives alone; at the end nothing may be held: slots, blocks, tickets, tasks, descriptors, threads,
memory. `make soak-http` does it for ten minutes; the seconds are in DECODEGRID_SOAK_SECONDS.
"""

import gc
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from decodegrid.engine.llm import LLM
from decodegrid.engine.server_queue import RequestQueue
from decodegrid.engine.tokenizer import Tokenizer

NUM_CLIENTS = 6
NUM_SLOTS = 4
MAX_MODEL_LEN = 4096
STEP_S = 0.001
TIMEOUT_S = 4.0
MAX_BUFFER = 2**18
"""Bytes that may wait for a client that stands still; its answer has twice as many."""
MAX_GROWTH_MIB = 64
"""Of the process between a quarter of the run and its end."""
WINDOW = 12
"""Different requests from which clients choose at a time; the window moves on with the work."""
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
NEEDED = (
    "whole", "stream", "leave", "leave_prefill", "leave_body", "malformed", "burst", "slow", "stop",
    "tools", "forms", "sampled", "429", "504", "read on", "cut off", "killed", "equal",
)  # fmt: skip
"""A run in which one of these did not happen shows nothing."""


class Soak:
    """Clients and what they found."""

    def __init__(
        self, server: Any, reference: Any, rss_mib: Any, seconds: float, needs: tuple[str, ...]
    ) -> None:
        """It goes on for the seconds, and one client until every count of `needs` has moved."""
        self._server, self._reference, self._needs = server, reference, needs
        self._rss_mib = rss_mib
        self._end = time.monotonic() + seconds
        self._host, port = server.url.removeprefix("http://").split(":")
        self._port = int(port)
        self._address = (self._host, port)
        self._lock = threading.Lock()
        self._slow_lock, self._stop_lock = threading.Lock(), threading.Lock()
        """Held by the one client that does what keeps slots for seconds."""
        self._quarter = time.monotonic() + seconds / 4
        self.rss_at_quarter: float | None = None
        self.errors: list[BaseException] = []
        self.counts: Counter[str] = Counter()
        self.max_buffer = 0

    def run(self) -> None:
        """All clients to their ends."""
        clients = [threading.Thread(target=self._client, args=(n,)) for n in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            for connection in self._connections():
                size = connection.transport.get_write_buffer_size()
                self.max_buffer = max(self.max_buffer, size)
            if self.rss_at_quarter is None and time.monotonic() > self._quarter:
                self.rss_at_quarter = self._rss_mib()
            time.sleep(0.05)
        if self.errors:
            raise self.errors[0]

    def missing(self) -> list[str]:
        return [name for name in self._needs if not self.counts[name]]

    def _connections(self) -> list[Any]:
        return self._server.call(lambda: list(self._server.server.connections))

    def _client(self, client: int) -> None:
        rng = random.Random(f"{self._reference.seed}/client/{client}")
        ways = (
            *[self._whole, self._stream] * 3, self._leave, self._leave_prefill, self._leave_body,
            self._malformed, self._burst, self._slow, self._stop,
        )  # fmt: skip
        try:
            # On a machine that is so slow that answers of some kinds take all their time beside
            # those of the other clients, they come to one that is alone.
            while not self.errors and (
                time.monotonic() < self._end or (client == 0 and self.missing())
            ):
                assert time.monotonic() < self._end + 300, f"never seen: {self.missing()}"
                with self._lock:
                    self.counts["requests"] += 1
                    number = self.counts["requests"] // WINDOW * WINDOW // 2 + rng.randrange(WINDOW)
                way = rng.choice(ways)
                way(number, rng)
                self.counts[way.__name__.strip("_")] += 1
        except BaseException as error:  # told by the main thread
            self.errors.append(error)

    def _post(self, kind: str, body: Any) -> tuple[Any, Any]:
        """Connection and answer of a request that was not sent away."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        while True:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=60)
            connection.request("POST", PATHS[kind], data)
            answer = connection.getresponse()
            if answer.status != 429:
                return connection, answer
            assert int(answer.headers["retry-after"]) >= 1
            self.counts["429"] += 1
            answer.close()
            connection.close()
            time.sleep(0.05)

    def _raw(self, data: bytes) -> socket.socket:
        connection = socket.create_connection((self._host, self._port), timeout=60)
        connection.sendall(data)
        return connection

    def _bytes(self, kind: str, body: Any) -> bytes:
        data = json.dumps(body).encode()
        head = f"POST {PATHS[kind]} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        return head.encode() + data

    def _compare(self, number: int, found: list[dict[str, Any]]) -> None:
        _, body = self._reference.make_body(number)
        want = self._reference.choices(number)
        assert found == want, f"another answer than alone: {body}"
        self.counts["equal"] += 1
        self.counts["tools"] += "tools" in body
        self.counts["forms"] += "structured_outputs" in body
        self.counts["sampled"] += body["temperature"] > 0

    def _whole(self, number: int, rng: random.Random) -> None:
        kind, body = self._reference.make_body(number)
        connection, answer = self._post(kind, body)
        found = answer.read()
        connection.close()
        if answer.status == 504:
            self.counts["504"] += 1
            return
        assert answer.status == 200, found
        self._compare(number, self._reference.of_whole(found))

    def _stream(self, number: int, rng: random.Random) -> None:
        kind, body = self._reference.make_body(number)
        connection, answer = self._post(kind, {**body, "stream": True})
        lines = [line for line in answer.read().split(b"\n") if line]
        connection.close()
        assert answer.status in (200, 504), lines
        if answer.status == 504 or b'"timeout"' in lines[-1]:
            self.counts["504"] += 1
            return
        assert lines[-1] == b"data: [DONE]"
        self._compare(number, self._reference.of_stream(lines[:-1]))

    def _leave(self, number: int, rng: random.Random) -> None:
        kind, body = self._reference.make_body(number)
        connection, answer = self._post(kind, {**body, "stream": True, "max_tokens": 500})
        for _ in range(rng.randrange(4)):
            answer.readline()
        answer.close()
        connection.close()

    def _leave_prefill(self, number: int, rng: random.Random) -> None:
        body = {"prompt": [20 + number % 200] * 1000, "stream": rng.random() < 0.5}
        connection = self._raw(self._bytes("completion", body))
        time.sleep(rng.choice((0.0, 0.005, 0.05)))
        connection.close()

    def _leave_body(self, number: int, rng: random.Random) -> None:
        data = self._bytes(*self._reference.make_body(number))
        self._raw(data[: rng.randrange(1, len(data))]).close()

    def _malformed(self, number: int, rng: random.Random) -> None:
        if rng.random() < 0.5:
            connection = self._raw(rng.choice(self._reference.garbage))
            head = connection.recv(65536)
            connection.close()
            assert not head or head.startswith(b"HTTP/1.1 4"), head
            return
        http_connection, answer = self._post("completion", rng.choice(self._reference.bad_bodies))
        assert 400 <= answer.status < 500, answer.read()
        answer.close()
        http_connection.close()

    def _burst(self, number: int, rng: random.Random) -> None:
        body = {"prompt": [20, 30], "max_tokens": 30, "temperature": 0}
        open_ = [self._raw(self._bytes("completion", body)) for _ in range(25)]
        for place, connection in enumerate(open_):
            if place % 2:
                head = connection.recv(65536).split(b"\r\n")[0].split()
                assert head[1] in (b"200", b"429", b"504"), head
                self.counts[head[1].decode()] += 1
            connection.close()

    def _slow(self, number: int, rng: random.Random) -> None:
        """More than fits into the time that a request has."""
        if not self._slow_lock.acquire(blocking=False):
            return
        try:
            body = {"prompt": [20], "max_tokens": 4000, "ignore_eos": True, "speculation": "off"}
            connection, answer = self._post("completion", body)
            assert answer.status == 504, answer.status
            answer.close()
            connection.close()
            self.counts["504"] += 1
        finally:
            self._slow_lock.release()

    def _stop(self, number: int, rng: random.Random) -> None:
        """A process that stops in the middle of an answer, and goes on, or ends, or never does."""
        if not self._stop_lock.acquire(blocking=False):
            return
        try:
            body = {"prompt": [20, number % 200], "n": 4, "max_tokens": 100, "ignore_eos": True}
            data = self._bytes("completion", {**body, "logprobs": 20, "stream": True})
            child = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", self._reference.stopped, *self._address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            with child:
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write(data)
                child.stdin.close()
                assert child.stdout.readline() == b"reading\n"
                self._end_stopped(child, rng)
        finally:
            self._stop_lock.release()

    def _end_stopped(self, child: "subprocess.Popen[bytes]", rng: random.Random) -> None:
        what = rng.choice(("read on", "cut off", "killed"))
        name = "decodegrid_connections_dropped_total"
        before, end = self._server.metric(name), time.monotonic() + 2 * TIMEOUT_S
        while what == "cut off" and self._server.metric(name) == before:
            if time.monotonic() > end:  # the answer was too slow to come, and ended in time
                what = "read on"
            time.sleep(0.1)
        if what == "killed":
            child.kill()
        else:
            child.send_signal(signal.SIGCONT)
            assert child.stdout is not None
            came = child.stdout.readline()
            assert came == b"in part\n" or what == "read on", came
        self.counts[what] += 1


@pytest.fixture
def soak(
    serve: Any,
    make_runner: Any,
    tokenizer: Tokenizer,
    reference: Any,
    idle: Any,
    held: Any,
    rss_mib: Any,
) -> Callable[..., None]:
    """soak(seconds, needs, patience_s): run it and check that nothing is held."""

    def run(seconds: float, needs: tuple[str, ...] = NEEDED, patience_s: int = 60) -> None:
        runner = make_runner(
            max_num_reqs=NUM_SLOTS,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=MAX_MODEL_LEN // 2,  # half of what the slots may need
            block_size=4,
            prefill_chunk_sizes=(16, 64),
            drafts="random",
        )
        runner.log, runner.order = deque(maxlen=8), deque(maxlen=8)
        launch = runner.launch

        def slow_launch(*args: Any) -> Any:
            time.sleep(STEP_S)
            return launch(*args)

        runner.launch = slow_launch
        llm = LLM.from_runner(runner, tokenizer, async_scheduling=True)
        server = serve(
            lambda: llm,
            f"scheduler.max_model_len={MAX_MODEL_LEN}",
            f"scheduler.max_num_reqs={NUM_SLOTS}",
            "server.max_queued_requests=12",
            f"server.request_timeout_s={TIMEOUT_S}",
            "server.send_timeout_s=1.5",
        )
        # Connections inherit it, so that answers do not fit into the system's buffers.
        server.server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        reference.choices(0)  # what is made once for every process
        gc.collect()
        before = held(server)
        made = Soak(server, reference, rss_mib, seconds, needs)
        made.run()
        print(f"\nsoak over HTTP: {dict(made.counts)}, at most {made.max_buffer} bytes to send")
        queue, scheduler = server.state.queue, llm.scheduler
        server.take_in()  # of clients that have gone since
        server.wait_until(
            lambda: not queue.open_ids and idle(llm) and not scheduler.waiting,
            "something is held",
            patience_s,
        )
        assert (queue.num_open, queue.num_waiting_tokens) == (0, 0), "something is held"
        blocks = range(llm.limits.num_blocks)
        assert all(scheduler.blocks.ref_count(block) == 0 for block in blocks)
        # Less is right: what other tests of the process left behind may end meanwhile.
        server.wait_until(
            lambda: all(held(server)[name] <= count for name, count in before.items()),
            f"more than {before}",
            patience_s,
        )
        assert made.max_buffer < MAX_BUFFER
        quarter = made.rss_at_quarter
        assert quarter is None or rss_mib() - quarter < MAX_GROWTH_MIB
        assert server.metric("decodegrid_http_responses_total", status="500") == 0
        assert server.stop().status == 0

    return run


def test_soak_over_http(soak: Callable[..., None]) -> None:
    soak(60.0)


@pytest.mark.slow
def test_long_soak_over_http(soak: Callable[..., None]) -> None:
    soak(float(os.environ.get("DECODEGRID_SOAK_SECONDS", "600")))


def test_a_leak_is_found(soak: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One ticket in ten is not given back."""
    remove, count = RequestQueue.remove, Counter[str]()

    def leak(self: RequestQueue, ticket: Any) -> None:
        count["tickets"] += 1
        if count["tickets"] % 10:
            remove(self, ticket)

    monkeypatch.setattr(RequestQueue, "remove", leak)
    with pytest.raises(AssertionError, match="something is held"):
        soak(1.0, ("equal",), 2)
