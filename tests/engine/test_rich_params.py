"""What a request's parameters become on their way to a slot, and the ends that they move."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from decodegrid.engine.grammar_matcher import TokenVerdict
from decodegrid.engine.llm import LLM
from decodegrid.engine.request import Request
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.rich_params import RichParams
from decodegrid.engine.runner_protocol import RichRequest, SlotRequest
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

PROMPT = [20, 21, 22]
EOS = 1
PLAIN = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture
def make_llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    return lambda **options: LLM.from_runner(make_runner(**options), tokenizer)


def starts_of(llm: LLM) -> list[SlotRequest]:
    """Every slot row that is written from now on."""
    runner: Any = llm.stream_table.loop.runner
    found: list[SlotRequest] = []
    start = runner.start

    def note(slot: int, request: SlotRequest, block_ids: Sequence[int]) -> None:
        found.append(request)
        start(slot, request, block_ids)

    runner.start = note
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logit_bias": {}},
        {"logit_bias": {5: 0, 6: 0.0}},
        {"min_p": 0.5, "temperature": 1, "top_k": 5},
        {"prompt_logprobs": 3},
        {"presence_penalty": 0, "frequency_penalty": -0.0, "repetition_penalty": 1},
    ],
)
def test_a_neutral_request_is_served_by_plain_steps(
    make_llm: Callable[..., LLM], changes: dict[str, Any]
) -> None:
    llm = make_llm()
    starts = starts_of(llm)
    llm.generate([PROMPT], replace(PLAIN, **changes))
    (start,) = starts
    assert start.rich is None
    assert start.min_p == changes.get("min_p", 0.0)


def test_the_slot_is_told_everything(make_llm: Callable[..., LLM]) -> None:
    """Stop ids beyond the eight of the row are barred too, and the end of text whatever it does."""
    llm = make_llm()
    starts = starts_of(llm)
    bias = {30: 1, 31: -100, 32: 0}
    params = replace(
        PLAIN,
        logit_bias=bias,
        presence_penalty=1,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        min_tokens=4,
        stop_token_ids=[*range(200, 212), 200],
        ignore_eos=True,
        logprobs=3,
    )
    llm.generate([PROMPT], params)
    (start,) = starts
    assert start.stop_token_ids == tuple(range(200, 208))
    assert start.rich == RichRequest(
        logit_bias={30: 1.0, 31: -100.0},
        presence_penalty=1.0,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        min_seq_len=len(PROMPT) + 4,
        banned_before=(EOS, *range(200, 212)),
        prompt_token_ids=PROMPT,
        output_token_ids=[],
        num_top_logprobs=3,
    )


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_alone_asks_for_rich_steps(make_llm: Callable[..., LLM], name: str) -> None:
    llm = make_llm()
    starts = starts_of(llm)
    llm.generate([PROMPT], replace(PLAIN, **{name: 0.5}))
    assert starts[0].rich is not None and getattr(starts[0].rich, name) == 0.5
    assert starts[0].rich.min_seq_len == 0 and starts[0].rich.banned_before == ()
    assert starts[0].rich.num_top_logprobs == -1


def test_a_preempted_request_starts_with_its_outputs(make_llm: Callable[..., LLM]) -> None:
    """The counts go on where they were; min_tokens that are out need no bar any more; logprobs go
    on behind those that were delivered; prompt logprobs are not asked for twice."""
    count = 30
    params = replace(
        PLAIN, max_tokens=count, presence_penalty=0.5, logprobs=1, prompt_logprobs=0, min_tokens=2
    )
    only_min = replace(PLAIN, max_tokens=count, min_tokens=2)
    prompts = [[20, 21, 22], [30, 31, 32], [40, 41, 42], [50, 51, 52]]
    seen = set()
    for many in ([params, only_min] * 2, [only_min, params] * 2):
        want = make_llm(drafts="mixed").generate(prompts, many)
        tight = make_llm(drafts="mixed", num_blocks=13, max_model_len=40)
        starts = starts_of(tight)
        found = tight.generate(prompts, many)
        assert [output.outputs for output in found] == [output.outputs for output in want]
        assert [o.prompt_logprobs for o in found] == [o.prompt_logprobs for o in want]
        asked = [output.outputs[0].logprobs for output in found]
        assert sorted(len(tokens or ()) for tokens in asked) == [0, 0, count, count]
        assert all(start.rich is not None for start in starts if start.seq_len == 3)
        again = [start for start in starts if start.seq_len > 3]
        assert len(again) == sum(output.num_preemptions for output in found)
        texts = [
            (*prompt, *o.outputs[0].token_ids) for prompt, o in zip(prompts, want, strict=True)
        ]
        for start in again:
            seen.add(start.rich is None)
            if start.rich is not None:
                assert start.rich.min_seq_len == 0 or start.seq_len < 5
                text = (*start.rich.prompt_token_ids, *start.rich.output_token_ids)
                assert len(start.rich.prompt_token_ids) == 3 and len(text) == start.seq_len
                assert any(text == whole[: len(text)] for whole in texts)
    assert seen == {True, False}, "no start was past its min_tokens, or none needed more"


def earliest_end(pieces: Sequence[str], stops: Sequence[str], min_tokens: int) -> tuple[int, str]:
    """Tokens and text up to the stop string that ends first behind min_tokens tokens."""
    text = ""
    for count, piece in enumerate(pieces, start=1):
        for char in piece:
            text += char
            found = [stop for stop in stops if text.endswith(stop)]
            if found and count > min_tokens:
                return count, text[: len(text) - len(max(found, key=len))]
    return len(pieces), text


@pytest.mark.parametrize("drafts", [0, 2, 99, "mixed", "random"])
def test_stop_strings_count_behind_min_tokens(
    make_llm: Callable[..., LLM], scripted: Any, byte_id: Callable[[int], int], drafts: Any
) -> None:
    """One that ends within them does not, one that begins in them and ends behind them does."""
    rng = random.Random(7)
    moved = 0
    for _ in range(60):
        text = "".join(rng.choices("ab", k=16))
        stops = [
            "".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.choice((1, 2)))
        ]
        min_tokens = rng.randrange(16)
        script = [byte_id(ord(char)) for char in text]
        llm = make_llm(model=scripted(len(PROMPT), script), drafts=drafts)
        params = replace(PLAIN, max_tokens=16, stop=stops, min_tokens=min_tokens)
        pieces = list(llm.stream([PROMPT], params))
        assert pieces[-1].output is not None
        completion = pieces[-1].output.outputs[0]
        count, want = earliest_end(text, stops, min_tokens)
        assert (len(completion.token_ids), completion.text) == (count, want), (text, stops)
        assert "".join(piece.text for piece in pieces) == want
        moved += count != earliest_end(text, stops, 0)[0]
    assert moved > 20


def test_min_tokens_of_the_whole_length_looks_for_no_stop_string(
    make_llm: Callable[..., LLM], scripted: Any, byte_id: Callable[[int], int]
) -> None:
    """Not in the sign for a character that was cut off by the end, either."""
    script = [byte_id(byte) for byte in b"ab\xe2"]
    llm = make_llm(model=scripted(len(PROMPT), script))
    params = replace(PLAIN, max_tokens=3, min_tokens=3, stop=["b", "\ufffd"])
    completion = llm.generate([PROMPT], params)[0].outputs[0]
    assert (completion.text, completion.finish_reason) == ("ab\ufffd", "length")
    cut = llm.generate([PROMPT], replace(params, min_tokens=2))[0].outputs[0]
    assert (cut.text, cut.stop_reason) == ("ab", "\ufffd")


class EndsAt:
    """A grammar whose text is complete with its n-th token."""

    failure: str | None = None

    def __init__(self, count: int) -> None:
        self.left = count

    def advance(self, token_id: int) -> TokenVerdict:
        assert self.left > 0, "advanced behind its end"
        self.left -= 1
        return TokenVerdict.OPEN if self.left else TokenVerdict.COMPLETE


@pytest.mark.parametrize(
    "options",
    [{"stop": "ab"}, {"stop": "\ufffd"}, {"stop_token_ids": [2]}, {"max_tokens": 3}, {}],
)
def test_the_end_of_a_grammar_comes_first(
    make_llm: Callable[..., LLM], byte_id: Callable[[int], int], options: dict[str, Any]
) -> None:
    """Before whatever else the same token completes; its text is not cut, and nothing follows."""
    last = 0xE2 if options.get("stop") == "\ufffd" else ord("b")
    script = [byte_id(byte) for byte in (ord("x"), ord("a"), last, ord("c"))]
    if "stop_token_ids" in options:
        options = {"stop_token_ids": [byte_id(last)]}
    stream = make_llm().stream_table.build(PROMPT, replace(PLAIN, **options))
    (request,) = stream.requests
    grammar: Any = EndsAt(3)
    request.grammar = grammar
    assert request.commit(script, num_drafted=3, num_verified=3) == tuple(script[:3])
    completion = stream.output().outputs[0]
    assert list(completion.token_ids) == script[:3]
    assert completion.text == ("xa\ufffd" if last == 0xE2 else "xab")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_a_grammar_asks_for_rich_steps() -> None:
    request = Request(
        "a", PROMPT, max_seq_len=9, temperature=0.0, seed=0, stop_token_ids=(EOS,), min_p=0.25
    )
    assert request.slot_request().rich is None
    grammar: Any = EndsAt(3)
    request.grammar = grammar
    rich = request.slot_request().rich
    assert rich is not None and rich.has_grammar and rich.num_top_logprobs == -1
    assert request.slot_request().min_p == 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_token_ids": [5, 266]}, "stop token id 1 is 266; the vocabulary has ids 0 to 265"),
        ({"logit_bias": {5: 1, 300: 2}}, "logit_bias key 1 is 300; the vocabulary has ids 0 to"),
        ({"max_tokens": None, "min_tokens": 94}, "min_tokens is 94; the context of 96 tokens leav"),
        ({"min_tokens": 1, "stop_token_ids": range(266)}, "min_tokens is 1 and every token of the"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    make_llm: Callable[..., LLM], changes: dict[str, Any], message: str
) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT], replace(PLAIN, **changes))
    assert llm.generate([PROMPT], replace(PLAIN, max_tokens=None, min_tokens=93, ignore_eos=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {5: 1}},
        {"presence_penalty": 1},
        {"frequency_penalty": 1},
        {"repetition_penalty": 2},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
    ],
)
def test_a_deployment_of_plain_steps_refuses_by_name(
    make_llm: Callable[..., LLM], tokenizer: Tokenizer, make_runner: Any, changes: dict[str, Any]
) -> None:
    runner = make_runner()
    runner.has_rich = False
    llm = LLM.from_runner(runner, tokenizer)
    (name,) = changes
    with pytest.raises(
        RequestError, match=rf"^{name} is not served by this deployment: .*grid\.rich"
    ):
        llm.generate([PROMPT], replace(PLAIN, **changes))
    assert llm.generate([PROMPT], replace(PLAIN, min_p=0.5, n=2))


def test_a_mapping_that_changes_later_changes_no_request() -> None:
    bias = {5: 1.0}
    rich = RichParams.of(SamplingParams(logit_bias=bias), EOS)
    bias[5] = 2.0
    assert rich.logit_bias == {5: 1.0} and rich.names == ("logit_bias",)
    assert not rich.is_neutral and RichParams.of(SamplingParams(), EOS).is_neutral
