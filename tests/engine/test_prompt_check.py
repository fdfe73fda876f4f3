"""Prompts that a deployment cannot hold are refused before start-up, in the engine's words."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodegrid.configs.load import load_config
from decodegrid.engine.admission import EngineLimits
from decodegrid.engine.cli import main
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import ChatMessage, Tokenizer

SMALL = ("scheduler.max_model_len=40", "cache.block_size=8")
# Two blocks of 8 tokens beside the null block.
POOL = ("scheduler.max_model_len=40", "cache.block_size=8", "cache.num_blocks=3")


def sets(overrides: tuple[str, ...]) -> list[str]:
    return [f"--set={text}" for text in overrides]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(*argv): the one error line of a command that must not start the engine."""

    def never(loaded: Any) -> LLM:
        raise AssertionError("the engine was started")

    def run(*argv: str) -> str:
        assert main(argv, never) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err.removeprefix("decodegrid: error: ").removesuffix("\n")

    return run


@pytest.fixture
def embedded(make_runner: Callable[..., Any]) -> Callable[..., LLM]:
    """embedded(*overrides): an engine with the deployment's limits and the embedded tokenizer."""

    def make(*overrides: str) -> LLM:
        loaded = load_config(None, overrides)
        runner = make_runner(
            max_model_len=loaded.config.scheduler.max_model_len,
            block_size=loaded.config.cache.block_size,
            num_blocks=loaded.config.num_blocks,
            max_num_reqs=loaded.config.scheduler.max_num_reqs,
            prefill_chunk_sizes=loaded.config.scheduler.prefill_chunk_sizes,
        )
        runner.vocab_size = 2048
        return LLM.from_runner(runner, Tokenizer(loaded.checkpoint_dir / "tokenizer.json"))

    return make


@pytest.mark.parametrize(
    ("overrides", "prompts", "options", "wanted"),
    [
        (SMALL, ["x" * 500], [], "leaves room for a prompt of at most 39"),
        (SMALL, ["fine", "x" * 500], [], "prompt 1: the prompt has"),
        (POOL, ["fine"], ["--max-tokens", "30"], "the pool has 2"),
        (POOL, ["fine", "fine too"], ["--max-tokens", "30"], "prompt 0: "),
        (SMALL, ["bad \udc80"], [], "not valid Unicode: character 4"),
    ],
)
def test_generate(
    refused: Callable[..., str],
    embedded: Callable[..., LLM],
    overrides: tuple[str, ...],
    prompts: list[str],
    options: list[str],
    wanted: str,
) -> None:
    error = refused("generate", *prompts, *options, *sets(overrides))
    assert wanted in error
    params = SamplingParams(max_tokens=30 if options else 128)
    with pytest.raises(RequestError) as caught:
        embedded(*overrides).generate(prompts, params)
    assert str(caught.value) == error


def test_generate_from_a_file(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("fine\n\n" + "x" * 500 + "\n")
    assert refused("generate", f"--prompts-file={path}", *sets(SMALL)).startswith("prompt 1: the")


def test_a_checkpoint_that_is_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    missing = sets((f"model.checkpoint={tmp_path}/nothing",))
    wanted = f"{tmp_path}/nothing: no such checkpoint directory"
    assert refused("generate", "x", *missing) == wanted
    empty = sets((f"model.checkpoint={tmp_path}",))
    wanted = f"{tmp_path}/tokenizer.json: No such file or directory"
    assert refused("generate", "x", *empty) == wanted


def test_limits_before_and_after_the_start_up(embedded: Callable[..., LLM]) -> None:
    for overrides in ((), SMALL, POOL):
        config = load_config(None, overrides).config
        limits = EngineLimits.of_deployment(config, 2048, config.num_blocks)
        assert limits == embedded(*overrides).limits


class Stdin(io.TextIOWrapper):
    """Standard input with a given text."""

    def __init__(self, text: str, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(text.encode()), encoding="utf-8")
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def test_chat_reads_the_first_message_of_a_pipe(
    refused: Callable[..., str],
    embedded: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = "x" * 500
    monkeypatch.setattr(sys, "stdin", Stdin(f"\n/clear\n{long}\n"))
    error = refused("chat", "--system", "s", *sets(SMALL))
    llm = embedded(*SMALL)
    messages = [ChatMessage("system", "s"), ChatMessage("user", long)]
    with pytest.raises(RequestError) as caught:
        llm.generate([llm.tokenizer.encode_chat(messages)])
    assert str(caught.value) == error


@pytest.mark.parametrize("is_terminal", [False, True])
def test_chat_with_a_system_message_that_leaves_no_room(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin("hi\n", is_terminal))
    error = refused("chat", "--system", "s" * 500, *sets(SMALL))
    assert "the context of 40 tokens leaves room for a prompt of at most 39" in error


@pytest.mark.parametrize("text", ["", "\n", "/exit\nhi\n", "\n/clear\n/exit\nhi\n"])
def test_chat_without_a_message_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    def never(loaded: Any) -> LLM:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(sys, "stdin", Stdin(text))
    assert main(["chat"], never) == 0
    assert capsys.readouterr() == ("", "")
