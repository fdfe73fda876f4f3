"""`decodegrid serve` at its start and end, and with an engine that fails or hangs."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from decodegrid.engine import server_process
from decodegrid.engine.llm import LLM
from decodegrid.engine.tokenizer import Tokenizer


def events(data: bytes) -> list[Any]:
    """The JSON of a stream's events."""
    lines = [line for line in data.split(b"\r\n") if line.startswith(b"data: {")]
    parts = [part for line in lines for part in line.split(b"\n\n") if part]
    return [json.loads(part.removeprefix(b"data: ")) for part in parts if b"[DONE]" not in part]


def test_the_end_waits_for_streams_and_takes_nothing_new(
    start: Any, tokenizer: Tokenizer, toy: Any, hold: Any
) -> None:
    server, _, runner = start()
    gate = hold(runner, "launch")
    stream = server.send({"prompt": "abc", "max_tokens": 40, "stream": True})
    server.wait_until(lambda: gate.num_waiting == 1)
    server.server.stop()
    server.wait_until(lambda: server.get("/ready")[0] == 503)
    assert "draining" in server.get("/ready")[1] and server.get("/live")[0] == 200
    refused = server.post("/v1/completions", {"prompt": "a"})
    assert refused.status_code == 503 and "draining" in refused.text
    assert int(refused.headers["retry-after"]) >= 1 and server.end is None
    gate.open()
    found = server.read_stream(stream)
    text = "".join(event["choices"][0]["text"] for event in events(found))
    assert text == tokenizer.decode(toy.generate(tokenizer.encode("abc"), 40))
    assert b"[DONE]" in found
    server.wait_until(lambda: server.end is not None)
    assert server.end.status == 0 and not server.end.is_stuck
    with pytest.raises(OSError):
        server.send({"prompt": "a"})


def test_an_end_that_cuts_requests_off_is_not_clean(start: Any, hold: Any) -> None:
    server, _, runner = start("server.drain_timeout_s=0.1")
    gate = hold(runner, "launch", permits=1)
    stream = server.send({"prompt": "abc", "max_tokens": 40, "stream": True})
    whole = server.send({"prompt": "abd", "max_tokens": 40})
    server.wait_until(lambda: len(server.state.queue.open_ids) == 2 and gate.num_waiting == 1)
    server.server.stop()
    server.wait_until(
        lambda: server.metric("decodegrid_requests_aborted_total", cause="drain") == 2
    )
    gate.open()
    found = server.read_stream(stream)
    reasons = [event["choices"][0]["finish_reason"] for event in events(found)]
    assert reasons[-1] == "abort" and reasons[:-1] == [None] * (len(reasons) - 1)
    assert b"[DONE]" in found
    assert "had to end" in json.loads(server.read_answer(whole))["error"]["message"]
    server.wait_until(lambda: server.end is not None)
    assert server.end.status == 1


def test_a_dead_engine_ends_the_server(start: Any, hold: Any) -> None:
    server, _, runner = start()
    gate = hold(runner, "launch")

    def fail(*args: Any) -> Any:
        raise OSError("the device is gone")

    stream = server.send({"prompt": "abc", "max_tokens": 40, "stream": True})
    server.wait_until(lambda: gate.num_waiting == 1)
    runner.launch = fail
    gate.open()
    answer = server.read_stream(stream)
    assert b"500 Internal" in answer or b'"error"' in answer
    assert b"device" not in answer, "a client is told what only the log may say"
    server.wait_until(lambda: server.end is not None)
    assert server.end.status == 3


def test_a_hanging_step_shows_and_may_come_back(start: Any, hold: Any, idle: Any) -> None:
    server, llm, runner = start("server.stall_s=0.2", "server.stall_exit_s=0")
    gate = hold(runner, "launch")
    stream = server.send({"prompt": "abc", "max_tokens": 5, "stream": True})
    server.wait_until(lambda: server.get("/ready")[0] == 503)
    assert "no step has finished for" in server.get("/ready")[1]
    assert server.get("/live")[0] == 200 and server.metric("decodegrid_ready") == 0
    gate.open()
    assert b"[DONE]" in server.read_stream(stream)
    server.wait_until(lambda: server.get("/ready")[0] == 200)
    assert idle(llm) and server.stop().status == 0


def test_a_step_that_hangs_too_long_ends_the_server(
    start: Any, monkeypatch: Any, hold: Any
) -> None:
    monkeypatch.setattr(server_process, "_CLOSE_S", 0.2)
    server, _, runner = start("server.stall_s=0.1", "server.stall_exit_s=0.3")
    gate = hold(runner, "launch")
    connection = server.send({"prompt": "abc", "max_tokens": 5})
    server.wait_until(lambda: server.end is not None)
    assert server.end.status == 3 and server.end.is_stuck
    connection.close()
    gate.open()


def test_probes_tell_of_the_start_and_of_its_failure(
    serve: Any, make_runner: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    go_on = threading.Event()

    def make() -> LLM:
        assert go_on.wait(60)
        return LLM.from_runner(make_runner(), tokenizer)

    server = serve(make, wait=False)
    assert server.get("/live")[0] == 200
    status, text = server.get("/ready")
    assert status == 503 and "warming" in text
    refused = server.post("/v1/completions", {"prompt": "a"})
    assert refused.status_code == 503 and "warming" in refused.text
    assert server.metric("decodegrid_ready") == 0 and server.get("/v1/models")[0] == 200
    go_on.set()
    server.wait_ready()
    assert server.get("/ready") == (200, '{"status":"ready"}')
