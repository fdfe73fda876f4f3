"""The DeepSeek-V4.1 text model as modules, and its plain uncached forward.

Owns the parameters (checkpoint names, experts stacked per layer) and the readable forward that is
the oracle for every cached, paged or compiled path. Training runs the same modules. Knows no
cache, no slots, no sampling.

Data flow: ids -> embedding repeated over hc_mult copies -> blocks (Engram, attention sublayer, MoE
sublayer, each between shifted mHC mixers) -> collapse -> norm -> head.

Source: DeepSeek-V4.1-Flash `inference/model.py` (Transformer, Block, MoE, Engram).
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decodegrid.graphs.attention import (
    Attention,
    AttentionCore,
    CrossLayer,
    IndexTrace,
    Norm,
    linear,
)
from decodegrid.graphs.kv_cache import KvCache, key_codec
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.packed_modules import PackedModule
from decodegrid.kernels.engram import engram_gate, hash_multipliers, hash_rows, table_primes
from decodegrid.kernels.hyper_connection import hc_mix, hc_post, hc_pre, initial_pre
from decodegrid.kernels.moe import route, routed_experts, swiglu
from decodegrid.kernels.norm_rope import island
from decodegrid.kernels.sparse_attention import dense_attention


class Gate(nn.Module):
    """Router parameters. `bias_vl` serves image tokens, which the text path never has."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_experts))
        self.bias_vl = nn.Parameter(torch.zeros(num_experts))


class Experts(nn.Module):
    """Routed experts stacked: w1 (gate), w3 (up) (E, I, D) and w2 (down) (E, D, I)."""

    def __init__(self, num_experts: int, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, inner, hidden_size))
        self.w3 = nn.Parameter(torch.empty(num_experts, inner, hidden_size))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_size, inner))

    def packed(self) -> tuple[Tensor, Tensor]:
        """Weights as the grouped product wants them: (E, D, 2 * I) gate first, and (E, I, D)."""
        return torch.cat((self.w1, self.w3), 1).transpose(1, 2), self.w2.transpose(1, 2)


class SharedExpert(nn.Module):
    """The expert that every token visits."""

    def __init__(self, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.w1 = linear(hidden_size, inner)
        self.w3 = linear(hidden_size, inner)
        self.w2 = linear(inner, hidden_size)

    def forward(self, x: Tensor, limit: float) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x), limit).to(x.dtype))


