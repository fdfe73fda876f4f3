"""Cases of values for the indexer, the mixer, the experts' product and attention.

Needs neither pytest, TileLang nor pydantic.
"""

import torch
from torch import Tensor

from decodegrid.kernels import indexer, quant, records
from decodegrid.kernels.hyper_connection import hc_mix, sinkhorn
from decodegrid.kernels.moe import grouped_product
from decodegrid.kernels.records import RecordFormat
from decodegrid.kernels.select_entries import entry_rows
from decodegrid.kernels.sparse_attention import gathered_attention
from tests.gpu.case_form import Case, Sizes, draw, ints, poison_bytes
from tests.gpu.hopper_record import page_bytes, put_records, record_values


def index_logits(sizes: Sizes) -> Case:
    """Lengths of 0, 1, a tile, one more, and all."""
    heads, dim, form = sizes["heads"], sizes["dim"], sizes["form"]
    block_size, ratio, blocks = sizes["block_size"], sizes["ratio"], 4
    capacity = blocks * block_size // ratio
    lengths = torch.tensor([0, 1, 64, min(65, capacity), capacity])
    table = (torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(21)) + 1).view(
        2, -1
    )
    slot = torch.tensor([0, 1, 1, 0, 1])
    rows = (2 * blocks + 1) * block_size // ratio
    pool = records.encode_records(draw(22, rows, dim), form)
    query = records.round_records(draw(23, 5, heads, dim).bfloat16(), form)
    weights = draw(24, 5, heads).bfloat16()
    scores = torch.full((5, capacity), torch.nan)
    want = scores.clone()
    for token, length in enumerate(lengths.tolist()):
        place = entry_rows(table[slot[token]], capacity, ratio, block_size)[:length]
        keys = records.decode_records(pool[place], form, dim)
        part = slice(token, token + 1)
        found = indexer.index_scores(query[None, part], weights[None, part], keys[None])
        want[token, :length] = found[0, 0]
        want[token, length : min(-(-length // 64) * 64, capacity)] = -torch.inf
    tensors = [query, weights, pool, table, slot, lengths, scores]
    return Case(tensors, {6: want}, 1e-3, 1e-2)


def _scores(capacity: int) -> tuple[Tensor, Tensor]:
    """Scores with many ties, NaN behind each length; and the lengths."""
    lengths = torch.tensor([0, 1, 8, 9, capacity // 2, capacity])
    scores = draw(25, len(lengths), capacity).mul(4).round().relu()
    return scores, lengths


def _visible(scores: Tensor, lengths: Tensor) -> Tensor:
    past = torch.arange(scores.shape[1]) >= lengths.unsqueeze(1)
    return scores.masked_fill(past, -torch.inf)


def _poisoned(scores: Tensor, lengths: Tensor) -> Tensor:
    past = torch.arange(scores.shape[1]) >= lengths.unsqueeze(1)
    return scores.masked_fill(past, torch.nan)


def select_top_k(sizes: Sizes) -> Case:
    """Ties everywhere: the lower index wins."""
    k = sizes["k"]
    scores, lengths = _scores(4 * k)
    want = indexer.mask_to_indices(indexer.top_k_mask(_visible(scores, lengths), k), k)
    ids = torch.full((len(lengths), k), -77, dtype=torch.int32)
    return Case([_poisoned(scores, lengths), lengths, ids], {2: want.to(torch.int32)})


def mask_scores(sizes: Sizes) -> Case:
    """Half of the candidates."""
    scores, lengths = _scores(512)
    kept = ints(26, 0, 2, *scores.shape) > 0
    before = _poisoned(scores, lengths)
    inside = torch.arange(512) < lengths.unsqueeze(1)
    want = before.masked_fill(inside & ~kept, -torch.inf)
    return Case([kept, lengths, before], {2: want}, 1e-9)


def block_scores(sizes: Sizes) -> Case:
    """The newest block is infinite, blocks without a visible entry stay as they were."""
    block = sizes["block"]
    scores, lengths = _scores(64 * block)
    best = torch.full((len(lengths), 64), torch.nan)
    want = best.clone()
    for row, length in enumerate(lengths.tolist()):
        count = -(-length // block)
        if count:
            padded = _visible(scores, lengths)[row, : count * block].unflatten(0, (count, block))
            want[row, :count] = padded.amax(1)
            want[row, count - 1] = torch.inf
    return Case([_poisoned(scores, lengths), lengths, best], {2: want}, 1e-9)


LAST_INDEX = 2**20 - 1
"""The bound where every tie is kept: no index is above it."""


def _best(k: int) -> tuple[Tensor, Tensor, list[float], list[int]]:
    """Scores of blocks with ties, poison behind each row's own; how many are each row's; and by
    sorting: the lowest kept score and the index of the first that ties with it and is not kept."""
    counts = torch.tensor([0, 1, k - 1, k, k + 1, 3 * k])
    best = draw(71, len(counts), 3 * k).mul(2).round() + 0.0
    levels, bounds = [], []
    for row, count in enumerate(counts.tolist()):
        best[row, count:] = torch.nan
        order = sorted(range(count), key=lambda i, row=row: (-float(best[row, i]), i))
        kept = order[:k]
        # With no more than fit, all are kept: every score is above minus infinity.
        lowest = float(best[row, kept[-1]]) if count >= k else -torch.inf
        late = [i for i in order[k:] if float(best[row, i]) == lowest]
        levels.append(lowest)
        bounds.append(0 if count < k else min(late, default=LAST_INDEX))
    return best, counts, levels, bounds


def select_threshold(sizes: Sizes) -> Case:
    """Fewer blocks than are kept, as many, one more and three times as many."""
    best, counts, levels, bounds = _best(sizes["k"])
    want = [torch.tensor(levels), torch.tensor(bounds, dtype=torch.int32)]
    outs = [torch.full_like(want[0], torch.nan), torch.full_like(want[1], -5)]
    return Case([best, counts * sizes["unit"], *outs], {2: want[0], 3: want[1]})


MARKED = 5
"""Blocks that are kept, of up to three times as many."""


def mark_blocks(sizes: Sizes) -> Case:
    """Entries of kept blocks, the last of them in part; what is past a length stays."""
    block, k = sizes["block"], MARKED
    best, counts, levels, bounds = _best(k)
    lengths = (counts * block - 3).clamp(min=0)
    marks = torch.ones(len(counts), 3 * k * block, dtype=torch.bool)
    want = marks.clone()
    for row, length in enumerate(lengths.tolist()):
        order = sorted(range(int(counts[row])), key=lambda i, row=row: (-float(best[row, i]), i))
        kept = set(order[:k])
        for entry in range(length):
            want[row, entry] = entry // block in kept
    tensors = [
        best, torch.tensor(levels), torch.tensor(bounds, dtype=torch.int32), lengths, marks
    ]  # fmt: skip
    return Case(tensors, {4: want})


def sinkhorn_rounds(sizes: Sizes) -> Case:
    """70 matrices."""
    n = sizes["copies"]
    logits = draw(27, 70, n * n) * 3
    want = sinkhorn(logits.double().view(-1, n, n), sizes["iters"], sizes["eps"]).flatten(1)
    return Case([logits, torch.full_like(logits, torch.nan)], {1: want.float()}, 1e-5, 1e-6)


def mixer(sizes: Sizes) -> Case:
    """Six rows, one of zeros."""
    dim, n = sizes["dim"], sizes["copies"]
    stream = draw(28, 6, n * dim).bfloat16()
    stream[1] = 0.0
    width = n * (n + 2)
    fn, scale, base = draw(29, width, n * dim) / dim**0.5, draw(30, 3), draw(31, width)
    want = hc_mix(
        stream.double().unflatten(1, (n, dim)), fn.double(), scale.double(), base.double(),
        norm_eps=sizes["norm_eps"], hc_eps=sizes["hc_eps"], iters=sizes["iters"],
    )  # fmt: skip
    outs = [torch.full((6, size), torch.nan) for size in (n, n, n * n)]
    expected = {4 + i: part.flatten(1).float() for i, part in enumerate(want)}
    return Case([stream, fn, scale, base, *outs], expected, 1e-3, 1e-4)


def grouped_fp4(sizes: Sizes) -> Case:
    """Experts with no row, one, a tile and one more; rows of no expert stay.

    Only visited experts have drawn weights: those of the others would be gigabytes.
    """
    experts, outputs, inputs = sizes["experts"], sizes["outputs_of"], sizes["inputs"]
    counts = [0] * experts
    counts[0], counts[1], counts[experts // 2], counts[experts - 1] = 1, 17, 3, 16
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    used = int(ends[-1])
    x = draw(32, used + 3, inputs).bfloat16()
    x[used:] = torch.nan
    codes = poison_bytes(experts, outputs, inputs // 2)
    scales = torch.full((experts, outputs, inputs // 32), 0xFF, dtype=torch.uint8)
    y = torch.full((used + 3, outputs), 7.0, dtype=torch.bfloat16)
    want = y.double()
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            codes[expert] = ints(33 + expert, 0, 256, *codes.shape[1:]).to(torch.uint8)
            scales[expert] = ints(34 + expert, 118, 124, *scales.shape[1:]).to(torch.uint8)
            blocks = quant.Blocks(codes[expert], scales[expert])
            wide = quant.dequantise_q4x(blocks).t().double().unsqueeze(0)
            rows = x[start:end].double()
            want[start:end] = grouped_product(rows, wide, torch.tensor([end - start]))
        start = end
    unread = (codes[0].numel() + scales[0].numel()) * counts.count(0)
    tensors = [x, ends, codes, scales, y]
    return Case(tensors, {4: want.bfloat16()}, 2**-6, 0.05, unread)


def _pool(page: int, form: RecordFormat, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """640 records with poison behind them, and the float32 values that they read as."""
    x = draw(seed, 640, dim)
    if page == 0:
        pool = poison_bytes(700, records.record_bytes(form, dim))
        pool[:640] = records.encode_records(x, form)
        return pool, records.decode_records(pool[:640], form, dim)
    pool = poison_bytes(-(-700 // page), page_bytes(page))
    put_records(pool, page, torch.arange(640), x.bfloat16())
    return pool, record_values(x.bfloat16()).float()


def _attention(sizes: Sizes, widths: tuple[int, ...]) -> Case:
    heads, dim, tokens = sizes["heads"], sizes["dim"], 5
    query, sink = draw(35, tokens, heads, dim).bfloat16(), draw(36, heads)
    parts, indices, keys = [], [], []
    for form, width in zip((RecordFormat.Q8, RecordFormat.Q4N), widths, strict=False):
        pool, values = _pool(sizes["page"], form, dim, 37 + form)
        index = ints(39 + form, -1, 640, tokens, width)
        index[1] = -1
        parts += [pool, index]
        indices.append(index)
        keys.append(values[index.clamp(min=0)])
    live = torch.cat(indices, 1) >= 0
    want = gathered_attention(query.float(), torch.cat(keys, 1), live, sink).bfloat16()
    out = torch.full_like(query, torch.nan)
    return Case([query, sink, *parts, out], {2 + len(parts): want}, 0.03, 0.01)


def sparse_mla(sizes: Sizes) -> Case:
    """Five tokens of 128 window keys and 512 compressed ones, one without a key."""
    return _attention(sizes, (128, 512))


def sparse_mla_window(sizes: Sizes) -> Case:
    """Five tokens of 133 window keys."""
    return _attention(sizes, (133,))
