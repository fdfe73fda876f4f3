"""Errors of the API and their bodies, as OpenAI's clients read them.

Owns the statuses, types and codes, and which error of the engine becomes which. Data flow: an
exception -> ApiError -> status, headers and JSON.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_checks import show
from decodegrid.engine.sampling_params import SamplingParams

Json = Any
"""What json.dumps takes."""

_FIELDS: Final = frozenset(field.name for field in fields(SamplingParams))
_FIRST_WORDS: Final = (
    ("stop token id", "stop_token_ids"),
    ("trigger token id", "structured_outputs"),
)
"""Of the engine's refusals that begin with no field's name."""
MESSAGES_PATH: Final = "/v1/messages"
"""Of Anthropic's API."""
_INVALID: Final = "invalid_request_error"
_MESSAGES_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors, by status."""
_MAX_CHARS: Final = 1000
"""Of a message: one that shows what a client sent may be as long as a body."""
CLIENT_GONE: Final = 499
"""The status of an answer that nobody was there for, as proxies have it."""


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """kind: OpenAI's `type`. retry_after_s: seconds after which it may be different."""
        message = _sendable(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = None if param is None else _sendable(param)
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Json]:
        """The JSON of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Headers of the answer beside the usual ones."""
        found = {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def error_body(error: ApiError, path: str, request_id: str) -> dict[str, Json]:
    """The JSON of an error as the protocol of the path has it."""
    if not path.startswith(MESSAGES_PATH):
        return error.body()
    return messages_error(error, request_id)


def messages_error(error: ApiError, request_id: str) -> dict[str, Json]:
    """The JSON of an error as Anthropic's clients read it."""
    kind = _MESSAGES_KINDS.get(error.status, "api_error" if error.status >= 500 else _INVALID)
    detail = {"type": kind, "message": error.message}
    return {"type": "error", "error": detail, "request_id": request_id}


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error; nothing of one that no request can cause."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        param = error.param if isinstance(error, BodyError) else None
        return ApiError(400, str(error), param=param)
    return server_error("the server failed; its log has the reason")


def blame(error: RequestError, source: str) -> RequestError:
    """An error of the engine with the field that its first words name.

    source: the field of the prompt.
    """
    if isinstance(error, BodyError):
        return error
    message = str(error)
    for words, name in (("the prompt", source), ("prompt token id", source), *_FIRST_WORDS):
        if message.startswith(words):
            return BodyError(message, name)
    first = re.split(r"[ .\[]", message, maxsplit=1)[0]
    return BodyError(message, first if first in _FIELDS else None)


def _sendable(text: str) -> str:
    """A text that UTF-8 has, and not too long: a field's name may be anything."""
    text = text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def server_error(message: str) -> ApiError:
    """A failure of the server itself."""
    return ApiError(500, message, kind="server_error")


def request_failed(message: str, form_field: str | None) -> ApiError:
    """What ended one request alone: its own form of the text, which no token fits or which takes
    too long to compile, but for an error of the grammar library.

    form_field: the field that asks for the form.
    """
    if message.startswith("the grammar failed"):
        return server_error(message)
    return ApiError(400, message, param=form_field)


def unavailable(message: str, retry_after_s: int = 5) -> ApiError:
    """The server serves nobody for now."""
    return ApiError(
        503, message, kind="server_error", code="unavailable", retry_after_s=retry_after_s
    )


def context_error(
    num_prompt: int,
    num_asked: int | None,
    max_model_len: int,
    *,
    source: str = "prompt",
    length_field: str = "max_tokens",
) -> ApiError | None:
    """The refusal of a prompt that leaves no room for its output; None where it does.

    num_asked: max_tokens, where the request gives it. source: the field of the prompt.
    length_field: that of num_asked.
    """
    param = source
    what = f"the context of the model has {max_model_len} tokens"
    if num_prompt >= max_model_len:
        message = (
            f"{what}; the prompt has {num_prompt}, "
            f"and may have at most {max_model_len - 1} so that one can follow"
        )
    elif num_asked is not None and num_prompt + num_asked > max_model_len:
        param = length_field
        message = (
            f"{what}; {show(num_prompt + num_asked)} are asked for, {num_prompt} of the prompt "
            f"and {show(num_asked)} of the output"
        )
    else:
        return None
    return ApiError(400, message, param=param, code="context_length_exceeded")
