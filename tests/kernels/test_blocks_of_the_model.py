"""mHC, MoE, attention, norm and rotary kernels against naive loops written from the formulas."""

import math

import pytest
import torch
from torch import Tensor

from decodegrid.kernels.hyper_connection import (
    hc_mix,
    hc_post,
    hc_pre,
    initial_pre,
    sinkhorn,
    sinkhorn_op,
)
from decodegrid.kernels.moe import grouped_product, route, routed_experts
from decodegrid.kernels.norm_rope import apply_rope, rms_norm, rope_angles, rope_frequencies
from decodegrid.kernels.sparse_attention import dense_attention, gathered_attention

EPS = 1e-6


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


def test_comb_columns_sum_to_one() -> None:
    stream = normal(50, 4, 8)
    _, _, comb = hc_mix(
        stream, normal(24, 32, seed=1) / 6, torch.tensor([0.5, 0.7, 1.0]), normal(24, seed=2),
        norm_eps=1e-20, hc_eps=EPS, iters=20,
    )  # fmt: skip
    assert ((comb.sum(-2) - 1).abs() <= 4.1 * EPS).all()
    assert ((comb.sum(-1) - 1).abs() <= 1e-2).all()
    assert (comb > 0).all()
    assert (comb - comb.transpose(-1, -2)).abs().max() > 0.1, "columns and rows differ"


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_sinkhorn_steps(iters: int) -> None:
    logits = normal(5, 4, 4) * 2
    found = sinkhorn(logits, iters, 1e-3)
    for matrix, result in zip(logits.tolist(), found.tolist(), strict=True):
        cells = [[math.exp(v) for v in row] for row in matrix]
        cells = [[v / sum(row) + 1e-3 for v in row] for row in cells]
        for step in range(iters):
            if step:
                cells = [[v / (sum(row) + 1e-3) for v in row] for row in cells]
            columns = [sum(row[k] for row in cells) + 1e-3 for k in range(4)]
            cells = [[row[k] / columns[k] for k in range(4)] for row in cells]
        assert result == [pytest.approx(row, abs=1e-13) for row in cells]
    unrolled = sinkhorn_op(logits, iters, 1e-3)
    torch.testing.assert_close(unrolled, found, rtol=1e-13, atol=1e-13)


def test_mixer_coefficients_and_stream_updates() -> None:
    n, dim = 4, 3
    stream, fn, base = normal(2, n, dim), normal(24, n * dim, seed=3), normal(24, seed=4)
    scale = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    pre, post, comb = hc_mix(stream, fn, scale, base, norm_eps=1e-2, hc_eps=EPS, iters=20)
    update = normal(2, dim, seed=5)
    after, before = hc_post(update, stream, post, comb), hc_pre(stream, pre)
    for t in range(2):
        flat = [float(v) for copy in stream[t] for v in copy]  # copy 0's channels first
        rms = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + 1e-2)
        m = [sum(float(fn[i, c]) * flat[c] for c in range(n * dim)) * rms for i in range(24)]
        for c in range(n):
            wanted = sigmoid(m[c] * 0.3 + float(base[c])) + EPS
            assert pre[t, c].item() == pytest.approx(wanted, abs=1e-12)
            wanted = 2 * sigmoid(m[n + c] * 0.6 + float(base[n + c]))
            assert post[t, c].item() == pytest.approx(wanted, abs=1e-12)
        logits = [
            [m[8 + 4 * j + k] * 0.9 + float(base[8 + 4 * j + k]) for k in range(4)]
            for j in range(4)
        ]
        wanted_comb = sinkhorn(torch.tensor(logits, dtype=torch.float64), 20, EPS)
        torch.testing.assert_close(comb[t], wanted_comb, rtol=0, atol=1e-12)
        for d in range(dim):
            total = sum(float(pre[t, c] * stream[t, c, d]) for c in range(n))
            assert before[t, d].item() == pytest.approx(total, abs=1e-12)
            for k in range(n):
                total = float(post[t, k] * update[t, d])
                total += sum(float(comb[t, j, k] * stream[t, j, d]) for j in range(n))
                assert after[t, k, d].item() == pytest.approx(total, abs=1e-12)
    assert initial_pre(stream).tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2


def test_routing() -> None:
    x, weight, bias = normal(30, 6), normal(9, 6, seed=1), 0.3 * normal(9, seed=2)
    weight[5], bias[5] = weight[2], bias[2]  # a tie in every row
    ids, weights = route(x, weight, bias, 3, scaling=1.5, normalise=True)
    for t in range(30):
        score = [math.sqrt(math.log1p(math.exp(float(x[t] @ weight[e])))) for e in range(9)]
        score[5] = score[2]
        order = sorted(range(9), key=lambda e: (-(score[e] + float(bias[e])), e))[:3]
        assert ids[t].tolist() == order
        total = sum(score[e] for e in order) + 1e-20
        wanted = [score[e] / total * 1.5 for e in order]
        assert weights[t].tolist() == pytest.approx(wanted, abs=1e-12)
    _, plain = route(x, weight, bias, 3, scaling=2.0, normalise=False)
    assert plain.sum(-1).max() > 2.0
    _, single = route(x, weight, bias, 1, scaling=1.0, normalise=True)
    assert (single != 1.0).any(), "one expert keeps its score"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_routed_experts(dtype: torch.dtype) -> None:
    tokens, dim, inner, num_experts, limit = 17, 8, 8, 5, 1.0
    x = normal(tokens, dim).to(dtype)
    w1, w3 = normal(num_experts, inner, dim, seed=1), normal(num_experts, inner, dim, seed=2)
    w2, weights = normal(num_experts, dim, inner, seed=3), normal(tokens, 3, seed=4).abs()
    draw = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(num_experts + 1, generator=draw)[:3] for _ in range(tokens)])
    ids[3] = num_experts  # a pad token: no expert at all
    w13 = torch.cat((w1, w3), 1).transpose(1, 2).to(dtype)
    found = routed_experts(x, ids, weights.to(dtype), w13, w2.transpose(1, 2).to(dtype), limit)
    assert (ids == num_experts).sum() > 3
    for t in range(tokens):
        total = torch.zeros(dim, dtype=torch.float64)
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if expert == num_experts:
                continue
            gate = (w1[expert] @ x[t].double()).clamp(max=limit)
            up = (w3[expert] @ x[t].double()).clamp(-limit, limit)
            total += w2[expert] @ (gate / (1 + (-gate).exp()) * up * weight)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(found[t].double(), total, rtol=tolerance, atol=tolerance)
    assert not found[3].any()


