"""Spans of requests, sent to an OpenTelemetry collector; the extra `otel` has what that needs.

Owns the names of the attributes (OpenTelemetry's for generative models, and vLLM's for what those
leave out) and the thread that sends. No span holds a prompt or an output. A collector that is slow
or gone costs spans and nothing else. Data flow: an ended request -> a span -> OTLP over HTTP.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from decodegrid import __version__
from decodegrid.engine.server_request import ServedRequest
from decodegrid.engine.server_times import RequestTimes

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_SPAN: Final = "llm_request"
_MAX_SPANS: Final = 2048
"""That wait to be sent; what comes on top is dropped."""
_SEND_EVERY_MS: Final = 1000
_SEND_TIMEOUT_S: Final = 5.0
_CLOSE_S: Final = 2.0
"""For the last spans at the end of the server."""
_MAX_INT: Final = 2**63 - 1
"""Of an attribute: a larger one would cost its whole batch."""
_PROPAGATED: Final = ("traceparent", "tracestate")
_OPERATIONS: Final[Mapping[str, str]] = {
    "chat": "chat",
    "completion": "text_completion",
    "response": "chat",
    "message": "chat",
}
"""OpenTelemetry's names of the kinds of requests."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What a span is made of."""

    headers: Mapping[str, str]
    """Of the HTTP request, by name in lower case."""
    request: ServedRequest
    times: RequestTimes
    request_id: str
    """The client's, or the one that it was given."""
    name: str
    """The engine's."""
    num_prompt_tokens: int
    failure: str | None
    """What ended it before its time, in a word; None for one that has its answer."""


class RequestTracer(Protocol):
    """Takes requests as they end; used from the event loop."""

    def ended(self, facts: EndedRequest) -> None:
        """Make a span; returns at once and raises nothing."""

    def close(self) -> None:
        """Send what is left, for a moment at most."""


def make_tracer(endpoint: str) -> RequestTracer | None:
    """What sends spans to a URL of a collector; None for an empty one, which imports nothing.

    Raises ValueError where the extra is not installed.
    """
    if not endpoint:
        return None
    try:
        return _OtlpTracer(_traces_url(endpoint))
    except ModuleNotFoundError as error:
        raise ValueError(
            f"server.otel_endpoint is set and {error.name} is not installed; "
            "pip install 'decodegrid[otel]' has it"
        ) from None


def trace_headers(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Those of an ASGI scope's headers that say which trace a request belongs to."""
    found = {}
    for name, value in headers:
        key = name.decode("latin-1").lower()
        if key in _PROPAGATED:
            found[key] = value.decode("latin-1")
    return found


class _OtlpTracer:
    """RequestTracer over OTLP."""

    def __init__(self, url: str) -> None:
        """Raises ModuleNotFoundError."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Everything is given here, so that no variable of the environment changes it.
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource({"service.name": "decodegrid", "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=url, timeout=_SEND_TIMEOUT_S),
                max_queue_size=_MAX_SPANS,
                schedule_delay_millis=_SEND_EVERY_MS,
                max_export_batch_size=_MAX_SPANS // 4,
                export_timeout_millis=_SEND_TIMEOUT_S * 1e3,
            )
        )
        self._tracer = self._provider.get_tracer("decodegrid", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, facts: EndedRequest) -> None:
        """See RequestTracer."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        times = facts.times
        span = self._tracer.start_span(
            _SPAN,
            # In a context of its own: what the server does itself belongs to no trace.
            context=self._propagator.extract(dict(facts.headers), context=Context()),
            kind=SpanKind.SERVER,
            attributes=_attributes(facts),
            start_time=times.began_ns,
        )
        _set_status(span, facts)
        span.end()

    def close(self) -> None:
        """See RequestTracer."""
        # A daemon: a collector that does not answer must not hold up the end of the process.
        thread = threading.Thread(
            target=self._provider.shutdown, name="decodegrid-otel-end", daemon=True
        )
        thread.start()
        thread.join(_CLOSE_S)


def _set_status(span: "Span", facts: EndedRequest) -> None:
    from opentelemetry.trace import StatusCode

    if facts.failure is not None:
        span.set_attribute("error.type", facts.failure)
        span.set_status(StatusCode.ERROR, facts.failure)


def _attributes(facts: EndedRequest) -> dict[str, Any]:
    request, times, params = facts.request, facts.times, facts.request.params
    found: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATIONS.get(request.kind, request.kind),
        "gen_ai.provider.name": "decodegrid",
        "gen_ai.request.id": facts.request_id,
        "gen_ai.request.model": request.model,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.n": params.n,
        "gen_ai.request.stream": request.stream,
        "gen_ai.response.id": request.answer_id(facts.name),
        "gen_ai.response.model": request.model,
        "gen_ai.usage.input_tokens": facts.num_prompt_tokens,
        "gen_ai.usage.output_tokens": times.num_tokens,
        "gen_ai.usage.prompt_tokens": facts.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": times.num_tokens,
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    if 0 < params.top_k <= _MAX_INT:
        found["gen_ai.request.top_k"] = params.top_k
    if times.output is not None:
        found["gen_ai.response.finish_reasons"] = [
            completion.finish_reason or "" for completion in times.output.outputs
        ]
        found["gen_ai.usage.cache_read.input_tokens"] = times.output.num_cached_tokens
    found.update({key: value for key, value in _latencies(times).items() if value is not None})
    return found


def _latencies(times: RequestTimes) -> dict[str, float | None]:
    """vLLM's attributes, in seconds; None where the request did not come that far."""
    first, ended = times.first_at, times.ended_at
    queue_s, e2e = times.queue_s, None if ended is None else ended - times.began_at
    return {
        "gen_ai.latency.time_to_first_token": None if first is None else first - times.began_at,
        "gen_ai.latency.e2e": e2e,
        "gen_ai.latency.time_in_queue": queue_s,
        "gen_ai.latency.time_in_model_prefill": times.prefill_s,
        "gen_ai.latency.time_in_model_decode": times.decode_s,
        "gen_ai.latency.time_in_model_inference": (
            None if e2e is None or queue_s is None else max(0.0, e2e - queue_s)
        ),
    }


def _traces_url(endpoint: str) -> str:
    """The URL for traces: OTLP's usual path where none is given."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()
