"""`decodegrid bench` from arguments to files, over a small model that nothing compiles."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodegrid.capture.budget import VerifyBudget
from decodegrid.capture.grid import build_grid
from decodegrid.capture.surface import Surface, SurfacePoint
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli import main
from decodegrid.engine.llm import LLM
from decodegrid.engine.runner import Runner
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import ScheduledVerify

LIMITS = (
    "scheduler: {max_num_reqs: 3, max_model_len: 64, prefill_chunk_sizes: [8, 16]}\n"
    "cache: {block_size: 8}\n"
    "speculation: {num_draft_tokens: 2}\n"
    "sampling: {temperature: 2.0}\n"
)

NAMES = ("none", "all", "scheduled", "oracle", "random")


@pytest.fixture(scope="module")
def device(
    make_model: Callable[..., Any],
    make_eager_runner: Callable[..., Runner],
    layer_changes: dict[int, dict[str, Any]],
    tokenizer: Tokenizer,
) -> Runner:
    changes = {**layer_changes[2], "vocab_size": tokenizer.vocab_size, "hc_sinkhorn_iters": 1}
    return make_eager_runner(make_model(**changes))


@pytest.fixture
def config(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A deployment with the toy's tokenizer, and four prompts that its context can hold."""
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "tokenizer.json").write_bytes(tokenizer.path.read_bytes())
    (tmp_path / "x.yaml").write_text(f"model: {{checkpoint: model}}\n{LIMITS}")
    (tmp_path / "prompts.txt").write_text("hi\nyou\nthere\nnow\n")
    return tmp_path / "x.yaml"


