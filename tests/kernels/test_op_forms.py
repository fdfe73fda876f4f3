"""The opaque ops: opcheck at grid corners, and the index selection against brute force.

opcheck compares schema, fake and implementation; brute force follows the definition entry by entry
over a paged pool whose blocks are shuffled.
"""

import random

import pytest
import torch

from decodegrid.kernels.hyper_connection import sinkhorn_op
from decodegrid.kernels.indexer import candidate_mask
from decodegrid.kernels.moe import grouped_product, routed_experts, routed_experts_op
from decodegrid.kernels.select_entries import CandidateMode, entry_rows, select_entries_op

HEADS, DIM, SLOTS, BLOCKS, BLOCK_SIZE, TOP_K = 4, 8, 4, 5, 8, 6
IMPLEMENTED = ("test_schema", "test_faketensor", "test_autograd_registration")


def strided(tensor):
    """The same values with a gap between rows and a last axis that is not dense."""
    if tensor.dim() == 1:
        wide = tensor.new_zeros(tensor.shape[0], 2)
        wide[:, 0] = tensor
        return wide[:, 0]
    wide = tensor.new_zeros(*tensor.shape, 3)
    wide[..., 1] = tensor
    return wide[..., 1]


def product_inputs(num_rows, dtype, experts=3):
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, 8, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.randn(experts, 8, 16, generator=generator, dtype=torch.float64).to(dtype)
    cuts = torch.randint(0, num_rows + 1, (experts,), generator=generator).sort().values
    return rows, weights, cuts.to(torch.int32)


def expert_inputs(num_tokens, dtype, experts=3, top_k=2):
    """x, ids (one of them "no expert"), routing weights, w13, w2 and the limit."""
    generator = torch.Generator().manual_seed(num_tokens)

    def floats(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    ids = torch.stack([torch.randperm(experts + 1, generator=generator) for _ in range(num_tokens)])
    return (
        floats(num_tokens, 8),
        ids[:, :top_k].contiguous(),
        floats(num_tokens, top_k).abs(),
        floats(experts, 8, 32),
        floats(experts, 16, 8),
        1.5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [1, 2, 48])
@pytest.mark.parametrize("dense", [True, False])
def test_opcheck_routed_experts(num_tokens, dtype, dense):
    x, ids, weights, w13, w2, limit = expert_inputs(num_tokens, dtype)
    if not dense:
        x, ids, weights = strided(x), strided(ids), strided(weights)
        w13, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w13, w2))
    args = (x, ids, weights, w13, w2, limit)
    torch.library.opcheck(routed_experts_op, args, test_utils=IMPLEMENTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck_routed_experts_without_tokens(dtype):
    _, _, _, w13, w2, limit = expert_inputs(1, dtype)
    x, ids, weights = torch.zeros(0, 8, dtype=dtype), torch.zeros(0, 2).long(), torch.zeros(0, 2)
    args = (x, ids, weights.to(dtype), w13, w2, limit)
    torch.library.opcheck(routed_experts_op, args, test_utils=IMPLEMENTED)


@pytest.mark.parametrize("form", [routed_experts, routed_experts_op])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_routed_experts_one_by_one(dtype, form):
    """Every token through each of its experts alone; "no expert" adds nothing."""
    x, ids, weights, w13, w2, limit = expert_inputs(9, dtype)
    got = form(x, ids, weights, w13, w2, limit)
    none = 0
    for token in range(9):
        want = torch.zeros(8, dtype=torch.float64)
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            if expert == 3:
                none += 1
                continue
            gate, up = (x[token].double() @ w13[expert].double()).chunk(2)
            hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            want += (weight * hidden) @ w2[expert].double()
        torch.testing.assert_close(got[token].double(), want, rtol=0, atol=1e-4)
    assert 0 < none < 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 48])
@pytest.mark.parametrize("dense", [True, False])
def test_opcheck_sinkhorn(num_rows, dtype, dense):
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    if not dense:
        logits = strided(logits)
    torch.library.opcheck(sinkhorn_op, (logits, 20, 1e-6), test_utils=IMPLEMENTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 48])
def test_grouped_product_row_by_row(num_rows, dtype):
    rows, weights, ends = product_inputs(num_rows, dtype)
    got = grouped_product(rows, weights, ends)
    assert got.shape == (num_rows, 16)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        for row in range(start, end):
            want = rows[row].double() @ weights[expert].double()
            torch.testing.assert_close(got[row].double(), want, rtol=0, atol=1e-5)
        start = end


