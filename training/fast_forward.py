"""The target's uncached forward, arranged for training on a CPU.

Owns how the work is cut: attention in blocks of queries with hand-written gradients, compiled
pieces between the matrix products, experts by permutation, and where cache records are rounded.
Owns no formula of its own: parameters and every other piece are those of `decodegrid.graphs.model`,
and a test holds loss and gradients against that module's forward. Data flow: ids -> `FastForward`
-> ForwardOutput.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decodegrid.graphs.attention import Attention, IndexTrace
from decodegrid.graphs.model import Block, ForwardOutput, Model, MoE
from decodegrid.kernels.engram import engram_gate, hash_rows
from decodegrid.kernels.hyper_connection import hc_post, hc_pre, initial_pre
from decodegrid.kernels.indexer import candidate_mask, index_scores, top_k_mask
from decodegrid.kernels.moe import grouped_product, route, swiglu
from decodegrid.kernels.norm_rope import apply_rope, rms_norm, rope_angles
from training.block_attention import BlockAttention, draft_attend, near_bias
from training.hand_gradients import Combine, Dispatch, Sinkhorn
from training.quantised import round_q4n, round_q4x, round_q8, round_record

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def _open(
    stream: Tensor,
    pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor,
    constants: tuple[float, float, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `hc_mix` up to the logits of the mixing matrix, and the normed input of the sublayer."""
    norm_eps, hc_eps, _ = constants
    n = stream.shape[-2]
    flat = stream.flatten(-2)
    rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mixed = (flat @ fn.t()) * rms
    next_pre = torch.sigmoid(mixed[..., :n] * scale[0] + base[:n]) + hc_eps
    post = 2.0 * torch.sigmoid(mixed[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixed[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return next_pre, post, logits, rms_norm(hc_pre(stream, pre), norm, norm_eps)


def _project(attn: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return attn.queries_and_keys(x, cos, sin)


def _output(attn: Attention, attended: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return attn.output(attended, cos, sin)


def _experts_hidden(gate_up: Tensor, weights: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return swiglu(gate, up, limit) * weights.unsqueeze(-1)


def _shared_expert(moe: MoE, flat: Tensor, limit: float) -> Tensor:
    return moe.shared_experts(flat, limit)


def token_loss(model: Model, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross entropy in nats; hidden (B, S, D), targets and weights (B, S), a weight
    being 0 where the target is -100."""
    logits = model.head_logits(hidden).flatten(0, -2)
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


class FastForward:
    """Callable form of one model; one instance serves any number of shapes.

    `compiler` wraps each piece (None: no compilation, for tests and odd shapes). Pieces that work
    token by token see every batch of as many tokens as `layout` in that shape (rows, tokens), so
    that another row length does not compile them again. `loads` holds the (experts,) token counts
    of each layer of the latest call, for the router-bias update; `spreads`, where asked for, the
    mean compressed mass of a head outside the indexer's selection, of each layer that has some.
    """

    def __init__(
        self,
        model: Model,
        compiler: Compiler | None = None,
        layout: tuple[int, int] | None = None,
    ) -> None:
        wrap: Compiler = compiler if compiler is not None else (lambda piece: piece)
        config = model.config
        self.model, self.config, self.layout = model, config, layout
        self.constants = (config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)
        self.open, self.post = wrap(_open), wrap(hc_post)
        self.project, self.output = wrap(_project), wrap(_output)
        self.experts_hidden, self.shared_expert = wrap(_experts_hidden), wrap(_shared_expert)
        self.engram_gate, self.index_scores = wrap(engram_gate), wrap(index_scores)
        self.route = wrap(route)
        self.loss = wrap(token_loss)
        self.attend = BlockAttention(config.sliding_window, wrap)
        self.draft_attend = wrap(draft_attend)
        self.loads: list[Tensor] = []
        self.spreads: list[Tensor] = []

    def __call__(
        self,
        ids: Tensor,
        *,
        dense: bool,
        trace_indexer: bool = False,
        records: bool = False,
        windows_only: bool = False,
        spread: bool = False,
    ) -> ForwardOutput:
        """Whole sequences from position 0: (B, S) int64, S a multiple of the window.

        `dense` ignores the selection: every layer sees all complete compressed entries; the
        indexer then runs only if `trace_indexer`. `records` rounds keys and index queries as a
        V4.1 cache does. `windows_only` masks all compressed entries off. `spread`, with both
        `dense` and `trace_indexer`, fills `spreads`.
        """
        model, config = self.model, self.config
        run = _Run(self, ids, dense, trace_indexer, records)
        run.windows_only, run.spread = windows_only, spread
        self.loads, self.spreads = [], []
        shape = self.layout_of(ids)
        stream = model.embed(ids.view(shape)).unsqueeze(2).repeat(1, 1, config.hc_mult, 1)
        pre = initial_pre(stream)
        taps = []
        for layer, block in enumerate(model.layers):
            assert isinstance(block, Block)
            if layer in config.engram_layer_ids:
                stream = self._engram(block, stream, model.lookback(ids))
            if layer in config.dspark_target_layer_ids:
                taps.append(stream.mean(2))
            next_pre, post, comb, x = self.open_sublayer(block, "attn", stream, pre)
            update = run.attention(block.attn, x.view(*ids.shape, -1)).view(x.shape)
            stream = self.post(update, stream, post, comb)
            pre, post, comb, x = self.open_sublayer(block, "ffn", stream, next_pre)
            stream = self.post(self.experts(block.ffn, x), stream, post, comb)
        hidden = hc_pre(stream, pre)
        gathered = torch.cat(taps, -1) if taps else hidden[..., :0]
        return ForwardOutput(
            hidden.view(*ids.shape, -1), gathered.view(*ids.shape, -1), tuple(run.traces)
        )

    def layout_of(self, ids: Tensor) -> tuple[int, int]:
        """The shape in which token-wise pieces see this batch."""
        if self.layout is not None and ids.numel() == self.layout[0] * self.layout[1]:
            return self.layout
        return ids.shape[0], ids.shape[1]

    def mean_loss(
        self, output: ForwardOutput, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Mean cross entropy in nats over (B, S) targets, -100 being left out; `weights` (B, S)
        float, None: all alike."""
        shape = self.layout_of(targets)
        live = (targets != -100).float()
        weights = live if weights is None else live * weights
        loss: Tensor = self.loss(
            self.model,
            output.hidden.view(*shape, -1),
            targets.reshape(shape),
            weights.reshape(shape),
        )
        return loss

    def open_sublayer(
        self, block: Block, part: str, stream: Tensor, pre: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Next `pre`, `post`, `comb` and the sublayer's normed input; part: "attn" or "ffn"."""
        names = [f"hc_{part}_fn", f"hc_{part}_scale", f"hc_{part}_base"]
        norm = block.attn_norm if part == "attn" else block.ffn_norm
        next_pre, post, logits, x = self.open(
            stream, pre, *(getattr(block, name) for name in names), norm.weight, self.constants
        )
        comb = Sinkhorn.apply(logits, self.config.hc_sinkhorn_iters, self.config.hc_eps)
        return next_pre, post, comb, x

    def _engram(self, block: Block, stream: Tensor, lookback: Tensor) -> Tensor:
        engram = block.engram
        heads = self.config.engram_n_heads
        lookback = lookback.view(*stream.shape[:2], -1)
        rows = hash_rows(lookback, engram.multipliers, engram.primes, engram.offsets, heads)
        kv = engram.wkv(F.embedding(rows, engram.embed.weight).flatten(-2))
        out: Tensor = self.engram_gate(
            stream, kv, engram.q_weight, engram.k_weight, self.config.rms_norm_eps
        )
        return out

    def experts(self, moe: nn.Module, x: Tensor) -> Tensor:
        """As `MoE.forward`; appends to `loads`."""
        assert isinstance(moe, MoE)
        config, limit = self.config, self.config.swiglu_limit
        flat = x.reshape(-1, x.shape[-1])
        ids, weights = self.route(
            flat,
            moe.gate.weight,
            moe.gate.bias.detach(),
            moe.top_k,
            scaling=config.routed_scaling_factor,
            normalise=config.norm_topk_prob,
        )
        chosen = ids.flatten()
        order = chosen.argsort(stable=True)
        load = chosen.bincount(minlength=moe.gate.weight.shape[0])
        self.loads.append(load)
        ends = load.cumsum(0).to(torch.int32)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        token = order // moe.top_k
        w13, w2 = moe.experts.packed()
        gate_up = grouped_product(Dispatch.apply(flat, token, back), w13, ends)
        sorted_weights = Dispatch.apply(weights.reshape(-1, 1), order, back).squeeze(-1)
        rows = grouped_product(self.experts_hidden(gate_up, sorted_weights, limit), w2, ends)
        routed = Combine.apply(rows, token, back, moe.top_k)
        return (routed + self.shared_expert(moe, flat, limit)).view(x.shape)


class _Run:
    """State that attention layers hand on within one forward."""

    def __init__(
        self, owner: FastForward, ids: Tensor, dense: bool, trace: bool, records: bool
    ) -> None:
        self.owner, self.dense, self.trace, self.records = owner, dense, trace, records
        self.positions = torch.arange(ids.shape[1])
        self.near = near_bias(ids.shape[1], owner.config.sliding_window)
        self.angles: dict[int, tuple[Tensor, Tensor]] = {}
        self.traces: list[IndexTrace] = []
        self.windows_only = self.spread = False
        self.compressed: Tensor | None = None
        self.index_keys: Tensor | None = None
        self.far: Tensor | None = None
        self.candidates: Tensor | None = None
        self.outside: Tensor | None = None

    def attention(self, attn: Attention, x: Tensor) -> Tensor:
        """As `Attention.forward`, with this run as the cross-layer state."""
        owner = self.owner
        key = min(attn.ratio, 1)
        if key not in self.angles:
            self.angles[key] = rope_angles(self.positions, attn.frequencies)
        cos, sin = self.angles[key]
        low_rank, query, window_keys = owner.project(attn, x, cos, sin)
        if self.records:
            window_keys = round_record(window_keys, round_q8)
        if attn.is_source:
            latent = attn.compressor.norm(attn.compressor.pooled(x))
            entry = torch.arange(latent.shape[1]) * attn.ratio
            far_cos, far_sin = rope_angles(entry, attn.frequencies)
            self.compressed = apply_rope(latent, far_cos, far_sin)
            if self.records:
                self.compressed = round_record(self.compressed, round_q4n)
            if self.trace or not self.dense:
                source = latent.detach() if self.trace else latent
                self.index_keys = attn.index_keys(source, far_cos, far_sin)
                if self.records:
                    self.index_keys = round_record(self.index_keys, round_q4x)
        if attn.runs_indexer:
            self._select(attn, x, low_rank, cos, sin)
        reads_far = attn.ratio > 0 and not self.windows_only
        compressed = self.compressed if reads_far else None
        far = self.far if reads_far else None
        attended, mass, spread = owner.attend(
            query,
            window_keys,
            attn.attn_sink,
            self.near,
            compressed,
            far,
            attn.ratio,
            self.trace,
            self.outside,
        )
        if mass is not None:
            self.traces[-1].mass.append(mass)
        if spread is not None:
            owner.spreads.append(spread)
        out: Tensor = owner.output(attn, attended, cos, sin)
        return out

    def _select(
        self, attn: Attention, x: Tensor, low_rank: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        assert self.compressed is not None
        config = self.owner.config
        lengths = (self.positions + 1) // attn.ratio
        visible = torch.arange(self.compressed.shape[1]) < lengths[:, None]
        if self.dense:
            bias = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
            self.far = bias.unsqueeze(0).repeat(x.shape[0], 1, 1)
            if not self.trace:
                return
        assert self.index_keys is not None
        if self.trace:
            x, low_rank = x.detach(), low_rank.detach()
        query, weights = attn.index_queries(x, low_rank, cos, sin)
        if self.records:
            query = round_record(query, round_q4x)
        scores = self.owner.index_scores(query, weights, self.index_keys)
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.dense:
            self.traces.append(IndexTrace(attn.layer, scores))
            if not self.spread:
                return
            scores = scores.detach()
        if attn.layer == config.candidate_source_layer_id:
            self.candidates = candidate_mask(
                scores.detach(),
                lengths.expand(scores.shape[:-1]),
                config.candidate_block_size,
                config.candidate_topk_blocks,
            )
        elif self.candidates is not None:
            scores = scores.masked_fill(~self.candidates, float("-inf"))
        selected = top_k_mask(scores.detach(), config.index_topk)
        if self.dense:
            self.outside = (visible & ~selected).to(x.dtype)
            return
        self.far = torch.zeros(selected.shape).masked_fill(~selected, float("-inf"))
        if self.trace:
            kept = scores.masked_fill(~selected, float("-inf"))
            self.traces.append(IndexTrace(attn.layer, kept))
