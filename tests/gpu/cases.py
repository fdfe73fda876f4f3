"""One case of values per tile kernel: tensors as a launch takes them, and what plain torch says.

Owns the cases for kernels at the sizes that are built; edge cases of shapes are for the CPU tests.
Outputs are poisoned before, and what a kernel must not touch is expected to be poison afterwards.
Pure torch on the CPU; where the tensors go is the caller's choice. Needs neither pytest, TileLang
nor pydantic.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from decodegrid.kernels import indexer, quant, records, sampling, verify
from decodegrid.kernels.filters import filter_logits
from decodegrid.kernels.hyper_connection import hc_mix, sinkhorn
from decodegrid.kernels.moe import grouped_product
from decodegrid.kernels.providers.layouts import scale_words
from decodegrid.kernels.records import RecordFormat
from decodegrid.kernels.select_entries import entry_rows
from decodegrid.kernels.sparse_attention import gathered_attention

Sizes = Mapping[str, Any]
POISON = 0xA5


@dataclass(frozen=True, slots=True)
class Case:
    """Tensors of one launch; `expected` by position among them."""

    tensors: list[Tensor]
    expected: dict[int, Tensor]
    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case: whether all outputs are as expected, and the largest difference."""

    is_right: bool
    worst: float


def compare(case: Case, found: list[Tensor]) -> Outcome:
    """found: the launch's tensors afterwards, on the CPU."""
    is_right, worst = True, 0.0
    for place, want in case.expected.items():
        got = found[place]
        if case.rtol == case.atol == 0.0:
            is_right &= bool(torch.equal(_bits(got), _bits(want)))
            continue
        is_right &= torch.allclose(
            got.double(), want.double(), rtol=case.rtol, atol=case.atol, equal_nan=True
        )
        gap = (got.double() - want.double()).abs()
        worst = max(worst, _most(gap))
    return Outcome(is_right, worst)


