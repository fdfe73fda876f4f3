"""`decodegrid serve` under load: gone clients, slow ones, and a full queue."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from decodegrid.engine.tokenizer import Tokenizer

GREEDY: Any = {"model": "tiny", "temperature": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_blocks_within_a_step(
    start: Any, stream: bool, tokenizer: Tokenizer, toy: Any, hold: Any, idle: Any
) -> None:
    """Others go on, and nothing is left after many of them."""
    server, llm, runner = start()
    gate = hold(runner, "launch")
    for _ in range(50):
        connection = server.send({"prompt": "abc", "max_tokens": 300, "stream": stream})
        server.wait_until(lambda: gate.num_waiting == 1)
        if stream:
            gate.allow()
            assert b"200 OK" in connection.recv(65536)
            server.wait_until(lambda: gate.num_waiting == 1)
        connection.close()
        server.wait_until(lambda: not server.state.queue.open_ids)
        steps = llm.stats.num_decode_steps
        gate.allow()
        server.wait_until(lambda: idle(llm))
        assert llm.stats.num_decode_steps == steps + 1
        assert server.state.queue.num_open == 0 == server.state.queue.num_waiting_tokens
    assert server.metric("decodegrid_requests_aborted_total", cause="client") == 50
    assert server.metric("vllm:request_success_total", finished_reason="abort") == 0
    gone = server.send({"prompt": "abc", "max_tokens": 300, "stream": stream})
    stays = server.send({"prompt": "abd", "max_tokens": 20})
    server.wait_until(lambda: len(server.state.queue.open_ids) == 2)
    gone.close()
    gate.open()
    body = json.loads(server.read_answer(stays))
    want = toy.generate(tokenizer.encode("abd"), 20)
    assert body["choices"][0]["text"] == tokenizer.decode(want)
    server.wait_until(lambda: idle(llm))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_may_go_while_its_prompt_is_computed(
    start: Any, stream: bool, hold: Any, idle: Any
) -> None:
    server, llm, runner = start()
    gate = hold(runner, "prefill")
    connection = server.send({"prompt": [20] * 100, "max_tokens": 50, "stream": stream})
    server.wait_until(lambda: gate.num_waiting == 1)
    connection.close()
    server.wait_until(lambda: not server.state.queue.open_ids)
    chunks = llm.stats.num_prefill_steps
    gate.allow()
    server.wait_until(lambda: idle(llm))
    assert llm.stats.num_prefill_steps == chunks + 1 and llm.stats.num_decode_steps == 0


def test_a_full_queue_sends_away_with_a_time(start: Any, hold: Any, idle: Any) -> None:
    server, llm, runner = start("server.max_queued_requests=2", max_num_reqs=2)
    gate = hold(runner, "launch")
    body: Any = {"prompt": [20, 21], "max_tokens": 4}
    open_ = [server.send(body) for _ in range(4)]
    server.wait_until(lambda: len(server.state.queue.open_ids) == 4)
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "rate_limit_exceeded" and "of at most 4" in error["message"]
    with pytest.raises(openai.RateLimitError):
        server.client().completions.create(**GREEDY, **body)
    assert server.metric("decodegrid_requests_rejected_total", status="429") == 2
    gate.open()
    for connection in open_:
        assert json.loads(server.read_answer(connection))["usage"]["completion_tokens"] == 4
    # What can never have room is told so, and not sent away for a while.
    too_many = server.post("/v1/completions", {**body, "n": 5})
    assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"
    assert server.post("/v1/completions", body).status_code == 200
    server.wait_until(lambda: idle(llm))


def test_a_client_that_does_not_read_takes_nobodys_place(start: Any, idle: Any) -> None:
    """The engine goes on to the end of its request, whose answer waits in part for the client."""
    server, llm, _ = start("server.max_queued_requests=4", max_num_reqs=4)
    # Connections inherit it, so that the answer does not fit into the system's buffers.
    server.server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    stopped = socket.socket()
    stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body: Any = {"prompt": [20], "max_tokens": 300, "n": 8, "logprobs": 20, "stream": True}
    server.send(body, connection=stopped)
    server.wait_until(lambda: llm.stats.num_emitted == 8 * 300)
    engine = server.state.health.engine
    server.wait_until(lambda: engine.num_open == 0 and idle(llm))
    assert len(server.state.queue.open_ids) == 1, "the answer is small enough to be sent"
    small: Any = {"prompt": [20], "max_tokens": 2, "n": 8}
    assert server.post("/v1/completions", small).status_code == 200
    # A client has its answer just before the server gives the request's place back.
    server.wait_until(lambda: len(server.state.queue.open_ids) == 1)
    stopped.close()
    server.wait_until(lambda: not server.state.queue.open_ids)
    assert server.state.queue.num_open == 0 and server.stop().status == 0


def test_waiting_tokens_are_bounded(start: Any, hold: Any) -> None:
    server, _, runner = start("server.max_queued_tokens=50", max_num_reqs=2)
    gate = hold(runner, "prefill")
    first = server.send({"prompt": [20] * 120, "max_tokens": 2})
    server.wait_until(lambda: server.state.queue.num_waiting_tokens == 120)
    refused = server.post("/v1/completions", {"prompt": [20], "max_tokens": 2})
    assert refused.status_code == 429 and "120 prompt tokens wait" in refused.text
    gate.open()
    assert json.loads(server.read_answer(first))["usage"]["prompt_tokens"] == 120
    server.wait_until(lambda: server.state.queue.num_waiting_tokens == 0)
    assert server.post("/v1/completions", {"prompt": [20], "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_is_ended(
    start: Any, stream: bool, hold: Any, idle: Any
) -> None:
    server, llm, runner = start("server.request_timeout_s=50")
    gate = hold(runner, "launch", permits=1)
    body: Any = {**GREEDY, "prompt": "abc", "max_tokens": 300, "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, "/v1/completions", body)
        # The first step is over; in a stream the client has something of it.
        server.wait_until(lambda: gate.num_passed == 1 and gate.num_waiting == 1)
        server.take_in()
        server.skip(50)
        answer = asked.result()
    if stream:
        assert answer.status_code == 200 and "[DONE]" not in answer.text
        last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    else:
        assert answer.status_code == 504
        last = answer.json()
    assert last["error"]["code"] == "timeout" and "50 s" in last["error"]["message"]
    gate.open()
    server.wait_until(lambda: idle(llm))
    assert server.metric("decodegrid_requests_aborted_total", cause="timeout") == 1


def test_many_clients_of_all_kinds_leave_nothing_behind(start: Any, toy: Any, idle: Any) -> None:
    """Bad bodies, gone clients and good ones at once; the good ones get what they get alone."""
    server, llm, _ = start(max_num_reqs=3)
    failures: list[str] = []

    def client(number: int) -> None:
        for round_ in range(6):
            kind = (number + round_) % 4
            prompt = [20 + number, 30 + round_]
            if kind == 0:
                answer = server.post("/v1/completions", {"prompt": prompt, "nonsense": 1})
                if answer.status_code != 400:
                    failures.append(f"{answer.status_code}")
            elif kind == 1:
                server.send({"prompt": prompt, "max_tokens": 300, "stream": True}).close()
            elif kind == 2:
                server.post("/v1/completions", b"{" * 50)
            else:
                body = {**GREEDY, "prompt": prompt, "max_tokens": 12}
                found = server.post("/v1/completions", body).json()
                want = llm.tokenizer.decode(toy.generate(prompt, 12))
                if found["choices"][0]["text"] != want:
                    failures.append(f"{prompt}: {found}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    # Those that went at once may have gone before the server had read what they asked for.
    path = "/v1/completions"
    server.wait_until(lambda: server.metric("decodegrid_http_responses_total", path=path) == 8 * 6)
    server.wait_until(lambda: idle(llm) and not server.state.queue.open_ids)
    assert server.state.queue.num_open == 0 == server.state.queue.num_waiting_tokens
    assert server.metric("vllm:num_requests_running") == 0
    assert server.stop().status == 0
