"""Records on the CPU route: bytes, values, untouched rows, the 584-byte page."""

import pytest
import torch

from decodegrid.kernels.records import RecordFormat, encode_records, record_bytes, take_records
from decodegrid.kernels.tile.hopper_records import page_bytes
from tests.gpu.hopper_record import put_records, record_values

pytestmark = pytest.mark.kernels

POISON = 0xFF
CASES = [
    (RecordFormat.Q8, 512), (RecordFormat.Q8, 64), (RecordFormat.Q4N, 512),
    (RecordFormat.Q4N, 64), (RecordFormat.Q4X, 128), (RecordFormat.Q4X, 32),
]


def keys(rows, dim, seed):
    make = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-12, 8, (rows, dim // 16), generator=make).float())
    x = torch.randn(rows, dim, generator=make) * scale.repeat_interleave(16, 1)
    return x.to(torch.bfloat16)


def slots(rows, pool, seed):
    """Distinct rows in no order; every third stores nothing."""
    order = torch.randperm(pool, generator=torch.Generator().manual_seed(seed))[:rows]
    order[2::3] = -1
    return order


@pytest.mark.parametrize(("form", "dim"), CASES)
@pytest.mark.parametrize("rows", [0, 1, 4, 23])
def test_store(tile, form, dim, rows):
    x, where = keys(rows, dim, rows), slots(rows, 40, rows)
    pool = torch.full((40, record_bytes(form, dim)), POISON, dtype=torch.uint8)
    expected = pool.clone()
    expected[where[where >= 0]] = encode_records(x, form)[where >= 0]
    tile("records.store_records", form=int(form), dim=dim)(x, where, pool)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(("form", "dim"), CASES)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_take(tile, form, dim, tokens):
    pool = torch.full((40, record_bytes(form, dim)), POISON, dtype=torch.uint8)
    pool[:30] = encode_records(keys(30, dim, 7), form)
    index = torch.empty(tokens, 21, dtype=torch.int64)
    for token in range(tokens):
        index[token] = slots(21, 30, token)
    out = torch.full((tokens, 21, dim), torch.nan, dtype=torch.bfloat16)
    tile("records.take_records", form=int(form), dim=dim)(pool, index, out)
    assert torch.equal(out, take_records(pool, index, form, dim, torch.bfloat16))


def test_every_byte_decodes(tile):
    """All E4M3 bytes under all E8M0 scales, NaN codes included."""
    pool = torch.zeros(256, record_bytes(RecordFormat.Q8, 256), dtype=torch.uint8)
    pool[:, :256] = torch.arange(256, dtype=torch.uint8)
    pool[:, 256:] = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    index = torch.arange(256).unsqueeze(0)
    out = torch.empty(1, 256, 256)
    tile("records.take_records", form=0, dim=256, dtype="float32")(pool, index, out)
    expected = take_records(pool, index, RecordFormat.Q8, 256, torch.float32)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("page", [64, 48])
@pytest.mark.parametrize("rows", [0, 1, 7, 30])
def test_store_hopper(tile, page, rows):
    x, where = keys(rows, 512, rows + page), slots(rows, 3 * page, rows)
    pool = torch.full((3, page_bytes(page)), POISON, dtype=torch.uint8)
    expected = pool.clone()
    put_records(expected, page, where, x)
    tile("hopper_records.store_hopper", page=page)(x, where, pool)
    assert torch.equal(pool, expected)


def test_take_hopper(tile):
    page, x = 64, keys(100, 512, 3)
    pool = torch.full((2, page_bytes(page)), POISON, dtype=torch.uint8)
    tile("hopper_records.store_hopper", page=page)(x, torch.arange(100), pool)
    index = torch.randint(-1, 100, (3, 17), generator=torch.Generator().manual_seed(1))
    index[0, 0] = -1
    out = torch.full((3, 17, 512), torch.nan, dtype=torch.bfloat16)
    tile("hopper_records.take_hopper", page=page)(pool, index, out)
    expected = record_values(x)[index.clamp(min=0)]
    expected[index < 0] = 0
    assert torch.equal(out, expected)


def test_a_page_is_a_multiple_of_its_records():
    assert page_bytes(64) == 65 * 576 and page_bytes(64) >= 64 * 584
    assert page_bytes(144) % 576 == 0 and page_bytes(144) - 144 * 584 < 576
