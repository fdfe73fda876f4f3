"""A deployment file is UTF-8; of any other encoding one line says so, and what to do."""

import codecs
from pathlib import Path

import pytest

from decodegrid.configs.load import ConfigError, load_config
from decodegrid.engine.cli import main

TEXT = "# caf\u00e9\nscheduler:\n  max_num_reqs: 3\n"


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (line,) = caught.value.errors
    return line


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_utf8_with_and_without_a_mark(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(mark + TEXT.encode())
    loaded = load_config(path)
    assert loaded.config.scheduler.max_num_reqs == 3
    assert loaded.origins["scheduler.max_num_reqs"] == "a.yaml:3"
    path.write_bytes(mark + b"nope: 1\n")
    assert error_of(path).startswith(f"{path}:1:1: nope: unknown key")


@pytest.mark.parametrize(
    ("encoding", "what"),
    [
        ("utf-16", "is UTF-16 text (byte order mark)"),
        ("utf-32", "is UTF-32 text (byte order mark)"),
        ("utf-16-le", "not UTF-8 text (byte 10 is 0xe9)"),
        ("latin-1", "not UTF-8 text (byte 5 is 0xe9)"),
        ("cp437", "not UTF-8 text (byte 5 is 0x82)"),
    ],
)
def test_other_encodings(tmp_path: Path, encoding: str, what: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(TEXT.encode(encoding))
    assert error_of(path) == f"{path}: {what}; save it as UTF-8"


@pytest.mark.parametrize(("order", "mark"), [("le", "ff fe"), ("be", "fe ff")])
def test_both_byte_orders(tmp_path: Path, order: str, mark: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(bytes.fromhex(mark) + "cache: {}\n".encode(f"utf-16-{order}"))
    assert error_of(path) == f"{path}: is UTF-16 text (byte order mark); save it as UTF-8"
    path.write_bytes("cache: {}\n".encode(f"utf-16-{order}"))
    zero = 1 if order == "le" else 0
    assert error_of(path) == f"{path}: not UTF-8 text (byte {zero} is 0x00); save it as UTF-8"
    path.write_bytes(bytes.fromhex(mark) + b"\xd8")  # cut in the middle of a character
    assert error_of(path) == f"{path}: is UTF-16 text (byte order mark); save it as UTF-8"


def test_the_command_line_says_it_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(TEXT.encode("latin-1"))
    for command in (["config", "show"], ["config", "check"], ["generate", "x"], ["chat"]):
        assert main([*command, "--config", str(path)]) == 2
        message = f"{path}: not UTF-8 text (byte 5 is 0xe9); save it as UTF-8"
        assert capsys.readouterr() == ("", f"decodegrid: error: {message}\n")
