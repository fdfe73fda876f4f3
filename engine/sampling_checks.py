"""Checks of single values in a request's parameters, and their words.

Owns the form of a refusal: the field's name first, then the limit, then the value on one line.
Knows no field's meaning. Every function raises RequestError or returns.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from decodegrid.engine.request_error import RequestError

MAX_LOGIT_BIAS: Final = 100.0
"""Largest bias on a logit, either way."""
MAX_NUM_LOGIT_BIAS: Final = 1024
"""Token ids of one request that may have a bias. Source: the sampler of vLLM."""


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def show(value: object) -> str:
    """A value on one line; Python refuses to print integers of thousands of digits."""
    try:
        return " ".join(repr(value).splitlines())
    except ValueError:
        return f"a value of type {type(value).__name__} that is too long to print"


def check_int(name: str, value: object, low: int, high: int | None, other: str = "") -> None:
    """An int (no bool) in low..high; `other` names what else would have been allowed."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer, got {show(value)}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"{low} to {high}"
        raise RequestError(f"{name} must be {other}{limit}, got {show(value)}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """A number in low..high; NaN is in no range."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise RequestError(f"{name} must be a number, got {show(value)}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be {low:g} to {high:g}, got {show(value)}")


def check_bool(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {show(value)}")


def check_token_ids(name: str, value: object) -> None:
    """A list of ints from 0; whether the vocabulary has them is for admission to say."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of token ids, got {show(value)}")
    for index, token_id in enumerate(value):
        check_int(f"{name}[{index}]", token_id, 0, None)


def check_logit_bias(name: str, value: object) -> None:
    """A mapping from token ids to numbers, None for none."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be a mapping from token ids to numbers, got {show(value)}")
    if len(value) > MAX_NUM_LOGIT_BIAS:
        raise RequestError(
            f"{name} has {len(value)} token ids; at most {MAX_NUM_LOGIT_BIAS} are allowed"
        )
    for token_id, bias in value.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise RequestError(
                f"{name} must have token ids as its keys, integers from 0, got {show(token_id)}"
            )
        check_number(f"{name}[{show(token_id)}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def check_strings(name: str, value: object, most: int) -> None:
    """A string or a list of strings, none of them empty, at most `most` different ones."""
    strings: Sequence[object] = ()
    if isinstance(value, str):
        strings = (value,)
    elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        strings = value
    else:
        strings = (None,)
    if not all(isinstance(item, str) for item in strings):
        raise RequestError(f"{name} must be a string or a list of strings, got {show(value)}")
    if len(set(strings)) > most:
        raise RequestError(f"{name} has {len(set(strings))} strings; at most {most} are allowed")
    if "" in strings:
        raise RequestError(f"{name} must not hold an empty string, got {show(value)}")
    # No text holds such a character, so that it would never stop anything.
    if any("\ud800" <= char <= "\udfff" for item in strings for char in str(item)):
        raise RequestError(f"{name} is not valid Unicode, got {show(value)}")
