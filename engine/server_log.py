"""The server's log: one JSON object a line, on standard error.

Owns the form of a line and which loggers go there. No line holds a prompt, an output or a header.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

_LOGGERS: Final = ("decodegrid", "uvicorn")


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

    level: the least one that is written. Lines of other packages stay where they go.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
