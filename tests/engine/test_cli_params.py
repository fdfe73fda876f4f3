"""The sampling flags of `decodegrid generate`, and logprobs on the screen."""

from collections.abc import Callable
from typing import Any

import pytest

from decodegrid.configs.load import load_config
from decodegrid.engine.cli import build_parser, main
from decodegrid.engine.cli_logprobs import logprob_lines
from decodegrid.engine.cli_options import sampling_from_options
from decodegrid.engine.llm import LLM
from decodegrid.engine.logprobs import Logprob
from decodegrid.engine.request_output import CompletionOutput, RequestOutput
from decodegrid.engine.tokenizer import Tokenizer

GREEDY = ("--temperature", "0", "--max-tokens", "12", "--no-report")


@pytest.fixture
def call(
    tokenizer: Tokenizer,
    make_runner: Callable[..., Any],
    scripted: Any,
    byte_id: Callable[[int], int],
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """The device says "one, two" to every prompt of one character."""

    def run(*argv: str) -> tuple[int, str, str]:
        model = scripted(2, [*map(byte_id, b"one, two"), 1])
        llm = LLM.from_runner(make_runner(max_model_len=400, model=model), tokenizer)
        status = main(argv, lambda loaded: llm)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_flags_become_parameters() -> None:
    argv = "generate x --min-p 0.25 --presence-penalty -1 --frequency-penalty 2 --min-tokens 4"
    argv += " --repetition-penalty 1.5 --logit-bias 5=-100 --logit-bias 60=1.5 --stop a --stop b"
    params = sampling_from_options(build_parser().parse_args(argv.split()), load_config(None))
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.25, -1, 2)
    assert params.repetition_penalty == 1.5 and params.min_tokens == 4
    assert params.logit_bias == {5: -100.0, 60: 1.5} and params.stop_strings == ("a", "b")
    plain = sampling_from_options(build_parser().parse_args(["chat"]), load_config(None))
    assert plain.logit_bias is None and plain.stop_strings == () and plain.min_p == 0
    assert plain.logprobs is None


def test_a_stop_string_ends_the_text(call: Any) -> None:
    assert call("generate", "x", *GREEDY) == (0, "one, two\n", "")
    assert call("generate", "x", *GREEDY, "--stop", "two", "--stop", "e,") == (0, "on\n", "")
    flags = ("--stop", "e", "--stop", "two", "--min-tokens", "3")
    assert call("generate", "x", *GREEDY, *flags) == (0, "one, \n", "")


def test_logprobs_stand_behind_the_text(call: Any, byte_id: Callable[[int], int]) -> None:
    """Each prompt's behind its own text; a token's own first, then the others."""
    status, out, err = call("generate", "x", "y", *GREEDY, "--logprobs", "2")
    assert (status, err) == (0, "")
    first, second = out.split("== 2/2: y\n")
    assert first.splitlines()[1:] == [*second.splitlines(), ""]
    text, heading, *lines = second.splitlines()
    assert text == "one, two" and len(lines) == 9
    ids = [*map(byte_id, b"one, two"), 1]
    assert heading == f"-- logprobs (sum {sum(-1.0 - token_id % 7 for token_id in ids):.4f})"
    own = -1.0 - ids[0] % 7
    assert lines[0] == f'{own:10.4f}   #1  "o"   others: "p" {own - 1:.4f}'
    assert lines[8] == "   -2.0000   #1  id 1   others: id 2 -3.0000"
    _, out, _ = call("generate", "x", *GREEDY, "--prompt-logprobs", "0")
    own = -1.0 - byte_id(ord("x")) % 7
    assert out == f'one, two\n-- logprobs of the prompt\n{own:10.4f}   #1  "x"\n'


def test_what_does_not_print_is_escaped() -> None:
    entries = {5: Logprob(-1.0, None, "\x1b[2J\n"), 6: Logprob(float("-inf"), 2, "\u00e9")}
    completion = CompletionOutput(0, "", (5,), "length", (entries,), -1.0)
    output = RequestOutput("r", None, (1,), (completion,), True, 0, 0, 0, 0)
    assert list(logprob_lines(output)) == [
        "-- logprobs (sum -1.0000)",
        '   -1.0000       "\\x1b[2J\\n"   others: "\u00e9" -inf',
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--min-p", "2"), "min_p must be 0 to 1, got 2.0"),
        (("--presence-penalty", "3"), "presence_penalty must be -2 to 2, got 3.0"),
        (("--repetition-penalty", "0"), "repetition_penalty must be 1e-05 to 100000, got 0.0"),
        (("--logit-bias", "5"), "'5' is not of the form ID=X"),
        (("--logit-bias", "a=1"), "'a=1' is not of the form ID=X"),
        (("--logit-bias", "5=nan"), "logit_bias[5] must be -100 to 100, got nan"),
        (("--logit-bias", "99999999=1"), "logit_bias key 0 is 99999999; the vocabulary has ids"),
        (("--min-tokens", "13"), "min_tokens must be at most max_tokens (12), got 13"),
        (("--logprobs", "21"), "logprobs must be 0 to 20, got 21"),
        (("--prompt-logprobs", "-1"), "prompt_logprobs must be 0 to 20, got -1"),
        (("--stop", ""), "stop must not hold an empty string"),
        (("--logprobs", "1", "--set", "grid.rich=false"), "logprobs is not served by this depl"),
        (("--json-schema", '{"type": "object"}'), "takes the name of a file that holds the text"),
        (("--json-schema", '{"a": "' + "x" * 5000 + '"}'), "--json-schema is '{\"a\": \"xxx"),
        (("--grammar", 'root ::= "a"'), "--grammar is 'root ::= \"a\"'; it takes the name"),
        (("--json-schema", "none.json"), "none.json: No such file"),
    ],
)
def test_errors_are_one_line(call: Any, flags: tuple[str, ...], message: str) -> None:
    status, out, err = call("generate", "x", *GREEDY, *flags)
    assert (status, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1
