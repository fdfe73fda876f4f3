"""`decodegrid doctor`: what it prints, the self-test, and exit statuses."""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.capture.grid import GraphKey
from decodegrid.engine import build, cli_doctor
from decodegrid.engine.cli import main
from decodegrid.engine.runner import Runner
from decodegrid.kernels import native
from decodegrid.kernels.providers.implementations import IMPLEMENTATIONS
from decodegrid.kernels.providers.packages import PACKAGES

YAML = """
model: {dtype: float64}
scheduler: {max_num_reqs: 3, max_model_len: 64, prefill_chunk_sizes: [8, 16]}
cache: {block_size: 8}
speculation: {num_draft_tokens: 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(YAML + f"compile: {{cache_dir: {tmp_path / 'cache'}}}\n")
    return path


@pytest.fixture
def runner(
    make_eager_runner: Callable[..., Runner], make_model: Callable[..., Any],
    layer_changes: dict[int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch,
) -> Runner:  # fmt: skip
    """What every deployment gets."""
    made = make_eager_runner(make_model(hc_sinkhorn_iters=2, **layer_changes[2]))
    monkeypatch.setattr(build, "build_runner", lambda loaded: made)
    return made


def rows(text: str) -> dict[str, str]:
    return {line[:26].strip(): line[27:] for line in text.splitlines()}


def test_what_is_printed(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started, nothing is built."""

    def refuse(*args: Any) -> None:
        raise AssertionError("started or built")

    monkeypatch.setattr(build, "build_runner", refuse)
    monkeypatch.setattr(native, "build_library", refuse)
    monkeypatch.setattr(native, "has_native_kernels", lambda: False)
    assert main(["doctor", "--config", str(config)]) == 0
    out, err = capsys.readouterr()
    found = rows(out)
    assert err == ""
    assert found["torch"] == torch.__version__ == version("torch")
    assert found["device"] == "cpu" and found["cpu capability"]
    assert found["cache directory"] == f"{config.parent / 'cache'} (not there yet)"
    assert found["deployment"] == str(config)
    ops = {name for name in found if name.startswith("op ")}
    assert ops == {f"op {item.op}" for item in IMPLEMENTATIONS} > {f"op {o}" for o in native.OPS}
    assert found["op linear"] == "native: C++ linear (built at the first start)"
    assert found["op attention"].startswith("reference: torch")
    assert found["in an engine's steps"] == "the implementations below"
    assert {f"library {item.name}" for item in PACKAGES} <= set(found)


def test_every_other_implementation_has_its_reason(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index(next(line for line in lines if line.startswith("op linear ")))
    assert [line[27:] for line in lines[place + 1 : place + 3]] == [
        "not library, DeepGEMM bf16_gemm_nt: for sm90, sm100",
        "not reference, torch linear: native comes first",
    ]


def test_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of it, the same at each call, and nothing optional imported."""
    texts = []
    for _ in range(2):
        assert main(["doctor", "--json", "--config", str(config)]) == 0
        out, err = capsys.readouterr()
        texts.append(out)
        assert err == ""
    assert texts[0] == texts[1]
    found = json.loads(texts[0])
    assert found["facts"]["torch"] == torch.__version__
    assert found["device"] == {"target": "cpu", "words": "the CPU"}
    ops = {row["op"]: row for row in found["ops"]}
    assert ops["linear"]["chosen"] == "native"
    assert {row["kind"] for row in ops["linear"]["others"]} == {"library", "reference"}
    assert all(row["reason"] for op in ops.values() for row in op["others"])
    assert [row["name"] for row in found["libraries"]] == [item.name for item in PACKAGES]
    assert not {"deep_gemm", "flash_mla", "deep_ep", "deep_select"} & set(sys.modules)


def test_another_device(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a Hopper and a Blackwell card would run, asked for on a machine without one."""
    found = {}
    for target in ("cpu", "sm90", "sm100"):
        options = ("--json", "--target", target, "--set", "model.dtype=bfloat16")
        assert main(["doctor", *options, "--config", str(config)]) == 0
        table = json.loads(capsys.readouterr().out)
        found[target] = {row["op"]: row["chosen"] for row in table["ops"]}
        assert table["device"]["target"] == target
        # No card has run what an engine on CUDA calls, and the output says so.
        traced = "" if target == "cpu" else ", traced: no step has run on a card"
        assert table["in_steps"] == f"the implementations below{traced}"
    assert found["cpu"]["sinkhorn"] == "native"
    assert found["sm90"]["sinkhorn"] == found["sm100"]["sinkhorn"] == "tilelang"
    assert found["sm90"]["linear"] == found["sm100"]["linear"] == "library"
    assert found["sm90"]["attention"] == "reference", "keys are not records here"


def test_native_kernels_are_named(
    config: Path, native_kernels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--config", str(config)]) == 0
    library = native.loaded_library()
    assert library is not None
    words = f"native: C++ select_entries ({library.name}, loaded)"
    assert rows(capsys.readouterr().out)["op select_entries"] == words


def test_native_kernels_are_looked_for(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the package first, then in the cache directory; nothing is loaded."""
    monkeypatch.setattr(native, "has_native_kernels", lambda: False)
    name = native.library_path(Path()).name
    package = config.parent / "package"
    for path in (config.parent / "cache" / name, package / "native" / name):
        path.parent.mkdir(parents=True)
        path.touch()
    (package / "manifest.json").touch()  # damaged, which the start repairs
    found = []
    for options in ((), ("--package", str(package))):
        assert main(["doctor", "--config", str(config), *options]) == 0
        found.append(rows(capsys.readouterr().out))
    assert found[0]["op linear"] == f"native: C++ linear ({name} in the cache directory)"
    assert found[1]["op linear"] == f"native: C++ linear ({name} in the package)"
    assert found[0]["package"] == "none" and found[1]["package"] == str(package)


def test_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def none() -> str:
        raise RuntimeError("no compiler\nmore")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "echo")
    assert cli_doctor.compiler_words("cpu").startswith("echo, echo ")
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "/nothing/g++")
    assert "does not tell its version" in cli_doctor.compiler_words("cpu")
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert cli_doctor.compiler_words("cpu") == "none: no compiler"


def test_self_test(config: Path, runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--self-test", "--config", str(config)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "(3, 9) fused" in out
    assert out.endswith("graphs equal to the eager step and pads inert\n")


def test_a_failed_proof_has_exit_status_1(
    config: Path, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nothing:
        def replay(self) -> None:
            pass

    runner.decode_graphs = {**runner.decode_graphs, GraphKey(1, 1): Nothing()}
    assert main(["doctor", "--self-test", "--config", str(config)]) == 1
    out = capsys.readouterr().out
    assert "FAILED (1, 1) fused: not the eager step" in out
    assert out.endswith("proofs: FAILED for 1 of 11 graphs and 0 plans\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "none.yaml"], "none.yaml: cannot read"),
        (["--set", "model.dtype=float99"], "model.dtype"),
        (["--package", "/none"], "/none"),
        (["--self"], "unrecognized arguments: --self"),
        (["--target", "sm80"], "argument --target: invalid choice: 'sm80'"),
        (["--json", "--self-test"], "not allowed with argument --json"),
        (["--set", "scheduler.max_model_len=1048576"], "max_position_embeddings is 4096"),
    ],
)
def test_bad_input_has_exit_status_2(
    runner: Runner, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
