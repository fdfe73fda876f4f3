"""The model's config.json, read into frozen dataclasses and checked.

Owns the Hugging Face schema of DeepSeek-V4.1 (text part); the rules between its fields stand in
model_config_checks.py. A field that is missing, of another JSON type, unknown, or breaks a rule
gives one ConfigFieldError that names it: what would change the model is never left unread. Reads
JSON; knows no tensors.

Source: config.json of deepseek-ai/DeepSeek-V4.1-Flash and its loader's checks.
"""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from decodegrid.configs.strict_json import unique_keys
from decodegrid.graphs.model_config_checks import (
    ConfigFieldError,
    bad_field,
    check_model_config,
    check_quantization_config,
)

_FIXED_TEXT = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
}

# May be absent, and then mean this.
_OPTIONAL_TEXT = {"hc_shifted": True, "dspark_target_attn_input": True, "gate_temp": 1.0}

_CALIBRATION = "dspark_confidence_temperatures"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# They say how to train, store or wrap the model, and change nothing of what it computes.
# use_fp4_sparse_kv is how another engine stores its cache.
_UNREAD_TEXT = frozenset(
    (
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_fp4_sparse_kv",
    )
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters of the compressed layers; `factor` 1 and 0 positions mean plain RoPE."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Divisors of the drafter's confidence logits by draft, for each way to verify."""

    coupled: tuple[float, ...]
    rejection: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Text model facts, named as in config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    quantized: bool
    """Whether config.json carries a quantization_config, so that weights are stored quantised."""
    # Not in the text that names a model: nothing that is compiled depends on it.
    dspark_confidence_temperatures: Calibration | None = field(default=None, repr=False)
    """What `training.calibrate` found for this checkpoint; None where nobody did. Our own field."""

    @property
    def num_layers_total(self) -> int:
        """Target layers and drafter layers together."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def num_prefill_layers(self) -> int:
        """First layer with ratio 1: layers before it are the encoder."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else self.num_hidden_layers

    @property
    def engram_columns(self) -> int:
        """Table columns of one Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def kv_source_of(self, layer: int) -> int:
        """Layer whose compressed keys `layer` reads; only for layers with a ratio above 0."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source_of(self, layer: int) -> int:
        """Layer whose top-k `layer` uses; only for layers with a ratio above 0."""
        return max(source for source in self.index_source_layer_ids if source <= layer)


def _number(where: str, value: object) -> float:
    # JSON as Python reads it has NaN and Infinity too, and integers beyond any float.
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    raise bad_field(where, value, "must be a finite number")


def _read_rope_scaling(raw: object) -> RopeScaling:
    where = "text_config.rope_scaling"
    if not isinstance(raw, dict):
        raise bad_field(
            where,
            raw,
            "must be an object with rope_type 'yarn' (original_max_position_embeddings 0 in it "
            "means plain rotary embedding)",
        )
    kinds = [raw[name] for name in ("rope_type", "type") if name in raw]
    if not kinds or any(kind != "yarn" for kind in kinds):
        raise bad_field(where, raw, "only rope_type 'yarn' is supported")
    known = ("rope_type", "type", *(item.name for item in fields(RopeScaling)))
    for name, value in raw.items():
        if name not in known:
            raise bad_field(f"{where}.{name}", value, "the field is unknown")
    for name in known[2:]:
        if name not in raw:
            raise ConfigFieldError(f"config.json: {where}.{name} is missing")
    factor, fast, slow = (
        _number(f"{where}.{name}", raw[name]) for name in ("factor", "beta_fast", "beta_slow")
    )
    original = raw["original_max_position_embeddings"]
    if type(original) is not int or original >= 2**31:
        raise bad_field(
            f"{where}.original_max_position_embeddings", original, "must be an integer below 2**31"
        )
    return RopeScaling(factor, fast, slow, original)


def _read_calibration(raw: object, num_drafts: object) -> Calibration | None:
    where = "text_config.dspark_confidence_temperatures"
    if raw is None:
        return None
    names = [item.name for item in fields(Calibration)]
    if not isinstance(raw, dict) or sorted(raw) != names:
        raise bad_field(where, raw, f"must be null or an object with {' and '.join(names)}")
    found = {}
    for name in names:
        place, values = f"{where}.{name}", raw[name]
        if not isinstance(values, list) or len(values) != num_drafts:
            message = f"must be a list of dspark_block_size = {num_drafts} numbers"
            raise bad_field(place, values, message)
        found[name] = tuple(_number(place, value) for value in values)
        if min(found[name], default=1.0) <= 0:
            raise bad_field(place, values, "every number must be above 0")
    return Calibration(**found)


def _same(left: object, right: object) -> bool:
    """Equal in type too: in Python 0 equals false, and 1 equals true and 1.0."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and left == right


def _check_fixed(text: dict[str, Any]) -> None:
    """Fields that this engine supports with one value only."""
    for name, wanted in _FIXED_TEXT.items():
        if name not in text:
            raise ConfigFieldError(f"config.json: text_config.{name} is missing")
        if not _same(text[name], wanted):
            raise bad_field(f"text_config.{name}", text[name], f"only {wanted!r} is supported")
    for name, usual in _OPTIONAL_TEXT.items():
        value = text.get(name, usual)
        if not _same(float(value) if type(value) is int else value, usual):
            raise bad_field(f"text_config.{name}", value, f"only {usual!r} is supported")
    sources = text.get("kv_source_layer_ids")
    if not _same(text.get("index_k_source_layer_ids", sources), sources):
        raise bad_field(
            "text_config.index_k_source_layer_ids",
            text["index_k_source_layer_ids"],
            "only the value of kv_source_layer_ids is supported",
        )


def _check_unread(raw: dict[str, Any], text: dict[str, Any]) -> None:
    """Refuse what would be left unread although it may change the model."""
    known = {item.name for item in fields(ModelConfig)} - {"quantized"}
    known |= {*_FIXED_TEXT, *_OPTIONAL_TEXT, "index_k_source_layer_ids"}
    for name, value in text.items():
        if name in _TOKEN_IDS and name in raw:
            if not _same(value, raw[name]):
                other = f"{name} beside text_config is {raw[name]!r}"
                raise bad_field(f"text_config.{name}", value, f"but {other}")
        elif name not in known | _UNREAD_TEXT and value is not None:
            raise bad_field(f"text_config.{name}", value, "the field is unknown")
    for name in sorted(known & (raw.keys() - {"model_type", *_TOKEN_IDS})):
        if not _same(raw[name], text.get(name)):
            raise bad_field(name, raw[name], f"but text_config.{name} is {text.get(name)!r}")
    check_quantization_config(raw.get("quantization_config"))


def _convert(name: str, kind: object, value: object) -> object:
    """`value` as the annotated type of the field, or an error that names it."""
    where = f"text_config.{name}"
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise bad_field(where, value, "must be true or false")
    if kind is int:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            return value
        raise bad_field(where, value, "must be an integer from 0 to 2**31 - 1")
    if kind is float:
        return _number(where, value)
    if kind == tuple[int, ...]:
        if isinstance(value, list) and all(
            type(item) is int and 0 <= item < 2**31 for item in value
        ):
            return tuple(value)
        raise bad_field(where, value, "must be a list of integers from 0 to 2**31 - 1")
    if value is None or type(value) is int:
        return value
    raise bad_field(where, value, "must be an integer or null")


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Build and check a ModelConfig from a parsed config.json."""
    if raw.get("model_type") != "deepseek_v41":
        raise bad_field("model_type", raw.get("model_type"), "must be 'deepseek_v41'")
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise bad_field("text_config", text, "must be an object")
    _check_fixed(text)
    values: dict[str, Any] = {}
    for item in fields(ModelConfig):
        name = item.name
        if name in ("quantized", _CALIBRATION, *_TOKEN_IDS):
            continue
        if name not in text:
            raise ConfigFieldError(f"config.json: text_config.{name} is missing")
        if name == "rope_scaling":
            values[name] = _read_rope_scaling(text[name])
        else:
            values[name] = _convert(name, item.type, text[name])
    values[_CALIBRATION] = _read_calibration(text.get(_CALIBRATION), values["dspark_block_size"])
    for name in _TOKEN_IDS:
        if name not in raw:
            raise ConfigFieldError(f"config.json: {name} is missing")
        if type(raw[name]) is not int:
            raise bad_field(name, raw[name], "must be an integer")
        values[name] = raw[name]
    _check_unread(raw, text)
    config = ModelConfig(quantized=raw.get("quantization_config") is not None, **values)
    check_model_config(config)
    return config


def load_model_config(checkpoint_dir: Path) -> ModelConfig:
    """Read `checkpoint_dir`/config.json."""
    path = checkpoint_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise ConfigFieldError(f"{path}: no such file; a checkpoint directory has one") from None
    except (ValueError, RecursionError) as error:
        raise ConfigFieldError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigFieldError(f"{path}: must hold a JSON object")
    return parse_model_config(raw)
