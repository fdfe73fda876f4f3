"""The server's log: one JSON object a line, on standard error.

Owns the form of a line and which loggers go there. No line holds a prompt, an output or a header;
of an error in a request not even its words, which may quote one.
"""

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

LOGGERS: Final = ("decodegrid", "uvicorn", "asyncio", "opentelemetry", "py.warnings")
"""Whose lines are the server's."""

_MAX_CAUSES: Final = 8
"""Of an error, in its line."""


class JsonFormatter(logging.Formatter):
    """A record as JSON: time, level, logger, message, its `fields`, and the error's trace."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        line.update(fields)
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(level: str, stream: TextIO | None = None) -> None:
    """Send the lines of this package and of uvicorn to `stream`; None is standard error.

    level: the least one that is written. Python's warnings and what asyncio and OpenTelemetry have
    to say go there too; lines of other packages stay where they go.
    """
    logging.captureWarnings(True)
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def log_failure(
    logger: logging.Logger, message: str, error: BaseException, fields: Mapping[str, object]
) -> None:
    """Log an error that a request met: its type and where it comes from, without its words.

    fields: of the line, beside `error` and `trace`.
    """
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < _MAX_CAUSES:
        frames = "".join(traceback.format_tb(cause.__traceback__))
        parts.append(f"{type(cause).__name__}\n{frames}")
        cause = cause.__cause__ or cause.__context__
    found = {**fields, "error": type(error).__name__, "trace": "\n".join(parts)}
    logger.error(message, extra={"fields": found})
