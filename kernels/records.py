"""Cache records: one key as the row of bytes in which the released model keeps it.

Owns the layout of a record, its data bytes and then its scale bytes, and three ops: encode rows,
gather and decode rows, and round values that are read without being stored. The numerics are
those of kernels/quant.py; values are taken in float32, whatever the tensor's dtype is.

| format | data | scales | bytes at 512 / 128 channels | holds |
|---|---|---|---|---|
| Q8 | E4M3 | E8M0 for 32 channels | 528 / 132 | window keys, the drafter's keys |
| Q4N | E2M1, two in a byte | E4M3 for 16 channels | 288 / 72 | compressed keys |
| Q4X | E2M1, two in a byte | E8M0 for 32 channels | 272 / 68 | index keys, rounds index queries |

A block that holds a NaN or an infinity decodes to what the plain forms here make of it: NaN, except
that Q4X loses a NaN, whose scale wraps, and Q4N clamps an infinity. No op fails on it.

Source: DeepSeek-V4.1-Flash `inference/kernel.py`; record layout of DeepInfer's cache engine, with
index records interleaved as the others are.
"""

from enum import IntEnum

import torch
from torch import Tensor

from decodegrid.kernels.quant import (
    Q4N_BLOCK,
    Q4X_BLOCK,
    Q8_BLOCK,
    Blocks,
    dequantise_q4n,
    dequantise_q4x,
    dequantise_q8,
    quantise_q4n,
    quantise_q4x,
    quantise_q8,
)

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define("encode_records(Tensor x, int format) -> Tensor")
LIBRARY.define(
    "take_records(Tensor records, Tensor index, int format, int dim, ScalarType dtype) -> Tensor"
)
LIBRARY.define("round_records(Tensor x, int format) -> Tensor")

CHANNEL_MULTIPLE = 32
"""Channels come in multiples of this: every format then has whole blocks."""


class RecordFormat(IntEnum):
    """Block format of a record."""

    Q8 = 0
    Q4N = 1
    Q4X = 2


def data_bytes(format: int, dim: int) -> int:
    """Bytes before the scales of a record of `dim` channels."""
    return dim if format == RecordFormat.Q8 else dim // 2


def record_bytes(format: int, dim: int) -> int:
    """Bytes of a record of `dim` channels.

    Raises ValueError unless `dim` is a positive multiple of CHANNEL_MULTIPLE.
    """
    if dim <= 0 or dim % CHANNEL_MULTIPLE:
        raise ValueError(
            f"a record has a positive multiple of {CHANNEL_MULTIPLE} channels, got {dim}"
        )
    if format == RecordFormat.Q8:
        return dim + dim // Q8_BLOCK
    if format == RecordFormat.Q4N:
        return dim // 2 + dim // Q4N_BLOCK
    return dim // 2 + dim // Q4X_BLOCK


def encode_records(x: Tensor, format: int) -> Tensor:
    """Records of rows. x: (..., dim) any float. Returns (..., record_bytes(format, dim)) uint8."""
    if format == RecordFormat.Q8:
        blocks = quantise_q8(x)
    elif format == RecordFormat.Q4N:
        blocks = quantise_q4n(x)
    else:
        blocks = quantise_q4x(x)
    return torch.cat((blocks.codes, blocks.scales), -1)


def decode_records(records: Tensor, format: int, dim: int) -> Tensor:
    """float32 values (..., dim) of records (..., record_bytes(format, dim)) uint8, exact."""
    data = data_bytes(format, dim)
    blocks = Blocks(records[..., :data], records[..., data:])
    if format == RecordFormat.Q8:
        return dequantise_q8(blocks)
    if format == RecordFormat.Q4N:
        return dequantise_q4n(blocks)
    return dequantise_q4x(blocks)


def take_records(
    records: Tensor, index: Tensor, format: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """Values of the records at `index`, zeros where it is -1; a masked row is never used.

    records: (rows, record_bytes(format, dim)) uint8; index: (T, N) int64. Returns (T, N, dim) in
    `dtype`. Work and memory follow the index, not the number of records.
    """
    values = decode_records(records[index.clamp(min=0)], format, dim).to(dtype)
    zero = torch.zeros((), dtype=dtype, device=records.device)
    return values.where((index >= 0).unsqueeze(-1), zero)


def round_records(x: Tensor, format: int) -> Tensor:
    """What `x` reads as once it was stored: (..., dim) any float, in the dtype of `x`."""
    return decode_records(encode_records(x, format), format, x.shape[-1]).to(x.dtype)


def _fake_encode(x: Tensor, format: int) -> Tensor:
    width = record_bytes(format, x.shape[-1])
    return x.new_empty((*x.shape[:-1], width), dtype=torch.uint8)


def _fake_take(records: Tensor, index: Tensor, format: int, dim: int, dtype: torch.dtype) -> Tensor:
    return records.new_empty((*index.shape, dim), dtype=dtype)


def _fake_round(x: Tensor, format: int) -> Tensor:
    return x.new_empty(x.shape)


# Not the CPU key: that one is for the native kernels, which then win.
LIBRARY.impl("encode_records", encode_records, "CompositeExplicitAutograd")
LIBRARY.impl("take_records", take_records, "CompositeExplicitAutograd")
LIBRARY.impl("round_records", round_records, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::encode_records", _fake_encode, lib=LIBRARY)
torch.library.register_fake("decodegrid::take_records", _fake_take, lib=LIBRARY)
torch.library.register_fake("decodegrid::round_records", _fake_round, lib=LIBRARY)

encode_records_op = torch.ops.decodegrid.encode_records.default
take_records_op = torch.ops.decodegrid.take_records.default
round_records_op = torch.ops.decodegrid.round_records.default
"""The op forms, for traced code."""
