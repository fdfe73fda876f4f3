"""Cases of values for the kernels that round and store: casts, records, the compressor.

Needs neither pytest, TileLang nor pydantic.
"""

import torch

from decodegrid.kernels import quant, records
from decodegrid.kernels.providers.layouts import scale_words
from tests.gpu.case_form import Case, Sizes, draw, ints, poison_bytes, spread
from tests.gpu.hopper_record import page_bytes, put_records, record_values


def cast_fp8(sizes: Sizes) -> Case:
    """37 rows."""
    x = spread(1, 37, sizes["dim"])
    want = quant.quantise_q8(x)
    outs = [poison_bytes(*want.codes.shape), poison_bytes(*want.scales.shape)]
    return Case([x, *outs], {1: want.codes, 2: want.scales})


def cast_fp8_columns(sizes: Sizes) -> Case:
    """37 rows, so that columns have three of padding."""
    x, dim = spread(2, 37, sizes["dim"]), sizes["dim"]
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
    return Case([x, poison_bytes(37, dim), scales], {1: codes, 2: expected})


def cast_fp4(sizes: Sizes) -> Case:
    """23 rows."""
    x = spread(3, 23, sizes["dim"])
    want = quant.quantise_q4x(x) if sizes["block"] == 32 else quant.quantise_q4n(x)
    outs = [poison_bytes(*want.codes.shape), poison_bytes(*want.scales.shape)]
    return Case([x, *outs], {1: want.codes, 2: want.scales})


def store_records(sizes: Sizes) -> Case:
    """23 rows into 40, every third stored nowhere."""
    form, dim = sizes["form"], sizes["dim"]
    x, where = spread(4, 23, dim), torch.randperm(40, generator=torch.Generator().manual_seed(4))
    where = where[:23]
    where[2::3] = -1
    pool = poison_bytes(40, records.record_bytes(form, dim))
    expected = pool.clone()
    expected[where[where >= 0]] = records.encode_records(x, form)[where >= 0]
    return Case([x, where, pool], {2: expected})


def take_records(sizes: Sizes) -> Case:
    """Three tokens of 21 rows; the rows that no index names are poison."""
    form, dim = sizes["form"], sizes["dim"]
    pool = poison_bytes(40, records.record_bytes(form, dim))
    pool[:30] = records.encode_records(spread(5, 30, dim), form)
    index = ints(6, -1, 30, 3, 21)
    out = torch.full((3, 21, dim), torch.nan, dtype=torch.bfloat16)
    want = records.take_records(pool, index, form, dim, torch.bfloat16)
    return Case([pool, index, out], {2: want})


def _pages(sizes: Sizes) -> tuple[int, int]:
    """Tokens of a page and bytes of three."""
    return sizes["page"], page_bytes(sizes["page"])


def store_hopper(sizes: Sizes) -> Case:
    """100 rows into three pages of 584-byte records, every third stored nowhere."""
    page, width = _pages(sizes)
    x = spread(41, 100, 512)
    where = torch.randperm(3 * page, generator=torch.Generator().manual_seed(42))[:100]
    where[2::3] = -1
    pool = poison_bytes(3, width)
    expected = pool.clone()
    put_records(expected, page, where, x)
    return Case([x, where, pool], {2: expected})


def take_hopper(sizes: Sizes) -> Case:
    """Three tokens of 21 slots; those that no index names are poison."""
    page, width = _pages(sizes)
    x, pool = spread(43, 2 * page + 30, 512), poison_bytes(3, width)
    put_records(pool, page, torch.arange(len(x)), x)
    index = ints(44, -1, len(x), 3, 21)
    index[0, 0], index[2, 20] = -1, len(x) - 1
    want = record_values(x)[index.clamp(min=0)]
    want[index < 0] = 0
    out = torch.full((3, 21, 512), torch.nan, dtype=torch.bfloat16)
    return Case([pool, index, out], {2: want})


def compress_pairs(sizes: Sizes) -> Case:
    """Pairs inside the step and across steps; rows of other slots stay."""
    dim = sizes["dim"]
    ring, joined = draw(19, 21, 2 * dim), draw(20, 5, 2 * dim)
    store, previous = torch.tensor([7, 8, 9, 14, 15]), torch.tensor([13, 7, 8, 20, 14])
    after = ring.clone()
    after[store] = joined
    early = after[previous]
    weight = torch.stack((early[:, :dim], joined[:, :dim])).softmax(0)
    want = (weight * torch.stack((early[:, dim:], joined[:, dim:]))).sum(0)
    pooled = torch.full((5, dim), torch.nan, dtype=torch.bfloat16)
    return Case(
        [joined, store, previous, ring, pooled], {3: after, 4: want.bfloat16()}, 2**-7, 2**-8
    )
