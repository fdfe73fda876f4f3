"""`decodegrid serve` with OpenTelemetry: what a collector gets, and that a dead one does no harm.

The collector is a small HTTP server of this process, which reads the protocol's own messages.
"""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from decodegrid.configs.load import ConfigError, load_config
from decodegrid.engine.cli import main
from decodegrid.engine.server_tracing import make_tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = "the secret words"


class Collector:
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.data = b""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.take(self.path, data)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, path: str, data: bytes) -> None:
        self.paths.add(path)
        self.data += data
        for found in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resources.append(attributes(found.resource))
            for scope in found.scope_spans:
                self.spans.extend(scope.spans)


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""

    def value(found: Any) -> Any:
        name = found.WhichOneof("value")
        inner = getattr(found, name)
        return [value(item) for item in inner.values] if name == "array_value" else inner

    return {item.key: value(item.value) for item in message.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_request_is_a_span_of_its_callers_trace(
    start: Any, collector: Collector, tokenizer: Any
) -> None:
    server, _, _ = start(f"server.otel_endpoint={collector.url}", "server.model_name=toy")
    fields: Any = {"temperature": 0.5, "seed": 3, "top_p": 0.9, "top_k": 2**70, "max_tokens": 7}
    answer = server.post(
        "/v1/completions",
        {**fields, "prompt": PROMPT, "n": 2, "model": "toy"},
        traceparent=f"00-{TRACE}-{PARENT}-01",
        **{"x-request-id": "mine"},
    )
    assert answer.status_code == 200
    server.wait_until(lambda: len(collector.spans) == 1)
    (span,) = collector.spans
    assert span.trace_id.hex() == TRACE and span.parent_span_id.hex() == PARENT
    assert span.name == "llm_request" and span.kind == span.SPAN_KIND_SERVER
    assert span.end_time_unix_nano > span.start_time_unix_nano
    found = attributes(span)
    want = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "toy",
        "gen_ai.response.model": "toy",
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.n": 2,
        "gen_ai.request.stream": False,
        "gen_ai.usage.prompt_tokens": len(tokenizer.encode(PROMPT)),
        "gen_ai.usage.input_tokens": len(tokenizer.encode(PROMPT)),
        "gen_ai.usage.completion_tokens": 14,
        "gen_ai.usage.output_tokens": 14,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert want.items() <= found.items()
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    phases = [found[f"gen_ai.latency.time_in_{name}"] for name in ("queue", "model_prefill")]
    phases.append(found["gen_ai.latency.time_in_model_decode"])
    assert all(phase >= 0 for phase in phases)
    assert sum(phases) == pytest.approx(found["gen_ai.latency.e2e"], abs=1e-6)
    assert sum(phases[:2]) == pytest.approx(found["gen_ai.latency.time_to_first_token"], abs=1e-6)
    assert found["gen_ai.latency.e2e"] <= seconds + 1e-3
    assert collector.resources[0]["service.name"] == "decodegrid"
    assert collector.paths == {"/v1/traces"}
    text = answer.json()["choices"][0]["text"]
    assert PROMPT.encode() not in collector.data and text.encode() not in collector.data


def test_streams_aborts_and_traces_that_nobody_records(
    start: Any, collector: Collector, hold: Any, idle: Any
) -> None:
    server, llm, runner = start(f"server.otel_endpoint={collector.url}/v1/traces")
    chat: Any = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5}

    def ask(body: Any, **headers: str) -> None:
        """A span is made just after its answer: without waiting the next one's could be first."""
        server.post("/v1/chat/completions", body, **headers)
        server.wait_until(lambda: not server.state.queue.open_ids)

    ask({**chat, "stream": True})
    # Whoever began the trace records nothing of it.
    ask(chat, traceparent=f"00-{TRACE}-{PARENT}-00")
    ask({**chat, "nonsense": 1})
    ask(chat, traceparent="no trace at all")
    gate = hold(runner, "launch")
    gone = server.send({"prompt": "abc", "max_tokens": 300})
    server.wait_until(lambda: gate.num_waiting == 1)
    gone.close()
    server.wait_until(lambda: not server.state.queue.open_ids)
    gate.open()
    server.wait_until(lambda: len(collector.spans) == 3 and idle(llm))
    streamed, whole, left = map(attributes, collector.spans)
    assert streamed["gen_ai.operation.name"] == "chat" and streamed["gen_ai.request.stream"] is True
    assert streamed["gen_ai.response.finish_reasons"] == ["length"]
    assert whole["gen_ai.usage.completion_tokens"] == 5
    assert all(span.trace_id.hex() != TRACE for span in collector.spans)
    assert all(not span.parent_span_id for span in collector.spans)
    assert left["error.type"] == "client" and "gen_ai.latency.e2e" not in left
    assert [span.status.code for span in collector.spans] == [0, 0, 2]


@pytest.mark.parametrize("kind", ["gone", "silent"])
def test_a_collector_that_does_not_answer_is_no_harm(start: Any, kind: str, log: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if kind == "gone":
            listener.close()
        server, _, _ = start(f"server.otel_endpoint=http://127.0.0.1:{port}")
        for _ in range(30):
            body = {"prompt": PROMPT, "max_tokens": 3}
            assert server.post("/v1/completions", body).status_code == 200
        assert server.get("/ready")[0] == 200
        assert server.stop().status == 0
    assert PROMPT not in log.getvalue()
    assert all(json.loads(line)["time"] for line in log.getvalue().splitlines())


def test_without_an_endpoint_nothing_is_imported() -> None:
    script = (
        "import sys\n"
        "import decodegrid.engine.server_process\n"
        "from decodegrid.engine.server_tracing import make_tracer\n"
        "assert make_tracer('') is None\n"
        "parts = ('sdk', 'exporter', 'proto')\n"  # FastAPI itself has the interface
        "print([name for name in sys.modules if name.startswith('opentelemetry.')\n"
        "       and name.split('.')[1] in parts])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout == "[]\n"


def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(loaded: Any) -> Any:
        raise AssertionError("the engine is built")

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    words = ["serve", "--port", "0", "--set", "server.otel_endpoint=http://localhost:4318"]
    assert main(words, build) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("decodegrid: error: server.otel_endpoint is set and opentelemetry")
    assert line.endswith("pip install 'decodegrid[otel]' has it")
    assert make_tracer("") is None


@pytest.mark.parametrize(
    "url",
    ["localhost:4318", "ftp://a", "http://", "http://a:0", "http://a:99999", "http://me:pw@a"],
)
def test_what_is_no_endpoint(url: str) -> None:
    words = "server.otel_endpoint: must be empty or a URL of http or https, without a user in it"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(None, [f"server.otel_endpoint={url!r}"])
