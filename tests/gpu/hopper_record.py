"""The 584-byte record of Hopper's attention kernels, stated in plain torch.

A page is every token's 576 data bytes (448 E4M3 codes, then 64 bfloat16), then every token's eight
scale bytes (one E8M0 for 64 channels, and a zero), filled up to a multiple of 576 bytes. A slot is
page * tokens of a page + place. Needs neither pytest, TileLang nor pydantic.
"""

import torch
from torch import Tensor

from decodegrid.kernels.quant import decode_e4m3, decode_e8m0, encode_e4m3, quantise_q8

PLAIN, DATA, SCALES = 448, 576, 8


def page_bytes(page: int) -> int:
    """Bytes of a page of so many tokens."""
    used = page * (DATA + SCALES)
    return used + -used % DATA


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Data (rows, 576) and scales (rows, 8) uint8 of x (rows, 512) bfloat16."""
    blocks = x[:, :PLAIN].float().unflatten(1, (7, 64))
    # The rule of a block of 32 on 32 copies of what is largest among 64.
    largest = blocks.abs().amax(2).repeat_interleave(32, 1)
    scales = quantise_q8(largest).scales
    codes = encode_e4m3(blocks / decode_e8m0(scales).unsqueeze(2)).flatten(1)
    rotated = x[:, PLAIN:].contiguous().view(torch.uint8)
    spare = torch.zeros(len(x), 1, dtype=torch.uint8)
    return torch.cat((codes, rotated), 1), torch.cat((scales, spare), 1)


def put_records(pool: Tensor, page: int, slots: Tensor, x: Tensor) -> None:
    """Write rows of x into pool (pages, page_bytes) uint8 at slots (rows,); -1 writes nothing."""
    data, scales = encode(x)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, place = divmod(slot, page)
            pool[block, place * DATA : (place + 1) * DATA] = data[row]
            start = page * DATA + place * SCALES
            pool[block, start : start + SCALES] = scales[row]


def record_values(x: Tensor) -> Tensor:
    """What rows (rows, 512) bfloat16 read as once they were stored."""
    data, scales = encode(x)
    codes = decode_e4m3(data[:, :PLAIN]).unflatten(1, (7, 64))
    plain = (codes * decode_e8m0(scales[:, :7]).unsqueeze(2)).flatten(1)
    return torch.cat((plain.to(torch.bfloat16), x[:, PLAIN:]), 1)
