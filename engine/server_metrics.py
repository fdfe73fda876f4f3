"""The server's metrics in Prometheus' form.

Owns their names: vLLM's where it has the metric, so that dashboards for it work, and decodegrid_
for the rest. Requests are counted here as they end, in the event loop; what the engine did is read
from a snapshot when somebody asks.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from decodegrid.engine.engine_snapshot import EngineSnapshot
from decodegrid.engine.request_output import RequestOutput
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.server_health import Health

if TYPE_CHECKING:
    from decodegrid.engine.server_times import RequestTimes

_SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKENS: Final = tuple(float(1 << i) for i in range(0, 21))
_COUNTS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)


class ServerMetrics:
    """Counters and histograms of requests, with a collector of the engine's numbers."""

    def __init__(self, model_name: str, health: Health) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        names = tuple(self._labels)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, what, names, buckets=buckets, registry=self._registry)
            return made.labels(**self._labels)

        def counter(name: str, what: str, *more: str) -> Counter:
            return Counter(name, what, (*names, *more), registry=self._registry)

        self.ttft = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to the first token", _SECONDS
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two pieces of a completion, by its tokens",
            _SECONDS,
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to the end", _SECONDS)
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "Arrival to the slot of a request", _SECONDS
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From the slot to the first token", _SECONDS
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the end", _SECONDS
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "From the slot to the end", _SECONDS
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "From the first token to the end, by the tokens behind the first",
            _SECONDS,
        )
        self._prompt_len = histogram("vllm:request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._output_len = histogram(
            "vllm:request_generation_tokens", "Tokens of a completion", _TOKENS
        )
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens", "Tokens that a request may have at most", _TOKENS
        )
        self._num_asked = histogram(
            "vllm:request_params_n", "Completions that a request asks for", _COUNTS
        )
        self._success = counter(
            "vllm:request_success", "Completions that ended, by reason", "finished_reason"
        )
        self._prompt_tokens = counter(
            "vllm:prompt_tokens", "Prompt tokens of the requests that were taken"
        ).labels(**self._labels)
        self._preemptions = counter(
            "vllm:num_preemptions", "Times that a request gave way, of those that ended"
        ).labels(**self._labels)
        self._rejected = counter(
            "decodegrid_requests_rejected", "Requests that were not taken, by status", "status"
        )
        self._aborted = counter(
            "decodegrid_requests_aborted",
            "Requests that were ended before their time: client (gone), timeout, drain",
            "cause",
        )
        for cause in ("client", "timeout", "drain"):
            self._aborted.labels(**self._labels, cause=cause)
        self._dropped = counter(
            "decodegrid_connections_dropped",
            "Connections that were cut off: not reading, or not asking anything",
            "reason",
        )
        for reason in ("not reading", "not asking"):
            self._dropped.labels(**self._labels, reason=reason)
        self._responses = counter(
            "decodegrid_http_responses", "Answers, by path and status", "path", "status"
        )
        self._registry.register(_EngineCollector(self._labels, health))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def response(self, path: str, status: int) -> None:
        """An answer went out; path: the route's, so that there are few."""
        self._responses.labels(**self._labels, path=path, status=str(status)).inc()

    def rejected(self, status: int) -> None:
        """A request was not taken."""
        self._rejected.labels(**self._labels, status=str(status)).inc()

    def aborted(self, cause: str) -> None:
        """A request was ended before its time."""
        self._aborted.labels(**self._labels, cause=cause).inc()

    def dropped(self, reason: str) -> None:
        """A connection was cut off."""
        self._dropped.labels(**self._labels, reason=reason).inc()

    def accepted(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """A request was taken."""
        self._prompt_len.observe(num_prompt_tokens)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._num_asked.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)

    def ended(self, output: RequestOutput) -> None:
        """A request has its whole result."""
        for completion in output.outputs:
            reason = completion.finish_reason or "error"
            self._success.labels(**self._labels, finished_reason=reason).inc()
            self._output_len.observe(len(completion.token_ids))
        self._preemptions.inc(output.num_preemptions)

    def phases(self, times: "RequestTimes") -> None:
        """A request has ended; only those that it came to have a time."""
        assert times.ended_at is not None
        self._e2e.observe(times.ended_at - times.began_at)
        queue_s, prefill_s, decode_s = times.queue_s, times.prefill_s, times.decode_s
        if queue_s is None:
            return
        self._queue.observe(queue_s)
        self._inference.observe(max(0.0, times.ended_at - times.began_at - queue_s))
        if prefill_s is None or decode_s is None:
            return
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        assert times.output is not None
        num_each = times.num_tokens / len(times.output.outputs)
        if num_each > 1:
            self._per_token.observe(decode_s / (num_each - 1))


