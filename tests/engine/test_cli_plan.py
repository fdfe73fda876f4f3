"""`decodegrid plan`: from a recorded run to a deployment's grid, and its errors on one line."""

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodegrid.capture.grid import GraphKey, Grid, build_grid
from decodegrid.capture.plan_trace import TraceError, read_trace
from decodegrid.capture.surface import Surface, SurfacePoint
from decodegrid.capture.surface_store import SurfaceStore
from decodegrid.configs.load import load_config
from decodegrid.engine.cli import main
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify

GREEDY = ["--temperature", "0", "--max-tokens", "12"]
FOUR = ["--set", "scheduler.max_num_reqs=4"]


def linear(grid: Grid, facts: dict[str, str] | None = None, when: float = 1.0) -> Surface:
    points = {}
    for key in grid.keys:
        ms = 5 + 0.7 * key.num_reqs + 0.5 * key.num_query_tokens
        points[key] = SurfacePoint(ms, ms, ms, 3)
    return Surface(points, 256, when, facts or {})


@pytest.fixture
def surface(tmp_path: Path) -> Path:
    path = tmp_path / "surface.json"
    path.write_text(json.dumps(linear(build_grid(4, 5)).as_json()))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three of four rows, always with 15 query tokens."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"format": 1, "source": "by hand", "max_num_reqs": 4, "num_draft_tokens": 5}\n'
        '{"num_reqs": 3, "num_query_tokens": 15, "steps": 90}\n'
        '{"num_reqs": 1, "num_query_tokens": 1, "steps": 10}\n'
    )
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def never(loaded: Any) -> LLM:
        raise AssertionError("a plan builds no engine")

    def run(*argv: object) -> tuple[int, str, str]:
        status = main([str(part) for part in argv], never)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_plan_and_its_fragment(call: Any, trace: Path, surface: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid.yaml"
    argv = ("plan", *FOUR, "--trace", trace, "--surface", surface, "--out", out)
    status, text, err = call(*argv)
    assert (status, err) == (0, "")
    lines = text.splitlines()
    assert lines[0] == f"step times: 18 pairs of {surface}"
    # 18 pairs of the default grid; three are enough, and (3, 15) takes 14.6 instead of 15.8 ms.
    assert lines[-2:] == ["drop 16 pairs, add 1, gain 7.3 %", f"written: {out}"]
    pairs = ((1, 1), (3, 15), (4, 24))
    assert load_config(out).config.grid.pairs == pairs
    # In the deployment's own file, as the fragment says.
    own = tmp_path / "own.yaml"
    own.write_text("scheduler: {max_num_reqs: 4}\ngrid: {pairs: [[1, 1], [3, 15], [4, 24]]}\n")
    status, text, _ = call("plan", "--config", own, "--trace", trace, "--surface", surface)
    assert status == 0 and text.splitlines()[-1].startswith("no gain: keep the deployment's 3 ")

    before = out.read_bytes()
    status, _, err = call(*argv)
    assert (status, out.read_bytes()) == (2, before)
    assert err == f"decodegrid: error: --out is {out}, which exists; --overwrite replaces it\n"
    assert call(*argv, "--overwrite", "--max-graphs", 1)[0] == 0
    assert load_config(out).config.grid.pairs == ((4, 24),)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_bounds_on_memory_and_time(call: Any, trace: Path, surface: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    pairs = [
        {
            "num_reqs": key.num_reqs,
            "num_query_tokens": key.num_query_tokens,
            "memory_bytes": 2**20 * key.num_query_tokens,
            "capture_s": 0.5,
        }
        for key in build_grid(4, 5).keys
    ]
    costs.write_text(json.dumps({"format": 1, "pairs": pairs}))
    argv = ("plan", *FOUR, "--trace", trace, "--surface", surface, "--costs", costs)
    # 24 + 15 + 1 MiB is what the best grid takes; a mebibyte less, and the rarer pair goes.
    status, text, _ = call(*argv, "--max-memory", "40MiB")
    assert status == 0 and "memory of the graphs           147.0 MiB    40.0 MiB" in text
    status, text, _ = call(*argv, "--max-memory", "39MiB", "--max-capture-seconds", "1")
    assert status == 0
    assert text.splitlines()[-1] == "drop 17 pairs, add 1, save 108.0 MiB and 8 s, gain 1.6 %"
    status, _, err = call(*argv, "--max-memory", "23MiB")
    assert status == 2 and "no grid is within the bounds: every grid has the pair (4, 24)" in err
    status, _, err = call(*argv, "--max-capture-seconds", "0.1")
    assert status == 2 and "max_capture_s is 0.1, and they take 0.5" in err


def test_a_simulated_load(call: Any, surface: Path) -> None:
    argv = ("plan", *FOUR, "--surface", surface, "--max-graphs", 4, "--arrivals")
    status, text, err = call(*argv, "rate=20, requests=30, tokens=20, seed=3")
    assert (status, err) == (0, "")
    assert "simulated: 30 requests at 20/s, 20 tokens (sigma 0.5), confidences Beta(6, 2)" in text
    assert "simulated with a total for each grid: " in text
    assert text.splitlines()[-1].startswith("drop ")
    assert call(*argv, "rate=20, requests=30, tokens=20, seed=3")[1] == text
    limit = ("--set", "speculation.verify_tokens=5")
    status, text, _ = call(*argv, "rate=200,requests=9,tokens=9", *limit)
    totals = [line for line in text.splitlines() if line.endswith("added")]
    assert status == 0 and totals and all(", 5)" in line or ", 4)" in line for line in totals)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "one of the arguments --trace --arrivals is required"),
        (("--trace", "TRACE", "--arrivals", "rate=1"), "not allowed with argument"),
        (("--trace", "TRACE", "--surface", "SURFACE", "--measure"), "not allowed with argument"),
        (("--trace", "no.json"), "no.json: No such file"),
        (("--trace", "TRACE", "--max-graphs", "0"), "max_graphs is 0; a finite number of at least"),
        (("--trace", "TRACE", "--max-graphs", "x"), "'x'"),
        (("--trace", "TRACE", "--max-memory", "much"), "'much' is no number of bytes"),
        (("--trace", "TRACE", "--max-capture-seconds", "nan"), "max_capture_s is nan"),
        (("--trace", "TRACE", "--max-loss", "-1"), "--max-loss is -1 %; at least 0"),
        (("--trace", "TRACE", "--unseen", "100"), "--unseen is 100 %; at least 0 and below 100"),
        (("--trace", "TRACE", "--time-limit", "inf"), "time_limit_s is inf"),
        (("--trace", "TRACE", "--max-memory", "1", "--surface", "SURFACE"), "needs what the pairs"),
        (("--trace", "TRACE", "--set", "scheduler.max_num_reqs=5"), "the deployment has 5"),
        (("--trace", "TRACE", "--set", "speculation.num_draft_tokens=3"), "the deployment has 3"),
        (("--trace", "TRACE", "--out", "/"), "--out is /, which is a directory"),
        (("--trace", "TRACE", "--out", "/none/x.yaml"), "there is no directory /none"),
        (("--trace", "TRACE", "--surface", "TRACE"), "not JSON at line 2, column 1"),
        (("--trace", "TRACE", "--costs", "TRACE"), "not JSON at line 2, column 1"),
        (("--arrivals", "requests=3"), "--arrivals needs rate=R"),
        (("--arrivals", "rate=0"), "--arrivals: rate is 0.0; a finite number above 0"),
        (("--arrivals", "rate=1,rate=2"), "--arrivals has rate twice"),
        (("--arrivals", "rate"), "--arrivals has 'rate'; allowed is NAME=VALUE with rate, req"),
        (("--arrivals", "speed=1"), "--arrivals has 'speed=1'"),
        (("--arrivals", "rate=1,requests=2.5"), "requests is '2.5'; a whole number is needed"),
        (("--arrivals", "rate=fast"), "rate is 'fast'; a number is needed"),
    ],
)
def test_errors_on_one_line(
    argv: tuple[str, ...], message: str, call: Any, trace: Path, surface: Path
) -> None:
    files = {"TRACE": trace, "SURFACE": surface}
    status, out, err = call("plan", *FOUR, *(files.get(part, part) for part in argv))
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1 and "Traceback" not in err


