"""The uncached forward against Hugging Face's DeepSeek-V4, an independent implementation.

V4 and V4.1 differ, but some weights mean the same function in both: constant, shifted mHC `pre`;
query blocks that are orthogonal, so that V4's query norm changes nothing; V4's overlapping
compressor switched off by its position bias. Everything else is random: windows, sinks, rotary
embeddings with YaRN, compression, index scores and top-k, router, experts, post and comb of mHC.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model import Block

transformers = pytest.importorskip("transformers", reason="needs the extra cross-check")

SLIDING, CSA, HCA, REUSE = "sliding", "csa", "hca", "reuse"
NAMES = {
    SLIDING: "sliding_attention",
    CSA: "compressed_sparse_attention",
    HCA: "heavily_compressed_attention",
    REUSE: "compressed_sparse_attention",
}
OFF = -1e9
SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "num_experts_per_tok",
    "n_routed_experts",
    "routed_scaling_factor",
    "max_position_embeddings",
    "rope_theta",
    "compress_rope_theta",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "swiglu_limit",
    "sliding_window",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "rms_norm_eps",
)


@dataclass(frozen=True)
class Case:
    """A schedule that both models can express."""

    kinds: tuple[str, ...]
    csa_rate: int
    hca_rate: int
    top_k: int
    length: int

    def ratio(self, kind: str) -> int:
        return {SLIDING: 0, CSA: self.csa_rate, REUSE: self.csa_rate, HCA: self.hca_rate}[kind]


CASES = {
    "hca rate 1": Case((SLIDING, HCA, HCA), 1, 1, 60, 60),
    "hca rate 2": Case((SLIDING, HCA, HCA), 1, 2, 64, 61),
    "csa rate 1": Case((SLIDING, CSA, CSA), 1, 2, 8, 80),
    "csa rate 2": Case((SLIDING, CSA, SLIDING, CSA), 2, 1, 6, 91),
    "csa rate 1, hca rate 2": Case((SLIDING, CSA, HCA, CSA, HCA), 1, 2, 30, 60),
    "reused keys and selection": Case((SLIDING, CSA, REUSE, CSA, REUSE), 2, 1, 6, 80),
}


def build_ours(make_model: Callable[..., DraftModel], case: Case) -> DraftModel:
    sources = [i for i, kind in enumerate(case.kinds) if kind in (CSA, HCA)]
    model = make_model(
        seed=3,
        dtype=torch.float32,
        num_hidden_layers=len(case.kinds),
        compress_ratios=[case.ratio(kind) for kind in case.kinds],
        kv_source_layer_ids=sources,
        index_source_layer_ids=sources,
        candidate_source_layer_id=None,
        index_topk=case.top_k,
        engram_layer_ids=[],
        engram_num_embeddings=[],
        num_nextn_predict_layers=0,
        hidden_size=64,
    )
    for block, kind in zip(model.layers, case.kinds, strict=True):
        specialise(block, kind)
    return model


def specialise(block: Block, kind: str) -> None:
    """Restrict a layer's weights to what V4 can express too."""
    attn, config = block.attn, block.config
    attn.q_norm.weight.fill_(1.0)
    heads = attn.wq_b.weight.data.unflatten(0, (config.num_attention_heads, -1))
    for head in heads:
        head.copy_(torch.linalg.qr(head)[0])
    block.hc_attn_scale[0] = 0.0
    block.hc_ffn_scale[0] = 0.0
    if kind == CSA and attn.ratio == 2:
        gate = attn.compressor.wgate.weight
        gate.copy_(gate[:1].expand_as(gate).clone())


