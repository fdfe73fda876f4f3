"""How a request wants its tokens chosen, checked when it is written down.

Owns the fields and their ranges. Field names follow vLLM and the OpenAI API, and so do their
meanings. Does not sample. A request carries one object from the caller to the slot row; nothing
changes it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from decodegrid.engine.grammar_calls import CallsParams
from decodegrid.engine.grammar_params import StructuredOutputsParams
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.runner_protocol import MAX_TOP_LOGPROBS
from decodegrid.engine.sampling_checks import (
    check_bool,
    check_int,
    check_logit_bias,
    check_number,
    check_strings,
    check_token_ids,
    is_number,
    show,
)
from decodegrid.engine.vllm_fields import (
    SAMPLING_VALUES,
    UnsupportedSampling,
    check_unsupported,
)

MAX_TEMPERATURE: Final = 100.0
MIN_TEMPERATURE: Final = 1e-5
"""Smallest temperature that samples: below it, logits divided by it overflow; 0 is greedy."""
MAX_SEED: Final = 2**63 - 1
MAX_COMPLETIONS: Final = 128
"""Largest `n`: each completion is a request of its own in the queue."""
MAX_STOP_STRINGS: Final = 64
"""Each of them is compared with every character of the output."""
MAX_PENALTY: Final = 2.0
"""Largest presence and frequency penalty, either way."""
MAX_REPETITION_PENALTY: Final = 1e5
"""Logits times it stay finite; divided by it, so do those for its reciprocal, the smallest one."""
_SEED_STEP: Final = 0x1E3779B97F4A7C15
"""Odd, so that its multiples modulo 2**63 all differ; large, so that the completions of one seed do
not come back with the next seed."""


@dataclass(frozen=True, slots=True)
class SamplingParams(UnsupportedSampling):
    """Raises RequestError naming the field, the value and the limit.

    A request ends with the first token after which one of these holds, asked in this order: the
    text of its grammar is complete, a stop string is, the token is a stop token, the length is
    reached. Nothing behind that token is delivered or counted. Fields of vLLM that this engine does
    not serve are keywords too, and refused by name.
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
    """0 to 1: a token is out if it has less than this share of the highest probability; 0 keeps
    all. The last of the filters."""
    min_tokens: int = 0
    """Tokens to emit at least: before them no stop token (nor the end of text, with ignore_eos
    either) can be chosen, and no stop string is looked for. A stop string that begins in them and
    ends behind them counts."""
    presence_penalty: float = 0.0
    """-2 to 2, taken from the logit of every token that the output holds."""
    frequency_penalty: float = 0.0
    """-2 to 2, taken from a token's logit as often as the output holds it."""
    repetition_penalty: float = 1.0
    """1e-5 to 1e5: logits of tokens in prompt or output are divided by it where they are positive,
    and multiplied where not; above 1 makes repetition less likely."""
    logprobs: int | None = None
    """Log-probabilities to give with each token: its own, and those of the 0 to 20 most probable
    ones. They are the model's, before bias, penalties, temperature and filters. None for none."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first."""
    logit_bias: Mapping[int, float] | None = None
    """By token id, -100 to 100, added to its logit before the penalties; at most 1024 ids."""
    structured_outputs: StructuredOutputsParams | CallsParams | None = None
    """The form of the text. A text that its grammar has ended is not made longer by min_tokens."""

    def __post_init__(self) -> None:
        check_unsupported(self, SAMPLING_VALUES)
        self._check_temperature()
        self._check_lengths()
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)
        check_token_ids("stop_token_ids", self.stop_token_ids)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        if not is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be above 0 and at most 1, got {show(self.top_p)}")
        if not isinstance(self.top_k, int) or self.top_k != -1:
            check_int("top_k", self.top_k, 1, None, "-1 (off) or ")
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        least = 1 / MAX_REPETITION_PENALTY
        check_number("repetition_penalty", self.repetition_penalty, least, MAX_REPETITION_PENALTY)
        check_logit_bias("logit_bias", self.logit_bias)
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams | CallsParams):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, got {show(form)}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_TOP_LOGPROBS)
        check_int("n", self.n, 1, MAX_COMPLETIONS)
        if self.stop is not None:
            check_strings("stop", self.stop, MAX_STOP_STRINGS)
        if not isinstance(self.speculation, str) or self.speculation not in ("auto", "off"):
            if not isinstance(self.speculation, int):
                shown = show(self.speculation)
                raise RequestError(f'speculation must be "auto", "off" or an integer, got {shown}')
            check_int("speculation", self.speculation, 1, None, '"auto", "off" or ')

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

    def _check_lengths(self) -> None:
        check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is None:
            return
        check_int("max_tokens", self.max_tokens, 1, None)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({show(self.max_tokens)}), "
                f"got {show(self.min_tokens)}"
            )

    def _check_temperature(self) -> None:
        value = self.temperature
        # An int is finite, and a large one has no float to ask.
        if not is_number(value) or (isinstance(value, float) and not math.isfinite(value)):
            raise RequestError(f"temperature must be a finite number, got {show(value)}")
        if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, "
                f"got {show(value)}"
            )


def completion_seed(seed: int, index: int) -> int:
    """Seed of the completion `index` of a prompt: `seed` for the first, and another for each."""
    return (seed + index * _SEED_STEP) & MAX_SEED
