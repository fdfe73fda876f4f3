"""Weights and scales in the layouts that the libraries read, made once when a model is loaded.

Owns plain torch forms of the layouts; a forward never calls them, except for views. Does not own
number formats: codes and E8M0 scale bytes come as a quantised checkpoint stores them
(`decodegrid.kernels.quant`), and no value changes here, except that `widen_tiles` writes the exact
product of both.

Words: "packed" scales are four E8M0 bytes of consecutive K blocks in one int32, lowest byte first;
"MN-major" means that the axis of rows is dense and each K column is padded to 16 bytes.

Source: DeepGEMM's notes on scaling factors; its weight transform for the fused MoE kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from decodegrid.kernels.packed import SCALE_BLOCK, expand_tiles

TMA_BYTES = 16
"""Alignment that tensor memory accesses want of a column."""
SCALES_PER_WORD = 4
GATE_UP_ROWS = 8
"""Rows of the gate, then of the up projection, that stand together for the fused MoE kernel."""
_UTCCP_ROWS = 128
_UTCCP_PARTS = 4


def align(count: int, multiple: int) -> int:
    """The next multiple at or above `count`."""
    return -(-count // multiple) * multiple


def column_rows(rows: int, itemsize: int) -> int:
    """Elements between two columns of an MN-major tensor of `rows` rows."""
    return align(rows, TMA_BYTES // itemsize)


def mn_major(values: Tensor) -> Tensor:
    """The same values with dense rows and padded columns.

    values: (..., rows, columns). Returns a tensor of that shape whose stride is 1 along the rows
    and `column_rows` along the columns; leading axes follow each other without a gap. The padding
    is zero.
    """
    *lead, rows, columns = values.shape
    storage = values.new_zeros(*lead, columns, column_rows(rows, values.element_size()))
    storage[..., :rows] = values.transpose(-1, -2)
    return storage.transpose(-1, -2)[..., :rows, :]


def scale_words(scales: Tensor) -> Tensor:
    """E8M0 bytes (..., K blocks) uint8 as (..., ceil(blocks / 4)) int32, the last word filled up
    with zero bytes."""
    missing = -scales.shape[-1] % SCALES_PER_WORD
    # A view takes the bytes in the order of memory; every host of a CUDA device is little-endian.
    return F.pad(scales, (0, missing)).contiguous().view(torch.int32)


def pack_scales(scales: Tensor) -> Tensor:
    """Packed MN-major scales of rows: (..., rows, K blocks) uint8 -> (..., rows, words) int32."""
    return mn_major(scale_words(scales))


def pack_group_scales(scales: Tensor) -> Tensor:
    """Scales of activations (T, G, K blocks) uint8 for a product that runs group by group.

    Returns (T, G, words) int32: a view of MN-major scales of (G, T, words), which is the order in
    which the library reads them.
    """
    return pack_scales(scales.transpose(0, 1)).transpose(0, 1)


def row_scales(tiles: Tensor, rows: int) -> Tensor:
    """Scales of 32 x 32 tiles, (..., ceil(rows / 32), K blocks), as one per row: (..., rows, K
    blocks)."""
    return tiles.repeat_interleave(SCALE_BLOCK, -2)[..., :rows, :]


def pack_matrix(codes: Tensor, scales: Tensor) -> list[Tensor]:
    """An FP8 matrix of 32 x 32 tiles, or a stack of them, for DeepGEMM on Blackwell.

    codes: (..., N, K) uint8 E4M3; scales: (..., ceil(N / 32), ceil(K / 32)) uint8 E8M0. Returns
    [codes (..., N, K) float8_e4m3fn, packed MN-major scales (..., N, ceil(K / 128)) int32].
    """
    return [codes.view(torch.float8_e4m3fn), pack_scales(row_scales(scales, codes.shape[-2]))]


def pack_experts(codes: Tensor, scales: Tensor) -> list[Tensor]:
    """MXFP4 experts for DeepGEMM's grouped products on Blackwell.

    codes: (E, N, K / 2) uint8, even input low; scales: (E, N, K / 32) uint8 E8M0. Returns [codes
    (E, N, K / 2) int8, packed MN-major scales (E, N, ceil(K / 128)) int32].
    """
    return [codes.view(torch.int8), pack_scales(scales)]


def widen_tiles(codes: Tensor, scales: Tensor) -> Tensor:
    """An FP8 matrix of 32 x 32 tiles in bfloat16, exact: what Hopper's products read.

    A code has four significant bits and a scale is a power of two. codes: (..., N, K) uint8;
    scales: (..., ceil(N / 32), ceil(K / 32)) uint8.
    """
    return expand_tiles(codes, scales).to(torch.bfloat16)


def interleave_gate_up(weights: Tensor) -> Tensor:
    """Gate rows then up rows, (E, 2 * I, ...), as 8 rows of each in turn, in the same layout of
    memory. Raises ValueError unless I is a multiple of 8."""
    experts, rows, *rest = weights.shape
    half = rows // 2
    if rows % 2 or half % GATE_UP_ROWS:
        raise ValueError(f"{rows} rows of gate and up; each half must be a multiple of 8")
    parts = weights.reshape(experts, 2, half // GATE_UP_ROWS, GATE_UP_ROWS, *rest)
    # Copied into a tensor like the argument: MN-major scales stay MN-major.
    return torch.empty_like(weights).copy_(parts.transpose(1, 2).reshape(weights.shape))


def utccp_scales(scales: Tensor) -> Tensor:
    """Packed scales (E, rows, words) in the order in which Blackwell copies them into its scale
    memory: within 128 rows, row 32 * a + b stands at 4 * b + a. Same layout of memory.

    Raises ValueError unless the rows are a multiple of 128.
    """
    experts, rows, words = scales.shape
    if rows % _UTCCP_ROWS:
        raise ValueError(f"{rows} rows of scales; a multiple of {_UTCCP_ROWS} is needed")
    parts = scales.reshape(experts, -1, _UTCCP_PARTS, _UTCCP_ROWS // _UTCCP_PARTS, words)
    return torch.empty_like(scales).copy_(parts.transpose(2, 3).reshape(scales.shape))


def mega_moe_weights(w13: list[Tensor], w2: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Results of `pack_experts` for both matrices, as the fused MoE kernel reads them.

    w13: gate rows first. Raises ValueError for sizes that the kernel does not take.
    """
    first = [interleave_gate_up(w13[0]), utccp_scales(interleave_gate_up(w13[1]))]
    return first, [w2[0], utccp_scales(w2[1])]


def expert_ends(counts: Tensor, alignment: int) -> Tensor:
    """End offset of each expert's rows, where each expert starts at a multiple of `alignment`.

    counts: (E,) int32 rows of each. Returns (E,) int32: the layout that grouped products read on
    the device.
    """
    taken = (counts + alignment - 1) // alignment * alignment
    starts = taken.cumsum(0, dtype=torch.int32) - taken
    return (starts + counts).to(torch.int32)


def split_index_pages(records: Tensor, page: int) -> Tensor:
    """Index records, each with its scale behind it, as pages of all codes and then all scales.

    records: (rows, bytes) uint8, the last 4 of each row the scales; rows a multiple of `page`.
    Returns (rows / page, page, 1, bytes) uint8, a reordered copy.
    """
    rows, width = records.shape
    if rows % page:
        raise ValueError(f"{rows} rows are not whole pages of {page}")
    pages = records.unflatten(0, (-1, page))
    codes, scales = pages[..., : width - 4], pages[..., width - 4 :]
    joined = torch.cat((codes.flatten(1), scales.flatten(1)), 1)
    return joined.reshape(-1, page, 1, width)
