"""The DSpark drafter: context keys from target taps, a block of parallel slots, sequential heads.

Owns the `mtp.*` parameters and the uncached form of one draft round, which training and tests run.
The block's rows see the target's context keys and all rows of their own block, without a causal
mask; the Markov head then makes the draft sequential.

Source: DeepSeek-V4.1-Flash `inference/model.py` (DSparkBlock, DSparkAttention, DSparkMarkovHead,
DSparkConfidenceHead); DSpark paper section 3.
"""

from typing import cast

import torch
from torch import Tensor, nn

from decodegrid.graphs.attention import Norm, linear
from decodegrid.graphs.kv_cache import KvCache, Rounding, keep_values, key_codec
from decodegrid.graphs.model import Block, Embedding, Model
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.kernels.hyper_connection import hc_post, hc_pre, initial_pre
from decodegrid.kernels.norm_rope import island, rope_angles
from decodegrid.kernels.records import RecordFormat
from decodegrid.kernels.sparse_attention import sink_softmax


class MarkovHead(nn.Module):
    """Low-rank bigram bias on the draft logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.dspark_markov_rank)
        self.head = linear(config.dspark_markov_rank, config.vocab_size)


class ConfidenceHead(nn.Module):
    """Scalar logit that the draft at a slot is accepted, given that all before it are."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = linear(config.hidden_size + config.dspark_markov_rank, 1)


class DraftBlock(Block):
    """A drafter layer; the first also projects the taps, the last carries norm and heads."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, config.num_hidden_layers + index)
        if index == 0:
            taps = len(config.dspark_target_layer_ids)
            self.main_proj = linear(taps * config.hidden_size, config.hidden_size)
            self.main_norm = Norm(config.hidden_size, config.rms_norm_eps)
        if index == config.num_nextn_predict_layers - 1:
            self.norm = Norm(config.hidden_size, config.rms_norm_eps)
            self.markov_head = MarkovHead(config)
            self.confidence_head = ConfidenceHead(config)

    def draft_attention(
        self,
        x: Tensor,
        positions: Tensor,
        context: Tensor,
        context_live: Tensor,
        rounding: Rounding = keep_values,
    ) -> Tensor:
        """x: (N, G, D) draft rows; positions: (N, G); context: (N, C, d) rotated context keys;
        context_live: (N, C) bool. Every row sees all live context keys and all G draft keys, which
        `rounding` is applied to."""
        attn = self.attn
        cos, sin = rope_angles(positions, attn.frequencies)
        _, query, own = attn.queries_and_keys(x, cos, sin)
        own = rounding(own, RecordFormat.Q8)
        keys = island(torch.cat((context, own), 1))
        live = torch.cat((context_live, context_live.new_ones(own.shape[:2])), 1)
        scores = torch.einsum("nghd,nkd->nghk", island(query) * query.shape[-1] ** -0.5, keys)
        scores = scores.masked_fill(~live[:, None, None, :], float("-inf"))
        attended = torch.einsum("nghk,nkd->nghd", sink_softmax(scores, attn.attn_sink), keys)
        return attn.output(attended.to(query.dtype), cos, sin)


class DraftModel(Model):
    """Target plus drafter. Without drafter layers in the config, `mtp` is empty."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mtp = nn.ModuleList(
            DraftBlock(config, i) for i in range(config.num_nextn_predict_layers)
        )

    @property
    def draft_blocks(self) -> list[DraftBlock]:
        """The drafter's layers; the last carries norm and heads."""
        return cast(list[DraftBlock], list(self.mtp))

    def draft_context(self, taps: Tensor) -> Tensor:
        """Drafter's view of target tokens: taps (..., taps * D) -> (..., D)."""
        first = self.draft_blocks[0]
        return first.main_norm(first.main_proj(taps))

    def context_keys(
        self, context: Tensor, positions: Tensor, kv_cache: KvCache = "compute"
    ) -> list[Tensor]:
        """Rotated context keys of each drafter layer, as a cache keeps them: (..., D) -> list of
        (..., d)."""
        rounding = key_codec(kv_cache, as_ops=False).round
        keys = []
        for block in self.draft_blocks:
            cos, sin = rope_angles(positions, block.attn.frequencies)
            keys.append(rounding(block.attn.window_keys(context, cos, sin), RecordFormat.Q8))
        return keys

    def draft_hidden(
        self,
        anchors: Tensor,
        positions: Tensor,
        keys: list[Tensor],
        live: Tensor,
        kv_cache: KvCache = "compute",
    ) -> Tensor:
        """Parallel part of a round: the un-normed collapse of every slot.

        anchors: (N,) the known token of each round; positions: (N,) its position p + 1; keys:
        per drafter layer (N, C, d) context keys at positions up to p; live: (N, C) bool;
        kv_cache: how the block's own keys are kept. Returns (N, block, D).
        """
        config, rounding = self.config, key_codec(kv_cache, as_ops=False).round
        size = config.dspark_block_size
        ids = anchors.unsqueeze(1).repeat(1, size)
        ids[:, 1:] = config.dspark_noise_token_id
        slots = positions.unsqueeze(1) + torch.arange(size, device=positions.device)
        stream = self.embed(ids).unsqueeze(2).expand(-1, -1, config.hc_mult, -1)
        pre = initial_pre(stream)
        for block, layer_keys in zip(self.draft_blocks, keys, strict=True):
            next_pre, post, comb = block.mix("attn", stream)
            x = block.attn_norm(hc_pre(stream, pre))
            update = block.draft_attention(x, slots, layer_keys, live, rounding)
            stream = hc_post(update, stream, post, comb)
            pre, post, comb = block.mix("ffn", stream)
            update = block.ffn(block.ffn_norm(hc_pre(stream, next_pre)))
            stream = hc_post(update, stream, post, comb)
        return hc_pre(stream, pre)

    def draft_base_logits(self, hidden: Tensor) -> Tensor:
        """Draft logits without the Markov bias: (..., D) -> (..., vocab), fp32 island."""
        normed = island(self.draft_blocks[-1].norm(hidden))
        return normed @ self.head.weight.to(normed.dtype).t()

    def markov(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Markov embedding (..., rank) of the previous token and its logit bias (..., vocab)."""
        head = self.draft_blocks[-1].markov_head
        embedded = head.embed(previous)
        wide = island(embedded)
        return embedded, wide @ head.head.weight.to(wide.dtype).t()

    def confidence_logit(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """Raw confidence logit of a slot: (..., D), (..., rank) -> (...), fp32 island."""
        joined = island(torch.cat((hidden, markov), -1))
        weight = self.draft_blocks[-1].confidence_head.proj.weight
        return (joined @ weight.to(joined.dtype).t()).squeeze(-1)
