"""Steps of real dumps, run again on a real runner (float64, regions not compiled).

What a replay emits is compared with what the engine had emitted; planted faults must show.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.engine import build
from decodegrid.engine.llm import LLM
from decodegrid.engine.replay_dump import ChunkFacts, DecodeFacts, Dump, load_dump
from decodegrid.engine.replay_file import DumpError
from decodegrid.engine.replay_record import engine_facts
from decodegrid.engine.replay_run import StepReplay, compare
from decodegrid.engine.request_output import RequestOutput
from decodegrid.engine.runner import Runner
from decodegrid.engine.runner_watch import runner_probes
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.step_watch import StepFaultError, StepWatch, WatchSettings
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.regions import build_regions
from decodegrid.graphs.regions_layer import RegionSpec

TEMPERATURES = (1.0, 1.0)
PROMPTS = [[20, 30, 40], list(range(11, 36)), [9, 9, 9, 9, 9, 9, 9, 9]]


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., LLM]:
    """start(runner, **settings): an LLM that writes dumps to tmp_path."""

    def make(
        runner: Runner,
        token_ids: bool = True,
        check_logits: bool = False,
        async_scheduling: bool = False,
    ) -> LLM:
        settings = WatchSettings(tmp_path, 4, 64, token_ids, 0.0)
        probes = runner_probes(runner, check_logits=check_logits)
        watch = StepWatch(engine_facts(runner, None), settings, probes)
        return LLM.from_runner(runner, tokenizer, watch=watch, async_scheduling=async_scheduling)

    return make


def params(rich: bool = False) -> list[SamplingParams]:
    if rich:
        first = SamplingParams(
            temperature=0, max_tokens=14, frequency_penalty=1.5, logit_bias={30: 4.0}, logprobs=2
        )
        return [first, *params()[1:]]
    return [
        SamplingParams(temperature=0, max_tokens=14),
        SamplingParams(temperature=1.0, seed=5, top_k=40, top_p=0.9, max_tokens=9),
        SamplingParams(temperature=0.7, seed=6, max_tokens=12, ignore_eos=True),
    ]


@pytest.fixture(scope="module")
def new_runner(
    make_eager_runner: Callable[..., Runner],
    make_model: Callable[..., DraftModel],
    tokenizer: Tokenizer,
) -> Callable[..., Runner]:
    model = make_model(vocab_size=tokenizer.vocab_size, hc_sinkhorn_iters=2)
    return lambda: make_eager_runner(model, rich=True)


@pytest.fixture(scope="module")
def runner(new_runner: Callable[[], Runner]) -> Runner:
    """One for all tests: what a replay needs of state it makes anew."""
    return new_runner()


@pytest.fixture
def crash(
    start: Callable[..., LLM], runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Dump]:
    """crash(name, count): the dump of a run whose count-th call of that runner method fails."""

    def run(name: str, count: int, rich: bool = False, **options: Any) -> Dump:
        method, calls = getattr(runner, name), []

        def call(*args: Any, **given: Any) -> Any:
            calls.append(name)
            if len(calls) == count:
                raise OSError("planted")
            return method(*args, **given)

        with monkeypatch.context() as patch:
            patch.setattr(runner, name, call)
            with pytest.raises(OSError, match="planted") as caught:
                start(runner, **options).generate(PROMPTS, params(rich))
        (path,) = tmp_path.glob("*.dump")
        (note,) = caught.value.__notes__
        assert f"decodegrid replay {path}" in note
        return load_dump(path)

    return run


@pytest.fixture
def planted_nan() -> Callable[[torch.Tensor, int], AbstractContextManager[None]]:
    """planted_nan(tensor, place): NaN at a place of the flat tensor, for a while."""

    @contextmanager
    def plant(tensor: torch.Tensor, place: int) -> Iterator[None]:
        flat = tensor.view(-1)
        saved = float(flat[place])
        flat[place] = torch.nan
        try:
            yield
        finally:
            flat[place] = saved

    return plant


def fault(start: Callable[..., LLM], runner: Runner, tmp_path: Path, **options: Any) -> Dump:
    """Run the prompts into a fault; the dump of it."""
    with pytest.raises(StepFaultError) as caught:
        start(runner, **options).generate(PROMPTS, params())
    (path,) = tmp_path.glob("*.dump")
    assert str(path) in str(caught.value)
    return load_dump(path)


def replay(runner: Runner, dump: Dump, step: int | None = None) -> StepReplay:
    return StepReplay(runner, dump, dump.find_step(step), TEMPERATURES)


def decode_steps(dump: Dump) -> list[DecodeFacts]:
    return [step for step in dump.steps if isinstance(step, DecodeFacts)]


def check_emits_again(runner: Runner, dump: Dump) -> None:
    """Every step that ended emits what it emitted, from the state that the dump tells."""
    num_verified = 0
    for step in decode_steps(dump):
        if step.seconds is None:
            continue
        again = replay(runner, dump, step.index)
        assert not again.notes
        view = again.run("graph")
        assert view.emitted == [list(row.token_ids or ()) for row in step.rows]
        assert view.query_lens == [1 + (row.num_verified or 0) for row in step.rows]
        num_verified += sum(view.query_lens) - len(step.rows)
    assert num_verified > 10, "no draft was verified: nothing is shown"


def check_goes_on(runner: Runner, dump: Dump, want: list[RequestOutput]) -> None:
    """The step that failed emits, in both forms, what a run without the failure emits there."""
    last = dump.find_step(None)
    assert isinstance(last, DecodeFacts) and last.seconds is None and last.is_exact
    again = replay(runner, dump)
    view = again.run("graph")
    assert compare(view, again.run("eager"), again.tolerance).is_equal
    for row, emitted in zip(last.rows, view.emitted, strict=True):
        known = list(dump.requests[row.request].token_ids or ())
        place = next(i for i, prompt in enumerate(PROMPTS) if known[: len(prompt)] == prompt)
        whole = PROMPTS[place] + list(want[place].outputs[0].token_ids)
        assert whole[: row.seq_len] == known[: row.seq_len]
        assert emitted[: len(whole) - row.seq_len] == whole[row.seq_len :][: len(emitted)]


def test_every_step_of_a_dump_emits_again_what_it_emitted(
    crash: Callable[..., Dump], start: Callable[..., LLM], runner: Runner
) -> None:
    dump = crash("launch", 12)
    assert dump.reason == "crash" and "OSError: planted" in dump.message
    assert [step.seconds is None for step in decode_steps(dump)] == [False] * 11 + [True]
    assert dump.step == decode_steps(dump)[-1].index
    check_emits_again(runner, dump)
    check_goes_on(runner, dump, start(runner).generate(PROMPTS, params()))


def test_a_rich_step_is_run_again(
    crash: Callable[..., Dump], start: Callable[..., LLM], runner: Runner
) -> None:
    dump = crash("launch_forward", 9, rich=True)
    assert {step.variant for step in decode_steps(dump)} == {"rich"}
    check_emits_again(runner, dump)
    check_goes_on(runner, dump, start(runner).generate(PROMPTS, params(rich=True)))


def test_with_a_step_in_flight_the_one_that_failed_is_told_apart(
    crash: Callable[..., Dump], start: Callable[..., LLM], runner: Runner
) -> None:
    """What the launch was refused for stands behind a step whose results nobody had seen."""
    dump = crash("launch", 12, async_scheduling=True)
    steps = decode_steps(dump)
    assert [step.seconds is None for step in steps] == [False] * 10 + [True, True]
    assert dump.step == steps[-1].index and steps[-2].is_exact and not steps[-1].is_exact
    assert "an earlier step was on its way" in "".join(replay(runner, dump).notes)
    check_emits_again(runner, dump)
    want = start(runner).generate(PROMPTS, params())
    check_goes_on(runner, dump.model_copy(update={"step": steps[-2].index}), want)


def test_a_collection_that_fails_is_of_the_oldest_step(
    crash: Callable[..., Dump], start: Callable[..., LLM], runner: Runner
) -> None:
    dump = crash("collect", 13, async_scheduling=True)
    steps = decode_steps(dump)
    assert [step.seconds is None for step in steps] == [False] * 12 + [True, True]
    assert dump.step == steps[-2].index
    check_goes_on(runner, dump, start(runner).generate(PROMPTS, params()))


def test_a_chunk_is_run_again(crash: Callable[..., Dump], runner: Runner) -> None:
    dump = crash("prefill", 3)
    step = dump.find_step(None)
    assert isinstance(step, ChunkFacts) and (step.start, step.num_tokens) == (16, 8)
    again = replay(runner, dump)
    graph, eager = again.run("graph"), again.run("eager")
    assert graph.values.shape[0] == 8 and graph.problem is None
    assert compare(graph, eager, 1e-9).is_equal
    assert graph.values.abs().max() > 0.01


def test_without_token_ids_a_dump_tells_none(crash: Callable[..., Dump], runner: Runner) -> None:
    dump = crash("launch", 9, token_ids=False)
    assert not dump.has_token_ids
    assert all(request.token_ids is None for request in dump.requests)
    assert all(row.token_ids is None for step in decode_steps(dump) for row in step.rows)
    assert all(row.drafts is None for step in decode_steps(dump) for row in step.rows)
    step = next(step for step in decode_steps(dump) if any(not row.fresh for row in step.rows))
    again = replay(runner, dump, step.index)
    assert "not in the dump" in again.notes[0] and "drafts: made up" in again.notes[1]
    graph, eager = again.run("graph"), again.run("eager")
    # The dumped confidences share out the query tokens as they did.
    assert graph.query_lens == [1 + (row.num_verified or 0) for row in step.rows]
    assert compare(graph, eager, 1e-9).is_equal
    assert again.run("graph").emitted == graph.emitted, "made-up ids change from run to run"


def test_a_nan_weight_is_found_and_shows_in_both_forms(
    start: Callable[..., LLM], runner: Runner, tmp_path: Path, planted_nan: Callable[..., Any]
) -> None:
    with planted_nan(runner.model.weights.layers[2].attention.q_norm, 3):
        dump = fault(start, runner, tmp_path)
        assert dump.reason == "fault" and "has confidence nan" in dump.message
        assert dump.step == decode_steps(dump)[0].index, "the first step was bad"
        again = replay(runner, dump)
        graph, eager = again.run("graph"), again.run("eager")
        assert "logits are not finite for 1 of 1 tokens (rows 0)" in str(graph.problem)
        assert graph.problem == eager.problem
        assert compare(graph, eager, 1e-9).max_difference == 0.0
    assert replay(runner, dump).run("graph").problem is None, "the NaN stayed in the state"


def test_a_nan_that_only_logits_have_is_found_where_they_are_looked_at(
    start: Callable[..., LLM], runner: Runner, tmp_path: Path, planted_nan: Callable[..., Any]
) -> None:
    """One row of the head: the drafter's confidences know nothing of it."""
    head = runner.model.weights.head
    assert isinstance(head, torch.Tensor)
    with planted_nan(head, 70 * head.shape[1] + 5):
        start(runner).generate(PROMPTS, params())
        assert not list(tmp_path.glob("*.dump")), "what a step returns tells of it after all"
        dump = fault(start, runner, tmp_path, check_logits=True)
    assert "a logit is not finite" in dump.message


