"""How a quantised DeepSeek-V4.1 checkpoint stores each weight: kind, names, shapes, dtypes, values.

Owns the table from checkpoint names to stored kinds, and the conversion of one weight between
floats and its stored bytes, in pieces of bounded size. Knows tensors and names; no files, no
modules. The arithmetic of the formats stands in kernels/quant.py.

Data flow: checkpoint name -> `StoredKind` -> shapes and dtypes of `X.weight` and `X.scale`; float
weight -> bytes, and back.

Source: safetensors inventory and `inference/convert.py` of deepseek-ai/DeepSeek-V4.1-Flash.
"""

import re
from collections.abc import Callable, Iterator
from enum import Enum

import torch
from torch import Tensor

from decodegrid.kernels.quant import (
    WEIGHT_TILE,
    Blocks,
    dequantise_fp8_weight,
    dequantise_q4x,
    dequantise_q8,
    quantise_fp8_rows,
    quantise_fp8_weight,
    quantise_mxfp4,
)


class StoredKind(Enum):
    """How a tensor lies in a quantised checkpoint; the value is what reports print."""

    FLOAT = "float"
    FP8_TILES = "fp8 32x32"
    """E4M3 (out, in), one E8M0 scale per 32 x 32 tile."""
    FP8_ROWS = "fp8 rows"
    """E4M3 (rows, dim), one E8M0 scale per 32 channels of a row."""
    MXFP4 = "mxfp4"
    """E2M1 pairs (out, in / 2), the even input low, one E8M0 scale per 32 inputs of a row."""


_TILES = re.compile(
    r"(layers|mtp)\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)"
    r"|ffn\.shared_experts\.(w1|w2|w3)|engram\.wkv|main_proj)\.weight"
)
_ROWS = re.compile(r"layers\.\d+\.engram\.embed\.weight")
_EXPERT = re.compile(r"(layers|mtp)\.\d+\.ffn\.experts\.\d+\.(w1|w2|w3)\.weight")

CODE_DTYPES = {
    StoredKind.FP8_TILES: ("F8_E4M3",),
    StoredKind.FP8_ROWS: ("F8_E4M3",),
    StoredKind.MXFP4: ("I8", "U8"),
}
"""Safetensors dtypes that `X.weight` may have; the first one is written."""
SCALE_DTYPE = "F8_E8M0"

QuantiseForm = Callable[[Tensor], Blocks]
"""A float weight (out, in) to its stored bytes."""

_QUANTISE: dict[StoredKind, QuantiseForm] = {
    StoredKind.FP8_TILES: quantise_fp8_weight,
    StoredKind.FP8_ROWS: quantise_fp8_rows,
    StoredKind.MXFP4: quantise_mxfp4,
}
_CODE_TORCH = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
_PIECE = 2**20
"""Elements that are converted at once: a few float32 copies of them are all the extra memory."""


def stored_kind(name: str) -> StoredKind:
    """Kind of the tensor `name` (a plain checkpoint name, such as
    "layers.0.ffn.experts.3.w1.weight") in a quantised checkpoint; everything that is not
    quantised is FLOAT."""
    if _TILES.fullmatch(name):
        return StoredKind.FP8_TILES
    if _EXPERT.fullmatch(name):
        return StoredKind.MXFP4
    return StoredKind.FP8_ROWS if _ROWS.fullmatch(name) else StoredKind.FLOAT


def scale_name(weight_name: str) -> str:
    """Name of the scales of a quantised weight: "X.weight" -> "X.scale"."""
    return weight_name.removesuffix(".weight") + ".scale"


