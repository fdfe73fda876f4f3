"""The watch around the loop: hangs, results that cannot be right, failures; on the toy runner."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decodegrid.capture.grid import GraphKey
from decodegrid.engine import step_watch
from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.llm import LLM
from decodegrid.engine.replay_dump import ChunkFacts, DecodeFacts, load_dump
from decodegrid.engine.replay_record import engine_facts
from decodegrid.engine.runner_protocol import StepLogprobs, StepResult
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.step_ring import StepRing
from decodegrid.engine.step_watch import StepFaultError, StepWatch, WatchSettings, find_fault
from decodegrid.engine.tokenizer import Tokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture
def start(
    tmp_path: Path, tokenizer: Tokenizer, make_runner: Callable[..., Any]
) -> Callable[..., LLM]:
    """start(limit_s=0, num_steps=8, token_ids=False, **runner options)"""

    def make(
        limit_s: float = 0.0, num_steps: int = 8, token_ids: bool = False, **options: Any
    ) -> LLM:
        runner = make_runner(drafts="mixed", **options)
        settings = WatchSettings(tmp_path / "dumps", 3, num_steps, token_ids, limit_s)
        watch = StepWatch(engine_facts(runner, None), settings)
        return LLM.from_runner(runner, tokenizer, watch=watch)

    return make


def runner_of(llm: LLM) -> Any:
    return llm.stream_table.loop.runner


def only_dump(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "dumps").glob("*.dump")
    return path


class Clock:
    """Of a watch; stands still until it is moved, however slow the machine."""

    def __init__(self) -> None:
        self.seconds = 5.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(step_watch, "perf_counter", made)
    return made


def test_a_hang_is_told_while_it_lasts(
    start: Callable[..., LLM], toy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    clock: Clock,
) -> None:  # fmt: skip
    """The log names a dump about the step that hangs; when the step ends all goes on."""
    llm = start(limit_s=0.2)
    runner, may_end = runner_of(llm), threading.Event()
    collect, calls = runner.collect, []

    def hang(step: Any) -> Any:
        calls.append(step)
        if len(calls) == 4:
            clock.seconds += 0.3
            assert may_end.wait(60)
        return collect(step)

    runner.collect = hang
    engine = AsyncLLM(llm)
    with caplog.at_level(logging.ERROR, "decodegrid.watch"):
        future = engine.submit([20, 30, 40], PARAMS)
        end = time.monotonic() + 60
        while not caplog.records:
            assert time.monotonic() < end, "nobody noticed"
            time.sleep(0.01)
        may_end.set()
        assert future.result(60).outputs[0].token_ids == tuple(toy.generate([20, 30, 40], 24))
        engine.close()
    path = only_dump(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(path) in line and "no step has ended for 0.2 s" in line
    dump = load_dump(path)
    assert dump.reason == "stall"
    step = dump.find_step(None)
    assert isinstance(step, DecodeFacts) and step.seconds is None
    assert [item.seconds is None for item in dump.steps] == [False] * 4 + [True]


def test_an_idle_engine_does_not_hang(
    start: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    llm = start(limit_s=0.04)
    llm.generate([[20, 30]], PARAMS)
    clock.seconds += 100
    time.sleep(0.3)  # the watch looks every 10 ms
    assert not caplog.records and not list((tmp_path / "dumps").glob("*.dump"))


def test_the_watching_thread_ends_with_the_engine(start: Callable[..., LLM]) -> None:
    def watching() -> set[threading.Thread]:
        return {found for found in threading.enumerate() if found.name == "decodegrid-watch"}

    before = watching()  # those of other tests may end at any time
    llm = start(limit_s=5.0)
    (thread,) = watching() - before
    llm.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_fault_ends_the_call_and_frees_everything(
    start: Callable[..., LLM], tmp_path: Path
) -> None:
    llm = start()
    runner = runner_of(llm)
    collect, calls = runner.collect, []

    def spoil(step: Any) -> StepResult:
        calls.append(step)
        result = collect(step)
        if len(calls) == 5:
            result.confidence[-1, 2] = np.nan
        return result

    runner.collect = spoil
    free = llm.scheduler.blocks.num_free
    with pytest.raises(StepFaultError) as caught:
        llm.generate([[20, 30, 40], [21, 31]], PARAMS)
    path = only_dump(tmp_path)
    assert "row 1 has confidence nan for draft 2" in str(caught.value)
    assert f"decodegrid replay {path}" in str(caught.value)
    assert llm.scheduler.blocks.num_free == free
    dump = load_dump(path)
    step = dump.find_step(None)
    assert isinstance(step, DecodeFacts)
    new = step.rows[1].new_confidence
    assert new is not None and new[2] != new[2], "the NaN itself is in the dump"
    runner.collect = collect
    assert llm.generate([[20, 30, 40]], PARAMS)[0].finished, "the engine can go on"


def test_no_token_id_is_in_a_dump_unless_asked_for(
    start: Callable[..., LLM], tmp_path: Path
) -> None:
    """The prompt's ids are large here, and no other number in the dump is as they are."""
    found = {}
    for token_ids in (False, True):
        llm = start(token_ids=token_ids)
        runner = runner_of(llm)
        runner.launch = None
        prompt = [201, 202, 203, 204, 205, 206, 207]
        with pytest.raises(TypeError):
            llm.generate([prompt], PARAMS)
        path = only_dump(tmp_path)
        found[token_ids] = "201,202,203" in path.read_text().replace(" ", "")
        path.unlink()
    assert found == {False: False, True: True}


