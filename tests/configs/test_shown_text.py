"""What messages about a deployment show of its text: places that are right, nothing secret, nothing
endless."""

from pathlib import Path

import pytest

from decodegrid.configs.load import ConfigError, load_config


def _errors(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [line.replace(f"{tmp_path}/", "") for line in caught.value.errors]


@pytest.mark.parametrize(
    "url", ["http://me:pass:word@h/", "http://me:pass@word@h/", "x://me:word@"]
)
def test_password_of_a_url_is_in_no_message(tmp_path: Path, url: str) -> None:
    (in_file,) = _errors(tmp_path, f"server: {{otel_endpoint: '{url}'}}")
    (in_option,) = _errors(tmp_path, "", f"server.otel_endpoint={url}")
    for line in (in_file, in_option):
        assert "word" not in line and "pass" not in line and "://***@" in line
    assert in_file.startswith("x.yaml:1:25: server.otel_endpoint: ")


def test_address_without_a_user_is_shown_whole(tmp_path: Path) -> None:
    (line,) = _errors(tmp_path, "server: {otel_endpoint: 'ftp://h/a@b'}")
    assert line.endswith('got "ftp://h/a@b"')


def test_long_option_is_cut(tmp_path: Path) -> None:
    for text in ("scheduler.max_num_reqs=" + "9" * 5000, "x" * 5000, "y" * 5000 + "=1"):
        (line,) = _errors(tmp_path, "", text)
        assert len(line) < 400
        assert line.startswith(f"--set {text[:117]}...: ")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("cache:\n  block_size: \x07\n", "2:15"),
        ("\x07", "1:1"),
        ("cache:\r\n  block_size: 8\r\n  kv_cache: a\x7fb", "3:14"),
    ],
)
def test_place_of_a_control_character(tmp_path: Path, text: str, place: str) -> None:
    code = 0x7F if "\x7f" in text else 7
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    want = f"{path}:{place}: a YAML text cannot hold the character U+{code:04X}"
    assert caught.value.errors == (want,)


def test_unreadable_value_is_reported_once(tmp_path: Path) -> None:
    assert _errors(tmp_path, 'model: {device: "a\\0"}') == [
        "x.yaml:1:17: a text cannot hold the character U+0000"
    ]


def test_merge_key_is_named(tmp_path: Path) -> None:
    assert _errors(tmp_path, "model:\n  <<: {device: cpu}\n") == [
        "x.yaml:2:3: merge keys are not supported; write the values out"
    ]
    assert _errors(tmp_path, "model: {'<<': 1}") == ['x.yaml:1:9: model."<<": unknown key']