def build_theirs(ours: DraftModel, case: Case) -> nn.Module:
    config, scaling = ours.config, ours.config.rope_scaling
    their_config = transformers.DeepseekV4Config(
        **{name: getattr(config, name) for name in SAME_FIELDS},
        layer_types=[NAMES[kind] for kind in case.kinds],
        mlp_layer_types=["moe"] * len(case.kinds),
        compress_rates={NAMES[CSA]: case.csa_rate, NAMES[HCA]: case.hca_rate},
        partial_rotary_factor=config.qk_rope_head_dim / config.head_dim,
        rope_parameters={
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
        attn_implementation="eager",
        use_cache=False,
    )
    theirs = transformers.DeepseekV4ForCausalLM(their_config).float().eval()
    for layer, kind in enumerate(case.kinds):
        if kind == REUSE:
            source = theirs.model.layers[layer - 1].self_attn.compressor
            theirs.model.layers[layer].self_attn.compressor = Repeat(source)
    theirs.load_state_dict(their_weights(ours, case), strict=True)
    return theirs


class Repeat(nn.Module):
    """A compressor that hands out what another one returned last."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.last: Any = None
        source.register_forward_hook(self.record)

    def record(self, module: nn.Module, args: Any, result: Any) -> None:
        self.last = result

    def forward(self, *args: Any) -> Any:
        return self.last


def their_weights(ours: DraftModel, case: Case) -> dict[str, Tensor]:
    n = ours.config.hc_mult
    weights = {
        "model.embed_tokens.weight": ours.embed.weight,
        "lm_head.weight": ours.head.weight,
        "model.norm.weight": ours.norm.weight,
        "model.hc_head.hc_fn": torch.zeros(n, n * ours.config.hidden_size),
        "model.hc_head.hc_scale": torch.zeros(1),
    }
    # All copies are equal before the first sublayer, so the common factor of `pre` is normed away.
    before = torch.tensor([40.0] + [-40.0] * (n - 1))
    for layer, (block, kind) in enumerate(zip(ours.layers, case.kinds, strict=True)):
        prefix = f"model.layers.{layer}."
        for name, value in layer_weights(block, kind).items():
            weights[prefix + name] = value
        attn_base, ffn_base = block.hc_attn_base.clone(), block.hc_ffn_base.clone()
        attn_pre, ffn_pre = attn_base[:n].clone(), ffn_base[:n].clone()
        attn_base[:n], ffn_base[:n] = before, attn_pre
        before = ffn_pre
        weights[prefix + "attn_hc.base"] = attn_base
        weights[prefix + "ffn_hc.base"] = ffn_base
    weights["model.hc_head.hc_base"] = before
    return weights


def layer_weights(block: Block, kind: str) -> dict[str, Tensor]:
    attn, ffn = block.attn, block.ffn
    weights = {
        "input_layernorm.weight": block.attn_norm.weight,
        "post_attention_layernorm.weight": block.ffn_norm.weight,
        "attn_hc.fn": block.hc_attn_fn,
        "attn_hc.scale": block.hc_attn_scale,
        "ffn_hc.fn": block.hc_ffn_fn,
        "ffn_hc.scale": block.hc_ffn_scale,
        "self_attn.q_a_proj.weight": attn.wq_a.weight,
        "self_attn.q_a_norm.weight": attn.q_norm.weight,
        "self_attn.q_b_proj.weight": attn.wq_b.weight,
        "self_attn.kv_proj.weight": attn.wkv.weight,
        "self_attn.kv_norm.weight": attn.kv_norm.weight,
        "self_attn.o_a_proj.weight": attn.wo_a.weight,
        "self_attn.o_b_proj.weight": attn.wo_b.weight,
        "self_attn.sinks": attn.attn_sink,
        "mlp.gate.weight": ffn.gate.weight,
        "mlp.gate.e_score_correction_bias": ffn.gate.bias,
        "mlp.experts.gate_up_proj": torch.cat((ffn.experts.w1, ffn.experts.w3), 1),
        "mlp.experts.down_proj": ffn.experts.w2,
        "mlp.shared_experts.gate_proj.weight": ffn.shared_experts.w1.weight,
        "mlp.shared_experts.up_proj.weight": ffn.shared_experts.w3.weight,
        "mlp.shared_experts.down_proj.weight": ffn.shared_experts.w2.weight,
    }
    if kind in (CSA, HCA):
        parts = compressor_weights(block) if kind == CSA else plain_compressor_weights(block)
        weights |= {f"self_attn.compressor.{name}": value for name, value in parts.items()}
    return weights


def gate_of(block: Block) -> Tensor:
    """(head_dim, D) gate; with one token in a group any gate gives weight 1."""
    compressor = block.attn.compressor
    if compressor.ratio == 1:
        return torch.zeros_like(compressor.wkv.weight)
    return compressor.wgate.weight.detach()


def plain_compressor_weights(block: Block) -> dict[str, Tensor]:
    compressor = block.attn.compressor
    return {
        "kv_proj.weight": compressor.wkv.weight,
        "gate_proj.weight": gate_of(block),
        "position_bias": torch.zeros(compressor.ratio, block.config.head_dim),
        "kv_norm.weight": compressor.norm.weight,
    }


def compressor_weights(block: Block) -> dict[str, Tensor]:
    compressor, indexer = block.attn.compressor, block.attn.indexer
    value, gate = compressor.wkv.weight, gate_of(block)
    index_value = indexer.wk.weight @ (compressor.norm.weight[:, None] * value)
    index_gate = gate[:1].expand(block.config.index_head_dim, -1)

    def second_half(weight: Tensor) -> Tensor:
        return torch.cat((torch.zeros_like(weight), weight))

    def no_overlap(dim: int) -> Tensor:
        bias = torch.zeros(compressor.ratio, 2 * dim)
        bias[:, :dim] = OFF
        return bias

    return {
        "kv_proj.weight": second_half(value),
        "gate_proj.weight": second_half(gate),
        "position_bias": no_overlap(block.config.head_dim),
        "kv_norm.weight": compressor.norm.weight,
        "indexer.kv_proj.weight": second_half(index_value),
        "indexer.gate_proj.weight": second_half(index_gate),
        "indexer.position_bias": no_overlap(block.config.index_head_dim),
        "indexer.kv_norm.weight": indexer.k_norm.weight,
        "indexer.q_b_proj.weight": indexer.wq_b.weight,
        "indexer.scorer.weights_proj.weight": indexer.weights_proj.weight,
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_agree(make_model: Callable[..., DraftModel], name: str) -> None:
    case = CASES[name]
    ours = build_ours(make_model, case)
    theirs = build_theirs(ours, case)
    ids = torch.randint(0, 96, (case.length,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        wanted = theirs(input_ids=ids.unsqueeze(0)).logits[0]
    found = ours.logits(ids)
    assert wanted.std() > 0.5
    assert (found - wanted).abs().max() < 1e-3
    # The comparison can fail: the selection and the compressed keys matter.
    if CSA in case.kinds:
        more = build_ours(make_model, Case(*(case.kinds, case.csa_rate, case.hca_rate, 90, 0)))
        assert (more.logits(ids) - wanted).abs().max() > 1e-2