@pytest.mark.parametrize("fault_value", [1e-6, float("nan")])
def test_a_fault_of_the_captured_form_alone_shows_as_a_difference(
    crash: Callable[..., Dump], new_runner: Callable[[], Runner],
    monkeypatch: pytest.MonkeyPatch, fault_value: float,
) -> None:  # fmt: skip
    dump = crash("launch", 8)

    def spoil(*args: Any, **options: Any) -> dict[str, RegionSpec]:
        specs = build_regions(*args, **options)
        head = specs["head"].function

        def wrong(
            stream: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor,
            logits_out: torch.Tensor,
        ) -> None:  # fmt: skip
            head(stream, pre, norm, weight, logits_out)
            logits_out[0, 17] += fault_value

        return {**specs, "head": RegionSpec(wrong, specs["head"].dynamic)}

    monkeypatch.setattr(build, "build_regions", spoil)
    again = replay(new_runner(), dump)
    graph, eager = again.run("graph"), again.run("eager")
    result = compare(graph, eager, again.tolerance)
    assert not result.is_equal and eager.problem is None
    if fault_value == fault_value:
        assert result.max_difference == pytest.approx(1e-6, rel=1e-6)
    else:
        assert result.max_difference == float("inf")
        assert "not finite" in str(graph.problem)


