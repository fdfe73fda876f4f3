"""The command line with the toy runner: texts, errors on one line, exit statuses."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodegrid.engine import cli_generate
from decodegrid.engine.cli import main
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

GREEDY = ["--temperature", "0", "--max-tokens", "12"]


class Stdin(io.TextIOWrapper):
    """Standard input with given bytes."""

    def __init__(self, data: bytes, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def build(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> Callable[[Any], LLM]:
    return lambda loaded: LLM.from_runner(make_runner(max_model_len=400), tokenizer)


@pytest.fixture
def call(build: Callable[[Any], LLM], capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(*argv: str) -> tuple[int, str, str]:
        status = main(argv, build)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def text_of(build: Callable[[Any], LLM], prompt: Any) -> str:
    params = SamplingParams(temperature=0, max_tokens=12)
    return build(None).generate([prompt], params)[0].outputs[0].text


def test_one_prompt_streams_its_text(call: Any, build: Any) -> None:
    status, out, err = call("generate", "hello", *GREEDY)
    assert (status, out) == (0, text_of(build, "hello") + "\n")
    assert err.splitlines()[-1] == "compilations after ready: 0"
    status, _, err = call("generate", "hello", *GREEDY, "--no-report")
    assert (status, err) == (0, "")


def test_several_prompts_have_a_block_each(call: Any, build: Any, tmp_path: Path) -> None:
    expected = "\n".join(
        f"== {i}/3: {prompt}\n{text_of(build, prompt)}\n"
        for i, prompt in enumerate(["one", "two", "three"], start=1)
    )
    assert call("generate", "one", "two", "three", *GREEDY, "--no-report") == (0, expected, "")
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n  \nthree\n")
    arguments = ("--prompts-file", str(path), "--no-report")
    assert call("generate", *arguments, *GREEDY) == (0, expected, "")


def test_standard_input_is_one_prompt(
    call: Any, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin("zwei\nZeilen \u00fc\n".encode()))
    status, out, _ = call("generate", *GREEDY)
    assert (status, out) == (0, text_of(build, "zwei\nZeilen \u00fc") + "\n")


def test_characters_are_never_split(
    tokenizer: Tokenizer,
    make_runner: Callable[..., Any],
    scripted: Any,
    byte_id: Callable[[int], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every write that reaches the screen holds whole characters, whatever a step emits."""
    text = "\u20ac\U0001f600\u00e9x\u4f60\u597d"
    script = [*map(byte_id, text.encode()), 1]
    written: list[str] = []
    write = cli_generate._write
    monkeypatch.setattr(cli_generate, "_write", lambda t: (written.append(t), write(t)))
    for drafts in (0, 1, 5, "mixed"):
        model = scripted(len(tokenizer.encode("p")), script)
        runner = make_runner(model=model, drafts=drafts)
        llm = LLM.from_runner(runner, tokenizer)
        arguments = ["generate", "p", "--temperature", "0", "--max-tokens", "60"]
        assert main(arguments, lambda loaded, llm=llm: llm) == 0
        assert capsys.readouterr().out == text + "\n"
    assert all("\ufffd" not in piece for piece in written) and len(written) > 12


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "COMMAND"),
        (("generat",), "invalid choice: 'generat'"),
        (("generate", "x", "--nope"), "--nope"),
        (("generate", "x", "--max-tokens", "0"), "max_tokens must be at least 1, got 0"),
        (("generate", "x", "--max-tokens", "-4"), "max_tokens must be at least 1, got -4"),
        (("generate", "x", "--max-tokens", "many"), "'many'"),
        (("generate", "x", "--temperature", "-1"), "temperature must be 0 (greedy) or"),
        (("generate", "x", "--temperature", "nan"), "temperature must be a finite number"),
        (("generate", "x", "--seed", str(2**63)), "seed must be 0 to"),
        (("generate", "x", "--top-p", "1.5"), "top_p must be above 0 and at most 1, got 1.5"),
        (("generate", "x", "--top-k", "0"), "top_k must be -1 (off) or at least 1, got 0"),
        (("generate", "x", "--top-k", "few"), "'few'"),
        (("chat", "--top-p", "0"), "top_p must be above 0 and at most 1, got 0.0"),
        (("generate", "x", "--set", "speculation.verify=exact"), "'coupled' or 'rejection'"),
        (("generate", ""), "the prompt is empty"),
        (("generate", "x", ""), "prompt 1: the prompt is empty"),
        (("generate", "y" * 400), "401 tokens; the context of 400 tokens"),
        (("generate", "x", "--config", "/nowhere/a.yaml"), "/nowhere/a.yaml: cannot read"),
        (("generate", "x", "--set", "nonsense"), "--set nonsense"),
        (("generate", "x", "--set", "cache.blok_size=4"), "block_size"),
        (("generate", "--prompts-file", "/nowhere/p"), "/nowhere/p: No such file"),
        (("generate", "x", "--prompts-file", "p"), "choose one"),
        (("chat", "--max-tokens", "0"), "max_tokens must be at least 1, got 0"),
        (("config",), "ACTION"),
        (("config", "check", "x.yaml"), "arguments: x.yaml; a deployment is given with --config"),
        (("config", "show", "x"), "unrecognized arguments: x (see decodegrid --help)"),
        (("config", "check", "--set", "scheduler.max_num_reqs=0"), "max_num_reqs"),
    ],
)
def test_errors_are_one_line(call: Any, argv: tuple[str, ...], message: str) -> None:
    status, out, err = call(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("decodegrid: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert message in err


def test_bad_input_files(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"ok \xff\n")
    for argv, data, message in (
        (("generate", "--prompts-file", str(path)), b"", f"{path}: not UTF-8 at byte 3"),
        (("generate",), b"\xff", "standard input: not UTF-8 at byte 0"),
        (("generate",), b"\n", "standard input: the prompt is empty"),
    ):
        monkeypatch.setattr(sys, "stdin", Stdin(data))
        status, out, err = call(*argv)
        assert (status, out, err) == (2, "", f"decodegrid: error: {message}\n")
    path.write_bytes(b"\n \n")
    assert "no prompt in it" in call("generate", "--prompts-file", str(path))[2]
    monkeypatch.setattr(sys, "stdin", Stdin(b"", is_terminal=True))
    assert "no prompt: give one" in call("generate")[2]


def test_many_errors_of_a_deployment_are_one_line(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("cache:\n  block_size: 3\n  nope: 1\n")
    status, _, err = call("generate", "x", f"--config={path}")
    assert status == 2 and err.count("\n") == 1
    assert f"{path}:2" in err and f"{path}:3" in err
    # The check, whose work they are, gives each a line.
    status, _, err = call("config", "check", f"--config={path}")
    assert status == 2 and err.count("\n") == 2


def test_config_show_names_origins(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("scheduler:\n  max_num_reqs: 3\n")
    both = [
        call("config", "show", *spelling, "--set", "cache.block_size=32")
        for spelling in (["--config", str(path)], [f"--config={path}"])
    ]
    assert both[0] == both[1]
    status, out, _ = both[0]
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert status == 0
    assert (
        rows["scheduler.max_num_reqs"][0] == "3" and "a.yaml:2" in rows["scheduler.max_num_reqs"][1]
    )
    assert rows["cache.block_size"] == ["32", "--set"]
    assert rows["speculation.num_draft_tokens"] == ["5", "default"]
    status, out, _ = call("config", "check", "--config", str(path))
    assert status == 0 and out.endswith(f"\n{path}: ok\n")


def test_help_and_version(call: Any) -> None:
    assert call("--version")[:2] == (0, "decodegrid 0.1.0\n")
    for argv in (["--help"], ["generate", "--help"], ["chat", "--help"], ["config", "-h"]):
        status, out, err = call(*argv)
        assert status == 0 and "usage: decodegrid" in out and err == ""


def test_interrupt_and_broken_pipe(
    tokenizer: Tokenizer, make_runner: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    llm = LLM.from_runner(make_runner(), tokenizer)
    for error, status in ((KeyboardInterrupt, 130), (BrokenPipeError, 141)):

        def fail(text: str, error: type[BaseException] = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(cli_generate, "_write", fail)
            assert main(["generate", "x"], lambda loaded: llm) == status
        assert "Traceback" not in capsys.readouterr().err
        assert not llm.scheduler.has_unfinished


def test_chat_keeps_clears_and_leaves(
    call: Any, build: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decodegrid.engine.tokenizer import ChatMessage as Message

    first = text_of(build, tokenizer.encode_chat([Message("system", "s"), Message("user", "a")]))
    history = [Message("system", "s"), Message("user", "a"), Message("assistant", first)]
    second = text_of(build, tokenizer.encode_chat([*history, Message("user", "b")]))
    monkeypatch.setattr(sys, "stdin", Stdin(b"a\n\nb\n/clear\na\n/exit\nb\n"))
    status, out, err = call("chat", "--system", "s", *GREEDY)
    assert (status, out) == (0, f"{first}\n{second}\n{first}\n")
    assert err.splitlines()[-1] == "compilations after ready: 0"
    monkeypatch.setattr(sys, "stdin", Stdin(b"/exit"))
    assert call("chat") == (0, "", "")


def test_chat_that_outgrows_the_context(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"a\n" + b"x" * 500 + b"\na\n"
    monkeypatch.setattr(sys, "stdin", Stdin(lines))
    status, out, err = call("chat", *GREEDY, "--no-report")
    assert status == 2 and out.count("\n") >= 1 and "context of 400 tokens" in err
    monkeypatch.setattr(sys, "stdin", Stdin(lines, is_terminal=True))
    status, out, err = call("chat", *GREEDY, "--no-report")
    assert status == 0 and "context of 400 tokens" in err and "/clear starts over" in err
    assert out.count("> ") >= 4


def test_an_unknown_command_of_the_chat_is_not_for_the_model(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"/help\n/exit\n", is_terminal=True))
    status, out, err = call("chat", *GREEDY, "--no-report")
    assert status == 0 and "/help is no command; /clear forgets" in err
    assert out.replace("> ", "") == ""
    # From a pipe, and with other words behind it, it is text.
    for data, is_terminal in ((b"/help\n", False), (b"/help me\n/exit\n", True)):
        monkeypatch.setattr(sys, "stdin", Stdin(data, is_terminal=is_terminal))
        status, out, err = call("chat", *GREEDY, "--no-report")
        assert status == 0 and "no command" not in err and out.replace("> ", "").strip()


def test_an_empty_prompt_is_refused_before_start_up(capsys: pytest.CaptureFixture[str]) -> None:
    def never(loaded: Any) -> Any:
        raise AssertionError("the engine was started")

    assert main(["generate", "x", ""], build_llm=never) == 2
    assert "prompt 1: the prompt is empty" in capsys.readouterr().err
