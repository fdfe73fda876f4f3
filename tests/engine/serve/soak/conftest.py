"""The requests of the soak over HTTP and what must come out of them.

Owns the bodies, equal for equal numbers, and the answers of an engine that nobody else uses.
"""

import asyncio
import json
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.engine.batch_body import answer_body, read_body
from decodegrid.engine.llm import LLM
from decodegrid.engine.tokenizer import Tokenizer

SEED = 20261
MAX_MODEL_LEN = 4096
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
GARBAGE = (
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"prompt"',
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70000 + b"\r\n\r\n",
)
BAD_BODIES: tuple[Any, ...] = (
    b"{", b"[]", b"\xff\xfe", b"[" * 5000, b'{"prompt": 1e999}', {"prompt": "a", "nonsense": 1},
    {"prompt": []}, {"prompt": [2**40]}, {"prompt": "a", "max_tokens": -1},
    {"prompt": [20] * 5000}, {"prompt": "a", "structured_outputs": {"regex": "("}},
)  # fmt: skip
STOPPED = """
import os, signal, socket, sys
data = sys.stdin.buffer.read()
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
s.connect((sys.argv[1], int(sys.argv[2])))
s.sendall(data)
s.recv(100)
print("reading", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
tail = b""
try:
    while part := s.recv(65536):
        tail = (tail + part)[-2000:]
        if tail.endswith(b"0\\r\\n\\r\\n"):
            break
except OSError:
    pass
print("whole" if b"[DONE]" in tail else "in part", flush=True)
"""


def make_body(number: int) -> tuple[Any, dict[str, Any]]:
    """Kind and body of the number-th request of the soak."""
    rng = random.Random(f"{SEED}/{number}")
    body: dict[str, Any] = {
        "temperature": rng.choice((0, 0, 0.8)),
        "seed": rng.randrange(2**31),
        "max_tokens": rng.choice((1, 4, 20, 60)),
    }
    what = rng.choice(("plain", "plain", "chat", "tools", "form"))
    if what in ("chat", "tools"):
        text = "".join(rng.choice("abc de\u00e9\u4e2d\n") for _ in range(rng.randrange(1, 60)))
        body["messages"] = [{"role": "user", "content": text}]
        if what == "tools":
            body |= {"tools": TOOLS, "tool_choice": "required", "max_tokens": 120}
        return "chat", body
    body["prompt"] = [rng.randrange(10, 266) for _ in range(rng.choice((1, 3, 8, 40)))]
    if what == "form":
        form = rng.choice(({"regex": "[a-f]{2,6}"}, {"choice": ["yes", "no, never"]}))
        body["structured_outputs"] = form
    else:
        body |= {"n": rng.choice((1, 1, 3)), "stop": rng.choice((None, ["e", "QQ"]))}
        body |= {"logprobs": rng.choice((None, None, 2)), "ignore_eos": True}
    return "completion", body


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without what is made for each answer anew."""
    message = choice.get("message", {})
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return {
        "index": choice["index"],
        "text": choice.get("text", message.get("content")) or "",
        "calls": calls,
        "finish_reason": choice["finish_reason"],
    }


def merged(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream's events, as plain() has them."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        index = choice["index"]
        made = found.setdefault(
            index, {"index": index, "text": "", "calls": [], "finish_reason": None}
        )
        delta = choice.get("delta", {})
        made["text"] += choice.get("text", delta.get("content")) or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(made["calls"]):
                made["calls"].append(("", ""))
            name, arguments = made["calls"][call["index"]]
            given = call["function"]
            name, arguments = name + (given.get("name") or ""), arguments + given["arguments"]
            made["calls"][call["index"]] = (name, arguments)
        assert made["finish_reason"] is None, "something comes behind the finish"
        made["finish_reason"] = choice["finish_reason"]
    return [found[index] for index in sorted(found)]


class Reference:
    """What an engine gives that nobody else uses."""

    seed = SEED
    garbage, bad_bodies, stopped = GARBAGE, BAD_BODIES, STOPPED
    """Of what is no request, of what is refused, and the program of a client that stops."""
    make_body = staticmethod(make_body)

    def __init__(self, llm: LLM) -> None:
        self._llm, self._lock = llm, threading.Lock()
        self._known: dict[int, list[dict[str, Any]]] = {}

    def of_whole(self, answer: bytes) -> list[dict[str, Any]]:
        """The choices of a whole answer, in the form of choices()."""
        return [plain(choice) for choice in json.loads(answer)["choices"]]

    def of_stream(self, lines: list[bytes]) -> list[dict[str, Any]]:
        """Those of the events of a stream, without the last one."""
        return merged([json.loads(line.removeprefix(b"data: ")) for line in lines])

    def choices(self, number: int) -> list[dict[str, Any]]:
        """Those of the number-th request alone."""
        with self._lock:
            if number not in self._known:
                kind, body = make_body(number)
                tokenizer = self._llm.tokenizer
                request = read_body(kind, body, tokenizer, SamplingSection())
                (output,) = self._llm.generate([request.prompt], request.params)
                answer = answer_body(request, output, 0, tokenizer)
                self._known[number] = [plain(choice) for choice in answer["choices"]]
            return self._known[number]


@pytest.fixture(scope="session")
def reference(make_runner: Callable[..., Any], tokenizer: Tokenizer) -> Reference:
    runner = make_runner(max_model_len=MAX_MODEL_LEN, drafts=0)
    return Reference(LLM.from_runner(runner, tokenizer))


def _held(server: Any) -> dict[str, int]:
    """What the process holds that must not grow."""

    def in_loop() -> int:
        return len(asyncio.all_tasks())

    pools = ("decodegrid-read", "decodegrid-grammar", "grammar-")
    return {
        "tasks": server.call(in_loop),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sum(not thread.name.startswith(pools) for thread in threading.enumerate()),
    }


def _rss_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture(scope="session")
def held() -> Callable[[Any], dict[str, int]]:
    return _held


@pytest.fixture(scope="session")
def rss_mib() -> Callable[[], float]:
    return _rss_mib