def test_rows_without_an_expert_cannot_leak() -> None:
    """NaN in a token that no expert sees does not reach another token or its own sum."""
    x = normal(4, 8).float()
    x[2] = math.nan
    ids = torch.tensor([[0], [1], [3], [2]])
    w13, w2 = normal(3, 8, 16, seed=1).float(), normal(3, 8, 8, seed=2).float()
    found = routed_experts(x, ids, torch.ones(4, 1), w13, w2, 10.0)
    assert found.isfinite().all() and not found[2].any()


def test_grouped_product_of_empty_groups() -> None:
    rows, weights = normal(3, 8), normal(4, 8, 8, seed=1)
    ends = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    wanted = torch.stack([rows[0] @ weights[1], rows[1] @ weights[1], rows[2] @ weights[3]])
    torch.testing.assert_close(grouped_product(rows, weights, ends), wanted)
    found = grouped_product(rows.float(), weights.float(), ends)
    torch.testing.assert_close(found, wanted.float())


@pytest.mark.parametrize("window", [1, 3, 50])
def test_dense_and_gathered_attention(window: int) -> None:
    batch, tokens, heads, dim, entries = 2, 9, 3, 4, 5
    query, near = normal(batch, tokens, heads, dim), normal(batch, tokens, dim, seed=1)
    far, sink = normal(batch, entries, dim, seed=2), normal(heads, seed=3)
    selected = normal(batch, tokens, entries, seed=4) > 0
    selected[0, 0] = False
    out, mass = dense_attention(query, near, sink, window, far, selected)
    assert mass is not None
    for b in range(batch):
        for t in range(tokens):
            seen = list(range(max(0, t - window + 1), t + 1))
            keys = [near[b, s] for s in seen] + [
                far[b, j] for j in range(entries) if selected[b, t, j]
            ]
            share = 0.0
            for h in range(heads):
                e = [math.exp(float(query[b, t, h] @ key) / 2) for key in keys]
                total = sum(e) + math.exp(float(sink[h]))
                wanted = sum(
                    ((w / total) * key for w, key in zip(e, keys, strict=True)), 0 * near[0, 0]
                )
                torch.testing.assert_close(out[b, t, h], wanted, rtol=0, atol=1e-12)
                share += sum(e[len(seen) :]) / total
            assert mass[b, t].sum().item() == pytest.approx(share, abs=1e-12)
    position = torch.arange(tokens)
    live = (position[:, None] >= position) & (position[:, None] - position < window)
    rows = torch.cat((near, far), 1).unsqueeze(1).expand(-1, tokens, -1, -1).flatten(0, 1)
    mask = torch.cat((live.expand(batch, -1, -1), selected), -1).flatten(0, 1)
    order = torch.randperm(tokens + entries, generator=torch.Generator().manual_seed(1))
    flat = gathered_attention(query.flatten(0, 1), rows[:, order], mask[:, order], sink)
    torch.testing.assert_close(flat.unflatten(0, (batch, tokens)), out, rtol=0, atol=1e-12)


def test_no_key_gives_zero() -> None:
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    out = gathered_attention(normal(2, 3, 4), normal(2, 4, 4), nothing, normal(3))
    assert not out.any()


def test_norm_and_rotary() -> None:
    x, weight = normal(5, 8), normal(8, seed=1)
    found = rms_norm(x, weight, 1e-3)
    for t in range(5):
        scale = 1 / math.sqrt(sum(float(v) ** 2 for v in x[t]) / 8 + 1e-3)
        torch.testing.assert_close(found[t], x[t] * scale * weight, rtol=1e-13, atol=0)
    assert not rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-20).any()
    frequencies = rope_frequencies(4, 100.0)
    assert frequencies.tolist() == pytest.approx([1.0, 0.1])
    cos, sin = rope_angles(torch.arange(5) * 7, frequencies)
    turned = apply_rope(x, cos, sin)
    assert torch.equal(turned[:, :4], x[:, :4])
    for t in range(5):
        for i, rate in enumerate((1.0, 0.1)):
            a, b = float(x[t, 4 + 2 * i]), float(x[t, 5 + 2 * i])
            turn = complex(a, b) * complex(math.cos(7 * t * rate), math.sin(7 * t * rate))
            assert complex(*turned[t, 4 + 2 * i : 6 + 2 * i].tolist()) == pytest.approx(turn)
    torch.testing.assert_close(apply_rope(turned, cos, sin, inverse=True), x)
