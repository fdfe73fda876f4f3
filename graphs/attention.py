"""Attention of one layer: projections, compressor, indexer, and the whole-sequence forward.

Owns the attention parameters (named as in the checkpoint) and the uncached forward that training
and the oracle run. The pieces that a cached step also needs (`queries_and_keys`, `latents`,
`index_queries`, `output`) are methods without any notion of a cache.

Data flow: normed hidden -> queries and window keys; sources add compressed keys and index keys to
the cross-layer state; indexer layers replace the selection; then one softmax over both.

Source: DeepSeek-V4.1-Flash `inference/model.py` (Attention, Compressor, Indexer).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from decodegrid.graphs.kv_cache import Rounding, keep_values
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.kernels.indexer import candidate_mask, index_scores, top_k_mask
from decodegrid.kernels.norm_rope import (
    apply_rope,
    island,
    rms_norm,
    rope_angles,
    rope_frequencies,
)
from decodegrid.kernels.records import RecordFormat
from decodegrid.kernels.sparse_attention import dense_attention

AttentionCore = Callable[
    [Tensor, Tensor, Tensor, int, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]
]
"""Signature of `dense_attention`; training passes a form that does less work."""


class Norm(nn.Module):
    """Holder of an RMS norm's weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def linear(in_features: int, out_features: int) -> nn.Linear:
    """A projection without bias, `[out, in]` as stored."""
    return nn.Linear(in_features, out_features, bias=False)


@dataclass(slots=True)
class CrossLayer:
    """What attention layers hand to later ones in one forward, (B, ...) each."""

    compressed: Tensor | None = None
    """(B, J, head_dim) keys of the latest kv source."""
    index_keys: Tensor | None = None
    """(B, J, index_head_dim)."""
    selected: Tensor | None = None
    """(B, S, J) bool, the latest selection."""
    candidates: Tensor | None = None
    """(B, S, J) bool, entries inside the candidate blocks."""
    traces: list["IndexTrace"] | None = None
    """Filled for training when a list is given: one trace per indexer layer."""
    rounding: Rounding = keep_values
    """What a cache makes of keys before anything reads them; index queries are rounded with it too.
    """


@dataclass(slots=True)
class IndexTrace:
    """What the indexer's loss needs of one indexer layer and the layers that reuse it."""

    layer: int
    scores: Tensor
    """(B, S, J) index scores with gradient, -inf where not selected."""
    mass: list[Tensor] = field(default_factory=list)
    """(B, S, J) attention mass of each layer that used the selection, without gradient."""


class Compressor(nn.Module):
    """Projection of the hidden state into one latent per `ratio` tokens."""

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = linear(config.hidden_size, config.head_dim)
        if ratio > 1:
            self.wgate = linear(config.hidden_size, config.head_dim)
        self.norm = Norm(config.head_dim, config.rms_norm_eps)

    def pooled(self, x: Tensor) -> Tensor:
        """Latents of complete groups, before the norm: (B, S, D) -> (B, S // ratio, head_dim)."""
        if self.ratio == 1:
            return self.wkv(x)
        wide = island(x)
        value = wide @ self.wkv.weight.to(wide.dtype).t()
        gate = wide @ self.wgate.weight.to(wide.dtype).t()
        whole = x.shape[1] // self.ratio * self.ratio
        value = value[:, :whole].unflatten(1, (-1, self.ratio))
        weight = gate[:, :whole].unflatten(1, (-1, self.ratio)).softmax(2)
        return (weight * value).sum(2).to(x.dtype)


class Indexer(nn.Module):
    """Index queries and head weights; index keys too where the layer is a kv source."""

    def __init__(self, config: ModelConfig, has_keys: bool) -> None:
        super().__init__()
        heads, dim = config.index_n_heads, config.index_head_dim
        self.heads = heads
        self.scale = heads**-0.5 * dim**-0.5
        self.wq_b = linear(config.q_lora_rank, heads * dim)
        self.weights_proj = linear(config.hidden_size, heads)
        if has_keys:
            self.wk = linear(config.head_dim, dim)
            self.k_norm = Norm(dim, config.rms_norm_eps)


