"""config.json of the embedded model, made from its tokenizer.

Owns the sizes of the model and the start values of its parameters. Data flow: tokenizer.json ->
`tiny_config` -> config.json's content; `initialise` fills a fresh model in place.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.engram_vocab import compressed_token_classes
from decodegrid.graphs.model_config import parse_model_config
from decodegrid.kernels.engram import table_primes

TOKENIZER = Path(__file__).parent.parent / "configs" / "tiny" / "tokenizer.json"
_ENGRAM_ROWS = 2000
"""Least rows of one engram column."""
_NOISE_TOKEN = "<\uff5cnoise\uff5c>"


def tiny_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The whole config.json. Raises ValueError when the tokenizer lacks the noise token."""
    noise = tokenizer.token_to_id(_NOISE_TOKEN)
    if noise is None:
        raise ValueError(f"tokenizer has no token {_NOISE_TOKEN!r}")
    columns, layers = 6, [1, 3]
    primes = table_primes(len(layers), columns, _ENGRAM_ROWS)
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 4,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        },
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 64,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 24,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": layers,
        "engram_num_embeddings": [sum(part) for part in primes],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": _ENGRAM_ROWS,
        "engram_n_heads": 2,
        "engram_head_dim": 64,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": max(compressed_token_classes(tokenizer)) + 1,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": noise,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "text_config": text,
    }


def build_model(raw: dict[str, Any], classes: list[int], seed: int) -> DraftModel:
    """A fresh float32 model of a config.json's content with the tokenizer's engram classes."""
    model = DraftModel(parse_model_config(raw)).cast(torch.float32)
    assert isinstance(model, DraftModel)
    model.compressed_ids = torch.tensor(classes)
    initialise(model, seed)
    return model


def copy_tokenizer(directory: Path) -> None:
    """Put the tokenizer where weights are exported to."""
    directory.mkdir(parents=True, exist_ok=True)
    copy = directory / "tokenizer.json"
    if copy.resolve() != TOKENIZER.resolve():
        shutil.copyfile(TOKENIZER, copy)


@torch.no_grad()
def initialise(model: DraftModel, seed: int) -> None:
    """Start values, in place: fan-in normal matrices, mixers near "keep the stream"."""
    generator = torch.Generator().manual_seed(seed)
    quiet = (2 * model.config.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf.startswith("hc_"):
            _initialise_mixer(leaf, parameter, model.config.hc_mult, generator)
        elif parameter.dim() >= 2 and leaf not in ("q_weight", "k_weight"):
            std = parameter.shape[-1] ** -0.5
            if name.endswith(("embed.weight", "markov_head.head.weight")):
                std = 0.3 if name == "embed.weight" else 0.02
            elif name == "head.weight" or "confidence_head" in name or "gate.weight" in name:
                std = 0.01
            elif "wo_b" in name or name.endswith(("w2", "w2.weight")):
                std *= quiet
            nn.init.normal_(parameter, 0.0, std, generator=generator)


def _initialise_mixer(
    leaf: str, parameter: Tensor, copies: int, generator: torch.Generator
) -> None:
    if leaf.endswith("fn"):
        nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5, generator=generator)
    elif leaf.endswith("scale"):
        parameter.fill_(0.1)
    else:
        # Unequal copies from the start: equal ones would stay equal for ever.
        noise = torch.randn(2 * copies, generator=generator) * 0.5
        parameter[: 2 * copies] = noise
        parameter[:copies] -= 1.1
        parameter[2 * copies :] = 2.0 * torch.eye(copies).flatten()
