"""Loading a deployment: strictness, places in the file, overrides, origins."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from decodegrid.configs.load import ConfigError, LoadedConfig, load_config
from decodegrid.configs.schema import DeploymentConfig

Write = Callable[[str], Path]

VERIFY_TOKENS = 'must be "scheduled", "all" or a whole number >= 1'


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "x.yaml"
        path.write_text(text)
        return path

    return write_file


def errors_of(path: Path | None, *overrides: str) -> list[str]:
    """The error lines, with the folder of the file cut off."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert str(caught.value).splitlines() == list(caught.value.errors)
    folder = "" if path is None else f"{path.parent}/"
    return [line.removeprefix(folder) for line in caught.value.errors]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "{}\n"])
def test_empty_file_is_all_defaults(write: Write, text: str) -> None:
    loaded = load_config(write(text))
    assert loaded.config == DeploymentConfig()
    assert set(loaded.origins.values()) == {"default"}


def test_embedded_deployment_spells_out_the_defaults() -> None:
    loaded = load_config(None)
    assert loaded.config == DeploymentConfig()
    assert all(re.fullmatch(r"tiny\.yaml:\d+", place) for place in loaded.origins.values())
    assert (loaded.path.parent.name, loaded.path.name) == ("configs", "tiny.yaml")


def test_duplicate_key_names_both_lines(write: Write) -> None:
    path = write("scheduler:\n  max_num_reqs: 4\n  max_model_len: 64\n  max_num_reqs: 8\n")
    want = "x.yaml:4:3: scheduler.max_num_reqs: duplicate key, first set in line 2"
    assert errors_of(path) == [want]
    path = write("cache: {}\ncache: {}\n")
    assert errors_of(path) == ["x.yaml:2:1: cache: duplicate key, first set in line 1"]


def test_unknown_key_is_placed_and_a_near_one_named(write: Write) -> None:
    path = write("# comment\nscheduler:\n  max_num_req: 8\n")
    want = "x.yaml:3:3: scheduler.max_num_req: unknown key; did you mean 'max_num_reqs'?"
    assert errors_of(path) == [want]
    assert errors_of(write("shedule: {}\n")) == [
        "x.yaml:1:1: shedule: unknown key; did you mean 'scheduler'?"
    ]
    assert errors_of(write("model:\n  zzz: 1\n")) == ["x.yaml:2:3: model.zzz: unknown key"]


def test_false_on_a_key_that_is_true_by_default(write: Write) -> None:
    assert DeploymentConfig().compile.progress is True
    assert load_config(write("compile: {progress: false}")).config.compile.progress is False


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1E2", 100.0), (".5", 0.5), ("2.", 2.0), ("1", 1.0), ("010", 10.0)],
)
def test_numbers(write: Write, text: str, value: float) -> None:
    loaded = load_config(write(f"sampling:\n  temperature: {text}\n"))
    assert loaded.config.sampling.temperature == value
    assert isinstance(loaded.config.sampling.temperature, float)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("+12", 12), ("010", 10), ("0o10", 8), ("0xff", 255)],
)
def test_whole_numbers(write: Write, text: str, value: int) -> None:
    loaded = load_config(write(f"sampling: {{max_tokens: {text}}}"))
    assert loaded.config.sampling.max_tokens == value


@pytest.mark.parametrize("word", ["no", "off", "yes", "1_000", "12:30", "1.2.3", "0b1", "'5'"])
def test_words_stay_text(write: Write, word: str) -> None:
    loaded = load_config(write(f"model: {{checkpoint: {word}}}"))
    assert loaded.config.model.checkpoint == word.strip("'")