@pytest.fixture
def build_toy(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[[Any], LLM]:
    """A toy with the limits of the deployment, which schedules."""

    def make(loaded: LoadedConfig) -> LLM:
        runner = make_runner(
            num_draft_tokens=2, max_num_reqs=3, max_model_len=64, prefill_chunk_sizes=(8, 16),
            drafts="mixed",
        )  # fmt: skip
        runner.grid = build_grid(3, 2)
        points = {key: SurfacePoint(1.0, 1.0, 1.0, 1) for key in runner.grid.keys}
        budget = VerifyBudget(runner.grid, Surface(points, 16, 1.0, {}), 2)
        policy = ScheduledVerify(budget, 4)
        return LLM.from_runner(runner, tokenizer, policy=policy, async_scheduling=True)

    return make


@pytest.fixture
def build(device: Runner, tokenizer: Tokenizer) -> Callable[[LoadedConfig], LLM]:
    def make(loaded: LoadedConfig) -> LLM:
        points = {key: SurfacePoint(1.0, 1.0, 1.0, 1) for key in device.grid.keys}
        budget = VerifyBudget(device.grid, Surface(points, 16, 1.0, {}), 2)
        policy = ScheduledVerify(budget, device.max_num_reqs + 1)
        return LLM.from_runner(device, tokenizer, policy=policy, async_scheduling=True)

    return make


@pytest.fixture
def call(
    config: Path, build: Callable[[Any], LLM], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(kind: str, *argv: object, build: Any = build) -> tuple[int, str, str]:
        words = ["bench", kind, "--config", str(config), *map(str, argv)]
        status = main(words, build)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def refuse(call: Any) -> Callable[..., str]:
    """The error of a command that must not start anything."""

    def never(loaded: Any) -> LLM:
        raise AssertionError("an engine was built")

    def run(kind: str, *argv: object) -> str:
        status, out, err = call(kind, *argv, build=never)
        assert (status, out) == (2, "") and err.count("\n") == 1
        prefix = "decodegrid: error: "
        assert err.startswith(prefix)
        return str(err.removeprefix(prefix))

    return run


def test_decode(call: Any, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two contexts; the document against recounts of itself."""
    json_path, png_path = tmp_path / "out.json", tmp_path / "out.png"
    argv = (
        "--batch", "3", "--contexts", "9,24", "--prompts-file", tmp_path / "prompts.txt",
        "--policies", ",".join(NAMES), "--requests", "4", "--repeats", "1", "--warm-up", "0",
        "--max-tokens", "7", "--ignore-eos", "--json", json_path, "--png", png_path,
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["x/decodegrid", "bench", "decode", *map(str, argv)])
    status, out, err = call("decode", *argv)
    assert status == 0
    document = json.loads(json_path.read_text())
    settings = document["settings"]
    keys = [(each["context_len"], each["batch"], each["policy"]) for each in settings]
    assert keys == [(c, b, name) for c in (9, 24) for b in (3,) for name in NAMES]
    for each in settings:
        counts, repeats = each["counts"], each["repeats"]
        assert len(repeats) == 1
        # 4 requests of 7 tokens: nothing may end before.
        assert [repeat["emitted"] for repeat in repeats] == [28]
        for name in ("drafted", "offered", "verified", "accepted", "emitted", "rounds"):
            assert counts[name] == sum(repeat["counts"][name] for repeat in repeats)
        assert counts["emitted"] == counts["rounds"] + counts["accepted"] == 28
        assert counts["drafted"] == 2 * (counts["rounds"] - 4)
        assert (each["policy"] == "none") == (counts["verified"] == 0)
        assert each["same_outputs"] == each["compared_outputs"] == 4
        assert each["tokens_per_s"]["repeats"] == 1
        assert each["user_tokens_per_s"]["count"] == 4
        rate = repeats[0]["emitted"] / repeats[0]["wall_s"]
        assert each["tokens_per_s"]["median"] == pytest.approx(rate)
        assert each["rows_per_step"] <= each["batch"]
        if each["policy"] in ("oracle", "random"):
            assert each["rows_as_foreseen"][0] == each["rows_as_foreseen"][1] > 0
    by_key = dict(zip(keys, settings, strict=True))
    for where in (9, 24):
        oracle, everything = (by_key[where, 3, name]["counts"] for name in ("oracle", "all"))
        assert 0 < oracle["verified"] == oracle["accepted"] <= everything["accepted"]
        assert everything["verified"] > everything["accepted"]
    assert document["output_equality"] == {"comparable": True, "same": 40, "compared": 40}
    assert len(document["pareto"]["measured"]) == 10
    assert [each["batch"] for each in document["pareto"]["assumed_not_measured"]] == [3, 3]
    assert document["devices"] == 1 and document["compilations_after_ready"] == 0
    assert len(document["config_hash"]) == 64 and document["machine"]["threads"]
    assert document["versions"]["torch"] and document["kind"] == "decodegrid bench decode"
    status_lines = by_key[9, 3, "scheduled"]["policy_status"]
    assert status_lines[0] == "surface: 9 pairs, context 16, 1970-01-01T00:00:01+00:00"
    assert document["command"][:3] == ["decodegrid", "bench", "decode"]
    assert document["workload"]["prompt_tokens"][1] == {
        "context_len": 24, "least": 24, "greatest": 24,
    }  # fmt: skip
    assert png_path.read_bytes().startswith(b"\x89PNG")
    for words in (
        "speed\n", "drafts and tokens\n", "ASSUMED x2.5", "nobody measured them",
        "output equality: 40 of 40 outputs (100.00%)", "denominator: 1 device",
        "policy oracle: the schedule, its rates being what truly survives",
        f"written: {json_path}", f"written: {png_path}", "compilations after ready: 0",
        "not counted: 2 passes", "(100.00%) verified and accepted what the first pass told",
    ):  # fmt: skip
        assert words in out, words
    assert err.count("\n") == 10 and err.startswith("repeat 1/1: context 9, batch 3, none: ")


def test_defaults_of_a_deployment_that_does_not_schedule(
    call: Any, build_toy: Any, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    status, out, err = call(
        "decode", "--set", "speculation.verify_tokens=all", "--prompts-file",
        tmp_path / "prompts.txt", "--requests", "2", "--repeats", "1", "--warm-up", "0",
        "--max-tokens", "4", "--json", path, "--no-progress", build=build_toy,
    )  # fmt: skip
    assert (status, err) == (0, "")
    settings = json.loads(path.read_text())["settings"]
    keys = [(each["batch"], each["policy"]) for each in settings]
    assert keys == [(b, name) for b in (1, 2) for name in ("none", "k1", "all")]
    assert "policy scheduled" not in out


def test_load(call: Any, build_toy: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    status, out, _ = call(
        "load", "--rates", "40,1000", "--prompts-file", tmp_path / "prompts.txt",
        "--requests", "6", "--repeats", "2", "--warm-up", "0", "--max-tokens", "6",
        "--temperature", "0", "--json", path, build=build_toy,
    )  # fmt: skip
    assert status == 0
    document = json.loads(path.read_text())
    keys = [(each["rate"], each["loop"], each["policy"]) for each in document["settings"]]
    names = ("none", "all", "scheduled")
    assert keys == [(rate, "open", name) for rate in (40.0, 1000.0) for name in names]
    assert document["output_equality"]["same"] == document["output_equality"]["compared"] == 72
    for each in document["settings"]:
        assert each["first_token_ms"]["count"] == 12 and each["first_token_ms"]["min"] > 0
        assert sum(each["repeats"][0]["finish_reasons"].values()) == 6
    assert "arrivals: a Poisson process" in out and "first token ms" in out


def test_prefill(call: Any, build_toy: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    status, out, err = call(
        "prefill", "--contexts", "9,40", "--requests", "3", "--repeats", "2", "--json", path,
        build=build_toy,
    )  # fmt: skip
    assert status == 0 and err.count("\n") == 6
    document = json.loads(path.read_text())
    assert [each["context_len"] for each in document["prompts"]] == [9, 40]
    assert [each["prompts"] for each in document["prompts"]] == [6, 6]
    for each in document["prompts"]:
        assert each["prefill_ms"]["count"] == 6
        assert each["first_token_ms"]["min"] > each["prefill_ms"]["min"]
    # 8 tokens are one chunk; 39 are 16 + 16 + 7.
    chunks = {each["captured_size"]: each for each in document["chunks"]}
    assert {size: each["chunks"] for size, each in chunks.items()} == {8: 12, 16: 12}
    assert chunks[8]["tokens_per_chunk"] == 7.5 and chunks[16]["tokens_per_chunk"] == 16
    assert "prompts, one at a time" in out and "prefix cache: off" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--batch", "4"), "--batch has 4; allowed are 1..3 (scheduler.max_num_reqs)"),
        (("--batch", "0"), "--batch has 0; allowed are 1..3"),
        (("--batch", "1,1"), "--batch has 1 twice"),
        (("--batch", "2", "--requests", "1"), "--batch has 2, but a pass has 1 --requests only"),
        (("--batch", "two"), "'two' is no list of whole numbers"),
        (("--policies", "best"), "--policies has 'best'; known are none, all, k0 to k2"),
        (("--policies", "k3"), "--policies has k3; speculation.num_draft_tokens allows k0 to k2"),
        (("--policies", "all,k2"), "--policies has all and k2, which are the same policy"),
        (
            ("--policies", "oracle", "--set", "speculation.verify_tokens=all"),
            "--policies has oracle, which needs speculation.verify_tokens = scheduled; the "
            "deployment has all",
        ),
        (
            ("--policies", "random", "--set", "speculation.verify=rejection"),
            "random, which needs texts that do not depend on what is verified",
        ),
        (
            ("--contexts", "60", "--max-tokens", "9"),
            "--contexts has 60; allowed are 2..55, scheduler.max_model_len less --max-tokens 9",
        ),
        (("--max-tokens", "64"), "scheduler.max_model_len = 64 leaves no room for a prompt"),
        (("--contexts", "1", "--max-tokens", "5"), "--contexts has 1; allowed are 2..59"),
        (("--contexts", "9,9", "--max-tokens", "5"), "--contexts has 9 twice"),
        (("--max-tokens", "0"), "max_tokens must be at least 1, got 0"),
        (("--temperature", "-1"), "temperature must be 0 (greedy) or"),
        (("--requests", "0"), "--requests is 0; allowed are 1..100000"),
        (("--repeats", "0"), "--repeats is 0; allowed are 1..1000"),
        (("--warm-up", "-1"), "--warm-up is -1; allowed are 0..1000"),
        (("--seed", "-1"), "--seed is -1; allowed are 0.."),
        (("--assumed-acceptance", "1.5"), "--assumed-acceptance is 1.5; allowed are 0..1"),
        (("--json", "TMP"), "which is a directory; a file is needed"),
        (("--png", "TMP/none/x.png"), "there is no directory"),
        (("--png", "TMP/x", "--json", "TMP/x"), "--json and --png are the same file"),
        (
            ("--max-tokens", "5", "--prompts-file", "TMP/none.txt"),
            "none.txt: No such file or directory",
        ),
        (("--prompts", "stories", "--prompts-file", "x"), "not allowed with argument"),
        (("--max-tokens", "5"), "a prompt has "),
        (("--set", "scheduler.engine_type=prompt"), "scheduler.engine_type is prompt"),
        (
            ("--max-tokens", "5", "--set", "model.checkpoint=TMP/none"),
            "none: no such checkpoint directory",
        ),
    ],
)
def test_refused_before_the_start(
    refuse: Any, tmp_path: Path, argv: tuple[str, ...], message: str
) -> None:
    assert message in refuse("decode", *(word.replace("TMP", str(tmp_path)) for word in argv))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "the following arguments are required: --rates"),
        (("--rates", "0"), "--rates has 0; a rate must be above 0 and finite"),
        (("--rates", "-2"), "--rates"),
        (("--rates", "inf"), "--rates has inf; a rate must be above 0 and finite"),
        (("--rates", "nan"), "--rates has nan; a rate must be above 0 and finite"),
        (("--rates", "1,fast"), "'1,fast' is no list of numbers"),
        (("--rates", "1,1.0"), "--rates has 1 twice"),
    ],
)
def test_refused_rates(refuse: Any, argv: tuple[str, ...], message: str) -> None:
    assert message in refuse("load", *argv)


def test_refused_for_prefill(refuse: Any) -> None:
    assert "--contexts has 64; allowed are 2..63" in refuse("prefill", "--contexts", "9,64")
    assert "WHAT" in refuse("--no-such")


def test_a_missing_plotting_library(refuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodegrid.capture.bench_plot.find_spec", lambda name: None)
    assert "pip install 'decodegrid[report]'" in refuse("decode", "--png", "plot.png")


def test_an_older_file_is_whole_until_the_new_one_is(
    call: Any, build_toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    path.write_text("older")
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    status, _, err = call(
        "prefill", "--contexts", "9", "--requests", "1", "--repeats", "1", "--json", path,
        build=build_toy,
    )  # fmt: skip
    assert status == 2 and err.splitlines()[-1] == "decodegrid: error: full"
    assert path.read_text() == "older" and not list(tmp_path.glob(".*"))
