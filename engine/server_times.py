"""When the parts of one request came, for the metrics and for its span.

Owns the clock of a request from its arrival to its last piece. Data flow: pieces of a stream ->
moments, and the histograms of ServerMetrics as they are passed.
"""

import time
from time import monotonic

from decodegrid.engine.request_output import RequestOutput, StreamOutput
from decodegrid.engine.server_metrics import ServerMetrics


class RequestTimes:
    """One request; made when it is taken."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last: dict[int, float] = {}
        """When each completion had its last piece."""
        self.began_ns = time.time_ns()
        """Of the calendar's clock; all other moments are of the monotonic one, in seconds."""
        self.began_at = monotonic()
        self.first_at: float | None = None
        self.ended_at: float | None = None
        self.num_tokens = 0
        """Tokens that came, of all completions."""
        self.output: RequestOutput | None = None
        """Once it is whole."""

    def piece(self, piece: StreamOutput) -> None:
        """A piece came."""
        now, metrics = monotonic(), self._metrics
        count = len(piece.token_ids)
        if count:
            self.num_tokens += count
            if self.first_at is None:
                self.first_at = now
                metrics.ttft.observe(now - self.began_at)
            last = self._last.get(piece.completion_index)
            if last is not None:
                metrics.inter_token.observe((now - last) / count)
            self._last[piece.completion_index] = now
        if piece.output is not None:
            self.ended_at, self.output = now, piece.output
            metrics.ended(piece.output)
            metrics.phases(self)

    @property
    def queue_s(self) -> float | None:
        """Arrival to the slot; None where the request never had one or is not whole."""
        admitted_at = None if self.output is None else self.output.admitted_at
        return None if admitted_at is None else max(0.0, admitted_at - self.began_at)

    @property
    def prefill_s(self) -> float | None:
        """From the slot to the first token."""
        queue_s = self.queue_s
        if queue_s is None or self.first_at is None:
            return None
        return max(0.0, self.first_at - self.began_at - queue_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the end."""
        if self.first_at is None or self.ended_at is None:
            return None
        return self.ended_at - self.first_at
