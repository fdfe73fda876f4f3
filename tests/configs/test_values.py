"""Values of a deployment that look right at first sight: sizes, switches, texts with escapes."""

from pathlib import Path

import pytest

from decodegrid.configs.byte_size import parse_size
from decodegrid.configs.load import ConfigError, load_config

SIZE = "must be a whole number of bytes, or a size such as 512MiB"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("12", 12), ("512MiB", 512 * 2**20), ("512 MiB", 512 * 2**20), ("1.5kib", 1536),
        ("2GB", 2_000_000_000), ("7b", 7), ("1pib", 2**50), ("0.001kB", 1), (" 3KB ", 3000),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "", "1,000", "1_000", "12:30", "2026-01-01", "0.5", "1.5b", "8bit", "12GiB more", "5MiB!",
        "+5", "-5MiB", "1e3MiB", "1/2", ".5GiB", "5 XiB", "MiB", "nanMiB", "5k", "\u0967", "9" * 19,
    ],
)  # fmt: skip
def test_what_is_no_size_whole_is_no_size(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a whole number of bytes"):
        parse_size(text)
    path = tmp_path / "x.yaml"
    for section, key in (("cache", "pool_bytes"), ("server", "max_body_bytes")):
        path.write_text(f'{section}:\n  {key}: "{text}"\n')
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        place = f"{path}:2:{len(key) + 5}: {section}.{key}"
        assert str(caught.value) == f'{place}: {SIZE}, got "{text}"'


@pytest.mark.parametrize("value", ["1.5", "true", "null", "[1]", "{a: 1}", ".nan"])
def test_a_size_of_another_type(value: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"cache:\n  pool_bytes: {value}\n")
    with pytest.raises(ConfigError, match=r"^\S+:2:15: cache\.pool_bytes: must be a whole number"):
        load_config(path)


@pytest.mark.parametrize("value", ["1", "null", '"yes"', "[]", "0.5", '"on"'])
def test_a_switch_with_a_third_word_has_one_message(value: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"scheduler:\n  async_scheduling: {value}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    want = f'{path}:2:21: scheduler.async_scheduling: must be true, false or "auto", got {value}'
    assert caught.value.errors == (want,)


@pytest.mark.parametrize("escape", [r"\0", r"\ud800", r"a\udfffb"])
def test_a_text_that_nothing_can_be_named_is_refused_where_it_stands(
    escape: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.yaml"
    for section, key in (
        ("model", "checkpoint"), ("compile", "package"), ("compile", "cache_dir"),
        ("compile", "cubins_dir"), ("dumps", "directory"), ("server", "host"),
        ("server", "api_keys_file"),
    ):  # fmt: skip
        path.write_text(f'{section}:\n  {key}: "{escape}"\n')
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        place = f"{path}:2:{len(key) + 5}: a text cannot hold the character U+"
        assert str(caught.value).splitlines()[0].startswith(place)
        with pytest.raises(ConfigError, match=r"^--set .*: a text cannot hold the character U\+"):
            load_config(None, [f'{section}.{key}="{escape}"'])


def test_fields_of_one_section_that_do_not_fit_are_named_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "server:\n  stall_s: 50\n  stall_exit_s: 40\n"
        "cache:\n  block_size: 8\n  num_blocks: 9\n  memory_fraction: 0.5\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert sorted(caught.value.errors) == [
        f"{path}:3:17: server.stall_exit_s: must be 0 (never) or at least server.stall_s = 50, "
        "got 40",
        f"{path}:7:20: cache.memory_fraction: the pool has one size, got cache.num_blocks = 9 and "
        "cache.memory_fraction = 0.5",
    ]