class Attention(nn.Module):
    """One layer's attention. `layer` counts drafter layers after the target's."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.ratio = config.compress_ratios[layer]
        self.is_source = layer in config.kv_source_layer_ids
        self.runs_indexer = layer in config.index_source_layer_ids
        heads, dim = config.num_attention_heads, config.head_dim
        self.wq_a = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = Norm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = linear(config.q_lora_rank, heads * dim)
        self.wkv = linear(config.hidden_size, dim)
        self.kv_norm = Norm(dim, config.rms_norm_eps)
        self.wo_a = nn.Linear(
            heads * dim // config.o_groups, config.o_groups * config.o_lora_rank, bias=False
        )
        self.wo_b = linear(config.o_groups * config.o_lora_rank, config.hidden_size)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        if self.is_source:
            self.compressor = Compressor(config, self.ratio)
        if self.runs_indexer:
            self.indexer = Indexer(config, has_keys=self.is_source)
        self.register_buffer("frequencies", layer_frequencies(config, layer), persistent=False)

    def queries_and_keys(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x: (..., D) -> low-rank query (..., q_lora_rank), rotated query heads (..., H, d) and
        the rotated window key (..., d). cos, sin: (..., rope_dim / 2)."""
        low_rank = self.q_norm(self.wq_a(x))
        query = self.wq_b(low_rank).unflatten(-1, (self.config.num_attention_heads, -1))
        query = apply_rope(query, cos.unsqueeze(-2), sin.unsqueeze(-2))
        return low_rank, query, self.window_keys(x, cos, sin)

    def window_keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated window keys (..., d) alone; the drafter's context keys are made so."""
        return apply_rope(self.kv_norm(self.wkv(x)), cos, sin)

    def index_keys(self, latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated index keys (..., index_head_dim) of normed, unrotated latents (..., d)."""
        return apply_rope(self.indexer.k_norm(self.indexer.wk(latent)), cos, sin)

    def index_queries(
        self, x: Tensor, low_rank: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotated index queries (..., Hi, di) and scaled head weights (..., Hi)."""
        query = self.indexer.wq_b(low_rank).unflatten(-1, (self.indexer.heads, -1))
        query = apply_rope(query, cos.unsqueeze(-2), sin.unsqueeze(-2))
        return query, self.indexer.weights_proj(x) * self.indexer.scale

    def output(self, attended: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate back, grouped first projection, second projection: (..., H, d) -> (..., D)."""
        plain = apply_rope(attended, cos.unsqueeze(-2), sin.unsqueeze(-2), inverse=True)
        groups = plain.flatten(-2).unflatten(-1, (self.config.o_groups, -1))
        weight = self.wo_a.weight.unflatten(0, (self.config.o_groups, -1))
        return self.wo_b(torch.einsum("...gi,goi->...go", groups, weight).flatten(-2))

    def forward(
        self, x: Tensor, shared: CrossLayer, core: AttentionCore = dense_attention
    ) -> Tensor:
        """Uncached forward of whole sequences from position 0: (B, S, D) -> (B, S, D).

        Updates `shared` where this layer is a source or runs an indexer.
        """
        positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = rope_angles(positions, self.frequencies)
        low_rank, query, window_keys = self.queries_and_keys(x, cos, sin)
        window_keys = shared.rounding(window_keys, RecordFormat.Q8)
        if self.is_source:
            self._add_compressed(x, shared)
        if self.runs_indexer:
            self._select(x, low_rank, cos, sin, shared)
        window = self.config.sliding_window
        if self.ratio == 0:
            attended, _ = core(query, window_keys, self.attn_sink, window, None, None)
        else:
            attended, mass = core(
                query, window_keys, self.attn_sink, window, shared.compressed, shared.selected
            )
            if shared.traces is not None and mass is not None:
                shared.traces[-1].mass.append(mass.detach())
        return self.output(attended, cos, sin)

    def _add_compressed(self, x: Tensor, shared: CrossLayer) -> None:
        latent = self.compressor.norm(self.compressor.pooled(x))
        entry = torch.arange(latent.shape[1], device=x.device) * self.ratio
        cos, sin = rope_angles(entry, self.frequencies)
        shared.compressed = shared.rounding(apply_rope(latent, cos, sin), RecordFormat.Q4N)
        # The index loss must not move the latent that attention itself reads.
        source = latent.detach() if shared.traces is not None else latent
        shared.index_keys = shared.rounding(self.index_keys(source, cos, sin), RecordFormat.Q4X)

    def _select(
        self, x: Tensor, low_rank: Tensor, cos: Tensor, sin: Tensor, shared: CrossLayer
    ) -> None:
        if shared.traces is not None:
            x, low_rank = x.detach(), low_rank.detach()
        query, weights = self.index_queries(x, low_rank, cos, sin)
        query = shared.rounding(query, RecordFormat.Q4X)
        assert shared.index_keys is not None
        scores = index_scores(query, weights, shared.index_keys)
        lengths = (torch.arange(x.shape[1], device=x.device) + 1) // self.ratio
        entry = torch.arange(scores.shape[-1], device=x.device)
        scores = scores.masked_fill(entry >= lengths[:, None], float("-inf"))
        config = self.config
        if self.layer == config.candidate_source_layer_id:
            shared.candidates = candidate_mask(
                scores.detach(),
                lengths.expand(scores.shape[:-1]),
                config.candidate_block_size,
                config.candidate_topk_blocks,
            )
        elif shared.candidates is not None:
            scores = scores.masked_fill(~shared.candidates, float("-inf"))
        shared.selected = top_k_mask(scores.detach(), config.index_topk)
        if shared.traces is not None:
            kept = scores.masked_fill(~shared.selected, float("-inf"))
            shared.traces.append(IndexTrace(self.layer, kept))


def layer_frequencies(config: ModelConfig, layer: int) -> Tensor:
    """RoPE frequencies of everything in `layer`, float64: plain without compression, else YaRN."""
    if config.compress_ratios[layer] == 0:
        return rope_frequencies(config.qk_rope_head_dim, config.rope_theta)
    scaling = config.rope_scaling
    return rope_frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        yarn_factor=scaling.factor,
        original_max_positions=scaling.original_max_position_embeddings,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
    )
