"""How a request wants its tokens chosen, checked when it is written down.

Owns the fields, their ranges, and the list of fields that this version cannot honour. Field names
follow vLLM and the OpenAI API. Does not sample. A request carries one object from the caller to
the slot row; nothing changes it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from decodegrid.engine.request_error import RequestError

MAX_TEMPERATURE: Final = 100.0
MIN_TEMPERATURE: Final = 1e-5
"""Smallest temperature that samples: below it, logits divided by it overflow; 0 is greedy."""
MAX_SEED: Final = 2**63 - 1

_NEUTRAL: Final[tuple[tuple[str, object, str], ...]] = (
    ("min_p", 0.0, "a number"),
    ("n", 1, "an integer"),
    ("min_tokens", 0, "an integer"),
    ("presence_penalty", 0.0, "a number"),
    ("frequency_penalty", 0.0, "a number"),
    ("repetition_penalty", 1.0, "a number"),
    ("logprobs", None, "an integer"),
    ("prompt_logprobs", None, "an integer"),
    ("stop", None, "a string or a list of strings"),
    ("logit_bias", None, "a mapping from token ids to numbers"),
)
"""Fields that are checked but not yet honoured, with the one value that asks for nothing, and what
any other value must be."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Raises RequestError naming the field, the value and the limit."""

    temperature: float = 1.0
    """0 is greedy; otherwise 1e-5 to 100."""
    max_tokens: int | None = 16
    """Tokens to emit at most, at least 1; None means up to the context limit."""
    seed: int | None = None
    """0 to 2**63 - 1; None draws one for the request."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the request beside the end of text; the id itself is delivered."""
    ignore_eos: bool = False
    """Decode on past the end-of-text token."""
    top_p: float = 1.0
    """Above 0, at most 1: a token is out if the tokens before it in the order of probability hold
    more than this share; 1 keeps all."""
    top_k: int = -1
    """Tokens that may be drawn at most, at least 1, the most probable ones; -1 keeps all."""
    min_p: float = 0.0
    n: int = 1
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        self._check_temperature()
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if isinstance(self.stop_token_ids, (str, bytes)) or not isinstance(
            self.stop_token_ids, Sequence
        ):
            raise RequestError(
                f"stop_token_ids must be a list of token ids, got {_show(self.stop_token_ids)}"
            )
        for index, token_id in enumerate(self.stop_token_ids):
            _check_int(f"stop_token_ids[{index}]", token_id, 0, None)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {_show(self.ignore_eos)}")
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be above 0 and at most 1, got {_show(self.top_p)}")
        if not isinstance(self.top_k, int) or self.top_k != -1:
            _check_int("top_k", self.top_k, 1, None, "-1 (off) or ")
        for name, neutral, kind in _NEUTRAL:
            value = getattr(self, name)
            if value is neutral:
                continue
            # The kind first: only what is of it can be compared, or has a length.
            if not _is_kind(kind, value):
                raise RequestError(f"{name} must be {kind}, got {_show(value)}")
            empty = name in ("stop", "logit_bias") and len(value) == 0
            if value != neutral and not empty:
                raise RequestError(
                    f"{name}={_show(value)} is not supported in this version; "
                    f"only {neutral!r} is accepted"
                )

    def _check_temperature(self) -> None:
        value = self.temperature
        # An int is finite, and a large one has no float to ask.
        if not _is_number(value) or (isinstance(value, float) and not math.isfinite(value)):
            raise RequestError(f"temperature must be a finite number, got {_show(value)}")
        if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, "
                f"got {_show(value)}"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_kind(kind: str, value: object) -> bool:
    """Whether a value is what `_NEUTRAL` says of its field."""
    if kind == "a number":
        return _is_number(value)
    if kind == "an integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind.startswith("a mapping"):
        return isinstance(value, Mapping)
    if isinstance(value, str):
        return True
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray, memoryview)):
        return False
    return all(isinstance(item, str) for item in value)


def _show(value: object) -> str:
    """A value on one line; Python refuses to print integers of thousands of digits."""
    try:
        return " ".join(repr(value).splitlines())
    except ValueError:
        return f"a value of type {type(value).__name__} that is too long to print"


def _check_int(name: str, value: object, low: int, high: int | None, other: str = "") -> None:
    """Raise RequestError unless value is an int (no bool) in low..high; `other` names what else
    would have been allowed."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer, got {_show(value)}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"{low} to {high}"
        raise RequestError(f"{name} must be {other}{limit}, got {_show(value)}")
