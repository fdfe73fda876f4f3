"""Names of other engines, misplaced keys, versions of the schema, settings that exclude each other:
each is an error with its place that says what to write instead."""

from pathlib import Path

import pytest

from decodegrid.configs import other_names
from decodegrid.configs.load import ConfigError, load_config
from decodegrid.configs.schema import DeploymentConfig


def errors_of(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [line.removeprefix(f"{tmp_path}/") for line in caught.value.errors]


def keys_of(config: DeploymentConfig) -> set[str]:
    """Dotted keys and sections."""
    found = set()
    for name in type(config).model_fields:
        found.add(name)
        section = getattr(config, name)
        found |= {f"{name}.{key}" for key in getattr(type(section), "model_fields", {})}
    return found


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("tensor_parallel_size", "parallel.expert"),
        ("gpu_memory_utilization", "cache.memory_fraction"),
        ("mem_fraction_static", "cache.memory_fraction"),
        ("max_num_seqs", "scheduler.max_num_reqs"),
        ("max_running_requests", "scheduler.max_num_reqs"),
        ("max_num_batched_tokens", "scheduler.prefill_chunk_sizes"),
        ("chunked_prefill_size", "scheduler.prefill_chunk_sizes"),
        ("enable_prefix_caching", "cache.prefix_cache"),
        ("disable_radix_cache", "cache.prefix_cache"),
        ("num_speculative_tokens", "speculation.num_draft_tokens"),
        ("cuda_graph_sizes", "grid.num_reqs"),
        ("cuda_graph_bs", "grid.num_reqs"),
        ("kv_cache_dtype", "cache.kv_cache"),
        ("served_model_name", "server.model_name"),
        ("enforce_eager", "every step is a captured graph"),
        ("quantization", "model.weights"),
        ("expert-parallel-size", "parallel.expert"),
        ("context_length", "scheduler.max_model_len"),
    ],
)
def test_names_of_other_engines(tmp_path: Path, name: str, instead: str) -> None:
    (error,) = errors_of(tmp_path, f"# first line\n{name}: 8\n")
    assert error.startswith(f"x.yaml:2:1: {name}: unknown key; another engine's name; ")
    assert instead in error
    (error,) = errors_of(tmp_path, f"scheduler:\n  {name}: 8\n")
    assert error.startswith(f"x.yaml:2:3: scheduler.{name}: unknown key; another engine's name; ")
    assert instead in error
    (error,) = errors_of(tmp_path, "", f"{name}=8")
    assert error.startswith(f"--set {name}=8: {name}: unknown key; another engine's name; ")


def test_what_is_named_instead_exists() -> None:
    keys = keys_of(DeploymentConfig())
    assert len(other_names._PATHS) > 50
    for name, words in (*other_names._PATHS.items(), *other_names._REASONS.items()):
        dotted = [word.strip(",;()") for word in words.split() if "." in word.strip(",;().")]
        named = [word.removesuffix(".") for word in dotted]
        ours = [word for word in named if word.partition(".")[0] in keys]
        assert all(word.rstrip(":") in keys for word in ours), (name, words)
        assert name == name.lower().replace("-", "_")
    for name in other_names._PATHS:
        words = other_names._PATHS[name]
        assert any(key in words for key in keys), (name, words)


def test_no_other_name_is_a_key_of_ours() -> None:
    leaves = {key.rpartition(".")[2] for key in keys_of(DeploymentConfig())}
    assert not leaves & {*other_names._PATHS, *other_names._REASONS}


def test_a_renamed_key_names_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_names, "RENAMED", {"cache.blocks": "cache.num_blocks"})
    assert errors_of(tmp_path, "cache:\n  blocks: 7\n") == [
        "x.yaml:2:3: cache.blocks: unknown key; renamed; it is now cache.num_blocks"
    ]
    assert errors_of(tmp_path, "grid:\n  blocks: 7\n") == ["x.yaml:2:3: grid.blocks: unknown key"]


def test_a_key_in_another_section_is_found(tmp_path: Path) -> None:
    text = "max_model_len: 64\ncache:\n  num_draft_tokens: 2\n"
    assert sorted(errors_of(tmp_path, text)) == [
        "x.yaml:1:1: max_model_len: unknown key; it is scheduler.max_model_len",
        "x.yaml:3:3: cache.num_draft_tokens: unknown key; it is speculation.num_draft_tokens",
    ]


def test_versions_of_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text in ("", "schema_version: 1\n", "schema_version: 01\n"):
        path.write_text(text)
        assert load_config(path).config.schema_version == 1
    wanted = "must be 1, the only version of the schema that this decodegrid reads"
    later = f"{wanted}; a file of a later one needs a later decodegrid"
    # What else is in such a file may be right in its version.
    text = "schema_version: 2\nquery: {planner: 3}\ncache: 5\n"
    assert errors_of(tmp_path, text) == [f"x.yaml:1:17: schema_version: {later}, got 2"]
    assert errors_of(tmp_path, text, "nonsense=1") == [
        f"x.yaml:1:17: schema_version: {later}, got 2"
    ]
    assert errors_of(tmp_path, "schema_version: 0\n") == [
        f"x.yaml:1:17: schema_version: {wanted}, got 0"
    ]
    for value in ("true", "'1'", "1.0", "null"):
        (error,) = errors_of(tmp_path, f"schema_version: {value}\n")
        assert error.startswith("x.yaml:1:17: schema_version: must be a whole number, got ")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "parallel:\n  expert: 8\n",
            "x.yaml:2:11: parallel.expert: must be 1 with model.device = cpu, got 8",
        ),
        (
            "model:\n  device: cuda\n  engram_tables: mapped\n",
            'x.yaml:3:18: model.engram_tables: must be "memory" with model.device = cuda, whose '
            'steps cannot read the checkpoint\'s files, got "mapped"',
        ),
        (
            "prefill: {keep_tokens: 80}\n",
            "x.yaml:1:24: prefill.keep_tokens: must be 0 with prefill.bounded_replay = off, which "
            "keeps every token, got 80",
        ),
    ],
)
def test_settings_that_exclude_each_other(tmp_path: Path, text: str, error: str) -> None:
    assert errors_of(tmp_path, text) == [error]


def test_a_conflict_between_file_and_command_line_names_the_place_to_change(
    tmp_path: Path,
) -> None:
    text = "model: {device: cuda}\nparallel: {expert: 4}\n"
    (tmp_path / "ok.yaml").write_text(text)
    assert load_config(tmp_path / "ok.yaml").config.parallel.expert == 4
    (error,) = errors_of(tmp_path, text, "model.device=cpu")
    assert error == "x.yaml:2:20: parallel.expert: must be 1 with model.device = cpu, got 4"
    (error,) = errors_of(tmp_path, "", "parallel.expert=2")
    assert error.startswith("--set parallel.expert=2: parallel.expert: must be 1 with")