def test_a_step_that_does_not_fit_is_refused(crash: Callable[..., Dump], runner: Runner) -> None:
    dump = crash("launch", 12)
    step = decode_steps(dump)[-1]
    row = step.rows[0]
    request = dump.requests[row.request]

    def with_row(**changes: Any) -> Dump:
        rows = (row.model_copy(update=changes), *step.rows[1:])
        return dump.model_copy(update={"steps": (step.model_copy(update={"rows": rows}),)})

    def with_request(**changes: Any) -> Dump:
        requests = list(dump.requests)
        requests[row.request] = request.model_copy(update=changes)
        return dump.model_copy(update={"requests": tuple(requests)})

    def with_sizes(**changes: Any) -> Dump:
        return dump.model_copy(update={"sizes": dump.sizes.model_copy(update=changes)})

    cases = [
        (with_row(slot=9), "the dump has slot 9; scheduler.max_num_reqs 3"),
        (with_row(slot=step.rows[1].slot), "one slot twice"),
        (with_row(seq_len=900), "length 900; the blocks hold"),
        (with_request(max_seq_len=65), "length 65; scheduler.max_model_len 64"),
        (with_request(block_ids=(99,) * row.num_blocks), "block twice"),
        (with_request(block_ids=tuple(range(60, 60 + row.num_blocks))), "last block of the pool"),
        (with_request(token_ids=(5000,)), "token id 5000; the last id is"),
        (with_sizes(num_draft_tokens=5), "5 drafts, this deployment's have speculation"),
        (with_sizes(block_size=64), "64 tokens, this deployment's have cache.block_size = 8"),
    ]
    for changed, message in cases:
        with pytest.raises(DumpError, match=message):
            replay(runner, changed)
    with pytest.raises(DumpError, match=r"step 777 is not in the dump; its steps are 0, 1"):
        dump.find_step(777)
