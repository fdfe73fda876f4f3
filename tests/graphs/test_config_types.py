"""config.json: a value of another JSON type, or one that would be left unread, is refused."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from decodegrid.graphs.checkpoint import read_checkpoint_config
from decodegrid.graphs.checkpoint_names import CheckpointError
from decodegrid.graphs.model_config import (
    Calibration,
    ModelConfig,
    load_model_config,
    parse_model_config,
)
from decodegrid.graphs.model_config_checks import ConfigFieldError

TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id")
FIXED = ("num_key_value_heads", "attention_bias", "tie_word_embeddings", "n_shared_experts")
TEXTS = ("model_type", "hidden_act", "scoring_func", "topk_method")


def other_types(value: Any) -> list[Any]:
    """Values of every JSON type but that of `value`; those that Python calls equal among them."""
    if isinstance(value, bool):
        return [None, int(value), float(value), str(value).lower(), [value], {}]
    if isinstance(value, int):
        return [None, bool(value), value + 0.0, str(value), [value], {}]
    if isinstance(value, float):
        return [None, True, str(value), [value], {}]
    if isinstance(value, list):
        return [None, False, 0, "[]", {}, [*value, 1.0], [*value, True], [*value, None], [value]]
    if isinstance(value, dict):
        return [None, False, 0, "yarn", [], [value]]
    return [None, False, 0, [value], {}]


CALIBRATION = "dspark_confidence_temperatures"
NAMES = [f.name for f in fields(ModelConfig) if f.name not in ("quantized", CALIBRATION)]
NUMBERS = {field.name for field in fields(ModelConfig) if field.type is float}


@pytest.mark.parametrize("name", [*NAMES, *FIXED, *TEXTS])
def test_other_json_types(small_raw: dict[str, Any], name: str) -> None:
    place = small_raw if name in TOP_LEVEL else small_raw["text_config"]
    where = name if name in TOP_LEVEL else f"text_config.{name}"
    good = place[name]
    for value in other_types(float(good) if name in NUMBERS else good):
        if name == "candidate_source_layer_id" and value is None:
            continue  # null is a value of this field
        place[name] = value
        wanted = rf"^config\.json: {re.escape(where)} is {re.escape(repr(value))}; "
        with pytest.raises(ConfigFieldError, match=wanted):
            parse_model_config(small_raw)
    place[name] = good
    parse_model_config(small_raw)


def test_other_json_types_inside_rope_scaling(small_raw: dict[str, Any]) -> None:
    scaling = small_raw["text_config"]["rope_scaling"]
    for name, good in list(scaling.items()):
        whole = name == "original_max_position_embeddings"
        for value in other_types(good if whole or name == "rope_type" else float(good)):
            scaling[name] = value
            named = r"text_config\.rope_scaling" + ("" if name == "rope_type" else rf"\.{name}")
            with pytest.raises(ConfigFieldError, match=rf"^config\.json: {named} is "):
                parse_model_config(small_raw)
        del scaling[name]
        with pytest.raises(ConfigFieldError, match=r"^config\.json: text_config\.rope_scaling"):
            parse_model_config(small_raw)
        scaling[name] = good
    scaling["original_max_position_embeddings"] = 2**31
    with pytest.raises(ConfigFieldError, match=r"is 2147483648; must be an integer below"):
        parse_model_config(small_raw)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hc_shifted", False, "only True is supported"),
        ("hc_shifted", 1, "only True is supported"),
        ("dspark_target_attn_input", False, "only True is supported"),
        ("gate_temp", 2.0, r"only 1\.0 is supported"),
        ("gate_temp", True, r"only 1\.0 is supported"),
        ("index_k_source_layer_ids", [1], "only the value of kv_source_layer_ids"),
        ("rope_parameters", {"rope_type": "yarn"}, "the field is unknown"),
        ("quantization_config", {}, "the field is unknown"),
        ("router_scale", 0.5, "the field is unknown"),
        ("eos_token_id", 5, "but eos_token_id beside text_config is 1"),
    ],
)
def test_what_would_be_left_unread(
    small_raw: dict[str, Any], name: str, value: Any, message: str
) -> None:
    small_raw["text_config"][name] = value
    wanted = rf"^config\.json: text_config\.{name} is .*{message}"
    with pytest.raises(ConfigFieldError, match=wanted):
        parse_model_config(small_raw)


@pytest.mark.parametrize("name", ["mscale", "attention_factor", "rope_theta"])
def test_unknown_in_rope_scaling(small_raw: dict[str, Any], name: str) -> None:
    small_raw["text_config"]["rope_scaling"][name] = 1.0
    with pytest.raises(ConfigFieldError, match=rf"rope_scaling\.{name} is 1\.0; the field is unk"):
        parse_model_config(small_raw)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tie_word_embeddings", True, "but text_config.tie_word_embeddings is False"),
        ("vocab_size", 97, "but text_config.vocab_size is 96"),
        ("vocab_size", 96.0, "but text_config.vocab_size is 96"),
        ("quantization_config", False, "must be an object"),
        ("quantization_config", [], "must be an object"),
    ],
)
def test_beside_text_config(
    small_raw: dict[str, Any], name: str, value: Any, message: str
) -> None:
    small_raw[name] = value
    with pytest.raises(ConfigFieldError, match=rf"^config\.json: {name} is .*{re.escape(message)}"):
        parse_model_config(small_raw)


def test_what_changes_nothing_is_accepted(small_raw: dict[str, Any]) -> None:
    plain = parse_model_config(small_raw)
    small_raw["text_config"] |= {
        "hc_shifted": True,
        "dspark_target_attn_input": True,
        "gate_temp": 1,
        "index_k_source_layer_ids": small_raw["text_config"]["kv_source_layer_ids"],
        "use_fp4_sparse_kv": False,
        "torch_dtype": "bfloat16",
        "sliding_window_pattern": None,
        "eos_token_id": 1,
    }
    small_raw |= {
        "image_token_id": 95,
        "vision_config": {"hidden_size": 1024},
        "transformers_version": "5.6.0",
        "tie_word_embeddings": False,
        "quantization_config": None,
    }
    assert parse_model_config(small_raw) == plain


def test_a_key_that_is_there_twice(small_raw: dict[str, Any], tmp_path: Path) -> None:
    """JSON readers keep the last of two equal keys, and the first would be left unread."""
    text = json.dumps(small_raw).replace('"head_dim": 16', '"head_dim": 32, "head_dim": 16', 1)
    (tmp_path / "config.json").write_text(text)
    message = r"config\.json: not valid JSON: the key 'head_dim' is there twice"
    with pytest.raises(ConfigFieldError, match=message):
        load_model_config(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint_config(tmp_path)


def test_a_calibration_is_read_and_names_no_other_model(small_raw: dict[str, Any]) -> None:
    plain = parse_model_config(small_raw)
    given = {"coupled": [1, 0.5, 2.0, 1.5, 1.0], "rejection": [0.25] * 5}
    small_raw["text_config"][CALIBRATION] = given
    config = parse_model_config(small_raw)
    kept = config.dspark_confidence_temperatures
    assert kept == Calibration((1.0, 0.5, 2.0, 1.5, 1.0), (0.25,) * 5)
    assert repr(config) == repr(plain) and config != plain
    small_raw["text_config"][CALIBRATION] = None
    assert parse_model_config(small_raw) == plain


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([1.0] * 5, ""),
        ({"coupled": [1.0] * 5}, ""),
        ({"coupled": [1.0] * 5, "rejection": [1.0] * 5, "other": []}, ""),
        ({"coupled": [1.0] * 5, "rejection": [1.0] * 4}, r"\.rejection"),
        ({"coupled": 1.0, "rejection": [1.0] * 5}, r"\.coupled"),
        ({"coupled": [1.0] * 4 + ["1"], "rejection": [1.0] * 5}, r"\.coupled"),
        ({"coupled": [1.0] * 5, "rejection": [1.0] * 4 + [0.0]}, r"\.rejection"),
        ({"coupled": [1.0] * 5, "rejection": [1.0] * 4 + [float("nan")]}, r"\.rejection"),
    ],
)
def test_another_form_of_calibration(small_raw: dict[str, Any], value: Any, place: str) -> None:
    small_raw["text_config"][CALIBRATION] = value
    with pytest.raises(ConfigFieldError, match=rf"text_config\.{CALIBRATION}{place}\b"):
        parse_model_config(small_raw)
