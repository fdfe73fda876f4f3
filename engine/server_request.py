"""What a body of any protocol becomes, and what its protocol makes of the answer.

Owns the two shapes between the protocols and the way of a request through the server. Data flow: a
protocol's reader makes a ServedRequest; its AnswerWriter turns pieces into bytes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from decodegrid.engine.request_output import RequestOutput, StreamOutput
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.server_errors import ApiError

Json = Any
"""What json.dumps takes."""


class AnswerWriter(Protocol):
    """Writes one answer, whole or in pieces; used for one of the two."""

    def events(self, piece: StreamOutput) -> bytes:
        """What a stream says of a piece; may be nothing. Raises ApiError for one that cannot end
        as an answer."""

    def end(self) -> bytes:
        """What stands behind the last piece of a stream."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The body of a whole answer. outputs: one for each prompt."""

    def error(self, error: ApiError, request_id: str) -> bytes:
        """The last event of a stream that has begun and fails. request_id: of the headers."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A checked body."""

    kind: str
    """What it asks for, in a word."""
    model: str
    prompts: list[list[int]]
    """Token ids of each prompt; all but completions have one."""
    params: SamplingParams
    write: Callable[[str, int], AnswerWriter]
    """Makes the writer of the answer from the request's name and the time, in seconds since 1970.
    """
    answer_id: Callable[[str], str]
    """The answer's id of the request's name."""
    source: str
    """The field of the prompt."""
    stream: bool = False
    num_asked: int | None = None
    """Tokens of the output at most, where the body says so."""
    length_field: str = "max_tokens"
    """The field that says so."""
    form_field: str | None = None
    """The field that asks for a form of the text."""


def encode(body: Json) -> bytes:
    """JSON on one line."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(body: Json, name: str | None = None) -> bytes:
    """A server-sent event. name: None for one without."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encode(body) + b"\n\n"
