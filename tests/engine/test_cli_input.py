"""Prompts and messages as bytes: line ends, byte order marks, and bytes that are not UTF-8."""

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodegrid.engine import build
from decodegrid.engine.cli import main
from decodegrid.engine.cli_generate import _read_prompts
from decodegrid.engine.cli_input import decode_utf8
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.tokenizer import Tokenizer

BOM = b"\xef\xbb\xbf"


def set_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_a_prompts_file_is_split_at_line_feeds_only(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    inner = ["a\u2028b", "c\x0bd\x0ce\x1cf\x85g", "h\ri", "j\r"]
    path.write_bytes(BOM + "\r\n".join([*inner, "", "last"]).encode())
    args = argparse.Namespace(prompts=[], prompts_file=path)
    assert _read_prompts(args) == [*inner, "last"]


def test_a_byte_order_mark_on_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(prompts=[], prompts_file=None)
    set_stdin(monkeypatch, BOM + b"one\n")
    assert _read_prompts(args) == ["one"]
    set_stdin(monkeypatch, BOM)
    with pytest.raises(RequestError, match="standard input: the prompt is empty"):
        _read_prompts(args)


def test_positions_count_from_the_start_of_the_input() -> None:
    with pytest.raises(RequestError, match=r"^f: not UTF-8 at byte 5$"):
        decode_utf8("f", BOM + b"ok\xff")
    with pytest.raises(RequestError, match=r"^f: not UTF-8 at byte 12$"):
        decode_utf8("f", b"ok\xff", 10)
    assert decode_utf8("f", BOM, 10) == "\ufeff"


def test_chat_names_the_byte(
    tokenizer: Tokenizer,
    make_runner: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["chat", "--temperature=0", "--max-tokens=4", "--no-report"]
    for data, position in ((b"\n\xff\n", 1), (BOM + b"a\nb \xff\n", 7)):
        set_stdin(monkeypatch, data)
        llm = LLM.from_runner(make_runner(max_model_len=400), tokenizer)
        assert main(arguments, lambda loaded, llm=llm: llm) == 2
        wanted = f"decodegrid: error: standard input: not UTF-8 at byte {position}\n"
        assert capsys.readouterr().err == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context-len=59"], "--context-len is 59; allowed are 1..58, scheduler.max_model_len"),
        (["--context-len=0"], "--context-len is 0; allowed are 1..58"),
        (["--set=scheduler.max_model_len=6"], "scheduler.max_model_len is 6; measuring step times"),
        (["--json={}"], "which is a directory; a file is needed"),
        (["--json={}/no/s.json"], "there is no directory"),
    ],
)
def test_profile_refuses_before_it_compiles(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(loaded: Any) -> Any:
        raise AssertionError("the runner was built")

    monkeypatch.setattr(build, "build_runner", never)
    filled = [text.format(tmp_path) for text in arguments]
    assert main(["profile", "--set=scheduler.max_model_len=64", *filled]) == 2
    assert message in capsys.readouterr().err