@pytest.mark.parametrize("null", ["null", "~", "Null", ""])
def test_null_is_refused(write: Write, null: str) -> None:
    path = write(f"cache:\n  block_size: {null}\nmodel:\n  checkpoint: {null}\n")
    errors = errors_of(path)
    assert len(errors) == 2
    assert re.fullmatch(r"x\.yaml:4:\d+: model\.checkpoint: must be text, got null", errors[0])
    want = r"x\.yaml:2:\d+: cache\.block_size: must be a whole number, got null"
    assert re.fullmatch(want, errors[1])
    assert "cache: must be a mapping, got null" in errors_of(write(f"cache: {null}"))[0]


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("sampling", "max_tokens", "1.0", "must be a whole number, got 1.0"),
        ("sampling", "max_tokens", "true", "must be a whole number, got true"),
        ("sampling", "max_tokens", '"5"', 'must be a whole number, got "5"'),
        ("sampling", "max_tokens", "0", "must be greater than or equal to 1, got 0"),
        ("sampling", "temperature", "-0.5", "must be 0 (greedy) or 1e-05 to 100, got -0.5"),
        ("sampling", "temperature", "true", "must be a number, got true"),
        ("sampling", "temperature", ".nan", "must be a finite number, got NaN"),
        ("sampling", "temperature", ".inf", "must be a finite number, got Infinity"),
        ("compile", "progress", "no", 'must be true or false, got "no"'),
        ("compile", "progress", "1", "must be true or false, got 1"),
        ("compile", "backend", "jit", "must be 'inductor' or 'eager', got \"jit\""),
        ("model", "checkpoint", "5", "must be text, got 5"),
        ("model", "checkpoint", '""', 'must not be empty, got ""'),
        ("cache", "block_size", "7", "must be even, got 7"),
        ("cache", "block_size", "1026", "must be less than or equal to 1024, got 1026"),
        ("cache", "num_blocks", "1", "must be 0 (sized by need) or at least 2"),
        ("speculation", "verify_tokens", "x", f'{VERIFY_TOKENS}, got "x"'),
        ("speculation", "verify_tokens", "0", f"{VERIFY_TOKENS}, got 0"),
        ("speculation", "verify_tokens", "true", f"{VERIFY_TOKENS}, got true"),
        ("grid", "num_reqs", "8", "must be a list, got 8"),
        ("grid", "num_reqs", "[4, 2, 8]", "must be ascending without repeats; 2 follows 4"),
        ("grid", "num_reqs", "[8, 8]", "must be ascending without repeats; 8 follows 8"),
        ("scheduler", "prefill_chunk_sizes", "[]", "must have at least one entry, got []"),
        ("scheduler", "max_num_reqs", "1025", "must be less than or equal to 1024, got 1025"),
    ],
)
def test_wrong_value_is_placed(
    write: Write, section: str, key: str, value: str, message: str
) -> None:
    (error,) = errors_of(write(f"{section}:\n  {key}: {value}\n"))
    assert error.startswith(f"x.yaml:2:{len(key) + 5}: {section}.{key}: {message}")
    (error,) = errors_of(write(""), f"{section}.{key}={value}")
    assert error.startswith(f"--set {section}.{key}={value}: {section}.{key}: {message}")


def test_entry_of_a_list_is_placed(write: Write) -> None:
    (error,) = errors_of(write("scheduler:\n  prefill_chunk_sizes: [1, 16]\n"))
    assert error.startswith("x.yaml:2:25: scheduler.prefill_chunk_sizes[0]: must be greater than")
    assert error.endswith("or equal to 2, got 1")


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("cache: [", "1:9", "expected the node content"),
        ("\tcache: 1", "1:1", "cannot start any token"),
        ("cache: {}\n---\ncache: {}\n", "2:1", "expected a single document"),
        ("a: &x {}\nb: *x\n", "2:4", "aliases are not supported, got *x; write the value out"),
        ("a: !!int 3\n", "1:4", "tags are not supported"),
        ("cache:\n  ? [1]\n  : 2\n", "2:5", "a key must be a plain word"),
        ("[" * 5000, "1:1", "nested too deeply"),
        ("sampling: {max_tokens: " + "9" * 5000 + "}", "1:24", "a number of 5000 digits"),
        ("5\n", "1:1", "must be a mapping of sections, got 5"),
        ("null\n", "1:1", "must be a mapping of sections, got null"),
        ("- cache\n", "1:1", 'must be a mapping of sections, got ["cache"]'),
    ],
)
def test_what_is_no_deployment_is_one_line(
    write: Write, text: str, place: str, message: str
) -> None:
    error = errors_of(write(text))[0]
    assert error.startswith(f"x.yaml:{place}: ")
    assert message in error
    assert "\n" not in error


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"model: \x80\x00")
    (error,) = errors_of(path)
    assert error == "x.yaml: not UTF-8 text (byte 7 is 0x80); save it as UTF-8"


def test_missing_file_and_folder(tmp_path: Path) -> None:
    (error,) = errors_of(tmp_path / "absent.yaml")
    assert error == "absent.yaml: cannot read: No such file or directory"
    with pytest.raises(ValueError, match="cannot read: Is a directory"):
        load_config(tmp_path)


