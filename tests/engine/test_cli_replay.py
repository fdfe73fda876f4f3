"""`decodegrid replay`: deployments, what is printed, exit statuses, and bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.engine import build
from decodegrid.engine.cli import main
from decodegrid.engine.llm import LLM
from decodegrid.engine.replay_file import write_dump
from decodegrid.engine.runner import Runner
from decodegrid.engine.runner_watch import make_watch
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

YAML = """
model: {dtype: float64}
scheduler: {max_num_reqs: 3, max_model_len: 64, prefill_chunk_sizes: [8, 16]}
cache: {block_size: 8}
speculation: {num_draft_tokens: 2}
dumps: {directory: dumps, num_steps: 8, token_ids: true, watchdog_s: 0}
"""


@pytest.fixture(scope="module")
def runner(
    make_eager_runner: Callable[..., Runner], make_model: Callable[..., Any], tokenizer: Tokenizer
) -> Runner:
    return make_eager_runner(make_model(vocab_size=tokenizer.vocab_size, hc_sinkhorn_iters=2))


@pytest.fixture
def built(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[LoadedConfig]:
    """Deployments that a runner was asked for; all get the same one."""
    asked: list[LoadedConfig] = []

    def build_runner(loaded: LoadedConfig) -> Runner:
        asked.append(loaded)
        return runner

    monkeypatch.setattr(build, "build_runner", build_runner)
    return asked


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(YAML)
    return path


@pytest.fixture
def dump(
    tmp_path: Path, config: Path, runner: Runner, tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:  # fmt: skip
    """Of a launch that failed."""
    loaded = load_config(config)
    llm = LLM.from_runner(runner, tokenizer, watch=make_watch(runner, loaded))
    launch, calls = runner.launch, []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise OSError("planted")
        return launch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", fail)
        with pytest.raises(OSError, match="planted"):
            llm.generate([[20, 30, 40]], SamplingParams(temperature=0, max_tokens=20))
    (path,) = (tmp_path / "dumps").glob("*.dump")
    return path


def test_both_forms_are_run_with_the_dumps_own_deployment(
    dump: Path, built: list[LoadedConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(dump)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (loaded,) = built
    assert loaded.config == load_config(dump.parent.parent / "deployment.yaml").config
    assert "dump: crash at " in out and "OSError: planted" in out
    assert "graph: in order" in out and "eager: in order" in out
    assert "(equal up to 1e-09)" in out and "tokens: equal" in out
    assert out.endswith("graph and eager are equal\n")


@pytest.mark.parametrize("form", ["graph", "eager"])
def test_one_form_alone(
    dump: Path, built: list[LoadedConfig], capsys: pytest.CaptureFixture[str], form: str,
    runner: Runner,
) -> None:  # fmt: skip
    """Exit status 1 where the fault shows."""
    assert main(["replay", str(dump), f"--{form}", "--step", "1"]) == 0
    assert f"{form}: in order, 1 tokens emitted" in capsys.readouterr().out
    norm = runner.model.weights.layers[2].attention.q_norm
    saved = float(norm[0])
    norm[0] = torch.nan
    try:
        assert main(["replay", str(dump), f"--{form}"]) == 1
    finally:
        norm[0] = saved
    assert f"{form}: logits are not finite" in capsys.readouterr().out


def test_a_difference_has_exit_status_1(
    dump: Path, built: list[LoadedConfig], capsys: pytest.CaptureFixture[str], runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A graph that leaves one logit a little wrong; a tolerance from the command line forgives."""

    class Wrong:
        def __init__(self, graph: Any) -> None:
            self.graph = graph

        def replay(self) -> None:
            self.graph.replay()
            runner.buffers.output.logits[0, 3] += 1e-5

    graphs = {key: Wrong(graph) for key, graph in runner.decode_graphs.items()}
    monkeypatch.setattr(runner, "decode_graphs", graphs)
    assert main(["replay", str(dump), "--diff"]) == 1
    out = capsys.readouterr().out
    assert "largest difference of logits: 1e-05" in out and "graph and eager differ" in out
    assert main(["replay", str(dump), "--tolerance", "1e-4"]) == 0


def test_what_differs_from_the_dumps_deployment_is_named(
    dump: Path, built: list[LoadedConfig], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["--set", "speculation.verify=rejection", "--set", "compile.progress=false"]
    assert main(["replay", str(dump), "--config", str(config), *changes]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["note: speculation.verify is 'rejection' here and 'coupled' in the dump"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "77"], "step 77 is not in the dump; its steps are"),
        (["--tolerance", "nan"], "--tolerance is nan; a number of at least 0 is needed"),
        (["--tolerance", "-1"], "--tolerance is -1.0"),
        (["--graph", "--eager"], "not allowed with argument"),
        (["--set", "model.dtype=float32"], "--set needs --config"),
        (["--config", "none.yaml"], "none.yaml: cannot read"),
    ],
)
def test_bad_arguments_have_exit_status_2(
    dump: Path, built: list[LoadedConfig], capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    assert main(["replay", str(dump), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and not built
    assert message in err and err.count("\n") == 1


def test_bad_dumps_have_exit_status_2_and_one_line(
    dump: Path, built: list[LoadedConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = dump.read_bytes()
    tree = json.loads(whole.partition(b"\n")[2])

    def changed(**changes: Any) -> bytes:
        path = write_dump(tmp_path / "other", json.dumps({**tree, **changes}).encode(), 9)
        return path.read_bytes()

    model = {**tree["config"]["model"], "dtype": "float99"}
    cases = [
        (b"", "is not a dump of decodegrid"),
        (whole[:-9], "is cut off"),
        (whole[:-1] + b"!", "is damaged"),
        (whole.replace(b'"decodegrid_dump": 1', b'"decodegrid_dump": 9'), "format version 9"),
        (changed(steps=[], step=None), "nothing had been launched"),
        (changed(config=None), "names no deployment; give one with --config"),
        (changed(config={**tree["config"], "model": model}), "does not fit this version: model."),
        (changed(surprise=1), "surprise: Extra inputs are not permitted"),
    ]
    for data, message in cases:
        path = tmp_path / "bad\n.dump"
        path.write_bytes(data)
        assert main(["replay", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and not built
        assert message in err and err.count("\n") == 1, err
    assert main(["replay", str(tmp_path / "absent")]) == 2
    assert "there is no dump" in capsys.readouterr().err


def test_a_step_that_does_not_fit_the_deployment_has_exit_status_2(
    dump: Path, built: list[LoadedConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = json.loads(dump.read_bytes().partition(b"\n")[2])
    tree["sizes"]["block_size"] = 64
    path = write_dump(tmp_path / "other", json.dumps(tree).encode(), 9)
    assert main(["replay", str(path)]) == 2
    assert "the dump's blocks have 64 tokens" in capsys.readouterr().err
