"""Cache records: bytes, published vectors, a slow decoder, plain and native forms of the ops."""

import math

import numpy as np
import pytest
import torch

from decodegrid.kernels.quant import (
    dequantise_q4n,
    dequantise_q4x,
    dequantise_q8,
    quantise_q4n,
    quantise_q4x,
    quantise_q8,
)
from decodegrid.kernels.records import (
    RecordFormat,
    data_bytes,
    decode_records,
    encode_records,
    encode_records_op,
    record_bytes,
    round_records,
    round_records_op,
    take_records,
    take_records_op,
)
from decodegrid.kernels.select_entries import CandidateMode, select_entries, select_entries_op

IMPLEMENTED = ("test_schema", "test_faketensor", "test_autograd_registration")
FORMATS = tuple(RecordFormat)
ENCODES, TAKES = (encode_records, encode_records_op), (take_records, take_records_op)
ROUNDS = (round_records, round_records_op)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
QUANT = {
    RecordFormat.Q8: (quantise_q8, dequantise_q8),
    RecordFormat.Q4N: (quantise_q4n, dequantise_q4n),
    RecordFormat.Q4X: (quantise_q4x, dequantise_q4x),
}

X16 = (
    "0.80078125 -0.69921875 -0.6015625 0.5 -0.400390625 -0.30078125 0.2001953125 -0.10009765625 "
    "0 -0.10009765625 0.2001953125 0.30078125 -0.400390625 0.5 0.6015625 -0.69921875"
)


@pytest.fixture(scope="module", autouse=True)
def installed(native_kernels):
    """Behind the op forms are the native kernels."""


def strided(tensor):
    """The same values with a gap between rows and a last axis that is not dense."""
    wide = tensor.new_full((*tensor.shape, 3), 7)
    wide[..., 1] = tensor
    return wide[..., 1]


def slow_e4m3(byte):
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