def test_all_errors_at_once(write: Write) -> None:
    path = write(
        "cache:\n  block_size: 7\n  blocks: 1\n  block_size: 8\nspeculation:\n"
        "  num_draft_tokens: 17\nmodel: 3\n"
    )
    errors = errors_of(path, "sampling.max_tokens=0", "nonsense", "grid.foo=1", "compile.progress=")
    places = [re.split(r": ", error, maxsplit=1)[0] for error in errors]
    assert sorted(places) == sorted(
        [
            "x.yaml:2:15",
            "x.yaml:3:3",
            "x.yaml:4:3",
            "x.yaml:6:21",
            "x.yaml:7:8",
            "--set sampling.max_tokens=0",
            "--set nonsense",
            "--set grid.foo=1",
            "--set compile.progress=",
        ]
    )


def test_fields_that_contradict_each_other_are_all_named(write: Write) -> None:
    path = write(
        "scheduler:\n  max_num_reqs: 6\ngrid:\n  num_reqs: [1, 4]\n"
        "  num_query_tokens_per_req: [1, 3]\nspeculation:\n  num_draft_tokens: 3\n"
        "  verify_tokens: 25\n"
    )
    reqs, per_req, verify = errors_of(path)
    assert reqs.startswith("x.yaml:4:13: grid.num_reqs: ")
    assert "scheduler.max_num_reqs = 6" in reqs
    assert reqs.endswith("got [1, 4]")
    assert per_req.startswith("x.yaml:5:29: grid.num_query_tokens_per_req: must end with 4")
    assert "speculation.num_draft_tokens = 3" in per_req
    assert verify.startswith("x.yaml:8:18: speculation.verify_tokens: must be at most 24")
    assert verify.endswith("got 25")


def test_fresh_rates_need_coupled_verification_and_no_step_in_flight(write: Write) -> None:
    path = write("speculation:\n  budget_rates: fresh\n")
    assert load_config(path).config.scheduler.async_scheduling == "auto"
    load_config(path, ["scheduler.async_scheduling=false"])
    (error,) = errors_of(path, "model.device=cuda")
    assert "scheduler.async_scheduling = auto on cuda" in error
    (error,) = errors_of(path, "speculation.verify=rejection")
    assert 'speculation.budget_rates: must be "delayed" with speculation.verify' in error
    (error,) = errors_of(path, "scheduler.async_scheduling=true")
    assert 'speculation.budget_rates: must be "delayed" with scheduler.async' in error


def test_contradiction_with_a_default_names_the_file(write: Write) -> None:
    (error,) = errors_of(write(""), "speculation.num_draft_tokens=0", "speculation.verify_tokens=9")
    assert error.startswith("--set speculation.verify_tokens=9: speculation.verify_tokens: ")
    path = write("scheduler: {max_num_reqs: 2}\ngrid: {num_reqs: [1, 2]}\n")
    (error,) = errors_of(path, "scheduler.max_num_reqs=4")
    assert error.startswith("x.yaml:2:18: grid.num_reqs: must end with scheduler.max_num_reqs = 4")


def test_overrides_win_and_origins_tell(write: Write) -> None:
    path = write("scheduler:\n  max_num_reqs: 4\n  max_model_len: 64\ncache: {block_size: 8}\n")
    overrides = [
        "scheduler.max_num_reqs=2",
        "scheduler.max_num_reqs=3",
        "grid.num_reqs=[1, 3]",
        "sampling.temperature=1e-3",
        "model.checkpoint=a=b",
    ]
    loaded = load_config(path, overrides)
    config = loaded.config
    assert config.scheduler.max_num_reqs == 3
    assert config.scheduler.max_model_len == 64
    assert config.grid.num_reqs == (1, 3)
    assert config.sampling.temperature == 0.001
    assert config.model.checkpoint == "a=b"
    told = {key: origin for key, origin in loaded.origins.items() if origin != "default"}
    assert told == {
        "scheduler.max_num_reqs": "--set",
        "scheduler.max_model_len": "x.yaml:3",
        "cache.block_size": "x.yaml:4",
        "grid.num_reqs": "--set",
        "sampling.temperature": "--set",
        "model.checkpoint": "--set",
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nonsense", "must be section.key=value"),
        ("=3", "must be section.key=value"),
        ("scheduler=3", "scheduler: a section; set one of its keys: max_num_reqs, "),
        ("schedule.max_num_reqs=3", "schedule: unknown key; did you mean 'scheduler'?"),
        ("cache.block_sise=8", "cache.block_sise: unknown key; did you mean 'block_size'?"),
        ("cache.block_size.x=8", "cache.block_size.x: unknown key"),
        ("cache.=8", "unknown key"),
        ("grid.num_reqs=[1", "expected ',' or ']'"),
        ("cache.block_size={}", "must be a whole number, got {}"),
    ],
)
def test_override_that_cannot_be(write: Write, override: str, message: str) -> None:
    (error,) = errors_of(write(""), override)
    assert error.startswith(f"--set {override}: ")
    assert message in error


