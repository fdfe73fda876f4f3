"""The whole model against a second one: numpy, one token at a time, straight from the formulas.

It reads a checkpoint's tensors by their stored names, and shares no code with the engine. So it
covers what no other implementation expresses: shifted hyper-connections, reuse and reindex layers,
candidate blocks, the Engram, and the drafter.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decodegrid.graphs.checkpoint_names import tensor_slots
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config import ModelConfig

Vector = NDArray[np.float64]


class Naive:
    """One sequence from position 0. `w` holds tensors by checkpoint name."""

    def __init__(self, config: ModelConfig, w: dict[str, Vector]) -> None:
        self.c, self.w = config, w

    def norm(self, x: Vector, name: str) -> Vector:
        return x / math.sqrt(np.mean(x * x) + self.c.rms_norm_eps) * self.w[f"{name}.weight"]

    def rotate(self, x: Vector, position: int, layer: int, sign: int = 1) -> Vector:
        c, out = self.c, x.copy()
        half = c.qk_rope_head_dim // 2
        compressed = c.compress_ratios[layer] > 0
        theta = c.compress_rope_theta if compressed else c.rope_theta
        for i in range(half):
            rate = theta ** (-i / half)
            if compressed:
                s = c.rope_scaling
                low, high = (
                    2 * half * math.log(s.original_max_position_embeddings / (2 * math.pi * beta))
                    / (2 * math.log(theta))
                    for beta in (s.beta_fast, s.beta_slow)
                )  # fmt: skip
                low = max(math.floor(low), 0)
                high = min(math.ceil(high), 2 * half - 1)
                ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
                rate = rate / s.factor * ramp + rate * (1 - ramp)
            at = len(x) - 2 * half + 2 * i
            turned = complex(*x[at : at + 2]) * np.exp(1j * sign * position * rate)
            out[at : at + 2] = turned.real, turned.imag
        return out

    def mix(self, h: Vector, name: str) -> tuple[Vector, Vector, Vector]:
        n = self.c.hc_mult
        flat = h.reshape(-1)
        rms = 1 / math.sqrt(np.mean(flat * flat) + self.c.rms_norm_eps)
        m = self.w[f"{name}_fn"] @ flat * rms
        scale, base = self.w[f"{name}_scale"], self.w[f"{name}_base"]
        pre = 1 / (1 + np.exp(-(m[:n] * scale[0] + base[:n]))) + self.c.hc_eps
        post = 2 / (1 + np.exp(-(m[n : 2 * n] * scale[1] + base[n : 2 * n])))
        comb = np.exp((m[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n))
        comb = comb / comb.sum(1, keepdims=True) + self.c.hc_eps
        comb = comb / (comb.sum(0, keepdims=True) + self.c.hc_eps)
        for _ in range(self.c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1, keepdims=True) + self.c.hc_eps)
            comb = comb / (comb.sum(0, keepdims=True) + self.c.hc_eps)
        return pre, post, comb

    def moe(self, x: Vector, p: str, top_k: int) -> Vector:
        score = np.sqrt(np.log1p(np.exp(self.w[f"{p}.gate.weight"] @ x)))
        biased = score + self.w[f"{p}.gate.bias"]
        picked = sorted(range(len(score)), key=lambda e: (-biased[e], e))[:top_k]
        total = sum(score[e] for e in picked) + 1e-20
        out = self.expert(x, f"{p}.shared_experts", 1.0)
        for e in picked:
            weight = score[e] / total * self.c.routed_scaling_factor
            out = out + self.expert(x, f"{p}.experts.{e}", weight)
        return out

    def expert(self, x: Vector, p: str, weight: float) -> Vector:
        limit = self.c.swiglu_limit
        gate = np.minimum(self.w[f"{p}.w1.weight"] @ x, limit)
        up = np.clip(self.w[f"{p}.w3.weight"] @ x, -limit, limit)
        return self.w[f"{p}.w2.weight"] @ (gate / (1 + np.exp(-gate)) * up * weight)

    def query(self, x: Vector, p: str, position: int, layer: int) -> tuple[Vector, list[Vector]]:
        low = self.norm(self.w[f"{p}.wq_a.weight"] @ x, f"{p}.q_norm")
        heads = (self.w[f"{p}.wq_b.weight"] @ low).reshape(self.c.num_attention_heads, -1)
        return low, [self.rotate(head, position, layer) for head in heads]

    def key(self, x: Vector, p: str, position: int, layer: int) -> Vector:
        key = self.norm(self.w[f"{p}.wkv.weight"] @ x, f"{p}.kv_norm")
        return self.rotate(key, position, layer)

    def attend(
        self, heads: list[Vector], keys: list[Vector], p: str, position: int, layer: int
    ) -> Vector:
        outs = []
        for head, sink in zip(heads, self.w[f"{p}.attn_sink"], strict=True):
            e = [math.exp(head @ key / math.sqrt(len(head))) for key in keys]
            total = sum(e) + math.exp(sink)
            out = sum((w / total * key for w, key in zip(e, keys, strict=True)), 0 * head)
            outs.append(self.rotate(out, position, layer, -1))
        groups = np.concatenate(outs).reshape(self.c.o_groups, -1)
        first = self.w[f"{p}.wo_a.weight"].reshape(self.c.o_groups, self.c.o_lora_rank, -1)
        joined = np.concatenate([w @ g for w, g in zip(first, groups, strict=True)])
        return self.w[f"{p}.wo_b.weight"] @ joined

    def latents(self, xs: list[Vector], p: str, ratio: int) -> list[Vector]:
        value = [self.w[f"{p}.compressor.wkv.weight"] @ x for x in xs]
        if ratio == 2:
            gate = [np.exp(self.w[f"{p}.compressor.wgate.weight"] @ x) for x in xs]
            value = [
                (gate[t] * value[t] + gate[t + 1] * value[t + 1]) / (gate[t] + gate[t + 1])
                for t in range(0, len(xs) - 1, 2)
            ]
        return [self.norm(v, f"{p}.compressor.norm") for v in value]

    def select(self, xs: list[Vector], lows: list[Vector], layer: int, state: Any) -> None:
        c, p = self.c, f"layers.{layer}.attn.indexer"
        state.topk = []
        candidates = []
        for t, (x, low) in enumerate(zip(xs, lows, strict=True)):
            heads = (self.w[f"{p}.wq_b.weight"] @ low).reshape(c.index_n_heads, -1)
            heads = [self.rotate(head, t, layer) for head in heads]
            gain = self.w[f"{p}.weights_proj.weight"] @ x
            gain = gain / math.sqrt(c.index_n_heads * c.index_head_dim)
            visible = (t + 1) // c.compress_ratios[layer]
            score = [
                sum(g * max(0.0, head @ key) for g, head in zip(gain, heads, strict=True))
                for key in state.index_keys[:visible]
            ]
            if layer == c.candidate_source_layer_id:
                size = c.candidate_block_size
                blocks = [max(score[b : b + size]) for b in range(0, visible, size)]
                if blocks:
                    blocks[-1] = math.inf
                order = sorted(range(len(blocks)), key=lambda b: (-blocks[b], b))
                candidates.append(set(order[: c.candidate_topk_blocks]))
            allowed = range(visible)
            if state.candidates is not None:
                allowed = [j for j in allowed if j // c.candidate_block_size in state.candidates[t]]
            state.topk.append(sorted(allowed, key=lambda j: (-score[j], j))[: c.index_topk])
        state.candidates = candidates or state.candidates

    def attention(self, xs: list[Vector], layer: int, state: Any) -> list[Vector]:
        c, p = self.c, f"layers.{layer}.attn"
        ratio = c.compress_ratios[layer]
        queries = [self.query(x, p, t, layer) for t, x in enumerate(xs)]
        window = [self.key(x, p, t, layer) for t, x in enumerate(xs)]
        if layer in c.kv_source_layer_ids:
            latents = self.latents(xs, p, ratio)
            state.keys = [self.rotate(z, j * ratio, layer) for j, z in enumerate(latents)]
            small = [self.w[f"{p}.indexer.wk.weight"] @ z for z in latents]
            small = [self.norm(k, f"{p}.indexer.k_norm") for k in small]
            state.index_keys = [self.rotate(k, j * ratio, layer) for j, k in enumerate(small)]
        if layer in c.index_source_layer_ids:
            self.select(xs, [low for low, _ in queries], layer, state)
        out = []
        for t, (_, heads) in enumerate(queries):
            keys = window[max(0, t - c.sliding_window + 1) : t + 1]
            if ratio:
                keys = keys + [state.keys[j] for j in state.topk[t]]
            out.append(self.attend(heads, keys, p, t, layer))
        return out

    def engram(self, stream: list[Vector], ids: list[int], layer: int, rows_at: Any) -> None:
        c, p = self.c, f"layers.{layer}.engram"
        for t, h in enumerate(stream):
            table = self.w[f"{p}.embed.weight"]
            kv = self.w[f"{p}.wkv.weight"] @ np.concatenate([table[r] for r in rows_at(ids, t)])
            dim = c.hidden_size
            value = kv[c.hc_mult * dim :]
            for copy in range(c.hc_mult):
                key = kv[copy * dim : (copy + 1) * dim]
                gain = self.w[f"{p}.q_weight"][copy] * self.w[f"{p}.k_weight"][copy]
                norms = math.sqrt(np.mean(h[copy] ** 2)) * math.sqrt(np.mean(key**2))
                delta = np.sum(h[copy] * gain * key) / norms / math.sqrt(dim)
                root = math.copysign(math.sqrt(max(abs(delta), 1e-6)), delta)
                h[copy] = h[copy] + value / (1 + math.exp(-root))

    def sublayers(
        self, stream: list[Vector], pres: list[Vector], p: str, attend: Any, top_k: int
    ) -> None:
        """Attention, then MoE; `stream` and `pres` are updated in place."""
        for part in ("attn", "ffn"):
            mixes = [self.mix(h, f"{p}.hc_{part}") for h in stream]
            inputs = [
                self.norm(pre @ h, f"{p}.{part}_norm") for pre, h in zip(pres, stream, strict=True)
            ]
            if part == "attn":
                updates = attend(inputs)
            else:
                updates = [self.moe(x, f"{p}.ffn", top_k) for x in inputs]
            for t, (pre, post, comb) in enumerate(mixes):
                stream[t] = np.outer(post, updates[t]) + comb.T @ stream[t]
                pres[t] = pre

    def start(self, ids: list[int]) -> tuple[list[Vector], list[Vector]]:
        n = self.c.hc_mult
        stream = [np.repeat(self.w["embed.weight"][i][None], n, 0) for i in ids]
        return stream, [np.eye(n)[0] for _ in ids]

    def head(self, hidden: Vector, norm: str) -> Vector:
        return self.w["head.weight"] @ self.norm(hidden, norm)

    def target(self, ids: list[int], rows_at: dict[int, Any]) -> tuple[Vector, list[Vector]]:
        """Logits (S, vocab), and the concatenated taps of each token."""
        c = self.c
        stream, pres = self.start(ids)
        state = type("State", (), {"candidates": None})()
        taps: list[list[Vector]] = [[] for _ in ids]
        for layer in range(c.num_hidden_layers):
            if layer in c.engram_layer_ids:
                self.engram(stream, ids, layer, rows_at[layer])
            if layer in c.dspark_target_layer_ids:
                for tap, h in zip(taps, stream, strict=True):
                    tap.append(h.mean(0))

            def attend(xs: list[Vector], layer: int = layer) -> list[Vector]:
                return self.attention(xs, layer, state)

            self.sublayers(stream, pres, f"layers.{layer}", attend, c.num_experts_per_tok)
        hidden = [pre @ h for pre, h in zip(pres, stream, strict=True)]
        return np.stack([self.head(u, "norm") for u in hidden]), [np.concatenate(t) for t in taps]

    def draft(self, taps: list[Vector], anchor: int) -> tuple[list[int], Vector, list[float]]:
        """Greedy drafts after the anchor that follows the tapped tokens; logits; confidences."""
        c = self.c
        size, last = c.dspark_block_size, f"mtp.{c.num_nextn_predict_layers - 1}"
        context = [
            self.norm(self.w["mtp.0.main_proj.weight"] @ tap, "mtp.0.main_norm") for tap in taps
        ]
        seen = range(max(0, len(taps) - c.sliding_window), len(taps))
        stream, pres = self.start([anchor] + [c.dspark_noise_token_id] * (size - 1))
        for i in range(c.num_nextn_predict_layers):
            p, layer = f"mtp.{i}.attn", c.num_hidden_layers + i
            near = [self.key(context[s], p, s, layer) for s in seen]

            def attend(
                xs: list[Vector], p: str = p, layer: int = layer, near: list[Vector] = near
            ) -> list[Vector]:
                at = len(taps)
                own = [self.key(x, p, at + g, layer) for g, x in enumerate(xs)]
                return [
                    self.attend(self.query(x, p, at + g, layer)[1], near + own, p, at + g, layer)
                    for g, x in enumerate(xs)
                ]

            self.sublayers(stream, pres, f"mtp.{i}", attend, c.dspark_num_experts_per_tok)
        token, tokens, rows, confidences = anchor, [], [], []
        for pre, h in zip(pres, stream, strict=True):
            u = pre @ h
            e = self.w[f"{last}.markov_head.embed.weight"][token]
            rows.append(
                self.head(u, f"{last}.norm") + self.w[f"{last}.markov_head.head.weight"] @ e
            )
            token = int(np.argmax(rows[-1]))
            tokens.append(token)
            proj = self.w[f"{last}.confidence_head.proj.weight"][0]
            confidences.append(float(proj @ np.concatenate((u, e))))
        return tokens, np.stack(rows), confidences


def naive_of(model: DraftModel) -> tuple[Naive, dict[int, Any]]:
    """The second model over the same tensors, and the Engram rows of each layer and token."""
    config = model.config
    weights = {slot.name: slot.target.double().numpy() for slot in tensor_slots(model)}
    classes, rows_at, prime = config.engram_compressed_vocab_size, {}, config.engram_vocab_size
    columns: dict[int, list[int]] = {}
    for layer in config.engram_layer_ids:
        columns[layer] = []
        while len(columns[layer]) < config.engram_columns:
            if all(prime % d for d in range(2, prime)):
                columns[layer].append(prime)
            prime += 1
    for layer in config.engram_layer_ids:
        bound = (2**63 - 1) // classes // 2
        draws = np.random.default_rng(10007 * layer).integers(
            0, bound, config.engram_max_ngram_size
        )
        odd = [2 * int(draw) + 1 for draw in draws]

        def rows(ids: list[int], t: int, layer: int = layer, odd: list[int] = odd) -> list[int]:
            back = [ids[t - r] if t >= r else config.engram_pad_token_id for r in range(len(odd))]
            mixed, out, offset = (back[0] % classes) * odd[0], [], 0
            for n in range(1, len(odd)):
                mixed ^= (back[n] % classes) * odd[n]
                for head in range(config.engram_n_heads):
                    size = columns[layer][(n - 1) * config.engram_n_heads + head]
                    out.append(mixed % size + offset)
                    offset += size
            return out

        rows_at[layer] = rows
    return Naive(config, weights), rows_at


@pytest.mark.parametrize("seed", [0, 1])
def test_target_and_drafter(make_model: Callable[..., DraftModel], seed: int) -> None:
    model = make_model(seed=seed, swiglu_limit=1.0)
    naive, rows_at = naive_of(model)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 96, (33,), generator=draw)
    logits, taps = naive.target(ids.tolist(), rows_at)
    np.testing.assert_allclose(model.logits(ids).numpy(), logits, rtol=0, atol=1e-9)
    assert logits.std() > 0.5
    with torch.inference_mode():
        found = model(ids[None])
        np.testing.assert_allclose(found.taps[0].numpy(), np.stack(taps), rtol=0, atol=1e-9)
        anchor = 17
        tokens, rows, confidences = naive.draft(taps, anchor)
        position = torch.arange(33)
        keys = model.context_keys(model.draft_context(found.taps), position)
        live = (position > 32 - model.config.sliding_window)[None]
        hidden = model.draft_hidden(torch.tensor([anchor]), torch.tensor([33]), keys, live)[0]
        base = model.draft_base_logits(hidden)
        previous = anchor
        for slot, token in enumerate(tokens):
            embedded, bias = model.markov(torch.tensor(previous))
            np.testing.assert_allclose((base[slot] + bias).numpy(), rows[slot], rtol=0, atol=1e-9)
            confidence = model.confidence_logit(hidden[slot], embedded)
            assert confidence.item() == pytest.approx(confidences[slot], abs=1e-9)
            previous = token
