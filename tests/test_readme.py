"""The README says what is so: its code parses and names what exists, its commands and paths too."""

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest

import decodegrid
from decodegrid.configs.load import load_config
from decodegrid.engine.cli import build_parser
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_output import CompletionOutput, StreamOutput

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 160
    assert all(len(line) <= 110 for line in lines)


def test_python_runs_up_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block runs with an LLM that only checks its arguments."""
    calls: list[str] = []
    completion = CompletionOutput(0, "text", (1,), "stop")

    class Output:
        outputs = (completion,)

    class CheckingLLM:
        def __init__(self, config: str) -> None:
            load_config(ROOT / config)

        def generate(self, *args: object) -> list[Output]:
            inspect.signature(LLM.generate).bind(self, *args)
            calls.append("generate")
            return [Output()]

        def stream(self, *args: object) -> list[StreamOutput]:
            inspect.signature(LLM.stream).bind(self, *args)
            calls.append("stream")
            return [StreamOutput(0, "0", "text", (1,), None, None)]

    sources = blocks("python")
    assert sources, "no Python block"
    monkeypatch.setattr(decodegrid, "LLM", CheckingLLM, raising=False)
    for source in sources:
        exec(compile(source, "README.md", "exec"), {})
    assert calls == ["generate", "stream"]


def test_names_exist() -> None:
    names = set(re.findall(r"\bdecodegrid\.(\w+)\(", README))
    for source in blocks("python"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module == "decodegrid":
                names |= {alias.name for alias in node.names}
    assert {"LLM", "SamplingParams", "load_model"} <= names
    assert names <= set(decodegrid.__all__)


def test_make_targets_exist() -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", README, re.MULTILINE))
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_commands_parse() -> None:
    commands = [
        line.split("decodegrid ", 1)[1]
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith(".venv/bin/decodegrid ")
    ]
    assert len(commands) >= 3
    for command in commands:
        assert build_parser().parse_args(shlex.split(command, comments=True)).run


@pytest.mark.parametrize("text", blocks("yaml"))
def test_deployments_load(text: str, tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(text, encoding="utf-8")
    loaded = load_config(path)
    assert loaded.cache_dir == tmp_path / "compile_cache"


def test_paths_exist() -> None:
    # A path in backquotes: something with a slash, or a file of the root; `--json FILE` is neither.
    named = set(re.findall(r"`([\w.]+/[\w./]*|LICENSE|NOTICE|[\w.]+\.(?:txt|toml))`", README))
    assert {"engine/", "tests/", "configs/tiny.yaml", "LICENSE"} <= named
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_every_folder_is_in_the_map() -> None:
    rows = set(re.findall(r"^\| `(\w+)/` \|", README, re.MULTILINE))
    sources = {path.parent.name for path in ROOT.glob("*/*.py")} - {"build", "dist"}
    assert rows == sources | {"tests"}