class _EngineCollector:
    """Metric families of a snapshot; none before the engine is there."""

    def __init__(self, labels: dict[str, str], health: Health) -> None:
        self._names, self._values = list(labels), list(labels.values())
        self._health = health

    def describe(self) -> list[Metric]:
        """Nothing is known ahead of the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        ready = GaugeMetricFamily(
            "decodegrid_ready", "1 while the server is ready", labels=self._names
        )
        ready.add_metric(self._values, float(self._health.problem() is None))
        yield ready
        engine = self._health.engine
        if engine is not None:
            found = engine.snapshot()
            yield from self._gauges(found)
            yield from self._counters(found)
            yield from self._drafts(found)
            yield from self._grid(found)
            yield from self._budget(found)

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        made = GaugeMetricFamily(name, what, labels=self._names)
        made.add_metric(self._values, value)
        return made

    def _counter(self, name: str, what: str, value: float) -> Metric:
        made = CounterMetricFamily(name, what, labels=self._names)
        made.add_metric(self._values, value)
        return made

    def _gauges(self, found: EngineSnapshot) -> Iterator[Metric]:
        used = 1 - found.num_blocks_free / found.num_blocks if found.num_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests in slots", found.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue", found.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the blocks in use, to 1", used)
        yield self._gauge("decodegrid_slots", "Requests that run at once", found.num_slots)

    def _counters(self, found: EngineSnapshot) -> Iterator[Metric]:
        for name, what, value in (
            ("vllm:generation_tokens", "Tokens emitted", found.num_emitted),
            (
                "vllm:prefix_cache_queries",
                "Tokens asked of the prefix cache",
                found.num_prefix_tokens,
            ),
            ("vllm:prefix_cache_hits", "Tokens that it had", found.num_prefix_tokens_hit),
            ("decodegrid_prefill_steps", "Chunks of prompts", found.num_prefill_steps),
            ("decodegrid_prefill_tokens", "Tokens prefilled", found.num_prefill_tokens),
            ("decodegrid_prefill_seconds", "Time of the chunks", found.prefill_seconds),
            ("decodegrid_decode_steps", "Decode steps", found.num_decode_steps),
            ("decodegrid_decode_seconds", "Time of the decode steps", found.decode_seconds),
            ("decodegrid_graph_seconds", "Of it, time of the graphs", found.graph_seconds),
            ("decodegrid_decode_rows", "Rows of requests", found.num_decode_rows),
            ("decodegrid_pad_rows", "Replayed rows without a request", found.num_pad_rows),
            (
                "decodegrid_surplus_query_tokens",
                "Replayed query tokens without a request",
                found.num_surplus_tokens,
            ),
            (
                "decodegrid_compilations_after_ready",
                "Compilations since start-up; stays 0",
                found.num_compilations_after_ready,
            ),
            (
                "decodegrid_captures_after_ready",
                "Captures since start-up; stays 0",
                found.num_captured_after_ready,
            ),
        ):
            yield self._counter(name, what, value)

    def _drafts(self, found: EngineSnapshot) -> Iterator[Metric]:
        yield self._counter(
            "vllm:spec_decode_num_drafts", "Rows with drafts to verify", sum(found.verified[:1])
        )
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens", "Drafts verified", sum(found.verified)
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafts accepted", sum(found.accepted)
        )
        for name, counts, first in (
            # vLLM counts positions from 0.
            ("vllm:spec_decode_num_accepted_tokens_per_pos", found.accepted, 0),
            ("decodegrid_drafts_offered", found.offered, 1),
            ("decodegrid_drafts_verified", found.verified, 1),
            ("decodegrid_drafts_accepted", found.accepted, 1),
        ):
            made = CounterMetricFamily(
                name, "Drafts, by their place", labels=[*self._names, "position"]
            )
            for place, count in enumerate(counts, start=first):
                made.add_metric([*self._values, str(place)], count)
            yield made

    def _grid(self, found: EngineSnapshot) -> Iterator[Metric]:
        made = CounterMetricFamily(
            "decodegrid_graph_hits",
            "Replays of each captured graph",
            labels=[*self._names, "num_reqs", "num_query_tokens"],
        )
        for (num_reqs, num_tokens), count in sorted(found.graph_hits.items()):
            made.add_metric([*self._values, str(num_reqs), str(num_tokens)], count)
        yield made

    def _budget(self, found: EngineSnapshot) -> Iterator[Metric]:
        budget = found.budget
        if budget is None:
            return
        yield self._counter(
            "decodegrid_budget_expected_tokens",
            "Tokens that the verify budget expected",
            budget.expected_tokens,
        )
        yield self._counter(
            "decodegrid_budget_measured_tokens", "Tokens that came", budget.measured_tokens
        )
        yield self._counter(
            "decodegrid_budget_predicted_seconds",
            "Step time that the verify budget predicted",
            budget.predicted_ms / 1e3,
        )
        if budget.step_time_ratio is not None:
            yield self._gauge(
                "decodegrid_budget_step_time_error",
                "Median of measured over predicted step time, less 1",
                budget.step_time_ratio - 1,
            )
