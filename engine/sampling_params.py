"""How a request wants its tokens chosen, checked when it is written down.

Owns the fields, their ranges, and the list of fields that this version cannot honour. Field names
follow vLLM and the OpenAI API. Does not sample. A request carries one object from the caller to
the slot row; nothing changes it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from decodegrid.engine.request_error import RequestError

MAX_TEMPERATURE: Final = 100.0
MIN_TEMPERATURE: Final = 1e-5
"""Smallest temperature that samples: below it, logits divided by it overflow; 0 is greedy."""
MAX_SEED: Final = 2**63 - 1
MAX_COMPLETIONS: Final = 128
"""Largest `n`: each completion is a request of its own in the queue."""
MAX_STOP_STRINGS: Final = 64
"""Each of them is compared with every character of the output."""
_SEED_STEP: Final = 0x1E3779B97F4A7C15
"""Odd, so that its multiples modulo 2**63 all differ; large, so that the completions of one seed do
not come back with the next seed."""

_NEUTRAL: Final[tuple[tuple[str, object, str], ...]] = (
    ("min_p", 0.0, "a number"),
    ("min_tokens", 0, "an integer"),
    ("presence_penalty", 0.0, "a number"),
    ("frequency_penalty", 0.0, "a number"),
    ("repetition_penalty", 1.0, "a number"),
    ("logprobs", None, "an integer"),
    ("prompt_logprobs", None, "an integer"),
    ("logit_bias", None, "a mapping from token ids to numbers"),
)
"""Fields that are checked but not yet honoured, with the one value that asks for nothing, and what
any other value must be."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Raises RequestError naming the field, the value and the limit.

    A request ends with the first token after which one of these holds, asked in this order: a stop
    string is complete, the token is a stop token, the length is reached. Nothing behind that token
    is delivered or counted.
    """

    temperature: float = 1.0
    """0 is greedy; otherwise 1e-5 to 100."""
    max_tokens: int | None = 16
    """Tokens to emit at most, at least 1; None means up to the context limit."""
    seed: int | None = None
    """0 to 2**63 - 1; None draws one for the request."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the request beside the end of text; the id itself is delivered. The
    device knows the first 8 of a request, the end of text included, and spends no drafts behind
    them; the host checks the rest."""
    ignore_eos: bool = False
    """Decode on past the end-of-text token."""
    top_p: float = 1.0
    """Above 0, at most 1: a token is out if the tokens before it in the order of probability hold
    more than this share; 1 keeps all."""
    top_k: int = -1
    """Tokens that may be drawn at most, at least 1, the most probable ones; -1 keeps all."""
    n: int = 1
    """Completions of the prompt, 1 to 128, each with a seed of its own (completion_seed); the first
    is that of n=1. At temperature 0 they are all alike."""
    stop: str | Sequence[str] | None = None
    """Strings that end the request when the text holds one, at most 64. The one that is complete
    first wins, of those that end at the same character the longest."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string; the token ids always keep its last token."""
    skip_special_tokens: bool = True
    """Whether special tokens have no text; otherwise they are spelled, and stop strings see it."""
    speculation: Literal["auto", "off"] | int = "auto"
    """Drafts that a step may verify for this request: "auto" as many as the engine likes, "off"
    none, or a number from 1. Changes the speed, and no token of greedy or coupled decoding."""
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
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
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be true or false, got {_show(getattr(self, name))}"
                )
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be above 0 and at most 1, got {_show(self.top_p)}")
        if not isinstance(self.top_k, int) or self.top_k != -1:
            _check_int("top_k", self.top_k, 1, None, "-1 (off) or ")
        _check_int("n", self.n, 1, MAX_COMPLETIONS)
        self._check_stop()
        if not isinstance(self.speculation, str) or self.speculation not in ("auto", "off"):
            if not isinstance(self.speculation, int):
                shown = _show(self.speculation)
                raise RequestError(f'speculation must be "auto", "off" or an integer, got {shown}')
            _check_int("speculation", self.speculation, 1, None, '"auto", "off" or ')
        self._check_unsupported()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, without repetitions."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(dict.fromkeys(self.stop))

    @property
    def max_drafts(self) -> int | None:
        """`speculation` as a number of drafts; None for no limit."""
        if self.speculation == "auto":
            return None
        return 0 if self.speculation == "off" else int(self.speculation)

    def _check_stop(self) -> None:
        if self.stop is None:
            return
        if not _is_strings(self.stop):
            raise RequestError(
                f"stop must be a string or a list of strings, got {_show(self.stop)}"
            )
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop_strings)} strings; at most {MAX_STOP_STRINGS} are allowed"
            )
        if "" in self.stop_strings:
            raise RequestError(f"stop must not hold an empty string, got {_show(self.stop)}")

    def _check_unsupported(self) -> None:
        for name, neutral, kind in _NEUTRAL:
            value = getattr(self, name)
            if value is neutral:
                continue
            # The kind first: only what is of it can be compared, or has a length.
            if not _is_kind(kind, value):
                raise RequestError(f"{name} must be {kind}, got {_show(value)}")
            empty = name == "logit_bias" and len(value) == 0
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


def completion_seed(seed: int, index: int) -> int:
    """Seed of the completion `index` of a prompt: `seed` for the first, and another for each."""
    return (seed + index * _SEED_STEP) & MAX_SEED


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_kind(kind: str, value: object) -> bool:
    """Whether a value is what `_NEUTRAL` says of its field."""
    if kind == "a number":
        return _is_number(value)
    if kind == "an integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, Mapping)


def _is_strings(value: object) -> bool:
    """Whether a value is a string or a list of strings."""
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