def test_a_dump_that_cannot_be_written_does_not_hide_the_failure(
    start: Callable[..., LLM], tmp_path: Path
) -> None:
    (tmp_path / "dumps").write_text("in the way")
    llm = start()
    runner_of(llm).launch = None
    with pytest.raises(TypeError, match="not callable") as caught:
        llm.generate([[20, 30, 40]], PARAMS)
    (note,) = caught.value.__notes__
    assert "no dump was written: DumpError: cannot write the dump" in note


def test_what_a_user_stops_leaves_no_dump(start: Callable[..., LLM], tmp_path: Path) -> None:
    llm = start()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    runner_of(llm).launch = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[20, 30, 40]], PARAMS)
    assert not (tmp_path / "dumps").exists()


def test_a_ring_is_bounded_and_a_long_prompt_does_not_push_decode_steps_out(
    start: Callable[..., LLM], tmp_path: Path
) -> None:
    llm = start(num_steps=3, prefill_chunk_sizes=(2,))
    runner = runner_of(llm)
    launch = runner.launch

    def fail(*args: Any) -> Any:
        if sum(entry[0] == "prefill" for entry in runner.log) > 15:
            raise OSError("planted")
        return launch(*args)

    runner.launch = fail
    with pytest.raises(OSError, match="planted"):
        llm.generate([[20, 30], list(range(20, 60))], PARAMS)
    dump = load_dump(only_dump(tmp_path))
    kinds = [isinstance(step, ChunkFacts) for step in dump.steps]
    assert kinds.count(True) == 3 and kinds.count(False) == 3
    assert [step.index for step in dump.steps] == sorted(step.index for step in dump.steps)
    with pytest.raises(ValueError, match="a ring of 1 steps is too short"):
        StepRing(1)


@pytest.fixture
def result() -> StepResult:
    """A sound one: two rows, two drafts."""
    return StepResult(
        token_ids=np.array([[5, 6, -99], [7, -99, 1000]]),
        num_emitted=np.array([2, 1]),
        num_verified=np.array([2, 0]),
        confidence=np.array([[0.0, 1.0], [0.5, 0.5]], dtype=np.float32),
        num_query_tokens=4,
        key=GraphKey(2, 4),
        drafts=np.zeros((2, 2), dtype=np.int64),
    )


def test_a_sound_result_has_no_fault(result: StepResult) -> None:
    assert find_fault(result, 10) is None
    no_drafts = replace(
        result, token_ids=np.array([[5], [6]]), num_emitted=np.array([1, 1]),
        confidence=np.zeros((2, 0), dtype=np.float32),
    )  # fmt: skip
    assert find_fault(no_drafts, 10) is None


@pytest.mark.parametrize(
    ("field", "place", "value", "message"),
    [
        ("num_emitted", (1,), 0, "row 1 emitted 0 tokens; allowed are 1..3"),
        ("num_emitted", (0,), 4, "row 0 emitted 4 tokens"),
        ("confidence", (1, 0), np.nan, "row 1 has confidence nan for draft 0"),
        ("confidence", (0, 1), 1.001, "row 0 has confidence 1.001"),
        ("confidence", (0, 0), -0.5, "row 0 has confidence -0.5"),
        ("token_ids", (0, 1), 10, "row 0 emitted token id 10; allowed are 0..9"),
        ("token_ids", (1, 0), -1, "row 1 emitted token id -1"),
    ],
)
def test_each_fault_is_found(
    result: StepResult, field: str, place: tuple[int, ...], value: float, message: str
) -> None:
    getattr(result, field)[place] = value
    assert str(find_fault(result, 10)).startswith(message)


@pytest.mark.parametrize("value", [np.nan, 0.1, np.inf])
def test_log_probabilities_of_emitted_tokens_are_looked_at(
    result: StepResult, value: float
) -> None:
    chosen = np.full((2, 3), -1.5, dtype=np.float32)
    ids, top = np.zeros((2, 3, 20), dtype=np.int64), np.zeros((2, 3, 20), dtype=np.float32)
    chosen[1, 1] = np.nan
    told = replace(result, logprobs=StepLogprobs(chosen, ids, top))
    assert find_fault(told, 10) is None, "a token that is not emitted counts"
    chosen[0, 1] = value
    assert str(find_fault(told, 10)).startswith("row 0 has log-probability")
