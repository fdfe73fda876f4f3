"""LLM.close: memory is given back, open streams end, and a closed engine says so."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.graphs.state import Capacity

GREEDY = SamplingParams(temperature=0, max_tokens=20)
CLOSED = "^this LLM is closed; make a new one$"


@pytest.fixture
def make_llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    return lambda **options: LLM.from_runner(make_runner(**options), tokenizer)


def test_later_calls_raise_one_error(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    unstarted = llm.stream("never asked for", GREEDY)
    llm.close()
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("x", GREEDY),
        lambda: llm.generate([]),
        lambda: llm.generate([[20, 999]]),
        lambda: llm.stream("x", GREEDY),
        lambda: llm.abort("0"),
        lambda: next(unstarted),
        lambda: llm.__enter__(),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=CLOSED):
            call()
    assert not llm.stream_table.open_ids


def test_closing_again_changes_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.generate("x", GREEDY)
    before = llm.report()
    llm.close()
    llm.close()
    assert llm.report() == before and llm.stats.num_emitted == 20
    assert llm.stats.num_compilations_after_ready == llm.stats.num_captured_after_ready == 0


def test_open_streams_end_with_abort(make_llm: Callable[..., LLM], toy: Any) -> None:
    """Running, waiting and finished requests at once; pieces not yet taken are not lost."""
    llm = make_llm(max_num_reqs=1, drafts=0)
    runner: Any = llm.stream_table.loop.runner
    first = llm.stream([[20, 21], [22, 23]], GREEDY)
    second = llm.stream([[30, 31]], GREEDY)
    pieces = [next(first), next(first)]
    params = SamplingParams(temperature=0, max_tokens=1)
    (done,) = llm._build_streams([[40, 41]], params)
    llm.stream_table.open([done])
    llm.close()
    assert not runner.slots and not llm.scheduler.has_unfinished
    pieces += first
    ends = {piece.index: piece for piece in pieces if piece.finish_reason is not None}
    assert {index: piece.finish_reason for index, piece in ends.items()} == {0: "abort", 1: "abort"}
    ids = [i for piece in pieces if piece.index == 0 for i in piece.token_ids]
    assert ids == toy.generate([20, 21], 20)[: len(ids)] and len(ids) >= 2
    output = ends[0].output
    assert output is not None and output.outputs[0].token_ids == tuple(ids)
    with pytest.raises(RuntimeError, match=CLOSED):
        next(second)
    assert done.requests[0].finish_reason == "abort"


def test_context_manager(make_llm: Callable[..., LLM]) -> None:
    with make_llm() as llm:
        (output,) = llm.generate("x", GREEDY)
        assert output.finished
    with pytest.raises(RuntimeError, match=CLOSED):
        llm.generate("x", GREEDY)
    with pytest.raises(ZeroDivisionError), make_llm() as llm:
        stream = llm.stream("x", GREEDY)
        next(stream)
        raise ZeroDivisionError
    assert [piece.finish_reason for piece in stream][-1] == "abort"


def test_a_device_that_fails_is_let_go_all_the_same(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    stream = llm.stream("x", GREEDY)
    next(stream)
    monkeypatch.setattr(llm.stream_table.loop.runner, "stop", lambda slot: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match=CLOSED):
        llm.generate("x", GREEDY)


def test_weights_state_and_graphs_are_freed(
    make_model: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    """Nothing that outlives the LLM's close holds the runner or one of its tensors."""
    model = make_model(vocab_size=tokenizer.vocab_size, hc_sinkhorn_iters=2)
    options = RunnerOptions(
        capacity=Capacity(3, 17, 8, 64, 2),
        grid=build_grid(2, 2, (2,)),
        prefill_chunk_sizes=(8,),
        dtype=torch.float64,
        device="cpu",
        compile_options=CompileOptions("none", None, 1),
        draft_temperatures=(1.0, 1.0),
        show_progress=False,
    )
    runner = make_runner(model, options, PhaseClock())
    gone = [
        weakref.ref(runner),
        weakref.ref(runner.buffers.output.logits),
        *(weakref.ref(tensor) for _, tensor in runner.model.state.tensors()),
        weakref.ref(model),
        *(weakref.ref(parameter) for parameter in model.parameters()),
    ]
    num_held = 2 + sum(1 for _ in runner.model.state.tensors())
    llm = LLM.from_runner(runner, tokenizer)
    del runner, model
    stream = llm.stream("some text", GREEDY)
    next(stream)
    gc.collect()
    assert all(ref() is not None for ref in gone[:num_held])
    llm.close()
    assert [ref() for ref in gone if ref() is not None] == []
    assert [piece.finish_reason for piece in stream] == ["abort"]
    assert llm.stats.num_decode_steps > 0 and "decode steps" in llm.report()
