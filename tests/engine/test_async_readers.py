"""AsyncLLM's hand-over between threads: slow readers, closed event loops, logs, a real runner."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.async_sinks import Mailbox
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.request_output import StreamOutput
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

LONG = SamplingParams(temperature=0, max_tokens=80)


@pytest.fixture
def make_llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    return lambda **options: LLM.from_runner(make_runner(**options), tokenizer)


def test_a_reader_that_does_not_read_holds_up_nobody(
    make_llm: Callable[..., LLM], toy: Any
) -> None:
    """It gets all its tokens in the end, joined, while others went on."""

    async def run() -> None:
        async with AsyncLLM(make_llm(drafts=0)) as engine:
            slow = engine.stream([20, 30], LONG)
            pieces = [await anext(slow)]
            other = await engine.generate([21, 31], LONG)
            assert other.outputs[0].token_ids == tuple(toy.generate([21, 31], 80))
            while engine.num_open:
                await asyncio.sleep(0.001)
            pieces += [piece async for piece in slow]
            ids = [token_id for piece in pieces for token_id in piece.token_ids]
            assert ids == toy.generate([20, 30], 80)
            assert len(pieces) < 10 and pieces[-1].finish_reason == "length"

    asyncio.run(run())


def test_joined_pieces_keep_completions_apart() -> None:
    def piece(completion: int, text: str, last: bool = False) -> StreamOutput:
        output: Any = "whole" if last else None
        end: Any = "stop" if last else None
        return StreamOutput(0, "r", text, (ord(text),), end, output, completion)

    async def run() -> list[StreamOutput]:
        box = Mailbox(asyncio.get_running_loop())
        for item in (piece(0, "a"), piece(1, "b"), piece(0, "c"), piece(0, "d", True)):
            assert box.put(item)
        box.fail(KeyError("late"))
        found = [await box.get(), await box.get()]
        with pytest.raises(KeyError):
            await box.get()
        return found

    first, second = asyncio.run(run())
    assert (first.completion_index, first.text, first.output) == (1, "b", None)
    assert (second.text, second.token_ids, second.output) == ("acd", (97, 99, 100), "whole")


def test_an_event_loop_that_is_gone_frees_its_requests(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(drafts=0)
    runner: Any = llm.stream_table.loop.runner
    decode, may_go_on = runner.launch, threading.Event()

    def wait(*args: Any) -> Any:
        if runner.log[-1][0] == "decode":
            assert may_go_on.wait(60)
        return decode(*args)

    runner.launch = wait
    engine = AsyncLLM(llm)
    loop = asyncio.new_event_loop()
    stream = engine.stream([20, 30], LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    may_go_on.set()
    assert engine.submit([21, 31], LONG).result(60).outputs[0].finish_reason == "length"
    while engine.num_open:
        pass
    engine.close()
    assert llm.stats.num_emitted < 160, "the request without a reader ran to its end"


def test_arguments_are_refused_in_the_callers_thread(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(TypeError, match=r"AsyncLLM\(LLM\(config\)\), got 'tiny.yaml'"):
        AsyncLLM("tiny.yaml")  # type: ignore[arg-type]
    engine = AsyncLLM(make_llm())
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: engine.submit("", LONG), "the prompt is empty"),
        (lambda: engine.submit(5, LONG), "must be a text or a list"),  # type: ignore[arg-type]
        (lambda: engine.stream([20, 999], LONG), "token id 1 is 999"),
        (lambda: engine.submit("x", {"n": 2}), "must be SamplingParams"),  # type: ignore[arg-type]
        (lambda: engine.submit("x", LONG, request_id=""), "request_id must be"),
        (lambda: engine.submit("x", LONG, priority=0.5), "priority must"),  # type: ignore[arg-type]
    ]
    for call, message in calls:
        with pytest.raises(RequestError, match=message):
            call()
    assert engine.num_open == 0
    engine.close()


def test_a_line_at_the_start_and_one_at_the_end(
    make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    engine = AsyncLLM(make_llm())
    params = SamplingParams(temperature=0, max_tokens=7, n=2)
    engine.submit("secret", params, request_id="quiet").result(60)
    assert not caplog.records
    with caplog.at_level(logging.INFO, "decodegrid.requests"):
        engine.submit("secret", params, request_id="mine", priority=2).result(60)
    engine.close()
    assert [record.getMessage() for record in caplog.records] == [
        "request mine: start, 7 prompt tokens, 2 completions, priority 2",
        "request mine: length, length, 7 prompt tokens, 14 output tokens, "
        "drafts 10 drafted / 10 verified / 10 accepted, 0 preemptions",
    ]


def test_the_captured_steps_run_in_the_engines_thread(
    make_model: Callable[..., Any], make_eager_runner: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    model = make_model(vocab_size=tokenizer.vocab_size, hc_sinkhorn_iters=2)
    llm = LLM.from_runner(make_eager_runner(model, 2), tokenizer)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=10)
    prompts = ["one", "two", "three"]
    want = [output.outputs for output in llm.generate(prompts, params)]
    engine = AsyncLLM(llm)
    futures = [engine.submit(prompt, params) for prompt in prompts]
    assert [future.result(120).outputs for future in futures] == want
    engine.close()
