"""Fields that vLLM's requests have and this engine does not serve: refused by name.

Owns their names and what each may be set to: what happens anyway. Somebody who brings code written
for vLLM reads which field is in the way, not that an argument is unknown. Data flow: the parameter
classes inherit the fields and ask for the check; a batch body is checked by the same tables.

Source: vLLM's SamplingParams and StructuredOutputsParams.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_checks import show

_ONLY_NONE: Final = (None,)

SAMPLING_VALUES: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "best_of": (None, 1),
        "use_beam_search": (False, None),
        "length_penalty": (1.0, 1, None),
        "early_stopping": (False, None),
        "bad_words": (None, []),
        "allowed_token_ids": _ONLY_NONE,
        "logits_processors": (None, []),
        "detokenize": (True, None),
        "spaces_between_special_tokens": (True, None),
        "truncate_prompt_tokens": _ONLY_NONE,
        "guided_decoding": _ONLY_NONE,
        "flat_logprobs": (False, None),
        "skip_reading_prefix_cache": (None, False),
        "thinking_token_budget": _ONLY_NONE,
        "extra_args": (None, {}),
    }
)
"""Of SamplingParams: the values that ask for what happens anyway, the default first."""

FORM_VALUES: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "structural_tag": _ONLY_NONE,
        "whitespace_pattern": _ONLY_NONE,
        "disable_fallback": (False, None),
        "disable_additional_properties": (False, None),
    }
)
"""The same of StructuredOutputsParams."""

_USE_INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "allowed_token_ids": "structured_outputs can say what may come",
        "bad_words": "logit_bias can make single tokens unlikely",
        "best_of": "n gives several completions",
        "guided_decoding": "structured_outputs has its place",
        "whitespace_pattern": "disable_any_whitespace allows none",
    }
)


def check_unsupported(
    owner: object, allowed: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> None:
    """Raise RequestError naming the first field that asks for something else.

    owner: has the fields of `allowed`. prefix: stands before the name in the message.
    """
    for name, values in allowed.items():
        value = getattr(owner, name)
        if not any(type(value) is type(item) and value == item for item in values):
            hint = f"; {_USE_INSTEAD[name]}" if name in _USE_INSTEAD else ""
            raise RequestError(
                f"{prefix}{name} is not supported, got {show(value)}; it can only be "
                f"{show(values[0])}{hint}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedSampling:
    """See SAMPLING_VALUES; every one has to be left as it is."""

    best_of: int | None = field(default=None, repr=False)
    use_beam_search: bool = field(default=False, repr=False)
    length_penalty: float = field(default=1.0, repr=False)
    early_stopping: bool = field(default=False, repr=False)
    bad_words: Any = field(default=None, repr=False)
    allowed_token_ids: Any = field(default=None, repr=False)
    logits_processors: Any = field(default=None, repr=False)
    detokenize: bool = field(default=True, repr=False)
    spaces_between_special_tokens: bool = field(default=True, repr=False)
    truncate_prompt_tokens: int | None = field(default=None, repr=False)
    guided_decoding: Any = field(default=None, repr=False)
    flat_logprobs: bool = field(default=False, repr=False)
    skip_reading_prefix_cache: bool | None = field(default=None, repr=False)
    thinking_token_budget: int | None = field(default=None, repr=False)
    extra_args: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedForm:
    """See FORM_VALUES; every one has to be left as it is."""

    structural_tag: str | None = field(default=None, repr=False)
    whitespace_pattern: str | None = field(default=None, repr=False)
    disable_fallback: bool = field(default=False, repr=False)
    disable_additional_properties: bool = field(default=False, repr=False)
