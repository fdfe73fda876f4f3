"""What sampling parameters accept, and how they refuse."""

import math
from typing import Any

import pytest

from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import MAX_SEED, SamplingParams, completion_seed


class Odd:
    """A value that cannot be compared, with a text of two lines."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("no order here")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "odd\nthing"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "-0.1"),
        ("temperature", math.nan, "nan"),
        ("temperature", math.inf, "inf"),
        ("temperature", 1e9, "100"),
        ("temperature", 1e-9, "1e-05"),
        ("temperature", "1", "'1'"),
        ("temperature", True, "True"),
        ("max_tokens", 0, "at least 1, got 0"),
        ("max_tokens", -3, "at least 1, got -3"),
        ("max_tokens", 1.5, "1.5"),
        ("seed", -1, "-1"),
        ("seed", 2**63, str(2**63 - 1)),
        ("stop_token_ids", [4, -2], r"stop_token_ids\[1\]"),
        ("stop_token_ids", "12", "'12'"),
        ("ignore_eos", 1, "true or false"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("top_p", "0.9", "above 0 and at most 1, got '0.9'"),
        ("top_p", True, "above 0 and at most 1, got True"),
        ("top_k", 0, r"top_k must be -1 \(off\) or at least 1, got 0"),
        ("top_k", -2, r"top_k must be -1 \(off\) or at least 1, got -2"),
        ("top_k", 2.0, "top_k must be an integer, got 2.0"),
        ("top_k", -1.0, "top_k must be an integer, got -1.0"),
        ("top_k", True, "top_k must be an integer, got True"),
        ("top_k", None, "top_k must be an integer, got None"),
        ("min_p", 1.01, "0 to 1, got 1.01"),
        ("min_p", math.nan, "0 to 1, got nan"),
        ("min_tokens", 17, r"at most max_tokens \(16\), got 17"),
        ("min_tokens", -1, "at least 0, got -1"),
        ("presence_penalty", 2.1, "-2 to 2, got 2.1"),
        ("presence_penalty", math.nan, "-2 to 2, got nan"),
        ("frequency_penalty", -2.5, "-2 to 2, got -2.5"),
        ("frequency_penalty", False, "must be a number, got False"),
        ("repetition_penalty", 0, "1e-05 to 100000, got 0"),
        ("repetition_penalty", -1.0, "1e-05 to 100000, got -1.0"),
        ("repetition_penalty", math.inf, "1e-05 to 100000, got inf"),
        ("repetition_penalty", "1", "must be a number, got '1'"),
        ("logprobs", 21, "0 to 20, got 21"),
        ("logprobs", -1, "0 to 20, got -1"),
        ("logprobs", 1.0, "must be an integer, got 1.0"),
        ("prompt_logprobs", 21, "0 to 20, got 21"),
        ("prompt_logprobs", True, "must be an integer, got True"),
        ("n", 0, "1 to 128, got 0"),
        ("n", 129, "1 to 128, got 129"),
        ("stop", "", "must not hold an empty string"),
        ("stop", ["x", ""], "must not hold an empty string"),
        ("stop", [str(i) for i in range(65)], "has 65 strings; at most 64"),
        ("include_stop_str_in_output", 1, "true or false, got 1"),
        ("skip_special_tokens", None, "true or false, got None"),
        ("speculation", "on", 'must be "auto", "off" or an integer, got \'on\''),
        ("speculation", 0, 'must be "auto", "off" or at least 1, got 0'),
        ("speculation", True, "integer, got True"),
        pytest.param("speculation", Odd(), "an integer, got odd thing", id="odd speculation"),
        ("logit_bias", {1: 100.5}, r"\[1\] must be -100 to 100, got 100.5"),
        ("logit_bias", {1: math.nan}, r"\[1\] must be -100 to 100, got nan"),
        ("logit_bias", {1: None}, r"\[1\] must be a number, got None"),
        ("logit_bias", {"1": 2.0}, "token ids as its keys, integers from 0, got '1'"),
        ("logit_bias", {True: 2.0}, "token ids as its keys, integers from 0, got True"),
        ("logit_bias", {-1: 2.0}, "token ids as its keys, integers from 0, got -1"),
        ("logit_bias", dict.fromkeys(range(1025), 1), "1025 token ids; at most 1024"),
        ("temperature", 10**400, r"must be 0 \(greedy\) or 1e-05 to 100, got 1000"),
        pytest.param("temperature", 10**5000, "type int that is too long to print", id="long"),
        ("temperature", None, "a finite number, got None"),
        pytest.param("seed", 10**5000, "type int that is too long to print", id="long seed"),
        ("top_p", 10**400, "above 0 and at most 1"),
        ("top_k", Odd(), "must be an integer, got odd thing"),
        ("min_p", "0", "must be a number, got '0'"),
        ("min_p", Odd(), "must be a number, got odd thing"),
        ("n", True, "must be an integer, got True"),
        ("n", 1.0, r"must be an integer, got 1\.0"),
        ("min_tokens", None, "must be an integer, got None"),
        ("logprobs", False, "must be an integer, got False"),
        ("stop", 3, "must be a string or a list of strings, got 3"),
        ("stop", 0, "must be a string or a list of strings, got 0"),
        ("stop", b"", "must be a string or a list of strings, got b''"),
        ("stop", [3], r"must be a string or a list of strings, got \[3\]"),
        ("logit_bias", 3, "must be a mapping from token ids to numbers, got 3"),
        ("logit_bias", [], r"must be a mapping from token ids to numbers, got \[\]"),
    ],
)
def test_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(field)
    assert "\n" not in str(caught.value)


def test_accepted() -> None:
    params = SamplingParams(
        temperature=0, max_tokens=None, seed=2**63 - 1, stop_token_ids=[1, 2], stop=[], top_p=1
    )
    assert params.temperature == 0 and params.max_tokens is None
    params = SamplingParams(top_p=1e-9, top_k=10**30)
    assert params.top_p == 1e-9 and params.top_k == 10**30
    assert params.stop_strings == () and params.max_drafts is None
    params = SamplingParams(stop=["a", "b", "a"], speculation="off", n=128)
    assert params.stop_strings == ("a", "b") and params.max_drafts == 0
    assert SamplingParams(stop="ab", speculation=3).stop_strings == ("ab",)
    assert SamplingParams(speculation=3).max_drafts == 3
    bias = dict.fromkeys(range(1023), -100.0) | {5000: 100}
    params = SamplingParams(min_p=1, logit_bias=bias, repetition_penalty=1e-5, logprobs=20)
    assert params.logit_bias is bias and params.min_p == 1
    SamplingParams(presence_penalty=-2, frequency_penalty=2.0, min_tokens=16, prompt_logprobs=0)
    assert SamplingParams(min_tokens=10**9, max_tokens=None).min_tokens == 10**9
    with pytest.raises(TypeError):
        SamplingParams(bes_of=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("seed", [0, 1, MAX_SEED])
def test_seeds_of_completions(seed: int) -> None:
    """The first is the given one, all differ, and those of neighbouring seeds do not overlap."""
    seeds = [completion_seed(seed, index) for index in range(128)]
    assert seeds[0] == seed and all(0 <= s <= MAX_SEED for s in seeds)
    assert seeds == [completion_seed(seed, index) for index in range(128)]
    near = [completion_seed(s, i) for s in (seed ^ 1, seed ^ 3) for i in range(128)]
    assert len({*seeds, *near}) == 3 * 128