def test_a_surface_of_other_limits(call: Any, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(linear(build_grid(2, 5)).as_json()))
    status, _, err = call("plan", *FOUR, "--trace", trace, "--surface", path)
    assert status == 2 and "no step time for (4, 24), the largest pair of the deployment" in err


def test_step_times_that_profile_kept(call: Any, trace: Path, tmp_path: Path) -> None:
    """Another grid's surface serves, with what it knows; other facts and old ones do not."""
    from decodegrid.engine.plan_surface import known_facts

    cache = tmp_path / "cache"
    settings = ["scheduler.max_num_reqs=4", f"compile.cache_dir={cache}"]
    options = [part for item in settings for part in ("--set", item)]
    argv = ("plan", *options, "--trace", trace)
    status, _, err = call(*argv)
    assert status == 2 and f"are kept (no surface has been saved in {cache})" in err
    assert "measure them with decodegrid profile" in err

    facts = known_facts(load_config(None, settings)) | {"storage": "torch.float32"}
    store, now = SurfaceStore(cache), time.time()
    store.save(linear(build_grid(4, 5), facts | {"torch": "0.1"}, now))
    status, _, err = call(*argv)
    assert status == 2 and "torch was 0.1, now " in err
    store.save(linear(build_grid(4, 5), facts, now - 1e6))
    status, _, err = call(*argv)
    told = re.search(r"its age is (\d+) s, allowed are 0\.\.86400 s", err)
    assert status == 2 and told and int(told[1]) >= 1000000, "time goes on until it is told"
    store.save(linear(build_grid(4, 5, [4]), facts, now))
    assert call(*argv)[1].startswith("step times: 6 pairs of ")
    # More pairs are better than fewer.
    path = store.save(linear(build_grid(4, 5, range(1, 5)), facts, now - 60))
    status, out, _ = call(*argv)
    assert status == 0 and out.startswith(f"step times: 24 pairs of {path}\n")