def slow_decode(record, form, dim):
    """Values of one record, channel by channel, by the definition of its format."""
    found = np.zeros(dim)
    for channel in range(dim):
        if form == RecordFormat.Q8:
            value, scale = slow_e4m3(record[channel]), record[dim + channel // 32]
        else:
            nibble = record[channel // 2] >> 4 * (channel % 2) & 15
            value = E2M1[nibble & 7] * (-1 if nibble & 8 else 1)
            scale = record[dim // 2 + channel // (16 if form == RecordFormat.Q4N else 32)]
        if form == RecordFormat.Q4N:
            found[channel] = value * slow_e4m3(scale)
        else:
            found[channel] = value * (math.nan if scale == 255 else 2.0 ** (scale - 127))
    return found


def every_byte(form, dim, rows=96):
    """Random records in which every byte occurs, as code and as scale."""
    generator = torch.Generator().manual_seed(int(form))
    shape = (rows, record_bytes(form, dim))
    records = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    data = data_bytes(form, dim)
    for part in (records[:, :data], records[:, data:]):
        flat = part.reshape(-1)
        flat[:256] = torch.arange(256)
        part.copy_(flat.view_as(part))
    return records


def wild(rows, dim, seed=0):
    """float32 rows of every magnitude: zeros of both signs, ties, subnormals, near the largest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-140, 125, (rows, 1), generator=generator)
    x[0::5] = torch.randint(-28, 29, x[0::5].shape, generator=generator) / 4.0
    x[1::5] *= torch.rand(x[1::5].shape, generator=generator) < 0.3
    x[2] = 0.0
    x[3] = -0.0
    return x.to(torch.float32)


def test_bytes_at_the_released_sizes():
    sizes = ((RecordFormat.Q8, 512), (RecordFormat.Q4N, 512), (RecordFormat.Q4X, 128))
    assert [record_bytes(*size) for size in sizes] == [528, 288, 68]
    sizes = ((RecordFormat.Q8, 64), (RecordFormat.Q4N, 64), (RecordFormat.Q4X, 32))
    assert [record_bytes(*size) for size in sizes] == [66, 36, 17]


@pytest.mark.parametrize("dim", [0, 16, 48])
def test_whole_blocks_only(dim):
    with pytest.raises(ValueError, match=rf"multiple of 32 channels, got {dim}"):
        record_bytes(RecordFormat.Q4N, dim)
    for op in (encode_records_op, round_records_op):
        with pytest.raises(RuntimeError, match=rf"{dim} channels.*multiples of 32"):
            op(torch.zeros(2, dim), 1)


@pytest.mark.parametrize("encode", ENCODES)
def test_published_vectors(encode):
    x16 = torch.tensor([float(word) for word in X16.split()]).to(torch.bfloat16)
    x32 = torch.cat((x16, 2 * x16.flip(0)))
    nibbles = "3 11 10 2 10 9 1 8 0 8 1 1 10 2 2 11 13 4 4 11 2 2 9 0 9 2 10 11 4 12 13 5"
    codes = [int(word) for word in nibbles.split()]
    pairs = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert encode(x32, 2).tolist() == [*pairs, 126]
    data = "75 f3 f2 70 ed ea 65 dd 00 dd 65 6a ed 70 72 f3 fb 7a 78 f5 72 6d e5 00 e5 6d f2 f5 78"
    assert encode(x32, 0).tolist() == [*bytes.fromhex(f"{data} fa fb 7d"), 127 - 8]
    # A block of 16: twice the same 16 values, then the scale of each half.
    data = list(bytes.fromhex("e7 6e cd 93 90 43 6d e6"))
    assert encode(torch.cat((x16, x16)), 1).tolist() == [*data, *data, 0x21, 0x21]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("take", TAKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_decoding_against_a_slow_decoder(form, take, dtype):
    records = every_byte(form, 96)
    want = np.stack([slow_decode(row, form, 96) for row in records.tolist()])
    index = torch.arange(96).reshape(24, 4).flip(0)
    got = take(records, index, form, 96, dtype)
    assert got.dtype == dtype and got.shape == (24, 4, 96)
    # Products beyond float32 are infinite; what is exact there is exact in bfloat16 too.
    want = torch.from_numpy(want).to(torch.float32).to(dtype)[index]
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert int(got.isnan().sum()) > 0


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("encode", ENCODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_encoding_is_the_references(form, encode, dtype):
    """Bytes of any shape and layout; what is decoded is the reference's value to the bit."""
    quantise, dequantise = QUANT[form]
    x = wild(80, 64).to(dtype)
    if dtype == torch.float64:
        x = x * (1.0 + 1e-12)  # rounded to float32 first
    blocks = quantise(x)
    want = torch.cat((blocks.codes, blocks.scales), -1)
    for given in (x, strided(x)):
        got = encode(given, form)
        assert torch.equal(got, want)
    assert torch.equal(encode(x.reshape(4, 20, 64), form), want.reshape(4, 20, -1))
    assert torch.equal(decode_records(want, form, 64), dequantise(blocks))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rounding", ROUNDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_is_storing_and_reading(form, rounding, dtype):
    x = wild(80, 64, seed=1).clamp(-1e30, 1e30).to(dtype).reshape(8, 10, 64)
    want = decode_records(encode_records(x, form), form, 64)
    got = rounding(x, form)
    assert got.dtype == dtype
    assert torch.equal(got.to(torch.float32), want) or dtype == torch.bfloat16
    assert torch.equal(got, want.to(dtype))
    assert not torch.equal(got, x)
    assert torch.equal(rounding(strided(x), form), got)
    assert rounding(x[:0], form).shape == (0, 10, 64)


@pytest.mark.parametrize("form", FORMATS)
def test_not_finite_is_what_the_plain_form_makes_of_it(form):
    x = wild(64, 64, seed=2).clamp(-1e30, 1e30)
    x[5, 3], x[6, 40], x[7, 0], x[8] = math.nan, math.inf, -math.inf, -math.nan
    plain = decode_records(encode_records(x, form), form, 64)
    native = decode_records(encode_records_op(x, form), form, 64)
    torch.testing.assert_close(native, plain, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(round_records_op(x, form), plain, rtol=0, atol=0, equal_nan=True)
    # E2M1 has no NaN: without one in the scale the block reads as next to nothing.
    lost = form == RecordFormat.Q4X
    assert bool(plain[5, 3].isnan()) != lost and bool(plain[8].isnan().all()) != lost
    # Q4N clamps the scale of an infinity, 448; the others have none to clamp to.
    assert plain[6, 40] == 6 * 448 if form == RecordFormat.Q4N else plain[6, 40].isnan()
    # Other blocks and other rows do not notice.
    rest = torch.ones(64, 64, dtype=torch.bool)
    for row, start in ((5, 0), (6, 32), (7, 0), (8, 0), (8, 32)):
        rest[row, start : start + 32] = False
    assert torch.equal(plain[rest], round_records(x.nan_to_num(0.0, 0.0, 0.0), form)[rest])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("take", TAKES)
def test_masked_rows_are_zero_and_not_used(form, take):
    records = encode_records(wild(9, 32), form)
    records[0] = 255  # NaN in every format; -1 is clamped to it in the plain form
    index = torch.tensor([[-1, 4, -1], [8, -1, 1]])
    got = take(records, index, form, 32, torch.float64)
    want = decode_records(records[index.clamp(min=0)], form, 32).double()
    live = index >= 0
    assert torch.equal(got[live], want[live])
    assert torch.equal(got[~live], torch.zeros(3, 32, dtype=torch.float64))
    assert torch.equal(take(strided(records), strided(index), form, 32, torch.float64), got)


def test_a_row_outside_of_the_pool_is_refused():
    records = torch.zeros(3, record_bytes(RecordFormat.Q8, 32), dtype=torch.uint8)
    with pytest.raises(IndexError, match="row 3 of 3"):
        take_records_op(records, torch.tensor([[0, 3]]), 0, 32, torch.float32)
    with pytest.raises(RuntimeError, match=r"\(rows, 17\)"):
        take_records_op(records, torch.tensor([[0]]), 2, 32, torch.float32)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck(form, rows, dense, dtype):
    x = wild(6, 64)[:rows].to(dtype)
    records, index = encode_records(wild(6, 64), form), torch.tensor([[0, -1, 5], [1, 1, -1]])
    index = index[: min(rows, 2)]
    if not dense:
        x, records, index = strided(x), strided(records), strided(index)
    for op in (encode_records_op, round_records_op):
        torch.library.opcheck(op, (x, int(form)), test_utils=IMPLEMENTED)
    args = (records, index, int(form), 64, dtype)
    torch.library.opcheck(take_records_op, args, test_utils=IMPLEMENTED)


def selection_args(dtype, mode, seed):
    """query, weights, keys, then the rest of a selection over 40 paged entries of two slots."""
    generator = torch.Generator().manual_seed(seed)

    def floats(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    lengths = torch.tensor([31, 32, 33, 5, 0])
    table = torch.randperm(21, generator=generator)[:15].reshape(3, 5)
    marks = torch.rand(5, 40, generator=generator) < 0.5
    slots, out = torch.tensor([1, 1, 1, 2, 0]), torch.full((5, 6), 7)
    rest = (table, slots, lengths, 1, 8, int(mode), 2, 4, marks, out)
    return floats(5, 4, 32), floats(5, 4), floats(21 * 8, 32), rest


@pytest.mark.parametrize("select", [select_entries, select_entries_op])
@pytest.mark.parametrize("mode", list(CandidateMode))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_selection_over_records(select, mode, dtype):
    """As over the keys that the records decode to; records that are not visible may be NaN."""
    for seed in range(6):
        query, weights, keys, rest = selection_args(dtype, mode, seed)
        records = encode_records(keys, RecordFormat.Q4X)
        values = decode_records(records, RecordFormat.Q4X, 32).to(dtype)
        wanted = [part.clone() if isinstance(part, torch.Tensor) else part for part in rest]
        select(query, weights, values, *wanted)
        seen = torch.zeros(keys.shape[0], dtype=torch.bool)
        for token, length in enumerate(rest[2].tolist()):
            for entry in range(length):
                seen[int(rest[0][rest[1][token], entry // 8]) * 8 + entry % 8] = True
        records[~seen] = 255
        select(query, weights, records, *rest)
        assert torch.equal(rest[-1], wanted[-1])
        assert torch.equal(rest[-2], wanted[-2])
        assert int((rest[-1] >= 0).sum()) > 10


def test_selection_refuses_records_of_other_keys():
    query, weights, _, rest = selection_args(torch.float32, CandidateMode.IGNORE, 0)
    with pytest.raises(RuntimeError, match="records of 36 bytes, allowed are 17"):
        select_entries_op(query, weights, torch.zeros(168, 36, dtype=torch.uint8), *rest)
