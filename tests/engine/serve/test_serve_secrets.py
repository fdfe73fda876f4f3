"""`decodegrid serve`: no key and no prompt in any line of its log, whatever goes wrong."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from decodegrid.engine import server_openai
from decodegrid.engine.chat_body import BodyError
from decodegrid.engine.server_log import configure_logging

KEY = "sk-known-0123456789"
WRONG = "sk-wrong-0123456789"
PROMPT = "the-secret-of-the-prompt"
WORDS = (KEY, WRONG, PROMPT)


@pytest.fixture
def server(start: Callable[..., Any], log: io.StringIO, tmp_path: Path) -> Any:
    """One that asks for a key and logs all that it can."""
    configure_logging("debug", log)
    path = tmp_path / "keys"
    path.write_text(KEY + "\n")
    made, _, _ = start(f"server.api_keys_file={path}", "server.max_body_bytes=4KiB")
    return made


def exchange(server: Any, data: bytes) -> bytes:
    """What comes back for bytes that need not be HTTP."""
    with server.connect(data) as connection:
        received: bytes = connection.recv(65536)
        return received


def check(server: Any, log: io.StringIO) -> list[dict[str, Any]]:
    """The lines of a server that has ended, none of which holds a secret."""
    assert server.stop().status == 0
    for word in WORDS:
        assert word not in log.getvalue()
    return [json.loads(line) for line in log.getvalue().splitlines()]


def test_headers_of_all_kinds(server: Any, log: io.StringIO) -> None:
    body: Any = {"prompt": PROMPT, "max_tokens": 1}
    for headers in (
        {"authorization": KEY},
        {"authorization": f"Basic {WRONG}"},
        {"authorization": f"Bearer  {WRONG}"},
        {"authorization": f"Bearer\t{KEY}"},
        {"authorization": b"Bearer \xff" + WRONG.encode()},
        {"x-api-key": WRONG},
        {"api-key": WRONG, "cookie": f"key={WRONG}"},
        {"authorization": f"Bearer {WRONG}", "x-request-id": f"{WRONG} with a space"},
    ):
        assert server.post("/v1/completions", body, **headers).status_code == 401
    found = server.post(f"/v1/completions?api_key={KEY}", body, authorization=f"Bearer {KEY}")
    assert found.status_code == 200
    for text in (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\n{PROMPT}\r\n\r\n",
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization : {KEY}\r\n\r\n",
        f"POST /v1/completions HTTP/9.1 {KEY}\r\n\r\n",
        f"{PROMPT}\r\n\r\n",
        f"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: {KEY}\r\n\r\n",
    ):
        assert exchange(server, text.encode()).startswith(b"HTTP/1.1 400")
    upgrade = f"Host: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\nX-Api-Key: {WRONG}"
    assert b"401" in exchange(server, f"GET /v1/models HTTP/1.1\r\n{upgrade}\r\n\r\n".encode())
    assert len([line for line in check(server, log) if line.get("status") == 401]) == 9


def test_refused_bodies(server: Any, log: io.StringIO) -> None:
    for body in (
        {"prompt": PROMPT, PROMPT: 1},
        {"prompt": {PROMPT: KEY}},
        {"prompt": PROMPT, "max_tokens": PROMPT},
        {"prompt": PROMPT, "stop": [f"{PROMPT}{i}" for i in range(99)]},
        {"prompt": PROMPT, "structured_outputs": {"regex": f"({PROMPT}"}},
        {"prompt": PROMPT * 30},
        {"prompt": "x" * 5000 + PROMPT},
        {"prompt": PROMPT, "model": KEY},
        b'{"prompt": "' + PROMPT.encode(),
        b"\xff" + PROMPT.encode(),
    ):
        answer = server.post("/v1/completions", body, authorization=f"Bearer {KEY}")
        assert 400 <= answer.status_code < 500, answer.text
    chat = {"messages": [{"role": PROMPT, "content": PROMPT}]}
    assert server.post("/v1/chat/completions", chat, **{"x-api-key": KEY}).status_code == 400
    check(server, log)


def test_failures_inside(server: Any, log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handler or an answer fails with may quote a prompt; the log has its type and place."""

    def fail_reading(*args: Any, **options: Any) -> Any:
        try:
            raise KeyError(PROMPT)
        except KeyError as error:
            raise ValueError(f"cannot read {PROMPT}") from error

    def fail_answering(*args: Any, **options: Any) -> Any:
        raise RuntimeError(PROMPT)

    body: Any = {"prompt": PROMPT, "max_tokens": 2}
    authorization = f"Bearer {KEY}"
    for name, failure in (("read_body", fail_reading), ("answer_body", fail_answering)):
        with monkeypatch.context() as patch:
            patch.setattr(server_openai, name, failure)
            answer = server.post("/v1/completions", body, authorization=authorization)
            assert answer.status_code == 500 and PROMPT not in answer.text
    # The others lose nothing.
    assert server.post("/v1/completions", body, authorization=authorization).status_code == 200
    lines = [line for line in check(server, log) if line["level"] == "error"]
    assert [line["error"] for line in lines] == ["ValueError", "RuntimeError"]
    assert lines[0]["path"] == "/v1/completions" and lines[0]["request_id"].startswith("req-")
    for word in ("ValueError", "KeyError", "fail_reading"):
        assert word in lines[0]["trace"]
    assert "fail_answering" in lines[1]["trace"] and lines[1]["id"]


def test_a_refusal_tells_the_client_what_the_log_does_not(
    server: Any, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise BodyError(f"no {PROMPT}", "prompt")

    monkeypatch.setattr(server_openai, "read_body", refuse)
    answer: httpx2.Response = server.post(
        "/v1/completions", {"prompt": PROMPT}, authorization=f"Bearer {KEY}"
    )
    assert answer.status_code == 400 and PROMPT in answer.text
    check(server, log)
