"""Servers in threads of their own, and what tests do to them.

The toy model behind them, and the tokenizer, are those of the engine's tests.
"""

import asyncio
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from decodegrid.configs.load import load_config
from decodegrid.engine.llm import LLM
from decodegrid.engine.server_log import LOGGERS, configure_logging
from decodegrid.engine.server_process import Server, ServerEnd
from decodegrid.engine.tokenizer import Tokenizer

GREEDY: Any = {"model": "tiny", "temperature": 0}
PLAIN: Any = {"timeout": 60, "verify": False}
"""For clients of plain HTTP: to load certificates takes ten times as long as a request."""


class Gate:
    """Holds a method of the runner: each call takes a permit."""

    def __init__(self, runner: Any, name: str, permits: int = 0) -> None:
        self._call, self._permits = getattr(runner, name), threading.Semaphore(permits)
        self._is_open = False
        self.num_waiting = 0
        self.num_passed = 0
        setattr(runner, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self._is_open:
            self.num_waiting += 1
            assert self._permits.acquire(timeout=60)
            self.num_waiting -= 1
            self.num_passed += 1
        return self._call(*args, **options)

    def allow(self, count: int = 1) -> None:
        self._permits.release(count)

    def open(self) -> None:
        self._is_open = True
        self._permits.release(1000)


class RunningServer:
    """A server in a thread of its own, on a free port."""

    def __init__(self, make_llm: Callable[[], Any], overrides: Sequence[str]) -> None:
        loaded = load_config(None, ["server.port=0", *overrides])
        self.server = Server(loaded, lambda _: make_llm())
        self.url = self.server.address
        self.state = self.server.state
        self.end: ServerEnd | None = None
        """Once it has ended."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.end = await self.server.run()

    def call(self, function: Callable[[], Any]) -> Any:
        """The result of a function, called by the server's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def skip(self, seconds: float) -> None:
        """Have so much time pass for what the event loop waits for: what is due is due now,
        however fast or slow the machine is until then."""
        loop, now = self._loop, self._loop.time
        self.call(lambda: setattr(loop, "time", lambda: now() + seconds))

    def take_in(self, rounds: int = 5) -> None:
        """Have the event loop do what is ready, so that whatever clients have sent until now has
        come to its handler, and, for which 2 rounds do, what the engine delivered to its reader."""
        for _ in range(rounds):  # accepted, made a connection, read, made a task, run
            self.call(lambda: None)

    def wait_ready(self) -> "RunningServer":
        self.wait_until(lambda: self.state.health.problem() is None)
        return self

    def wait_until(
        self, is_so: Callable[[], bool], failure: str = "it did not happen", seconds: int = 60
    ) -> None:
        """Wait for what is sure to come; fails with a message where it does not."""
        for _ in range(100 * seconds):
            if is_so():
                return
            time.sleep(0.01)
        raise AssertionError(failure)

    def stop(self) -> ServerEnd:
        """Drain and wait for the end."""
        self.server.stop()
        self._thread.join(60)
        assert self.end is not None, "the server did not end"
        return self.end

    def kill(self) -> None:
        """End it without waiting for open requests."""
        self.server.stop()
        self.server.stop()
        self._thread.join(60)

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, which does not try again."""
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        http_client = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=http_client, **settings)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Anthropic's official client, which does not try again."""
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        http_client = anthropic.DefaultHttpxClient(verify=False)
        return anthropic.Anthropic(base_url=self.url, http_client=http_client, **settings)

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and text of a GET."""
        found = httpx2.get(self.url + path, headers=headers, **PLAIN)
        return found.status_code, found.text

    def post(self, path: str, body: Any, **headers: str | bytes) -> httpx2.Response:
        """A POST of JSON, or of bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.post(self.url + path, content=data, headers=headers, **PLAIN)

    def post_stream(self, path: str, body: Any) -> httpx2.Response:
        """A POST of bytes, or of an iterator of them, whose length nobody tells ahead."""
        return httpx2.post(self.url + path, content=body, **PLAIN)

    def connect(self, data: bytes) -> socket.socket:
        """A connection that was sent some bytes."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=60)
        connection.sendall(data)
        return connection

    def send(self, body: Any, connection: socket.socket | None = None) -> socket.socket:
        """A request on a connection of its own, whose answer nobody has read."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.socket() if connection is None else connection
        connection.settimeout(60)
        connection.connect((host, int(port)))
        data = json.dumps({**GREEDY, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection

    def read_stream(self, connection: socket.socket) -> bytes:
        """The rest of a streamed answer, to its end."""
        found = b""
        while part := connection.recv(65536):
            found += part
            if found.endswith((b"[DONE]\n\n\r\n0\r\n\r\n", b"0\r\n\r\n")):
                break
        return found

    def read_answer(self, connection: socket.socket) -> bytes:
        """The body of an answer with a length."""
        found = b""
        while b"\r\n\r\n" not in found:
            found += connection.recv(65536)
        head, _, body = found.partition(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        while len(body) < length:
            body += connection.recv(65536)
        return body

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        families = text_string_to_metric_families(self.get("/metrics")[1])
        samples = [sample for family in families for sample in family.samples]
        return sum(
            sample.value
            for sample in samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@contextmanager
def _servers() -> Iterator[Callable[..., RunningServer]]:
    running: list[RunningServer] = []

    def start(make_llm: Callable[[], Any], *overrides: str, wait: bool = True) -> RunningServer:
        running.append(RunningServer(make_llm, overrides))
        return running[-1].wait_ready() if wait else running[-1]

    try:
        yield start
    finally:
        for server in running:
            server.kill()


@pytest.fixture
def serve() -> Iterator[Callable[..., RunningServer]]:
    """serve(make_llm, *overrides, wait=True): a RunningServer, which is ended with the test."""
    with _servers() as start:
        yield start


@pytest.fixture(scope="module")
def serve_shared() -> Iterator[Callable[..., RunningServer]]:
    """The same for a server of all tests of a file."""
    with _servers() as start:
        yield start


@pytest.fixture
def start(
    serve: Any, make_runner: Callable[..., Any], tokenizer: Tokenizer
) -> Callable[..., tuple[Any, LLM, Any]]:
    """start(*overrides, **options of the runner): server, its engine and the runner."""

    def make(*overrides: str, **options: Any) -> tuple[Any, LLM, Any]:
        runner = make_runner(**{"max_model_len": 400, "drafts": "mixed", **options})
        llm = LLM.from_runner(runner, tokenizer)
        limits = ("scheduler.max_model_len=400", f"scheduler.max_num_reqs={runner.max_num_reqs}")
        return serve(lambda: llm, *limits, *overrides), llm, runner

    return make


@pytest.fixture(scope="session")
def hold() -> type[Gate]:
    """hold(runner, name, permits=0): a Gate in front of a method of the runner."""
    return Gate


@pytest.fixture(scope="session")
def idle() -> Callable[[LLM], bool]:
    """idle(llm): whether all its slots and blocks are free."""

    def is_idle(llm: LLM) -> bool:
        scheduler = llm.scheduler
        free = scheduler.blocks.num_free == scheduler.blocks.num_usable
        return free and scheduler.slots.num_free == scheduler.slots.num_usable

    return is_idle


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What a server logs at its usual level; the loggers are put back behind the test."""
    stream = io.StringIO()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(list(found.handlers), found.level, found.propagate) for found in loggers]
    configure_logging("info", stream)
    yield stream
    logging.captureWarnings(False)
    for found, (handlers, level, propagate) in zip(loggers, before, strict=True):
        found.handlers, found.propagate = handlers, propagate
        found.setLevel(level)


@pytest.fixture
def answering(
    serve: Any,
    make_runner: Callable[..., Any],
    scripted: Any,
    spell: Callable[[str], list[int]],
    tokenizer: Tokenizer,
) -> Callable[..., Any]:
    """answering(read, body, text, *overrides): a server whose model gives this text to prompts of
    the body's length, and an engine's noise to others. read: of the body's protocol."""

    def start(read: Callable[..., Any], body: Any, text: str, *overrides: str) -> Any:
        (ids,) = read(body, "tiny", tokenizer, load_config(None).config.sampling).prompts
        model = scripted(len(ids), spell(text))
        runner = make_runner(max_model_len=4096, drafts="mixed", model=model)
        return serve(lambda: LLM.from_runner(runner, tokenizer), *overrides)

    return start