def test_step_times_that_are_measured_now(
    call: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deployment is started once, and what was measured is kept."""
    from decodegrid.engine import plan_surface

    found, calls = linear(build_grid(4, 5), when=time.time()), []
    monkeypatch.setattr(plan_surface, "build_runner", lambda loaded: calls.append(1) or "runner")
    monkeypatch.setattr(plan_surface, "context_for", lambda runner, loaded: 256)
    monkeypatch.setattr(plan_surface, "measure", lambda *given: calls.append(given) or found)
    options = ("--set", f"compile.cache_dir={tmp_path / 'cache'}", "--measure")
    status, text, _ = call("plan", *FOUR, *options, "--trace", trace)
    assert status == 0 and calls == [1, ("runner", 256, 9)]
    kept = list((tmp_path / "cache").glob("surface-*.json"))
    assert len(kept) == 1 and text.startswith(f"step times: 18 pairs of {kept[0]}\n")


def test_a_file_of_step_times_needs_no_torch(trace: Path, surface: Path) -> None:
    code = (
        "import sys\nfrom decodegrid.engine.cli import main\n"
        "status = main(sys.argv[1:])\n"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    argv = ["plan", *FOUR, "--trace", str(trace), "--surface", str(surface)]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def serve(tokenizer: Tokenizer, runner: Any, policy: FixedVerify | None = None) -> LLM:
    llm = LLM.from_runner(runner, tokenizer, policy=policy)
    llm.generate([[20], [21], [22]], SamplingParams(temperature=0, max_tokens=7))
    return llm


def test_what_a_run_records(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> None:
    """Three requests of 7 tokens, all drafts right: a step of 1 token and one of 6 each."""
    runner = make_runner(drafts=5)
    runner.grid = build_grid(4, 5, [4], [1, 6])
    trace = serve(tokenizer, runner).stats.grid.trace("x")
    assert trace.batches == {(3, 3): 1, (3, 18): 1}
    assert (trace.max_num_reqs, trace.num_draft_tokens, trace.source) == (4, 5, "x")
    uses = {str(key): (use.steps, use.pad_rows) for key, use in trace.pairs.items()}
    assert uses == {"(4, 4)": (1, 1), "(4, 24)": (1, 1)}
    assert trace.pairs[GraphKey(4, 4)].surplus_tokens == 1
    assert trace.pairs[GraphKey(4, 24)].surplus_tokens == 24 - sum([1 + 5] * 3)


def test_wanted_tokens_are_those_of_the_schedule(
    tokenizer: Tokenizer, make_runner: Callable[..., Any]
) -> None:
    runner = make_runner(drafts=5)
    runner.grid = build_grid(4, 5)
    batches = serve(tokenizer, runner, FixedVerify(9)).stats.grid.trace().batches
    assert (3, 9) in batches and max(tokens for _, tokens in batches) == 9


def test_nothing_is_recorded_before_the_first_step(
    tokenizer: Tokenizer, make_runner: Callable[..., Any]
) -> None:
    llm = LLM.from_runner(make_runner(), tokenizer)
    with pytest.raises(TraceError, match="the trace is empty"):
        llm.stats.grid.trace()


@pytest.mark.parametrize("verb", ["generate", "batch"])
def test_a_recorded_run_is_planned(
    verb: str,
    tokenizer: Tokenizer,
    make_runner: Callable[..., Any],
    tmp_path: Path,
    surface: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner = make_runner(drafts="mixed", max_model_len=400)
    runner.grid = build_grid(4, 5)
    path, source = tmp_path / "t.json", tmp_path / "in.jsonl"
    body = {"model": "m", "prompt": "hello", "max_tokens": 9}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(line) + "\n")
    argv = {"generate": ["a", "b", *GREEDY], "batch": [str(source), str(tmp_path / "out.jsonl")]}
    llm = LLM.from_runner(runner, tokenizer)
    assert main([verb, *argv[verb], "--trace", str(path)], lambda loaded: llm) == 0
    steps = llm.stats.num_decode_steps
    assert f"trace of {steps} decode steps: {path}" in capsys.readouterr().err
    trace = read_trace(path)
    assert trace.num_steps == steps and trace.source.startswith(f"decodegrid {verb}")
    assert main(["plan", *FOUR, "--trace", str(path), "--surface", str(surface)]) == 0
    assert f"trace: {steps} decode steps, decodegrid {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "message"),
    [("", "which is a directory; a file is needed"), ("none/t.json", "there is no directory")],
)
def test_a_trace_that_cannot_be_written(
    target: str, message: str, call: Any, tmp_path: Path
) -> None:
    status, _, err = call("generate", "x", "--trace", tmp_path / target)
    assert status == 2 and f"--trace is {tmp_path / target}" in err and message in err


def test_the_sum_of_the_best_grid_is_right(call: Any, trace: Path, surface: Path) -> None:
    """By hand: 90 steps in (3, 15), 10 in (1, 1), against (4, 16) and (1, 1)."""
    _, text, _ = call("plan", *FOUR, "--trace", trace, "--surface", surface)
    ours = (90 * (5 + 2.1 + 7.5) + 10 * 6.2) / 100
    theirs = (90 * (5 + 2.8 + 8.0) + 10 * 6.2) / 100
    line = next(line for line in text.splitlines() if line.startswith("expected step ms"))
    assert [float(part) for part in line.split()[3:]] == [
        pytest.approx(theirs, rel=1e-3),
        pytest.approx(ours, rel=1e-3),
    ]
    assert math.isclose(theirs, 14.84) and math.isclose(ours, 13.76)
