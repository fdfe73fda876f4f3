"""mHC mixer, FP4 grouped product and sparse attention on the CPU route."""

import pytest
import torch

from decodegrid.kernels.hyper_connection import hc_mix, sinkhorn
from decodegrid.kernels.moe import grouped_product
from decodegrid.kernels.quant import dequantise_q4x, quantise_mxfp4
from decodegrid.kernels.records import RecordFormat, encode_records, record_bytes, take_records
from decodegrid.kernels.sparse_attention import gathered_attention
from decodegrid.kernels.tile.hopper_records import page_bytes

pytestmark = pytest.mark.kernels


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_sinkhorn(tile, rows):
    logits = draw(1, rows, 16) * 3
    matrix = torch.full((rows, 16), torch.nan)
    tile("hyper_connection.sinkhorn", copies=4, iters=20, eps=1e-6)(logits, matrix)
    expected = sinkhorn(logits.double().view(-1, 4, 4), 20, 1e-6).flatten(1)
    assert torch.allclose(matrix.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hc_mix(tile, rows, dtype):
    dim, copies = 64, 4
    stream = draw(2, rows, copies * dim).to(dtype)
    if rows > 1:
        stream[1] = 0.0
    fn, scale, base = draw(3, 24, copies * dim) / 16, draw(4, 3), draw(5, 24)
    outs = [torch.full((rows, size), torch.nan) for size in (4, 4, 16)]
    tile("hyper_connection.hc_mix", dim=dim, copies=copies, iters=20, norm_eps=1e-20,
         hc_eps=1e-6, dtype=str(dtype)[6:])(stream, fn, scale, base, *outs)
    expected = hc_mix(
        stream.double().unflatten(1, (copies, dim)), fn.double(), scale.double(), base.double(),
        norm_eps=1e-20, hc_eps=1e-6, iters=20,
    )
    for found, wanted in zip(outs, expected, strict=True):
        assert torch.allclose(found.double(), wanted.flatten(1), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("counts", [
    [0, 0, 0, 0], [1, 0, 0, 0], [0, 3, 0, 40], [16, 17, 1, 0], [2, 2, 2, 2],
])
@pytest.mark.parametrize("rows", [16, 64])
def test_grouped_fp4(tile, counts, rows):
    """Experts with no row, one, a tile and one more; rows of no expert stay as they were."""
    experts, outputs, inputs = 4, 96, 128
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    used = int(ends[-1])
    x = draw(6, used + 3, inputs).bfloat16()
    x[used:] = torch.nan
    blocks = quantise_mxfp4(draw(7, experts, outputs, inputs))
    y = torch.full((used + 3, outputs), 7.0, dtype=torch.bfloat16)
    tile("moe.grouped_fp4", experts=experts, outputs_of=outputs, inputs=inputs, rows=rows)(
        x, ends, blocks.codes, blocks.scales, y
    )
    weights = dequantise_q4x(blocks).transpose(1, 2).double()
    expected = grouped_product(x[:used].double(), weights, ends)
    assert torch.allclose(y[:used].double(), expected, rtol=2**-8, atol=2**-8)
    assert bool((y[used:] == 7.0).all())


def index_of(tokens, width, pool, seed):
    """Rows of a pool with -1 among them, at the end of lines too; a line of -1 alone."""
    make = torch.Generator().manual_seed(seed)
    index = torch.randint(0, pool, (tokens, width), generator=make)
    index[torch.rand(tokens, width, generator=make) < 0.2] = -1
    index[:, width - 3 :] = -1
    if tokens > 1:
        index[1] = -1
    return index


CASES = [(8, 64, 64, 64), (8, 64, 64, 0), (64, 512, 128, 128), (3, 64, 20, 70)]


@pytest.mark.parametrize(("heads", "dim", "near_width", "far_width"), CASES)
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_sparse_mla(tile, heads, dim, near_width, far_width, tokens):
    """One softmax over records of both pools; rows that no index names are poison."""
    query, sink = draw(8, tokens, heads, dim).bfloat16(), draw(9, heads)
    pools, indices, keys = [], [], []
    for form, width in ((RecordFormat.Q8, near_width), (RecordFormat.Q4N, far_width)):
        if width == 0:
            continue
        pool = torch.full((150, record_bytes(form, dim)), 0xFF, dtype=torch.uint8)
        pool[:140] = encode_records(draw(10 + width, 140, dim), form)
        index = index_of(tokens, width, 140, width)
        pools.append(pool)
        indices.append(index)
        keys.append(take_records(pool, index, form, dim, torch.float32))
    out = torch.full((tokens, heads, dim), torch.nan, dtype=torch.bfloat16)
    kernel = tile("sparse_mla.sparse_mla", heads=heads, dim=dim, has_far=int(far_width > 0))
    kernel(query, sink, *(part for pair in zip(pools, indices, strict=True) for part in pair), out)
    live = torch.cat(indices, 1) >= 0
    expected = gathered_attention(query.float(), torch.cat(keys, 1), live, sink)
    assert torch.allclose(out.float(), expected, rtol=0.03, atol=0.01)
    if tokens > 1:
        assert bool((out[1] == 0).all())


def test_sparse_mla_over_hopper_pages(tile):
    """Both pools as 584-byte pages, their values taken by the page's own kernel."""
    page, heads, tokens = 64, 8, 2
    query, sink = draw(20, tokens, heads, 512).bfloat16(), draw(21, heads)
    pools, indices, keys = [], [], []
    for seed in (22, 23):
        pool = torch.full((2, page_bytes(page)), 0xFF, dtype=torch.uint8)
        x = draw(seed, 100, 512).bfloat16()
        tile("hopper_records.store_hopper", page=page)(x, torch.arange(100), pool)
        index = index_of(tokens, 40, 100, seed)
        values = torch.empty(tokens, 40, 512, dtype=torch.bfloat16)
        tile("hopper_records.take_hopper", page=page)(pool, index, values)
        pools.append(pool)
        indices.append(index)
        keys.append(values.float())
    out = torch.full((tokens, heads, 512), torch.nan, dtype=torch.bfloat16)
    tile("sparse_mla.sparse_mla", heads=heads, dim=512, page=page)(
        query, sink, pools[0], indices[0], pools[1], indices[1], out
    )
    live = torch.cat(indices, 1) >= 0
    expected = gathered_attention(query.float(), torch.cat(keys, 1), live, sink)
    assert torch.allclose(out.float(), expected, rtol=0.03, atol=0.01)
