"""What a request asks of its tokens beyond temperature and filters.

Owns the decision whether a request is plain (the fused step serves it) or rich, and the way from
its parameters to the slot row. Adjusts no logits. Data flow: SamplingParams -> RichParams, once a
request; RichParams and the tokens so far -> RichRequest, each time it gets a slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decodegrid.engine.runner_protocol import RichRequest
from decodegrid.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RichParams:
    """The parameters that only a rich step honours, in the numbers that the device takes."""

    logit_bias: Mapping[int, float]
    """By token id, none of them 0."""
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    banned_token_ids: tuple[int, ...]
    """Ids that cannot be chosen before min_tokens tokens are out."""
    num_logprobs: int | None
    """Most probable tokens whose log-probabilities are wanted beside the token's own; None for no
    logprobs at all."""

    @classmethod
    def of(cls, params: SamplingParams, eos_token_id: int) -> "RichParams":
        """The end of text is barred by min_tokens whether it would end the request or not."""
        bias = params.logit_bias or {}
        return cls(
            logit_bias={token: float(value) for token, value in bias.items() if value != 0},
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            min_tokens=params.min_tokens,
            banned_token_ids=tuple(dict.fromkeys((eos_token_id, *params.stop_token_ids))),
            num_logprobs=params.logprobs,
        )

    @property
    def is_neutral(self) -> bool:
        """Whether a request without a grammar can do without the rich step from its start on."""
        return not self.names

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that ask for something."""
        asked = {
            "logit_bias": bool(self.logit_bias),
            "presence_penalty": self.presence_penalty != 0.0,
            "frequency_penalty": self.frequency_penalty != 0.0,
            "repetition_penalty": self.repetition_penalty != 1.0,
            "min_tokens": self.min_tokens > 0,
            "logprobs": self.num_logprobs is not None,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)

    def slot_request(
        self,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        *,
        has_grammar: bool,
    ) -> RichRequest | None:
        """The rich part of a slot row for a request with this much output, which is none at its
        first start and more after a preemption. None where nothing is left to ask for."""
        bans = len(output_token_ids) < self.min_tokens
        if not has_grammar and not bans and not set(self.names) - {"min_tokens"}:
            return None
        return RichRequest(
            logit_bias=self.logit_bias,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            min_seq_len=len(prompt_token_ids) + self.min_tokens if bans else 0,
            banned_before=self.banned_token_ids if bans else (),
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            num_top_logprobs=-1 if self.num_logprobs is None else self.num_logprobs,
            has_grammar=has_grammar,
        )


NEUTRAL = RichParams({}, 0.0, 0.0, 1.0, 0, (), None)
"""Asks for nothing."""