def _most(gap: Tensor) -> float:
    finite = gap[gap.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _bits(tensor: Tensor) -> Tensor:
    """A tensor as bytes, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _ints(seed: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def _spread(seed: int, rows: int, dim: int) -> Tensor:
    """bfloat16 rows of all magnitudes, with a row of zeros."""
    scale = torch.exp2(_ints(seed + 1, -12, 8, rows, dim // 16).float())
    x = _draw(seed, rows, dim) * scale.repeat_interleave(16, 1)
    x[rows // 2] = 0.0
    return x.to(torch.bfloat16)


def _bytes(*shape: int) -> Tensor:
    return torch.full(shape, POISON, dtype=torch.uint8)


def cast_fp8(sizes: Sizes) -> Case:
    """37 rows."""
    x = _spread(1, 37, sizes["dim"])
    want = quant.quantise_q8(x)
    outs = [_bytes(*want.codes.shape), _bytes(*want.scales.shape)]
    return Case([x, *outs], {1: want.codes, 2: want.scales})


def cast_fp8_columns(sizes: Sizes) -> Case:
    """37 rows, so that columns have three of padding."""
    x, dim = _spread(2, 37, sizes["dim"]), sizes["dim"]
    if sizes["block"] == 32:
        want = quant.quantise_q8(x)
        words, codes = scale_words(want.scales), want.codes
        scales = torch.full((dim // 128, 40), -7, dtype=torch.int32)
    else:
        blocks = x.float().unflatten(1, (-1, 128))
        largest = blocks.abs().amax(2).repeat_interleave(32, 1)
        words = quant.decode_e8m0(quant.quantise_q8(largest).scales)
        codes = quant.encode_e4m3(blocks / words.unsqueeze(2)).flatten(1)
        scales = torch.full((dim // 128, 40), -7.0)
    expected = scales.clone()
    expected[:, :37] = words.t()
    return Case([x, _bytes(37, dim), scales], {1: codes, 2: expected})


def cast_fp4(sizes: Sizes) -> Case:
    """23 rows."""
    x = _spread(3, 23, sizes["dim"])
    want = quant.quantise_q4x(x) if sizes["block"] == 32 else quant.quantise_q4n(x)
    outs = [_bytes(*want.codes.shape), _bytes(*want.scales.shape)]
    return Case([x, *outs], {1: want.codes, 2: want.scales})


def store_records(sizes: Sizes) -> Case:
    """23 rows into 40, every third stored nowhere."""
    form, dim = sizes["form"], sizes["dim"]
    x, where = _spread(4, 23, dim), torch.randperm(40, generator=torch.Generator().manual_seed(4))
    where = where[:23]
    where[2::3] = -1
    pool = _bytes(40, records.record_bytes(form, dim))
    expected = pool.clone()
    expected[where[where >= 0]] = records.encode_records(x, form)[where >= 0]
    return Case([x, where, pool], {2: expected})


def take_records(sizes: Sizes) -> Case:
    """Three tokens of 21 rows; the rows that no index names are poison."""
    form, dim = sizes["form"], sizes["dim"]
    pool = _bytes(40, records.record_bytes(form, dim))
    pool[:30] = records.encode_records(_spread(5, 30, dim), form)
    index = _ints(6, -1, 30, 3, 21)
    out = torch.full((3, 21, dim), torch.nan, dtype=torch.bfloat16)
    want = records.take_records(pool, index, form, dim, torch.bfloat16)
    return Case([pool, index, out], {2: want})


def convert_index(sizes: Sizes) -> Case:
    """Nine tokens of three requests."""
    block_size, ratio, top_k = sizes["block_size"], sizes["ratio"], sizes["top_k"]
    capacity, table = 5 * block_size // ratio, _ints(7, 1, 50, 3, 5)
    slot, lengths = _ints(8, 0, 3, 9), _ints(9, 0, capacity, 9)
    ids = _ints(10, -1, capacity, 9, top_k)
    rows = torch.stack([entry_rows(table[s], capacity, ratio, block_size) for s in slot])
    live = (ids >= 0) & (ids < lengths.unsqueeze(1))
    want = rows.gather(1, ids.clamp(min=0)).where(live, torch.full_like(ids, -1))
    out = torch.full_like(ids, -99)
    return Case([ids.to(torch.int32), table, slot, lengths, out], {4: want})


def expand_ranges(sizes: Sizes) -> Case:
    """Six rows."""
    ranges, lines = _ints(11, 0, 9, 6, 4), []
    for first, length, second, count in ranges.tolist():
        line = [*range(first, first + length), *range(second, second + count)]
        lines.append((line + [-1] * sizes["width"])[: sizes["width"]])
    out = torch.full((6, sizes["width"]), -99)
    return Case([ranges, out], {1: torch.tensor(lines)})


def window_index(sizes: Sizes) -> Case:
    """Seven tokens, pads among them."""
    reach, after, ring = sizes["reach"], sizes["after"], sizes["ring"]
    position, slot = _ints(12, 0, 4 * reach, 7), _ints(13, 0, 4, 7)
    valid = _ints(14, 0, 4, 7) > 0
    seen = position.unsqueeze(1) - reach + 1 + torch.arange(reach + after)
    rows = slot.unsqueeze(1) * ring + seen.clamp(min=0) % ring
    want = rows.where(valid.unsqueeze(1) & (seen >= 0), torch.full_like(rows, -1))
    return Case([position, slot, valid, torch.full_like(want, -99)], {3: want})


def split_lengths(sizes: Sizes) -> Case:
    """32 rows, half of the drafts, ties among them."""
    rows, drafts = min(32, sizes["max_rows"]), sizes["num_drafts"]
    coarse = torch.rand(rows, drafts, generator=torch.Generator().manual_seed(15))
    rates = verify.survival((coarse * 4).round() / 4)
    limits, live = _ints(16, 0, drafts + 1, rows), _ints(17, 0, 5, rows) > 0
    total = torch.tensor([rows + rows * drafts // 2])
    want = verify.split_verify_lengths(rates, limits, live, total)
    return Case([rates, limits, live, total, torch.full_like(want, -5)], {4: want})


def uniform_bits(sizes: Sizes) -> Case:
    """Four rows of large seeds."""
    seed, place = torch.tensor([0, 1, 2**32, 2**63 - 1]), torch.tensor([0, 7, 2**21 - 1, 2**28])
    wide = sampling.uniform_bits(seed, place, sizes["vocab"])
    want = torch.where(wide >= 2**31, wide - 2**32, wide).to(torch.int32)
    return Case([seed, place, torch.zeros_like(want)], {2: want})


def gumbel_noise(sizes: Sizes) -> Case:
    """Four rows, one of temperature 0."""
    seed, place = torch.tensor([0, 1, 2**32, 2**63 - 1]), torch.tensor([0, 7, 2**21 - 1, 2**28])
    heat = torch.tensor([1.0, 0.0, 0.5, 1.0])
    want = sampling.gumbel_noise(seed, place, heat, sizes["vocab"])
    return Case([seed, place, heat, torch.full_like(want, torch.nan)], {3: want}, 2e-6, 2e-6)


_FILTERS = ((1.0, -1, 0.0), (0.9, -1, 0.0), (0.5, 7, 0.0), (1.0, 40, 0.0), (0.95, 50, 0.01))


def filters(sizes: Sizes) -> Case:
    """Each filter at two temperatures; logits far enough apart for any order of sums."""
    logits = _draw(18, 2 * len(_FILTERS), sizes["vocab"]) * 3
    heat = torch.tensor([0.7, 0.0]).repeat(len(_FILTERS))
    top_p, top_k, min_p = (
        torch.tensor(part).repeat_interleave(2) for part in zip(*_FILTERS, strict=True)
    )
    want = filter_logits(logits, heat, top_p, top_k, min_p)
    tensors = [logits, heat, top_p, top_k, min_p, torch.full_like(logits, torch.nan)]
    return Case(tensors, {5: want})


def compress_pairs(sizes: Sizes) -> Case:
    """Pairs inside the step and across steps; rows of other slots stay."""
    dim = sizes["dim"]
    ring, joined = _draw(19, 21, 2 * dim), _draw(20, 5, 2 * dim)
    store, previous = torch.tensor([7, 8, 9, 14, 15]), torch.tensor([13, 7, 8, 20, 14])
    after = ring.clone()
    after[store] = joined
    early = after[previous]
    weight = torch.stack((early[:, :dim], joined[:, :dim])).softmax(0)
    want = (weight * torch.stack((early[:, dim:], joined[:, dim:]))).sum(0)
    pooled = torch.full((5, dim), torch.nan, dtype=torch.bfloat16)
    return Case([joined, store, previous, ring, pooled], {3: after, 4: want}, 2**-7, 2**-8)


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
    pool = records.encode_records(_draw(22, rows, dim), form)
    query = records.round_records(_draw(23, 5, heads, dim).bfloat16(), form)
    weights = _draw(24, 5, heads).bfloat16()
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
    scores = _draw(25, len(lengths), capacity).mul(4).round().relu()
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
    kept = _ints(26, 0, 2, *scores.shape) > 0
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


def sinkhorn_rounds(sizes: Sizes) -> Case:
    """70 matrices."""
    n = sizes["copies"]
    logits = _draw(27, 70, n * n) * 3
    want = sinkhorn(logits.double().view(-1, n, n), sizes["iters"], sizes["eps"]).flatten(1)
    return Case([logits, torch.full_like(logits, torch.nan)], {1: want.float()}, 1e-5, 1e-6)


def mixer(sizes: Sizes) -> Case:
    """Six rows, one of zeros."""
    dim, n = sizes["dim"], sizes["copies"]
    stream = _draw(28, 6, n * dim).bfloat16()
    stream[1] = 0.0
    width = n * (n + 2)
    fn, scale, base = _draw(29, width, n * dim) / dim**0.5, _draw(30, 3), _draw(31, width)
    want = hc_mix(
        stream.double().unflatten(1, (n, dim)), fn.double(), scale.double(), base.double(),
        norm_eps=sizes["norm_eps"], hc_eps=sizes["hc_eps"], iters=sizes["iters"],
    )  # fmt: skip
    outs = [torch.full((6, size), torch.nan) for size in (n, n, n * n)]
    expected = {4 + i: part.flatten(1).float() for i, part in enumerate(want)}
    return Case([stream, fn, scale, base, *outs], expected, 1e-3, 1e-4)


def grouped_fp4(sizes: Sizes) -> Case:
    """Experts with no row, one, a tile and one more; rows of no expert stay."""
    experts, outputs, inputs = sizes["experts"], sizes["outputs_of"], sizes["inputs"]
    counts = [0] * experts
    counts[0], counts[1], counts[experts // 2], counts[experts - 1] = 1, 17, 3, 16
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    used = int(ends[-1])
    x = _draw(32, used + 3, inputs).bfloat16()
    x[used:] = torch.nan
    codes = _ints(33, 0, 256, experts, outputs, inputs // 2).to(torch.uint8)
    scales = _ints(34, 118, 124, experts, outputs, inputs // 32).to(torch.uint8)
    y = torch.full((used + 3, outputs), 7.0, dtype=torch.bfloat16)
    want = y.double()
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            blocks = quant.Blocks(codes[expert], scales[expert])
            wide = quant.dequantise_q4x(blocks).t().double().unsqueeze(0)
            rows = x[start:end].double()
            want[start:end] = grouped_product(rows, wide, torch.tensor([end - start]))
        start = end
    return Case([x, ends, codes, scales, y], {4: want.bfloat16()}, 2**-6, 0.05)


def _attention(sizes: Sizes, widths: tuple[int, ...]) -> Case:
    heads, dim, tokens = sizes["heads"], sizes["dim"], 5
    query, sink = _draw(35, tokens, heads, dim).bfloat16(), _draw(36, heads)
    pools, indices, keys = [], [], []
    for form, width in zip((RecordFormat.Q8, RecordFormat.Q4N), widths, strict=False):
        pool = _bytes(700, records.record_bytes(form, dim))
        pool[:640] = records.encode_records(_draw(37 + form, 640, dim), form)
        index = _ints(39 + form, -1, 640, tokens, width)
        index[1] = -1
        pools.append(pool)
        indices.append(index)
        keys.append(records.take_records(pool, index, form, dim, torch.float32))
    live = torch.cat(indices, 1) >= 0
    want = gathered_attention(query.float(), torch.cat(keys, 1), live, sink).bfloat16()
    parts = [part for pair in zip(pools, indices, strict=True) for part in pair]
    out = torch.full_like(query, torch.nan)
    return Case([query, sink, *parts, out], {2 + len(parts): want}, 0.03, 0.01)


def sparse_mla(sizes: Sizes) -> Case:
    """Five tokens of 128 window keys and 512 compressed ones, one without a key."""
    return _attention(sizes, (128, 512))


def sparse_mla_window(sizes: Sizes) -> Case:
    """Five tokens of 133 window keys."""
    return _attention(sizes, (133,))


CASES: Mapping[str, Callable[[Sizes], Case]] = MappingProxyType(
    {
        "cast_fp8": cast_fp8,
        "cast_fp8_columns": cast_fp8_columns,
        "cast_fp4": cast_fp4,
        "store_records": store_records,
        "take_records": take_records,
        "convert_index": convert_index,
        "expand_ranges": expand_ranges,
        "window_index": window_index,
        "split_lengths": split_lengths,
        "uniform_bits": uniform_bits,
        "gumbel_noise": gumbel_noise,
        "filter_logits": filters,
        "compress_pairs": compress_pairs,
        "index_logits": index_logits,
        "select_top_k": select_top_k,
        "mask_scores": mask_scores,
        "block_scores": block_scores,
        "sinkhorn": sinkhorn_rounds,
        "hc_mix": mixer,
        "grouped_fp4": grouped_fp4,
        "sparse_mla": sparse_mla,
        "sparse_mla_window": sparse_mla_window,
    }
)
"""By op. The other ops have none of their own: they run inside the captured step, whose result is
compared with plain torch."""


def has_case(op: str, sizes: Sizes) -> bool:
    """Whether there is a case; pages of 584-byte records are seen by the CPU tests alone."""
    return op in CASES and not sizes.get("page", 0)
