"""Rules between the fields of a model config, and the error that names the field.

Owns what makes a well-typed config impossible to run: sizes that do not divide, layer schedules
that break DeepSeek-V4.1's rules, Engram tables that are not made of the right primes, another
quantisation than the released one. Each check raises at the first broken rule.

Source: loader checks of DeepSeek-V4.1-Flash; tech report section on CSA2.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decodegrid.kernels.engram import table_primes

if TYPE_CHECKING:
    from decodegrid.graphs.model_config import ModelConfig

_ABOVE_ZERO = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "moe_intermediate_size",
    "n_routed_experts",
    "hc_mult",
    "num_experts_per_tok",
    "max_position_embeddings",
    "sliding_window",
    "hc_sinkhorn_iters",
    "swiglu_limit",
    "rope_theta",
    "compress_rope_theta",
    "rms_norm_eps",
    "hc_eps",
    "routed_scaling_factor",
)

QUANTIZATION_CONFIG: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
"""The one quantisation that is read and written, as config.json states it."""


class ConfigFieldError(ValueError):
    """A model config field is missing or has a value that this engine cannot run."""


def bad_field(name: str, value: object, allowed: str) -> ConfigFieldError:
    """The error for field `name` with `value`; `allowed` says what would do."""
    return ConfigFieldError(f"config.json: {name} is {value!r}; {allowed}")


def check_model_config(config: "ModelConfig") -> None:
    """Raise ConfigFieldError for the first rule that `config` breaks."""
    _check_sizes(config)
    _check_ratios(config)
    _check_sources(config)
    _check_indexer(config)
    _check_candidates(config)
    _check_engram(config)
    _check_drafter(config)
    _check_quantised_sizes(config)


def check_quantization_config(raw: object) -> None:
    """Raise ConfigFieldError unless `raw` is the released quantisation, or None for no
    quantisation."""
    if raw is None:
        return
    if not isinstance(raw, dict):
        raise bad_field("quantization_config", raw, "must be an object")
    for name, value in raw.items():
        where = f"quantization_config.{name}"
        if name not in QUANTIZATION_CONFIG:
            known = ", ".join(QUANTIZATION_CONFIG)
            raise bad_field(where, value, f"the field is unknown; supported are {known}")
        # In Python 32 equals 32.0, and 1 equals true; as text they differ.
        if repr(value) != repr(QUANTIZATION_CONFIG[name]):
            raise bad_field(where, value, f"only {QUANTIZATION_CONFIG[name]!r} is supported")
    for name in QUANTIZATION_CONFIG:
        if name not in raw:
            raise ConfigFieldError(f"config.json: quantization_config.{name} is missing")


def _bad(config: "ModelConfig", name: str, allowed: str) -> ConfigFieldError:
    value = getattr(config, name)
    return bad_field(
        f"text_config.{name}", list(value) if isinstance(value, tuple) else value, allowed
    )


def _demand_above_zero(config: "ModelConfig", names: Sequence[str]) -> None:
    for name in names:
        if getattr(config, name) <= 0:
            raise _bad(config, name, "must be above 0")


def _demand_ascending(config: "ModelConfig", name: str) -> None:
    ids = getattr(config, name)
    if list(ids) != sorted(set(ids)):
        raise _bad(config, name, "must be ascending without repeats")


def _check_sizes(config: "ModelConfig") -> None:
    _demand_above_zero(config, _ABOVE_ZERO)
    for name in ("hidden_size", "moe_intermediate_size"):
        # The grouped expert product wants rows of whole 16 bytes.
        if getattr(config, name) % 8:
            raise _bad(config, name, "must be a multiple of 8")
    if config.qk_rope_head_dim % 2 or config.qk_rope_head_dim > config.head_dim:
        raise _bad(
            config, "qk_rope_head_dim", f"must be even and at most head_dim {config.head_dim}"
        )
    if config.num_attention_heads % config.o_groups:
        raise _bad(
            config, "o_groups", f"must divide num_attention_heads {config.num_attention_heads}"
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise _bad(
            config,
            "num_experts_per_tok",
            f"must be at most n_routed_experts {config.n_routed_experts}",
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not 0 <= getattr(config, name) < config.vocab_size:
            raise bad_field(
                name, getattr(config, name), f"must be a token id below {config.vocab_size}"
            )
    scaling = config.rope_scaling
    for name in ("factor", "beta_fast", "beta_slow"):
        if getattr(scaling, name) <= 0:
            raise bad_field(
                f"text_config.rope_scaling.{name}", getattr(scaling, name), "must be above 0"
            )
    if scaling.original_max_position_embeddings < 0:
        raise bad_field(
            "text_config.rope_scaling.original_max_position_embeddings",
            scaling.original_max_position_embeddings,
            "must be 0 (plain rotary embedding) or more",
        )
    for name in ("rope_theta", "compress_rope_theta"):
        if getattr(config, name) <= 1:
            raise _bad(config, name, "must be above 1")


def _check_ratios(config: "ModelConfig") -> None:
    ratios = config.compress_ratios
    if len(ratios) != config.num_layers_total:
        raise _bad(
            config,
            "compress_ratios",
            f"must have num_hidden_layers + num_nextn_predict_layers = "
            f"{config.num_layers_total} entries, has {len(ratios)}",
        )
    if any(ratio not in (0, 1, 2) for ratio in ratios):
        raise _bad(config, "compress_ratios", "entries must be 0, 1 or 2")
    if any(ratios[config.num_hidden_layers :]):
        raise _bad(config, "compress_ratios", "drafter layers must have ratio 0")


def _check_sources(config: "ModelConfig") -> None:
    ratios = config.compress_ratios
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        _demand_ascending(config, name)
        for layer in getattr(config, name):
            if layer >= config.num_hidden_layers or ratios[layer] == 0:
                raise _bad(config, name, f"layer {layer} is no target layer with ratio above 0")
    missing = set(config.kv_source_layer_ids) - set(config.index_source_layer_ids)
    if missing:
        raise _bad(
            config,
            "kv_source_layer_ids",
            f"layers {sorted(missing)} must be in index_source_layer_ids too",
        )
    for layer, ratio in enumerate(ratios[: config.num_hidden_layers]):
        if ratio == 0:
            continue
        if not config.kv_source_layer_ids or config.kv_source_layer_ids[0] > layer:
            raise _bad(
                config,
                "kv_source_layer_ids",
                f"no source at or before layer {layer}, which has ratio {ratio}",
            )
        source = config.kv_source_of(layer)
        if ratios[source] != ratio:
            raise _bad(
                config, "compress_ratios", f"layer {layer} and its kv source {source} differ"
            )


def _check_indexer(config: "ModelConfig") -> None:
    if not config.kv_source_layer_ids:
        return
    _demand_above_zero(config, ["index_n_heads", "index_head_dim", "index_topk"])
    if config.index_head_dim < config.qk_rope_head_dim:
        raise _bad(
            config,
            "index_head_dim",
            f"must be at least qk_rope_head_dim {config.qk_rope_head_dim}",
        )


def _check_candidates(config: "ModelConfig") -> None:
    if config.candidate_source_layer_id is None:
        return
    if config.candidate_source_layer_id not in config.kv_source_layer_ids[-1:]:
        raise _bad(
            config,
            "candidate_source_layer_id",
            f"must be null or the last kv source of {list(config.kv_source_layer_ids)}",
        )
    _demand_above_zero(config, ["candidate_block_size", "candidate_topk_blocks"])
    # The newest block is always kept, and may hold one entry only.
    reach = (config.candidate_topk_blocks - 1) * config.candidate_block_size + 1
    if reach < config.index_topk:
        raise _bad(
            config,
            "candidate_topk_blocks",
            f"(blocks - 1) * candidate_block_size + 1 = {reach} must reach index_topk "
            f"{config.index_topk}",
        )


def _check_engram(config: "ModelConfig") -> None:
    layers = config.engram_layer_ids
    _demand_ascending(config, "engram_layer_ids")
    if any(layer >= config.num_hidden_layers for layer in layers):
        raise _bad(config, "engram_layer_ids", f"layers must be below {config.num_hidden_layers}")
    if len(config.engram_num_embeddings) != len(layers):
        raise _bad(
            config,
            "engram_num_embeddings",
            f"must have one entry per engram layer of {list(layers)}",
        )
    if not layers:
        return
    if config.engram_max_ngram_size < 2:
        raise _bad(config, "engram_max_ngram_size", "must be 2 or more")
    _demand_above_zero(
        config,
        ["engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"],
    )
    if config.engram_pad_token_id >= config.vocab_size:
        raise _bad(config, "engram_pad_token_id", f"must be below vocab_size {config.vocab_size}")
    if config.engram_compressed_vocab_size > config.vocab_size:
        raise _bad(
            config,
            "engram_compressed_vocab_size",
            f"must be at most vocab_size {config.vocab_size}",
        )
    _check_engram_columns(config)
    primes = table_primes(len(layers), config.engram_columns, config.engram_vocab_size)
    rows = [sum(columns) for columns in primes]
    if list(config.engram_num_embeddings) != rows:
        raise _bad(
            config,
            "engram_num_embeddings",
            f"the primes from engram_vocab_size {config.engram_vocab_size} on sum to {rows}",
        )


def _check_engram_columns(config: "ModelConfig") -> None:
    """Before the primes are searched for: columns that no number of rows could be the sum of."""
    columns, least = config.engram_columns, config.engram_vocab_size
    needed = columns * least + columns * (columns - 1) // 2  # no two columns are alike
    if needed >= 2**31:
        raise _bad(
            config,
            "engram_num_embeddings",
            f"the {columns} columns of engram_max_ngram_size {config.engram_max_ngram_size} and "
            f"engram_n_heads {config.engram_n_heads}, each of engram_vocab_size {least} rows or "
            f"more, need {needed}, which must be below 2**31",
        )


def _check_drafter(config: "ModelConfig") -> None:
    if config.num_nextn_predict_layers == 0:
        return
    taps = config.dspark_target_layer_ids
    _demand_ascending(config, "dspark_target_layer_ids")
    if not taps or taps[-1] >= config.num_hidden_layers:
        raise _bad(
            config,
            "dspark_target_layer_ids",
            f"must name layers below {config.num_hidden_layers}, at least one",
        )
    _demand_above_zero(
        config,
        [
            "dspark_block_size",
            "dspark_markov_rank",
            "dspark_n_routed_experts",
            "dspark_num_experts_per_tok",
        ],
    )
    if config.dspark_num_experts_per_tok > config.dspark_n_routed_experts:
        raise _bad(
            config,
            "dspark_num_experts_per_tok",
            f"must be at most dspark_n_routed_experts {config.dspark_n_routed_experts}",
        )
    if config.dspark_noise_token_id >= config.vocab_size:
        raise _bad(config, "dspark_noise_token_id", f"must be below vocab_size {config.vocab_size}")


def _check_quantised_sizes(config: "ModelConfig") -> None:
    """Inputs of routed experts and rows of Engram tables share a scale in blocks of 32."""
    if not config.quantized:
        return
    names = ["hidden_size", "moe_intermediate_size"]
    if config.engram_layer_ids:
        names.append("engram_head_dim")
    for name in names:
        if getattr(config, name) % 32:
            raise _bad(config, name, "must be a multiple of 32 under a quantization_config")
