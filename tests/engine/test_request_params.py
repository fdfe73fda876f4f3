"""Parameters that the host alone honours, against one token at a time without drafts."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify

PROMPT = [20, 21, 22]
EOS = 1
DRAFTS = (0, 2, 99, "mixed", "random")

End = tuple[list[int], str, str, str | int | None]


@pytest.fixture
def make_llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    return lambda **options: LLM.from_runner(make_runner(**options), tokenizer)


def whole_characters(data: bytes) -> str:
    """Text of the bytes up to the last character that is complete."""
    for cut in range(len(data), max(len(data) - 4, -1), -1):
        text = data[:cut].decode(errors="replace")
        if not text.endswith("\ufffd"):
            return text
    return data.decode(errors="replace")


def first_match(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string that ends first begins; the longest of those that end together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


def plain_end(
    ids: Sequence[int], tokenizer: Tokenizer, params: SamplingParams, max_tokens: int
) -> End:
    """The same rules, one token at a time: ids, text, reason and its cause."""
    stops = params.stop_strings
    skip = params.skip_special_tokens
    spelled = tokenizer.token_bytes if skip else tokenizer.spelled_bytes
    for count in range(1, max_tokens + 1):
        data = b"".join(spelled(token_id) for token_id in ids[:count])
        last = ids[count - 1]
        is_eos = last == EOS and not params.ignore_eos
        is_end = is_eos or last in params.stop_token_ids or count == max_tokens
        text = data.decode(errors="replace") if is_end else whole_characters(data)
        match = first_match(text, stops)
        if match is not None:
            begin, stop = match
            end = begin + len(stop) if params.include_stop_str_in_output else begin
            return list(ids[:count]), text[:end], "stop", stop
        if is_eos or last in params.stop_token_ids:
            return list(ids[:count]), text, "stop", None if is_eos else last
        if is_end:
            return list(ids[:count]), text, "length", None
    raise AssertionError("max_tokens is at least 1")


def found_end(llm: LLM, params: SamplingParams) -> End:
    """What the engine makes of it, alone and in a batch, whole and streamed."""
    (alone,) = llm.generate([PROMPT], params)
    other = SamplingParams(temperature=0, max_tokens=9)
    crowd = llm.generate([[40], PROMPT, [41, 42]], [other, params, other])
    assert crowd[1].outputs == alone.outputs
    pieces = list(llm.stream([PROMPT], params))
    completion = alone.outputs[0]
    assert "".join(piece.text for piece in pieces) == completion.text
    assert [i for piece in pieces for i in piece.token_ids] == list(completion.token_ids)
    assert pieces[-1].stop_reason == completion.stop_reason
    assert alone.num_drafted >= alone.num_verified >= alone.num_accepted
    assert completion.finish_reason is not None
    return (
        list(completion.token_ids),
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
    )


@pytest.mark.parametrize("drafts", DRAFTS)
def test_every_end_is_that_of_one_token_at_a_time(
    tokenizer: Tokenizer,
    make_llm: Callable[..., LLM],
    scripted: Any,
    byte_id: Callable[[int], int],
    drafts: Any,
) -> None:
    """Random texts of 1 to 4 byte characters, broken bytes, special tokens, and all parameters."""
    rng = random.Random(3)
    reasons = set()
    pieces = [b"a", b"b", "\u00e9".encode(), "\u20ac".encode(), "\U0001f600".encode(), b"\xe2"]
    for _ in range(60):
        script: list[int] = []
        while len(script) < 18:
            script += map(byte_id, rng.choice(pieces))
            script += rng.choice([[], [], [], [EOS], [5]])
        alphabet = ["a", "b", "\u00e9", "\u20ac", "\ufffd"]
        stops = ["".join(rng.choices(alphabet, k=rng.randrange(1, 4))) for _ in range(2)]
        special = tokenizer.decode([5], skip_special_tokens=False)
        max_tokens = rng.randrange(1, 18)
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            stop=rng.choice([None, stops[0], stops, [*stops, f"a{special}", special[:3]]]),
            stop_token_ids=rng.choice([[], [byte_id(ord("b"))], [EOS], range(200, 266)]),
            ignore_eos=rng.random() < 0.5,
            include_stop_str_in_output=rng.random() < 0.5,
            skip_special_tokens=rng.random() < 0.5,
            speculation=rng.choice(["auto", "off", 1, 3]),
        )
        llm = make_llm(model=scripted(len(PROMPT), script), drafts=drafts)
        found = found_end(llm, params)
        assert found == plain_end(script, tokenizer, params, max_tokens), params
        reasons.add((found[2], type(found[3])))
        blocks = llm.scheduler.blocks
        assert blocks.num_free == blocks.num_usable
    assert reasons == {
        ("length", type(None)), ("stop", str), ("stop", int), ("stop", type(None))
    }  # fmt: skip


def test_an_accepted_block_is_cut_in_text_ids_and_counts(
    make_llm: Callable[..., LLM], scripted: Any, byte_id: Callable[[int], int]
) -> None:
    """C1: the stop string spans two tokens of one block; three more were accepted behind it."""
    script = [byte_id(byte) for byte in b"a<|bcdef"]
    llm = make_llm(model=scripted(len(PROMPT), script))
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, stop="<|"))
    completion = output.outputs[0]
    assert completion.token_ids == tuple(script[:3]) and completion.text == "a"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "<|")
    # "a" came from the fresh step; of the block's five drafts and one more token, two were kept.
    assert (output.num_drafted, output.num_verified, output.num_accepted) == (2, 2, 2)
    assert llm.stats.num_emitted == 3 and llm.stats.num_dropped == 4
    assert llm.stats.accepted_per_position == [1] * 5, "what the device did is not cut"
    assert "dropped behind an end: 4 tokens" in llm.report()


def test_order_at_one_token(
    make_llm: Callable[..., LLM], scripted: Any, byte_id: Callable[[int], int]
) -> None:
    """The second token is a stop string, a stop token and the last that is allowed, all at once."""
    a, b = byte_id(ord("a")), byte_id(ord("b"))

    def reason(last: int, **options: Any) -> tuple[str | None, str | int | None]:
        llm = make_llm(model=scripted(len(PROMPT), [a, last, a]))
        params = SamplingParams(temperature=0, max_tokens=2, **options)
        completion = llm.generate([PROMPT], params)[0].outputs[0]
        assert completion.token_ids == (a, last)
        return completion.finish_reason, completion.stop_reason

    assert reason(b, stop="ab", stop_token_ids=[b]) == ("stop", "ab")
    assert reason(b, stop="ba", stop_token_ids=[b]) == ("stop", b)
    assert reason(b, stop="ba") == ("length", None)
    assert reason(EOS, stop_token_ids=[EOS]) == ("stop", None)
    assert reason(EOS, stop_token_ids=[EOS], ignore_eos=True) == ("stop", EOS)
    assert reason(EOS, ignore_eos=True) == ("length", None)


@pytest.mark.parametrize("limit", ["off", 1, 2, 4, 5])
def test_a_request_limits_its_drafts_and_no_other(
    make_llm: Callable[..., LLM], toy: Any, limit: Any
) -> None:
    """With right drafts the rounds count the limit: one fresh token, then limit + 1 a step."""
    most = 0 if limit == "off" else limit
    params = SamplingParams(temperature=0, max_tokens=31, speculation=limit)
    llm = make_llm()
    (output,) = llm.generate([PROMPT], params)
    assert output.outputs[0].token_ids == tuple(toy.generate(PROMPT, 31))
    assert llm.stats.num_decode_steps == 1 + -(-30 // (most + 1))
    assert llm.stats.offered_per_position[most:] == [0] * (5 - most)
    assert llm.stats.verified_per_position[most:] == [0] * (5 - most)
    free = SamplingParams(temperature=0, max_tokens=31)
    limited, other = llm.generate([PROMPT, PROMPT], [params, free])
    assert limited.outputs == other.outputs == output.outputs
    assert limited.num_verified == limited.num_accepted == output.num_accepted
    assert other.num_accepted == 25


def test_a_limit_above_the_deployment_is_refused(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_draft_tokens=2)
    with pytest.raises(RequestError, match="speculation is 3 drafts; the deployment makes 2"):
        llm.generate([PROMPT], SamplingParams(speculation=3))
    assert make_llm(num_draft_tokens=0).generate([PROMPT], SamplingParams(speculation="off"))


def test_completions_in_a_stream_and_their_abort(make_llm: Callable[..., LLM], toy: Any) -> None:
    """Pieces name their completion; one result at the end; an abort ends all of a prompt."""
    llm = make_llm(max_num_reqs=2, drafts="mixed")
    params = SamplingParams(temperature=1, seed=7, n=3, max_tokens=12)
    (want,) = llm.generate([PROMPT], params)
    assert want.outputs[0].token_ids == tuple(toy.generate(PROMPT, 12, 1.0, 7))
    ids: list[list[int]] = [[], [], []]
    pieces = list(llm.stream([PROMPT], params))
    for piece in pieces:
        ids[piece.completion_index] += piece.token_ids
    assert [tuple(i) for i in ids] == [completion.token_ids for completion in want.outputs]
    assert [piece.output is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(piece.finish_reason == "length" for piece in pieces) == 3
    ends = []
    for piece in llm.stream([PROMPT], SamplingParams(temperature=1, n=3, max_tokens=60)):
        if piece.finish_reason is None and not ends:
            assert llm.abort(piece.request_id)
        ends.append(piece.finish_reason)
    assert ends.count("abort") == 3
    assert not llm.scheduler.has_unfinished and not llm.stream_table.open_ids


def test_the_device_keeps_a_limit(
    make_model: Callable[..., Any], make_eager_runner: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    """The captured step of a model: rows beside a limited one are not limited, tokens are equal."""
    model = make_model(vocab_size=tokenizer.vocab_size, hc_sinkhorn_iters=2)
    llm = LLM.from_runner(make_eager_runner(model, 3), tokenizer)
    prompts = [[20, 21, 22], [30, 31], [40, 41, 42]]
    limits: list[Any] = ["off", 1, "auto"]
    params = [
        SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, speculation=limit)
        for limit in limits
    ]
    free = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    want = llm.generate(prompts, free)
    assert all(output.num_verified > 14 for output in want)
    found = llm.generate(prompts, params)
    assert [output.outputs for output in found] == [output.outputs for output in want]
    assert found[0].num_verified == 0 and found[2].num_verified == want[2].num_verified
    # One a step after the fresh one, and none where one token is left.
    assert 0 < found[1].num_verified < 14
    again = llm.generate(prompts, free)
    assert [output.num_verified for output in again] == [output.num_verified for output in want]
    assert isinstance(llm.scheduler.policy, FixedVerify)
