"""AsyncLLM: equal outputs, aborts, slow and gone readers, a failing engine, and its end."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

PROMPTS = [[20 + i, 30] * (1 + i) for i in range(7)]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture
def make_llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    return lambda **options: LLM.from_runner(make_runner(**options), tokenizer)


def is_idle(llm: LLM) -> bool:
    scheduler = llm.scheduler
    return (
        not scheduler.has_unfinished
        and scheduler.blocks.num_free == scheduler.blocks.num_usable
        and scheduler.slots.num_free == scheduler.slots.num_usable
    )


def hold_decode(llm: LLM, num_free_steps: int) -> threading.Event:
    """Let the engine decode that many steps; it takes the next one when the event is set.

    A toy step takes microseconds: without this a request may end before its reader wakes up.
    """
    runner: Any = llm.stream_table.loop.runner
    decode, may_go_on, calls = runner.launch, threading.Event(), []

    def wait(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > num_free_steps:
            assert may_go_on.wait(60)
        return decode(*args)

    runner.launch = wait
    return may_go_on


def test_tasks_and_threads_get_what_a_plain_call_gets(
    make_llm: Callable[..., LLM], toy: Any
) -> None:
    llm = make_llm(drafts="mixed")
    want = [tuple(toy.generate(prompt, 16)) for prompt in PROMPTS]
    from_threads: dict[int, Any] = {}

    async def read(engine: AsyncLLM, prompt: list[int]) -> tuple[int, ...]:
        pieces = [piece async for piece in engine.stream(prompt, GREEDY)]
        assert pieces[-1].finish_reason == "length" and pieces[-1].output is not None
        assert "".join(piece.text for piece in pieces) == pieces[-1].output.outputs[0].text
        return tuple(token for piece in pieces for token in piece.token_ids)

    async def run() -> list[tuple[int, ...]]:
        async with AsyncLLM(llm) as engine:

            def submit(index: int) -> None:
                future = engine.submit(PROMPTS[index], GREEDY)
                from_threads[index] = future.result(60).outputs[0].token_ids

            threads = [threading.Thread(target=submit, args=(i,)) for i in range(len(PROMPTS))]
            for thread in threads:
                thread.start()
            found = await asyncio.gather(*(read(engine, prompt) for prompt in PROMPTS))
            await asyncio.to_thread(lambda: [thread.join() for thread in threads])
            assert engine.num_open == 0 and is_idle(llm)
            return list(found)

    assert asyncio.run(run()) == want
    assert [from_threads[i] for i in range(len(PROMPTS))] == want


def test_abort_cancelled_readers_and_names(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_reqs=2)
    long = SamplingParams(temperature=0, max_tokens=80)
    may_go_on = hold_decode(llm, 1)

    async def run() -> None:
        async with AsyncLLM(llm) as engine:
            pieces = engine.stream([20, 30], long, request_id="mine")
            first = await anext(pieces)
            assert first.finish_reason is None and engine.num_open == 1
            with pytest.raises(RequestError, match="mine"):
                engine.stream([20], long, request_id="mine")
            assert engine.abort("mine") and not engine.abort("nobody")
            task = asyncio.create_task(engine.generate([20, 30], long))
            await asyncio.sleep(0)
            task.cancel()
            may_go_on.set()
            last = [piece async for piece in pieces][-1]
            assert last.finish_reason == "abort"
            with pytest.raises(asyncio.CancelledError):
                await task
            output = await engine.generate([20, 40], GREEDY, request_id="mine")
            assert output.request_id == "mine" and len(output.outputs[0].token_ids) == 16
            while engine.num_open:
                await asyncio.sleep(0.01)
            assert is_idle(llm)

    asyncio.run(run())


def test_an_error_of_the_engine_reaches_every_reader_and_later_callers(
    make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm()
    runner: Any = llm.stream_table.loop.runner
    decode, calls = runner.launch, []

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise OSError("the device is gone")
        return decode(*args)

    runner.launch = fail

    async def run() -> None:
        engine = AsyncLLM(llm)
        tasks = [asyncio.create_task(engine.generate(prompt, GREEDY)) for prompt in PROMPTS[:3]]
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, OSError) and "gone" in str(found)
        with pytest.raises(OSError, match="gone"):
            engine.submit([20], GREEDY)
        await engine.aclose()

    asyncio.run(run())


def test_the_end_aborts_what_is_open(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_reqs=1)
    may_go_on = hold_decode(llm, 2)
    engine = AsyncLLM(llm)
    futures = [
        engine.submit(prompt, SamplingParams(temperature=0, max_tokens=60)) for prompt in PROMPTS
    ]
    closing = threading.Thread(target=engine.close)
    closing.start()
    with pytest.raises(RuntimeError, match="closed"):
        while True:
            futures.append(engine.submit([20], GREEDY))
    may_go_on.set()
    closing.join(60)
    engine.close()
    reasons = {future.result(10).outputs[0].finish_reason for future in futures}
    assert reasons == {"abort"}
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([20], GREEDY)


def test_a_lower_priority_number_goes_first(make_llm: Callable[..., LLM]) -> None:
    """With one slot, requests that wait end in the order of their priorities."""
    order: list[str] = []
    llm = make_llm(max_num_reqs=1)
    runner: Any = llm.stream_table.loop.runner
    decode, all_queued = runner.launch, threading.Event()

    def wait(*args: Any) -> Any:
        assert all_queued.wait(60)
        return decode(*args)

    runner.launch = wait
    engine = AsyncLLM(llm)
    futures = []
    for name, priority in (("first", 0), ("b", 5), ("c", 5), ("a", -1)):
        future = engine.submit([20, 30], GREEDY, request_id=name, priority=priority)
        future.add_done_callback(lambda done, name=name: order.append(name))  # type: ignore[misc]
        futures.append(future)
        while name == "first" and not runner.slots:
            pass  # until it holds the slot
    all_queued.set()
    for future in futures:
        future.result(60)
    engine.close()
    assert order == ["first", "a", "b", "c"]
