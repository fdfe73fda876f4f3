"""The sampling fields of a request's body, whatever its protocol.

Owns the names that are the same everywhere, and which field of the body an error of SamplingParams
is about. Data flow: fields of a body -> SamplingParams.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.engine.body_fields import BodyError, shown
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams

Json = Any
"""What json.loads makes."""

EXTRAS: Final = (
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "speculation",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""Fields of SamplingParams that bodies may have beside those of their protocol."""
_DEFAULTS: Final = ("temperature", "top_p", "top_k")


def make_params(
    given: dict[str, Json],
    defaults: SamplingSection,
    names: Sequence[str],
    spelled: Mapping[str, str],
) -> SamplingParams:
    """SamplingParams of a body's fields. given: by the names of SamplingParams, as JSON has them.
    defaults: for what is not given. names: those that an error may be about. spelled: how the body
    has them, where it is not the same.

    Raises BodyError.
    """
    for name in _DEFAULTS:
        given.setdefault(name, getattr(defaults, name))
    given.setdefault("max_tokens", defaults.max_tokens)
    try:
        if isinstance(given.get("logit_bias"), dict):
            given["logit_bias"] = _read_logit_bias(given["logit_bias"])
        return SamplingParams(**given)
    except RequestError as error:
        raise sampling_error(error, names, spelled) from None


def sampling_error(
    error: RequestError, names: Sequence[str], spelled: Mapping[str, str]
) -> BodyError:
    """An error of SamplingParams with the field that it begins with, as the body has it."""
    if isinstance(error, BodyError):
        return error
    message = str(error)
    name = next((name for name in names if _names(message, name)), None)
    if name is None or name not in spelled:
        return BodyError(message, name)
    return BodyError(spelled[name] + message.removeprefix(name), spelled[name])


def _read_logit_bias(bias: Mapping[str, Json]) -> dict[int, Json]:
    """JSON's keys are strings; raises RequestError for one that is not a token id's digits."""
    found = {}
    for key, value in bias.items():
        # One spelling for an id, so that none is given twice; no id has as many digits as an int64.
        if not (key.isascii() and key.isdigit() and len(key) < 19 and str(int(key)) == key):
            raise RequestError(f"logit_bias must have token ids as its keys, got {shown(key)}")
        found[int(key)] = value
    return found


def _names(message: str, name: str) -> bool:
    """Whether a refusal of SamplingParams is about the field: it begins with its name."""
    rest = message.removeprefix(name)
    return rest != message and not (rest[0].isalnum() or rest[0] == "_")
