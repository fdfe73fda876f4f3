"""The benchmark of the server: what its client reads, and what its ratio is made of."""

import socket
import threading

import pytest

from benchmarks.serve_client import run
from benchmarks.serve_overhead import Pass, make_bodies, summarise

CHUNK = '{"choices": [{"text": "%s"}]}'
USAGE = '{"choices": [], "usage": {"completion_tokens": 5}}'


def serve_once(parts: list[bytes]) -> tuple[tuple[str, int], list[bytes]]:
    """A server of one connection that answers in parts; its address and what it was sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent: list[bytes] = []

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            sent.append(connection.recv(65536))
            for part in parts:
                connection.sendall(part)

    threading.Thread(target=answer, daemon=True).start()
    return listener.getsockname(), sent


def stream(*events: str) -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events)
    return f"HTTP/1.1 200 OK\r\n\r\n{body}\r\n0\r\n\r\n".encode()


def test_the_client_reads_a_stream_to_its_end() -> None:
    whole = stream(CHUNK % "ab", CHUNK % "c", USAGE, "[DONE]")
    # Cut anywhere, in the middle of the end too.
    address, sent = serve_once([whole[:5], whole[5:60], whole[60:-9], whole[-9:-1], whole[-1:]])
    found = run(address, "/v1/completions", [b"{}"])
    assert sent[0].startswith(b"POST /v1/completions HTTP/1.1\r\n") and sent[0].endswith(b"{}")
    assert (found["texts"], found["num_tokens"]) == (["abc"], 5)
    assert found["num_bytes"] == len(whole) and found["seconds"] > 0 <= found["cpu_s"]


def test_the_client_takes_no_error_for_a_stream() -> None:
    address, _ = serve_once([b"HTTP/1.1 429 Too Many Requests\r\n\r\n"])
    with pytest.raises(ConnectionError, match="not a stream"):
        run(address, "/v1/completions", [b"{}"])
    address, _ = serve_once([stream(CHUNK % "a")[:-5]])
    with pytest.raises(ConnectionError, match="cut off"):
        run(address, "/v1/completions", [b"{}"])


def test_all_streams_are_of_one_kind() -> None:
    bodies = make_bodies([(20, 21), (22,)], 6)
    assert [body["prompt"] for body in bodies] == [[20, 21], [22]]
    assert bodies[1]["seed"] == bodies[0]["seed"] + 1
    assert all(body["stream"] and body["ignore_eos"] for body in bodies)


def test_the_ratio_is_of_one_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    def one(seconds: float, text: str) -> Pass:
        return Pass(
            seconds=seconds, num_tokens=100, num_steps=25, graph_s=0.5, engine_s=0.6, loop_s=0.1,
            client_s=0.05, texts=(text, "b"),
        )  # fmt: skip

    engine = [one(1.0, "a"), one(2.0, "a"), one(4.0, "a")]
    server = [one(1.1, "a"), one(2.6, "a"), one(4.8, "x")]
    found = summarise({"engine": engine, "server": server})
    assert found["server_over_engine"]["median"] == pytest.approx(1.2)
    assert found["server_over_engine"]["min"] == pytest.approx(1.1)
    assert found["engine"]["us_per_token"]["median"] == pytest.approx(20_000)
    assert found["server"]["loop_cpu_ms"]["median"] == pytest.approx(4.0)
    assert found["same_output_share"] == pytest.approx(5 / 6)
    assert "MISSED" in capsys.readouterr().out
