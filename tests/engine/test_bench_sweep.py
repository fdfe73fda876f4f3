"""The order and the seeds of a comparison's passes, and what its lines say."""

from collections.abc import Callable
from typing import Any

import pytest

from decodegrid.engine import bench_sweep
from decodegrid.engine.bench_drive import ClosedLoop, OpenLoop
from decodegrid.engine.bench_policies import parse_policies
from decodegrid.engine.bench_prompts import PromptSource, make_prompts
from decodegrid.engine.bench_report import (
    assumed_points,
    count_table,
    equality_lines,
    make_lines,
    method_lines,
    pareto_points,
    pareto_table,
    speed_table,
    step_table,
)
from decodegrid.engine.bench_sweep import SweepPlan, run_sweep
from decodegrid.engine.llm import LLM
from decodegrid.engine.tokenizer import Tokenizer


def plan_of(**changes: Any) -> SweepPlan:
    prompts = tuple(
        tuple(
            tuple(tuple(range(20 + i, 24 + i + repeat + where)) for i in range(4))
            for repeat in range(3)
        )
        for where in range(2)
    )
    values: dict[str, Any] = {
        "traffics": (ClosedLoop(1), ClosedLoop(3)),
        "policies": parse_policies(["none", "k2", "all"], 5),
        "contexts": (None, 7),
        "prompts": prompts,
        "warm_up": 1,
        "repeats": 2,
        "seed": 50,
        "max_tokens": 9,
        "temperature": 0.7,
        "ignore_eos": True,
    }
    return SweepPlan(**{**values, **changes})


@pytest.fixture
def llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> LLM:
    return LLM.from_runner(make_runner(drafts="mixed"), tokenizer, async_scheduling=True)


def test_every_pass_in_its_turn(llm: LLM, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts, then repeats; within one the settings, every second time backwards."""
    order: list[tuple[str, int, int]] = []
    told: list[str] = []
    run_pass = bench_sweep.run_pass

    def spy(llm: LLM, requests: Any, policy: Any, traffic: Any, **options: Any) -> Any:
        params = requests[0].params
        order.append((f"{traffic} {params.speculation}", params.seed, len(requests[0].prompt)))
        return run_pass(llm, requests, policy, traffic, **options)

    monkeypatch.setattr(bench_sweep, "run_pass", spy)
    plan = plan_of()
    result = run_sweep(llm, plan, told.append)
    names = [f"batch {b} {s}" for b in (1, 3) for s in ("auto", "2", "auto")]
    wanted = [
        (name, 50 + 4 * repeat, 4 + repeat + where)
        for where in range(2)
        for repeat in range(3)
        for name in (names if repeat % 2 == 0 else reversed(names))
    ]
    assert order == wanted and len(told) == len(wanted)
    assert told[0].startswith("warm-up: batch 1, none: ")
    assert told[-1].startswith("repeat 2/2: context 7, batch 3, all: ")
    assert result.num_uncounted == 2 * 6
    assert all(len(passes) == 2 for passes in result.passes.values())
    for setting, passes in result.passes.items():
        where = plan.contexts.index(setting.context_len)
        for repeat, found in enumerate(passes, start=1):
            prompts = plan.prompts[where][repeat]
            assert found.outputs == tuple(
                tuple(toy.generate(prompt, 9, 0.7, plan.seed_of(repeat) + i))
                for i, prompt in enumerate(prompts)
            )


def test_lines_and_tables(llm: LLM) -> None:
    result = run_sweep(llm, plan_of(), lambda line: None)
    lines = make_lines(result)
    assert [line.names for line in lines[:3]] == [
        ["as is", "1", "none"], ["as is", "1", "k2"], ["as is", "1", "all"],
    ]  # fmt: skip
    assert all(line.num_same == line.num_compared == 8 for line in lines)
    assert [line.over_first is None for line in lines] == [True, False, False] * 4
    for table in (speed_table(lines), step_table(lines), count_table(lines)):
        assert len(table.splitlines()) == 13
    points = pareto_points(lines)
    assert len(points) == 12
    assumed = assumed_points(lines, 5, 0.75)
    assert [(point.batch, point.context_len) for point in assumed] == [
        (1, None), (3, None), (1, 7), (3, 7),
    ]  # fmt: skip
    for point, line in zip(assumed, [lines[i] for i in (2, 5, 8, 11)], strict=True):
        assert point.factor == 4.75 and point.steps_per_s == line.summary.steps_per_s
    table = pareto_table(points, assumed).splitlines()
    assert sum("ASSUMED x4.75" in row and "not measured" in row for row in table) == 4
    assert sum(row.rstrip().endswith("*") for row in table) >= 2
    text = "\n".join(method_lines(plan_of(), result, "four prompts"))
    for words in ("1 device", "prefill charged", "12 passes that warmed up", "prefix cache: off"):
        assert words in text


def test_outputs_that_differ_are_counted(llm: LLM) -> None:
    result = run_sweep(llm, plan_of(), lambda line: None)
    last = list(result.passes)[-1]
    found = result.passes[last][1]
    object.__setattr__(found.requests[2], "token_ids", (1, 2, 3))
    lines = make_lines(result)
    assert [line.num_same for line in lines] == [8] * 11 + [7]
    said = list(equality_lines(lines, True))
    assert said[0].startswith("output equality: 95 of 96 outputs (98.96%)")
    assert said[1:] == ["  context 7, batch 3, all: 7 of 8"]
    assert "not compared" in next(equality_lines(lines, False))


def test_an_open_loop_has_no_pareto_point(llm: LLM) -> None:
    plan = plan_of(traffics=(OpenLoop(500.0),), contexts=(None,), warm_up=0, repeats=2)
    lines = make_lines(run_sweep(llm, plan, lambda line: None))
    assert pareto_points(lines) == [] and assumed_points(lines, 5, 0.75) == []
    assert all(line.num_same == line.num_compared for line in lines)


def test_built_in_prompts(tokenizer: Tokenizer) -> None:
    for kind in ("mixed", "structured", "stories"):
        source = PromptSource(kind)  # type: ignore[arg-type]
        texts = source.texts(12, 3)
        assert texts == source.texts(12, 3) != source.texts(12, 4) and len(set(texts)) > 6
        assert source.describe()
    mixed = PromptSource("mixed").texts(4, 0)
    assert ["story" in text for text in mixed] == [False, True, False, True]


@pytest.mark.parametrize("context_len", [2, 9, 300, 1000])
def test_prompts_of_a_wanted_length(tokenizer: Tokenizer, context_len: int) -> None:
    source = PromptSource("mixed")
    plain = make_prompts(source, tokenizer, 5, 1, None)
    found = make_prompts(source, tokenizer, 5, 1, context_len)
    assert found == make_prompts(source, tokenizer, 5, 1, context_len)
    assert len(set(found)) == 5 or context_len < 20
    for short, long in zip(plain, found, strict=True):
        assert len(long) == context_len and long[0] == short[0] == tokenizer.bos_token_id
        # The chat stands at the end, as far as there is room.
        room = min(context_len, len(short)) - 1
        assert long[len(long) - room :] == short[len(short) - room :]


def test_lines_of_a_file(tokenizer: Tokenizer, tmp_path: Any) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n two \r\nthree\n", encoding="utf-8")
    source = PromptSource.of_file(path)
    assert source.lines == ("one", "two", "three")
    assert source.texts(4, 0) == ["one", "two", "three", "one"]
    assert source.texts(2, 1) == ["two", "three"]
    path.write_text(" \n")
    with pytest.raises(ValueError, match=r"prompts\.txt: no prompt in it"):
        PromptSource.of_file(path)