def stored_shapes(
    kind: StoredKind, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the stored codes and scales of a weight (..., out, in) of a quantised kind.

    Raises ValueError where the last axis must be a multiple of 32 and is not.
    """
    *lead, rows, columns = shape
    if kind is StoredKind.FP8_TILES:
        return shape, (*lead, -(-rows // WEIGHT_TILE), -(-columns // WEIGHT_TILE))
    if columns % 32:
        raise ValueError(
            f"a weight of shape {list(shape)} cannot be stored as {kind.value}: its last axis must "
            "be a multiple of 32"
        )
    codes = columns // 2 if kind is StoredKind.MXFP4 else columns
    return (*lead, rows, codes), (*lead, rows, columns // 32)


def as_bytes(stored: Tensor) -> Tensor:
    """The bytes of a one-byte tensor (E4M3, E8M0, int8, uint8) as uint8, without a copy."""
    return stored.view(torch.uint8)


def as_stored(kind: StoredKind, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Codes and scales in the dtypes that a checkpoint file has for them, without a copy."""
    codes = blocks.codes.view(_CODE_TORCH[CODE_DTYPES[kind][0]])
    return codes, blocks.scales.view(torch.float8_e8m0fnu)


def row_pieces(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, in order, each of about a million elements and cut at a tile's edge."""
    step = max(_PIECE // max(columns, 1) // WEIGHT_TILE, 1) * WEIGHT_TILE
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def piece_scales(kind: StoredKind, scales: Tensor, start: int, stop: int) -> Tensor:
    """The scales of weight rows [start, stop), where start is a tile's edge."""
    if kind is StoredKind.FP8_TILES:
        return scales[start // WEIGHT_TILE : -(-stop // WEIGHT_TILE)]
    return scales[start:stop]


def quantise(kind: StoredKind, weight: Tensor) -> Blocks:
    """The stored bytes of a float weight (out, in), as uint8, on the weight's device.

    The scale of a tile or block is the smallest power of two under which its largest magnitude
    fits. Raises ValueError for a value that is not finite, and as `stored_shapes` does.
    """
    code_shape, scale_shape = stored_shapes(kind, tuple(weight.shape))
    codes = torch.empty(code_shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(scale_shape, dtype=torch.uint8, device=weight.device)
    for start, stop in row_pieces(*weight.shape):
        piece = weight[start:stop].to(torch.float32)
        if not piece.isfinite().all():
            raise ValueError("a value is not a finite float32 and cannot be quantised")
        blocks = _QUANTISE[kind](piece)
        codes[start:stop] = blocks.codes
        piece_scales(kind, scales, start, stop).copy_(blocks.scales)
    return Blocks(codes, scales)


def expand_piece(kind: StoredKind, codes: Tensor, scales: Tensor) -> Tensor:
    """float32 values (..., out, in) of stored bytes, exact; tiles take two axes."""
    if kind is StoredKind.FP8_TILES:
        return dequantise_fp8_weight(codes, scales)
    blocks = Blocks(codes, scales)
    return dequantise_q4x(blocks) if kind is StoredKind.MXFP4 else dequantise_q8(blocks)


def expand(kind: StoredKind, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values (out, in) of stored uint8 bytes in `dtype`, by rule: code times scale in float32, then
    one rounding, which only values outside the dtype's range need."""
    columns = codes.shape[1] * (2 if kind is StoredKind.MXFP4 else 1)
    values = torch.empty(codes.shape[0], columns, dtype=dtype, device=codes.device)
    expand_into(kind, codes, scales, values)
    return values


def expand_into(kind: StoredKind, codes: Tensor, scales: Tensor, target: Tensor) -> None:
    """Write the values of stored uint8 bytes over `target` (out, in), a float tensor that may be on
    another device, piece by piece; see `expand`."""
    for start, stop in row_pieces(*target.shape):
        piece = piece_scales(kind, scales, start, stop)
        target[start:stop] = expand_piece(kind, codes[start:stop], piece)


def has_nan_code(kind: StoredKind, codes: Tensor) -> bool:
    """Whether uint8 codes (out, in) have an E4M3 NaN (0x7f, 0xff); E2M1 has none."""
    if kind is StoredKind.MXFP4 or codes.numel() == 0:
        return False
    # Shifting the sign out leaves 0xfe for both, above every number's byte.
    return any(
        int((codes[start:stop] << 1).amax()) == 0xFE for start, stop in row_pieces(*codes.shape)
    )


def has_nan_scale(scales: Tensor) -> bool:
    """Whether uint8 scales have an E8M0 NaN (255)."""
    return scales.numel() > 0 and int(scales.amax()) == 255