class MoE(nn.Module):
    """Router, routed experts and the shared expert."""

    def __init__(self, config: ModelConfig, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.config, self.top_k = config, top_k
        inner = config.moe_intermediate_size
        self.gate = Gate(config.hidden_size, num_experts)
        self.experts = Experts(num_experts, config.hidden_size, inner)
        self.shared_experts = SharedExpert(config.hidden_size, inner)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        flat = x.reshape(-1, x.shape[-1])
        ids, weights = route(
            flat,
            self.gate.weight,
            self.gate.bias,
            self.top_k,
            scaling=self.config.routed_scaling_factor,
            normalise=self.config.norm_topk_prob,
        )
        limit = self.config.swiglu_limit
        routed = routed_experts(flat, ids, weights, *self.experts.packed(), limit)
        out = routed + island(self.shared_experts(flat, limit))
        return out.to(x.dtype).reshape(x.shape)


class EngramTable(nn.Module):
    """Rows of all columns of one layer, one after another."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim))

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Table rows: index (...) int64 -> (..., dim) in `dtype`."""
        return F.embedding(index, self.weight).to(dtype)


class Engram(nn.Module):
    """N-gram memory of one layer."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        order = config.engram_layer_ids.index(layer)
        primes = table_primes(
            len(config.engram_layer_ids), config.engram_columns, config.engram_vocab_size
        )[order]
        copies, hidden = config.hc_mult, config.hidden_size
        self.embed = EngramTable(sum(primes), config.engram_head_dim)
        self.wkv = linear(config.engram_columns * config.engram_head_dim, (copies + 1) * hidden)
        self.q_weight = nn.Parameter(torch.ones(copies, hidden))
        self.k_weight = nn.Parameter(torch.ones(copies, hidden))
        multipliers = hash_multipliers(
            layer, config.engram_compressed_vocab_size, config.engram_max_ngram_size
        )
        # Tables have real values, even where the parameters are built without memory.
        rows = torch.tensor(primes, device="cpu")
        odd = torch.tensor(multipliers, device="cpu")
        self.register_buffer("multipliers", odd, persistent=False)
        self.register_buffer("primes", rows, persistent=False)
        self.register_buffer("offsets", rows.cumsum(0) - rows, persistent=False)

    def forward(self, stream: Tensor, lookback: Tensor) -> Tensor:
        """stream: (..., n, D); lookback: (..., N) compressed ids, newest first, padded."""
        rows = hash_rows(
            lookback, self.multipliers, self.primes, self.offsets, self.config.engram_n_heads
        )
        kv = self.wkv(self.embed.rows(rows, stream.dtype).flatten(-2))
        return engram_gate(stream, kv, self.q_weight, self.k_weight, self.config.rms_norm_eps)


class Embedding(nn.Embedding):
    """An embedding that can be built without memory at no cost."""

    def reset_parameters(self) -> None:
        """Draw the weights, if they have memory: drawing on "meta" loads the whole compiler."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Block(nn.Module):
    """One layer: optional Engram, attention sublayer, MoE sublayer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        drafter = layer >= config.num_hidden_layers
        self.attn = Attention(config, layer)
        self.ffn = (
            MoE(config, config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)
            if drafter
            else MoE(config, config.n_routed_experts, config.num_experts_per_tok)
        )
        if layer in config.engram_layer_ids:
            self.engram = Engram(config, layer)
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        n = config.hc_mult
        for part in ("attn", "ffn"):
            self.register_parameter(
                f"hc_{part}_fn", nn.Parameter(torch.empty(n * (n + 2), n * config.hidden_size))
            )
            self.register_parameter(f"hc_{part}_scale", nn.Parameter(torch.ones(3)))
            self.register_parameter(f"hc_{part}_base", nn.Parameter(torch.zeros(n * (n + 2))))

    def mix(self, part: str, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`pre` for the next sublayer, `post` and `comb` for this one; part: "attn" or "ffn"."""
        return hc_mix(
            stream,
            getattr(self, f"hc_{part}_fn"),
            getattr(self, f"hc_{part}_scale"),
            getattr(self, f"hc_{part}_base"),
            norm_eps=self.config.rms_norm_eps,
            hc_eps=self.config.hc_eps,
            iters=self.config.hc_sinkhorn_iters,
        )

    def forward(
        self, stream: Tensor, pre: Tensor, shared: CrossLayer, core: AttentionCore
    ) -> tuple[Tensor, Tensor]:
        """Both sublayers: stream (B, S, n, D) and the shifted `pre` (B, S, n) in and out."""
        next_pre, post, comb = self.mix("attn", stream)
        update = self.attn(self.attn_norm(hc_pre(stream, pre)), shared, core)
        stream = hc_post(update, stream, post, comb)
        last_pre, post, comb = self.mix("ffn", stream)
        update = self.ffn(self.ffn_norm(hc_pre(stream, next_pre)))
        return hc_post(update, stream, post, comb), last_pre


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Result of an uncached forward over (B, S) ids."""

    hidden: Tensor
    """(B, S, D) collapsed stream before the final norm."""
    taps: Tensor
    """(B, S, taps * D) mean stream at the inputs of the drafter's target layers; empty last axis
    without a drafter."""
    traces: tuple[IndexTrace, ...]


class Model(nn.Module):
    """Target model; the drafter's layers hang under `mtp` (see drafter.py)."""

    compressed_ids: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = linear(config.hidden_size, config.vocab_size)
        self.register_buffer("compressed_ids", default_compressed_ids(config), persistent=False)

    @property
    def blocks(self) -> list[Block]:
        """The target's layers."""
        return cast(list[Block], list(self.layers))

    def lookback(self, ids: Tensor) -> Tensor:
        """Compressed n-gram ids of whole sequences from position 0: (B, S) -> (B, S, N)."""
        size = self.config.engram_max_ngram_size
        mapped = self.compressed_ids[ids]
        pad = self.compressed_ids[self.config.engram_pad_token_id]
        columns = [mapped]
        for back in range(1, size):
            head = pad.expand(ids.shape[0], min(back, ids.shape[1]))
            columns.append(torch.cat((head, mapped[:, : max(ids.shape[1] - back, 0)]), 1))
        return torch.stack(columns, -1)

    def forward(
        self,
        ids: Tensor,
        core: AttentionCore = dense_attention,
        *,
        trace_indexer: bool = False,
        kv_cache: KvCache = "compute",
    ) -> ForwardOutput:
        """Uncached forward of whole sequences from position 0; ids: (B, S) int64.

        kv_cache: keys are rounded as such a cache would, for forwards without gradients.
        """
        config = self.config
        stream = self.embed(ids).unsqueeze(2).expand(-1, -1, config.hc_mult, -1)
        lookback = self.lookback(ids) if config.engram_layer_ids else None
        pre = initial_pre(stream)
        rounding = key_codec(kv_cache, as_ops=False).round
        shared = CrossLayer(traces=[] if trace_indexer else None, rounding=rounding)
        taps = []
        for layer, block in enumerate(self.blocks):
            if layer in config.engram_layer_ids:
                stream = block.engram(stream, lookback)
            if layer in config.dspark_target_layer_ids:
                taps.append(island(stream).mean(2).to(stream.dtype))
            stream, pre = block(stream, pre, shared, core)
        hidden = hc_pre(stream, pre)
        gathered = torch.cat(taps, -1) if taps else hidden[..., :0]
        return ForwardOutput(hidden, gathered, tuple(shared.traces or ()))

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head in an fp32 island: (..., D) -> (..., vocab)."""
        normed = island(self.norm(hidden))
        return normed @ self.head.weight.to(normed.dtype).t()

    @torch.inference_mode()
    def logits(self, ids: Tensor, kv_cache: KvCache = "compute") -> Tensor:
        """The oracle: next-token logits at every position, no cache; (S,) int64 -> (S, vocab).

        float32 for float32 and lower models, float64 for float64 ones. With `kv_cache` v41 keys and
        index queries are rounded where steps store or read them as records.
        """
        if ids.dim() != 1 or ids.numel() == 0:
            raise ValueError(f"ids must be a non-empty vector, got shape {tuple(ids.shape)}")
        return self.head_logits(self.forward(ids.unsqueeze(0), kv_cache=kv_cache).hidden[0])

    def cast(self, dtype: torch.dtype) -> "Model":
        """Convert in place: floats to `dtype`, except that fp32 parameters never go below fp32.
        Packed weights keep their bytes and expand to `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        for name, parameter in self.named_parameters():
            keep_wide = is_wide_parameter(name)
            parameter.data = parameter.data.to(wide if keep_wide else dtype)
        for module in self.modules():
            if isinstance(module, PackedModule):
                module.dtype = dtype
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(wide))
        return self


def is_wide_parameter(name: str) -> bool:
    """Whether the checkpoint stores this parameter in float32: mHC, router biases, sinks."""
    leaf = name.rsplit(".", 1)[-1]
    return leaf.startswith("hc_") or leaf in ("attn_sink", "bias", "bias_vl")


def default_compressed_ids(config: ModelConfig) -> Tensor:
    """Class of each token id without a tokenizer: id modulo the number of classes."""
    classes = max(config.engram_compressed_vocab_size, 1)
    return torch.arange(config.vocab_size, device="cpu") % classes
