"""Regions of a layer: the functions that target, drafter, decode and prefill share.

A region is a plain function of tensors that writes its results into its last arguments and
returns nothing, so that it can be compiled once and bound to buffers that never move. The first
dimension of token tensors (T) and of rings and pools is symbolic; everything else is static.

Owns the arithmetic between two buffers of a layer; the order of calls is in target_step.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decodegrid.graphs.kv_cache import KvCache, step_codec
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.kernels.engram import engram_gate, hash_rows
from decodegrid.kernels.hyper_connection import hc_mix, hc_post, hc_pre
from decodegrid.kernels.moe import route, swiglu
from decodegrid.kernels.norm_rope import apply_rope, island, rms_norm, rope_angles
from decodegrid.kernels.products import Matrix
from decodegrid.kernels.records import RecordFormat
from decodegrid.kernels.sparse_attention import gathered_attention
from decodegrid.kernels.step_kernels import StepKernels

Region = Callable[..., None]
TOKENS = (0,)


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """A region function and the arguments whose first dimension is symbolic."""

    function: Region
    dynamic: dict[str, tuple[int, ...]]
    opaque: bool = False
    """Run as it is, not compiled: its work depends on values."""
    variants: int = 1


def spec(function: Region, *names: str, variants: int = 1) -> RegionSpec:
    """A spec whose named arguments have a symbolic first dimension."""
    return RegionSpec(function, dict.fromkeys(names, TOKENS), variants=variants)


def mix_regions(config: ModelConfig, kernels: StepKernels) -> dict[str, RegionSpec]:
    """Embedding, mHC collapse and Engram."""
    norm_eps, hc_eps = config.rms_norm_eps, config.hc_eps
    iters, heads = config.hc_sinkhorn_iters, config.engram_n_heads
    rounds, product, look_up = kernels.sinkhorn, kernels.project, kernels.table_rows

    def embed(input_ids: Tensor, table: Tensor, stream_out: Tensor, pre_out: Tensor) -> None:
        rows = F.embedding(input_ids, table)
        stream_out.copy_(rows.unsqueeze(1).expand_as(stream_out))
        copy = torch.arange(pre_out.shape[1], device=pre_out.device)
        pre_out.copy_((copy == 0).to(pre_out.dtype).expand_as(pre_out))

    def collapse(
        stream: Tensor, pre: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor,
        x_out: Tensor, pre_out: Tensor, post_out: Tensor, comb_out: Tensor,
    ) -> None:
        next_pre, post, comb = hc_mix(
            stream, fn, scale, base,
            norm_eps=norm_eps, hc_eps=hc_eps, iters=iters, rounds=rounds,
        )
        x_out.copy_(rms_norm(hc_pre(stream, pre), norm, norm_eps))
        pre_out.copy_(next_pre)
        post_out.copy_(post)
        comb_out.copy_(comb)

    def engram(
        stream: Tensor, lookback: Tensor, table: Matrix, wkv: Matrix, q_weight: Tensor,
        k_weight: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor,
    ) -> None:
        rows = hash_rows(lookback, multipliers, primes, offsets, heads)
        kv = product(look_up(rows, table).flatten(1).to(stream.dtype), wkv)
        stream.copy_(engram_gate(stream, kv, q_weight, k_weight, norm_eps))

    specs = {
        "embed": spec(embed, "input_ids", "stream_out", "pre_out"),
        "collapse": spec(
            collapse, "stream", "pre", "x_out", "pre_out", "post_out", "comb_out"
        ),
    }
    if config.engram_layer_ids:
        # The tables of two layers differ in rows.
        specs["engram"] = spec(engram, "stream", "lookback", "table")
    return specs


def attention_regions(
    config: ModelConfig, kv_cache: KvCache, kernels: StepKernels
) -> dict[str, RegionSpec]:
    """Projections in, sources, index queries, attention cores, projection out."""
    codec = step_codec(kv_cache, kernels)
    keep, take, rounded = codec.store, codec.take, codec.round
    attend = kernels.attend if kv_cache == "v41" else None
    q8, q4n, q4x = int(RecordFormat.Q8), int(RecordFormat.Q4N), int(RecordFormat.Q4X)
    eps, rank, heads = config.rms_norm_eps, config.q_lora_rank, config.num_attention_heads
    index_heads, groups = config.index_n_heads, config.o_groups
    hc_eps, iters = config.hc_eps, config.hc_sinkhorn_iters
    rounds, product, group_product = kernels.sinkhorn, kernels.project, kernels.project_groups

    def attn_in(
        x: Tensor, positions: Tensor, store: Tensor, w_in: Matrix, q_norm: Tensor, wq_b: Matrix,
        kv_norm: Tensor, frequencies: Tensor, low_rank_out: Tensor, query_out: Tensor,
        window_out: Tensor,
    ) -> None:
        joined = product(x, w_in)
        low_rank = rms_norm(joined[:, :rank], q_norm, eps)
        cos, sin = rope_angles(positions, frequencies)
        query = product(low_rank, wq_b).unflatten(1, (heads, -1))
        low_rank_out.copy_(low_rank)
        query_out.copy_(apply_rope(query, cos.unsqueeze(1), sin.unsqueeze(1)))
        keys = apply_rope(rms_norm(joined[:, rank:], kv_norm, eps), cos, sin)
        keep(window_out, store, keys, q8)

    def source_one(
        x: Tensor, positions: Tensor, entry_store: Tensor, w_in: Tensor, norm: Tensor,
        wk: Tensor, k_norm: Tensor, frequencies: Tensor, pool_out: Tensor, index_out: Tensor,
    ) -> None:
        latent = rms_norm(product(x, w_in), norm, eps)
        cos, sin = rope_angles(positions, frequencies)
        keep(pool_out, entry_store, apply_rope(latent, cos, sin), q4n)
        index = apply_rope(rms_norm(product(latent, wk), k_norm, eps), cos, sin)
        keep(index_out, entry_store, index, q4x)

    def source_two_in(
        x: Tensor, store: Tensor, w_in: Tensor, compressor_out: Tensor
    ) -> None:
        compressor_out[store] = product(island(x), w_in)

    def source_two(
        positions: Tensor, store: Tensor, previous: Tensor, entry_store: Tensor,
        compressor: Tensor, norm: Tensor, wk: Tensor, k_norm: Tensor, frequencies: Tensor,
        pool_out: Tensor, index_out: Tensor,
    ) -> None:
        dim = norm.shape[0]
        early, late = compressor[previous], compressor[store]
        # The softmax over two gates is a sigmoid of their difference.
        weight = torch.sigmoid(early[:, :dim] - late[:, :dim])
        pooled = weight * early[:, dim:] + (1.0 - weight) * late[:, dim:]
        latent = rms_norm(pooled.to(norm.dtype), norm, eps)
        cos, sin = rope_angles(positions - positions % 2, frequencies)
        keep(pool_out, entry_store, apply_rope(latent, cos, sin), q4n)
        index = apply_rope(rms_norm(product(latent, wk), k_norm, eps), cos, sin)
        keep(index_out, entry_store, index, q4x)

    def index_in(
        x: Tensor, low_rank: Tensor, positions: Tensor, wq_b: Matrix, weights_proj: Tensor,
        frequencies: Tensor, index_query_out: Tensor, index_weight_out: Tensor,
    ) -> None:
        cos, sin = rope_angles(positions, frequencies)
        query = product(low_rank, wq_b).unflatten(1, (index_heads, -1))
        turned = apply_rope(query, cos.unsqueeze(1), sin.unsqueeze(1))
        index_query_out.copy_(rounded(turned, q4x))
        index_weight_out.copy_(F.linear(x, weights_proj))

    def attend_window(
        query: Tensor, window: Tensor, window_index: Tensor, sink: Tensor, attended_out: Tensor
    ) -> None:
        if attend is not None:
            attended_out.copy_(attend(query, window, window_index, None, None, sink))
            return
        keys = take(window, window_index, q8, query.shape[2], query.dtype)
        attended_out.copy_(gathered_attention(query, keys, window_index >= 0, sink))

    def attend_both(
        query: Tensor, window: Tensor, window_index: Tensor, pool: Tensor, entry_index: Tensor,
        sink: Tensor, attended_out: Tensor,
    ) -> None:
        if attend is not None:
            attended_out.copy_(attend(query, window, window_index, pool, entry_index, sink))
            return
        near = take(window, window_index, q8, query.shape[2], query.dtype)
        far = take(pool, entry_index, q4n, query.shape[2], query.dtype)
        keys = torch.cat((near, far), 1)
        live = torch.cat((window_index, entry_index), 1) >= 0
        attended_out.copy_(gathered_attention(query, keys, live, sink))

    def attn_out(
        attended: Tensor, positions: Tensor, frequencies: Tensor, wo_a: Matrix, wo_b: Matrix,
        stream: Tensor, post: Tensor, comb: Tensor, pre: Tensor, fn: Tensor, scale: Tensor,
        base: Tensor, norm: Tensor, x_out: Tensor, pre_out: Tensor, post_out: Tensor,
        comb_out: Tensor,
    ) -> None:
        cos, sin = rope_angles(positions, frequencies)
        plain = apply_rope(attended, cos.unsqueeze(1), sin.unsqueeze(1), inverse=True)
        joined = group_product(plain.flatten(1).unflatten(1, (groups, -1)), wo_a)
        after = hc_post(product(joined.flatten(1), wo_b), stream, post, comb)
        next_pre, next_post, next_comb = hc_mix(
            after, fn, scale, base, norm_eps=eps, hc_eps=hc_eps, iters=iters,
            rounds=rounds,
        )
        x_out.copy_(rms_norm(hc_pre(after, pre), norm, eps))
        stream.copy_(after)
        pre_out.copy_(next_pre)
        post_out.copy_(next_post)
        comb_out.copy_(next_comb)

    specs = {
        "attn_in": spec(
            attn_in, "x", "positions", "store", "low_rank_out", "query_out", "window_out"
        ),
        "attend_window": spec(attend_window, "query", "window", "window_index", "attended_out"),
        "attn_out": spec(
            attn_out, "attended", "positions", "stream", "post", "comb", "pre", "x_out",
            "pre_out", "post_out", "comb_out",
        ),
    }
    specs["attend_window"].dynamic["window_index"] = (0, 1)
    ratios = {config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
    if ratios:
        specs["index_in"] = spec(
            index_in, "x", "low_rank", "positions", "index_query_out", "index_weight_out"
        )
        specs["attend_both"] = spec(
            attend_both, "query", "window", "window_index", "pool", "entry_index", "attended_out"
        )
    if 1 in ratios:
        specs["source_one"] = spec(
            source_one, "x", "positions", "entry_store", "pool_out", "index_out"
        )
    if 2 in ratios:
        specs["source_two_in"] = spec(source_two_in, "x", "store", "compressor_out")
        specs["source_two"] = spec(
            source_two, "positions", "store", "previous", "entry_store", "compressor",
            "pool_out", "index_out",
        )
    return specs


def moe_regions(
    config: ModelConfig, kernels: StepKernels, *, with_drafter: bool
) -> dict[str, RegionSpec]:
    """MoE sublayer with the stream update."""
    limit, scaling = config.swiglu_limit, config.routed_scaling_factor
    normalise = config.norm_topk_prob
    experts, product = kernels.run_experts, kernels.project

    def make(top_k: int) -> Region:
        def moe(
            x: Tensor, valid: Tensor, gate: Tensor, bias: Tensor, w13: Matrix, w2: Matrix,
            shared_w13: Matrix, shared_w2: Matrix, post: Tensor, comb: Tensor, stream: Tensor,
        ) -> None:
            ids, weights = route(
                x, gate, bias, top_k, scaling=scaling, normalise=normalise
            )
            # A pad visits no routed expert, so that it costs nothing and counts nowhere.
            ids = ids.where(valid.unsqueeze(-1), torch.full_like(ids, gate.shape[0]))
            routed = experts(x, ids, weights, w13, w2, limit)
            gated, up = product(x, shared_w13).chunk(2, -1)
            shared = product(swiglu(gated, up, limit).to(x.dtype), shared_w2)
            update = (routed + island(shared)).to(x.dtype)
            stream.copy_(hc_post(update, stream, post, comb))

        return moe

    names = ("x", "valid", "post", "comb", "stream")
    specs = {"moe": spec(make(config.num_experts_per_tok), *names)}
    if with_drafter:
        specs["draft_moe"] = spec(make(config.dspark_num_experts_per_tok), *names)
    return specs
