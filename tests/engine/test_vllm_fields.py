"""Fields of vLLM that are not served: refused by name, let through where they ask for nothing."""

from dataclasses import fields, replace
from typing import Any

import pytest

from decodegrid.engine.grammar_params import StructuredOutputsParams
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.vllm_fields import (
    FORM_VALUES,
    SAMPLING_VALUES,
    UnsupportedForm,
    UnsupportedSampling,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2), ("use_beam_search", True), ("length_penalty", 0.5),
        ("early_stopping", True), ("bad_words", ["x"]), ("allowed_token_ids", [1]),
        ("allowed_token_ids", []), ("logits_processors", [print]), ("detokenize", False),
        ("detokenize", 0), ("spaces_between_special_tokens", False),
        ("truncate_prompt_tokens", 5), ("guided_decoding", object()), ("flat_logprobs", True),
        ("skip_reading_prefix_cache", True), ("thinking_token_budget", 9),
        ("extra_args", {"a": 1}),
    ],
)  # fmt: skip
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is not supported, got ") and "; it can only be " in message


@pytest.mark.parametrize("name", list(FORM_VALUES))
def test_forms_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs.{name} is not supported"):
        StructuredOutputsParams(regex="a", **{name: "x"})  # type: ignore[arg-type]
    for value in FORM_VALUES[name]:
        StructuredOutputsParams(regex="a", **{name: value})


def test_what_happens_anyway_may_be_asked_for() -> None:
    """vLLM's own defaults, and other words for them; replace() and equality do not mind."""
    for name, values in SAMPLING_VALUES.items():
        for value in values:
            assert getattr(SamplingParams(**{name: value}), name) == value
    plain = SamplingParams(temperature=0)
    assert replace(plain, max_tokens=9) == SamplingParams(temperature=0, max_tokens=9)
    assert "best_of" not in repr(plain)


def test_tables_and_fields_agree() -> None:
    for owner, values in ((UnsupportedSampling, SAMPLING_VALUES), (UnsupportedForm, FORM_VALUES)):
        assert {item.name: item.default for item in fields(owner)} == {
            name: allowed[0] for name, allowed in values.items()
        }


def test_the_first_argument_is_still_the_temperature() -> None:
    assert SamplingParams(0.5).temperature == 0.5
    assert StructuredOutputsParams({"type": "string"}).source.kind == "json"