def selection_inputs(lengths_of, ratio, seed, mode=CandidateMode.IGNORE):
    """Arguments of select_entries; lengths_of: token counts and lengths by slot, in order."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(len(lengths) for _, lengths in lengths_of)
    entries = BLOCKS * BLOCK_SIZE // ratio

    def floats(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    order = 1 + torch.randperm(SLOTS * BLOCKS, generator=generator)
    table = order.reshape(SLOTS, BLOCKS)
    table[0] = 0
    slot = torch.tensor([s for s, lengths in lengths_of for _ in lengths], dtype=torch.int64)
    length = torch.tensor([n for _, lengths in lengths_of for n in lengths], dtype=torch.int64)
    pool_rows = (SLOTS * BLOCKS + 1) * BLOCK_SIZE // ratio
    return [
        floats(num_tokens, HEADS, DIM),
        floats(num_tokens, HEADS),
        floats(pool_rows, DIM),
        table,
        slot,
        length,
        ratio,
        BLOCK_SIZE,
        int(mode),
        2,
        2,
        torch.zeros(num_tokens, entries, dtype=torch.bool),
        torch.full((num_tokens, TOP_K), 7, dtype=torch.int64),
    ]


CORNERS = {
    "one pad": [(0, [0])],
    "one row": [(2, [1])],
    "full": [(1, [18, 19, 20])],
    "mixed": [(3, [0, 1, 2]), (1, [9]), (2, [5, 6, 7, 8]), (0, [0, 0])],
}


@pytest.mark.parametrize("mode", list(CandidateMode))
@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("dense", [True, False])
def test_opcheck_select_entries(corner, mode, dense):
    args = selection_inputs(CORNERS[corner], 2, 0, mode)
    if not dense:
        args = [strided(a) if isinstance(a, torch.Tensor) else a for a in args]
    torch.library.opcheck(select_entries_op, args, test_utils=IMPLEMENTED)


def test_a_wrong_fake_is_caught():
    """opcheck notices a fake that gives one row too many."""
    with torch.library._scoped_library("decodegrid_test", "FRAGMENT") as library:
        library.define("planted(Tensor rows, Tensor weights, Tensor ends) -> Tensor")
        library.impl("planted", grouped_product, "CPU")
        torch.library.register_fake(
            "decodegrid_test::planted",
            lambda rows, weights, ends: rows.new_empty(rows.shape[0] + 1, weights.shape[2]),
            lib=library,
        )
        with pytest.raises(Exception, match=r"(?i)shape|size"):
            torch.library.opcheck(
                torch.ops.decodegrid_test.planted.default,
                product_inputs(3, torch.float32),
                test_utils=IMPLEMENTED,
            )


def brute_scores(args, token):
    """Index scores of the entries that a token sees, entry by entry through the block table."""
    query, weights, keys, table, slot, length, ratio, block_size = args[:8]
    per_block = block_size // ratio
    scores, rows = [], []
    for entry in range(int(length[token])):
        row = int(table[slot[token], entry // per_block]) * per_block + entry % per_block
        total = 0.0
        for head in range(HEADS):
            total += float(weights[token, head]) * max(float(query[token, head] @ keys[row]), 0.0)
        scores.append(total)
        rows.append(row)
    return scores, rows


def brute_top(scores, allowed, k):
    """The k best allowed entries, ascending."""
    order = sorted(allowed, key=lambda j: (-scores[j], j))
    return sorted(order[:k])


def random_batch(draw, ratio):
    """Adjacent tokens by slot with growing lengths, pads last."""
    batch = []
    for slot in draw.sample([1, 2, 3], draw.randint(1, 3)):
        start = draw.randint(0, BLOCKS * BLOCK_SIZE // ratio - 6)
        batch.append((slot, [start + i for i in range(draw.randint(1, 6))]))
    batch.append((0, [0] * draw.randint(0, 3)))
    return batch


@pytest.mark.parametrize("mode", list(CandidateMode))
@pytest.mark.parametrize("ratio", [1, 2])
def test_selection_against_brute_force(ratio, mode):
    """Rows of the pool in entry order, candidates written where asked, read where asked."""
    draw = random.Random(ratio)
    narrowed = 0
    for seed in range(12):
        args = selection_inputs(random_batch(draw, ratio), ratio, seed, mode)
        candidates, out = args[11], args[12]
        generator = torch.Generator().manual_seed(seed)
        if mode == CandidateMode.READ:
            candidates.copy_(torch.rand(candidates.shape, generator=generator) < 0.4)
        before = candidates.clone()
        select_entries_op(*args)
        for token in range(out.shape[0]):
            scores, rows = brute_scores(args, token)
            allowed = list(range(len(scores)))
            if mode == CandidateMode.READ:
                allowed = [j for j in allowed if before[token, j]]
                narrowed += len(allowed) < len(scores)
            want = [rows[j] for j in brute_top(scores, allowed, TOP_K)]
            assert out[token].tolist() == want + [-1] * (TOP_K - len(want))
            if mode == CandidateMode.WRITE and scores:
                kept = candidate_mask(torch.tensor(scores), torch.tensor(len(scores)), 2, 2)
                assert torch.equal(candidates[token, : len(scores)], kept)
        if mode != CandidateMode.WRITE:
            assert torch.equal(candidates, before)
    assert mode != CandidateMode.READ or narrowed > 20


def test_entry_rows_follow_the_block_table():
    table = torch.tensor([7, 2, 9, 0])
    assert entry_rows(table, 10, 2, 8).tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 36, 37]
    assert entry_rows(table, 9, 1, 8).tolist() == [*range(56, 64), 16]