def test_rows_are_every_leaf_in_order(write: Write) -> None:
    rows = list(load_config(write("grid: {num_reqs: [2, 8]}")).rows())
    fields = DeploymentConfig.model_fields
    sections = [name for name in fields if name != "schema_version"]
    assert rows[0] == ("schema_version", "1", "default")
    assert list(dict.fromkeys(key.split(".")[0] for key, _, _ in rows[1:])) == sections
    assert ("grid.num_reqs", "[2, 8]", "x.yaml:1") in rows
    assert ("model.checkpoint", '"tiny"', "default") in rows


def resolved(loaded: LoadedConfig) -> tuple[Path, Path, Path]:
    return loaded.checkpoint_dir, loaded.cache_dir, loaded.cubins_dir


def test_paths_are_relative_to_the_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("model: {checkpoint: ../m}\ncompile: {cache_dir: c}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    root = tmp_path.resolve()
    assert resolved(load_config(path)) == (root.parent / "m", root / "c", root / "c" / "cubins")
    by_set = load_config(path, ["model.checkpoint=m", "compile.cache_dir=c"])
    there = root / "elsewhere"
    assert resolved(by_set) == (there / "m", there / "c", there / "c" / "cubins")
    named = write("compile: {cubins_dir: k}\n")
    assert load_config(named).cubins_dir == root / "k"
    assert load_config(named, ["compile.cubins_dir=k"]).cubins_dir == there / "k"
    embedded = load_config(path, ["model.checkpoint=tiny"]).checkpoint_dir
    assert embedded == load_config(None).path.parent / "tiny"


def test_cache_dir_of_the_user(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_config(write(""))
    for name in ("DECODEGRID_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert loaded.cache_dir == tmp_path / ".cache" / "decodegrid"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert loaded.cache_dir == tmp_path / ".cache" / "decodegrid"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert loaded.cache_dir == tmp_path / "xdg" / "decodegrid"
    monkeypatch.setenv("DECODEGRID_CACHE_DIR", str(tmp_path / "own"))
    assert loaded.cache_dir == tmp_path / "own"
    monkeypatch.setenv("DECODEGRID_CACHE_DIR", "own")
    with pytest.raises(ValueError, match="absolute path, got 'own'"):
        _ = loaded.cache_dir


def test_derived_numbers() -> None:
    config = DeploymentConfig()
    assert (config.max_query_tokens_per_req, config.max_num_query_tokens) == (6, 48)
    assert config.num_blocks == 8 * 64 + 1
    assert config.grid_num_reqs == (1, 2, 4, 8)
    assert config.grid_num_query_tokens_per_req == (1, 2, 3, 4, 5, 6)
    small = load_config(
        None,
        [
            "scheduler.max_num_reqs=6",
            "scheduler.max_model_len=65",
            "speculation.num_draft_tokens=0",
        ],
    ).config
    assert small.grid_num_reqs == (1, 2, 4, 6)
    assert small.grid_num_query_tokens_per_req == (1,)
    assert small.num_blocks == 6 * 2 + 1
    assert load_config(None, ["scheduler.max_num_reqs=1"]).config.grid_num_reqs == (1,)
    chosen = load_config(None, ["cache.num_blocks=9", "grid.num_reqs=[3, 8]"]).config
    assert (chosen.num_blocks, chosen.grid_num_reqs) == (9, (3, 8))


def test_nothing_changes_after_load() -> None:
    config = DeploymentConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.cache.block_size = 8
    assert hash(config) == hash(DeploymentConfig())
    with pytest.raises(TypeError):
        load_config(None).origins["model.device"] = "x"  # type: ignore[index]


def test_every_field_is_documented() -> None:
    schema = DeploymentConfig.model_json_schema()
    for name, section in schema["$defs"].items():
        assert section["additionalProperties"] is False
        for key, field in section["properties"].items():
            assert field.get("description"), f"{name}.{key}"
