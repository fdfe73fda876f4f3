"""A line in the log when a request starts and one when it ends.

Owns the words. They go to the logger "decodegrid.requests" at level INFO, which nothing shows until
the caller configures logging. No line holds text or token ids.
"""

import logging

from decodegrid.engine.output_stream import OutputStream

_LOG = logging.getLogger("decodegrid.requests")
_LOG.addHandler(logging.NullHandler())


def log_start(stream: OutputStream) -> None:
    """Say that a request was queued."""
    if not _LOG.isEnabledFor(logging.INFO):
        return
    first = stream.requests[0]
    _LOG.info(
        "request %s: start, %d prompt tokens, %d completions, priority %d",
        stream.request_id,
        first.num_prompt_tokens,
        len(stream.requests),
        first.priority,
    )


def log_end(stream: OutputStream) -> None:
    """Say how all its completions ended, and what they took."""
    if not _LOG.isEnabledFor(logging.INFO):
        return
    requests = stream.requests
    _LOG.info(
        "request %s: %s, %d prompt tokens, %d output tokens, drafts %d drafted / %d verified / "
        "%d accepted, %d preemptions",
        stream.request_id,
        ", ".join(str(request.finish_reason) for request in requests),
        requests[0].num_prompt_tokens,
        sum(request.num_output_tokens for request in requests),
        sum(request.num_drafted for request in requests),
        sum(request.num_verified for request in requests),
        sum(request.num_accepted for request in requests),
        sum(request.num_preemptions for request in requests),
    )
