"""config.json: every field is read, and every broken rule gives one error that names the field."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from decodegrid.graphs.model_config import ModelConfig, load_model_config, parse_model_config
from decodegrid.graphs.model_config_checks import ConfigFieldError

MISSING = object()
TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id")

# (field, value, part of the message after the field's name); the base is the small config.
BAD_VALUES: list[tuple[str, Any, str]] = [
    ("model_type", "deepseek_v4", "only 'deepseek_v41_text'"),
    ("num_key_value_heads", 2, "only 1"),
    ("hidden_act", "gelu", "only 'silu'"),
    ("scoring_func", "softmax", "only 'sqrtsoftplus'"),
    ("topk_method", "greedy", "only 'noaux_tc'"),
    ("attention_bias", True, "only False"),
    ("tie_word_embeddings", True, "only False"),
    ("n_shared_experts", 2, "only 1"),
    ("vocab_size", 0, "above 0"),
    ("vocab_size", "96", "integer"),
    ("vocab_size", True, "integer"),
    ("vocab_size", 2**40, "2\\*\\*31"),
    ("hidden_size", -4, "integer from 0"),
    ("hidden_size", None, "integer"),
    ("hidden_size", 36, "multiple of 8"),
    ("moe_intermediate_size", 12, "multiple of 8"),
    ("swiglu_limit", 0.0, "above 0"),
    ("swiglu_limit", float("nan"), "finite"),
    ("swiglu_limit", float("inf"), "finite"),
    ("swiglu_limit", 10**301, "finite"),
    ("rms_norm_eps", 0, "above 0"),
    ("rope_theta", 1.0, "above 1"),
    ("compress_rope_theta", "big", "finite"),
    ("norm_topk_prob", 1, "true or false"),
    ("qk_rope_head_dim", 7, "even"),
    ("qk_rope_head_dim", 32, "at most head_dim 16"),
    ("o_groups", 3, "divide num_attention_heads 4"),
    ("num_experts_per_tok", 9, "at most n_routed_experts 8"),
    ("rope_scaling", {"rope_type": "linear"}, "yarn"),
    ("rope_scaling", 3, "yarn"),
    ("rope_scaling", [], "yarn"),
    ("rope_scaling", None, "object with rope_type 'yarn'"),
    ("rope_scaling.factor", None, "finite"),
    ("rope_scaling.factor", 0, "above 0"),
    ("rope_scaling.beta_slow", -1, "above 0"),
    ("rope_scaling.beta_fast", True, "finite"),
    ("rope_scaling.original_max_position_embeddings", 64.5, "integer"),
    ("rope_scaling.original_max_position_embeddings", -1, "or more"),
    ("compress_ratios", [0, 2, 2, 2, 1, 1, 1, 1, 0], "= 10 entries, has 9"),
    ("compress_ratios", [0, 2, 2, 2, 1, 1, 1, 3, 0, 0], "0, 1 or 2"),
    ("compress_ratios", [0, 2, 2, 2, 1, 1, 1, 1, 0, 1], "drafter layers"),
    ("compress_ratios", [0, 2, 1, 2, 1, 1, 1, 1, 0, 0], "layer 2 and its kv source 1 differ"),
    ("compress_ratios", "012", "list of integers"),
    ("compress_ratios", [0, 2.0], "list of integers"),
    ("compress_ratios", [-1], "list of integers"),
    ("kv_source_layer_ids", [3, 1, 4], "ascending"),
    ("kv_source_layer_ids", [1, 3, 3], "ascending"),
    ("kv_source_layer_ids", [0, 1, 3, 4], "layer 0 is no target layer"),
    ("kv_source_layer_ids", [1, 3, 4, 8], "layer 8 is no target layer"),
    ("kv_source_layer_ids", [1, 3, 4, 5], "\\[5\\] must be in index_source_layer_ids"),
    ("kv_source_layer_ids", [3, 4], "at or before layer 1"),
    ("kv_source_layer_ids", [], "at or before layer 1"),
    ("index_source_layer_ids", [1, 4, 3], "ascending"),
    ("index_source_layer_ids", [0, 1, 3, 4], "layer 0 is no target layer"),
    ("index_n_heads", 0, "above 0"),
    ("index_topk", 0, "above 0"),
    ("index_head_dim", 4, "at least qk_rope_head_dim 8"),
    ("candidate_source_layer_id", 3, "last kv source"),
    ("candidate_source_layer_id", 1.5, "integer or null"),
    ("candidate_block_size", 0, "above 0"),
    ("candidate_topk_blocks", 0, "above 0"),
    ("candidate_topk_blocks", 3, "= 5 must reach index_topk 6"),
    ("engram_layer_ids", [3, 1], "ascending"),
    ("engram_layer_ids", [1, 8], "below 8"),
    ("engram_num_embeddings", [184], "one entry per engram layer"),
    ("engram_num_embeddings", [184, 259], "sum to \\[184, 258\\]"),
    ("engram_vocab_size", 500, "sum to"),
    ("engram_max_ngram_size", 1, "2 or more"),
    ("engram_n_heads", 0, "above 0"),
    ("engram_compressed_vocab_size", 0, "above 0"),
    ("engram_compressed_vocab_size", 97, "at most vocab_size 96"),
    ("engram_pad_token_id", 96, "below vocab_size 96"),
    ("dspark_target_layer_ids", [], "at least one"),
    ("dspark_target_layer_ids", [6, 5], "ascending"),
    ("dspark_target_layer_ids", [7, 8], "below 8"),
    ("dspark_block_size", 0, "above 0"),
    ("dspark_n_routed_experts", 1, "at most dspark_n_routed_experts 1"),
    ("dspark_noise_token_id", 96, "below vocab_size 96"),
]
# The field that the error names, where it is not the one that was changed.
NAMED = {
    ("engram_vocab_size", 500): "engram_num_embeddings",
    ("dspark_n_routed_experts", 1): "dspark_num_experts_per_tok",
}


def put(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        raw = raw[parent]
    if value is MISSING:
        del raw[leaf]
    else:
        raw[leaf] = value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    BAD_VALUES,
    ids=[f"{i}-{bad[0]}" for i, bad in enumerate(BAD_VALUES)],
)
def test_bad_value(small_raw: dict[str, Any], name: str, value: Any, message: str) -> None:
    put(small_raw["text_config"], name, value)
    key = (name, value) if isinstance(value, int) else (name, 0)
    named = NAMED.get(key, name).replace(".", r"\.")
    with pytest.raises(ConfigFieldError, match=rf"^config\.json: text_config\.{named} .*{message}"):
        parse_model_config(small_raw)


@pytest.mark.parametrize("name", [f.name for f in fields(ModelConfig)])
def test_missing_field(small_raw: dict[str, Any], name: str) -> None:
    if name == "quantized":
        assert not parse_model_config(small_raw).quantized, "floats may leave it out"
        return
    if name == "dspark_confidence_temperatures":
        assert parse_model_config(small_raw).dspark_confidence_temperatures is None
        return
    parent = small_raw if name in TOP_LEVEL else small_raw["text_config"]
    del parent[name]
    prefix = "" if name in TOP_LEVEL else "text_config."
    with pytest.raises(ConfigFieldError, match=rf"^config\.json: {prefix}{name} is missing$"):
        parse_model_config(small_raw)


@pytest.mark.parametrize("name", ["model_type", "hidden_act", "n_shared_experts"])
def test_missing_fixed_field(small_raw: dict[str, Any], name: str) -> None:
    del small_raw["text_config"][name]
    with pytest.raises(ConfigFieldError, match=rf"text_config\.{name} is missing"):
        parse_model_config(small_raw)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_type", "llama"), ("text_config", None), ("bos_token_id", 96), ("eos_token_id", -1)],
)
def test_bad_top_level(small_raw: dict[str, Any], name: str, value: Any) -> None:
    small_raw[name] = value
    with pytest.raises(ConfigFieldError, match=rf"^config\.json: {name} is {value!r}"):
        parse_model_config(small_raw)


def test_token_id_of_wrong_type(small_raw: dict[str, Any]) -> None:
    small_raw["pad_token_id"] = "2"
    with pytest.raises(ConfigFieldError, match="pad_token_id is '2'; must be an integer"):
        parse_model_config(small_raw)


def test_parts_can_be_off(small_raw: dict[str, Any]) -> None:
    text = small_raw["text_config"]
    text.update(
        compress_ratios=[0] * 8,
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=None,
        engram_layer_ids=[],
        engram_num_embeddings=[],
        num_nextn_predict_layers=0,
    )
    config = parse_model_config(small_raw)
    assert config.num_layers_total == config.num_prefill_layers == 8


def test_derived_facts(tiny_config: ModelConfig) -> None:
    assert tiny_config.num_layers_total == 15
    assert tiny_config.num_prefill_layers == 6
    assert tiny_config.engram_columns == 6
    assert [tiny_config.kv_source_of(layer) for layer in range(2, 12)] == [2, 2, 4, 4] + [6] * 6
    assert [tiny_config.index_source_of(layer) for layer in range(2, 12)] == [
        2, 2, 4, 4, 6, 6, 8, 8, 10, 10,
    ]  # fmt: skip
    assert tiny_config.rms_norm_eps == 1e-20
    assert tiny_config.rope_scaling.factor == 4.0


def test_reading_a_directory(small_raw: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigFieldError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ConfigFieldError, match=r"config\.json: not valid JSON"):
        load_model_config(tmp_path)
    path.write_text("[1]")
    with pytest.raises(ConfigFieldError, match=r"config\.json: must hold a JSON object"):
        load_model_config(tmp_path)
    path.write_text(json.dumps(small_raw))
    assert load_model_config(tmp_path) == parse_model_config(small_raw)
