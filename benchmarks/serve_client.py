"""A light client of several streams: `python -m benchmarks.serve_client HOST PORT`.

Owns nothing but sockets. One line of JSON on standard input is one run: the bodies to post, all at
once. One line on standard output is its outcome: seconds from the first byte sent to the last one
received, and of this process's processor. It looks for the ends of the streams and nothing else,
so that what is measured is the server.
"""

import json
import selectors
import socket
import sys
from time import perf_counter, process_time
from typing import Any

_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def run(address: tuple[str, int], path: str, bodies: list[bytes]) -> dict[str, Any]:
    """Post the bodies on a connection each and read the streams to their ends.

    Raises ConnectionError for a stream that is cut off or is none.
    """
    selector = selectors.DefaultSelector()
    connections = [socket.create_connection(address) for _ in bodies]
    received = [bytearray() for _ in bodies]
    for index, connection in enumerate(connections):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, index)
    began, cpu_began = perf_counter(), process_time()
    for connection, body in zip(connections, bodies, strict=True):
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
    first = 0.0
    num_reads = 0
    num_open = len(bodies)
    while num_open:
        for key, _ in selector.select():
            connection, data = connections[key.data], received[key.data]
            part = connection.recv(1 << 16)
            if not part:
                raise ConnectionError(f"a stream was cut off: {bytes(data[-200:])!r}")
            num_reads += 1
            first = first or perf_counter() - began
            data += part
            if part.endswith(b"\n") and data.endswith(_END):
                selector.unregister(connection)
                num_open -= 1
            elif num_reads < 100 and not data.startswith(b"HTTP/1.1 200"[: len(data)]):
                raise ConnectionError(f"not a stream: {bytes(data[:500])!r}")
    seconds, cpu_s = perf_counter() - began, process_time() - cpu_began
    for connection in connections:
        connection.close()
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "first_s": first,
        "num_reads": num_reads,
        "num_bytes": sum(map(len, received)),
        "texts": [_text(bytes(data)) for data in received],
        "num_tokens": sum(_num_tokens(bytes(data)) for data in received),
    }


def _events(data: bytes) -> list[Any]:
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def _text(data: bytes) -> str:
    choices = [event["choices"][0] for event in _events(data) if event["choices"]]
    return "".join(choice.get("text") or "" for choice in choices)


def _num_tokens(data: bytes) -> int:
    return int(_events(data)[-1]["usage"]["completion_tokens"])


def main() -> None:
    """Serve runs until standard input ends."""
    address = (sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        order = json.loads(line)
        bodies = [json.dumps(body).encode() for body in order["bodies"]]
        print(json.dumps(run(address, order["path"], bodies)), flush=True)


if __name__ == "__main__":
    main()
