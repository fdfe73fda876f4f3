"""FlashMLA's sparse attention behind our ops.

Owns the ops `decodegrid_mla::*`: decode over cache records and prefill over gathered bfloat16 keys.
Does not own the records (`decodegrid.kernels.records`). Never imports the library.

Decode on Blackwell reads 528-byte window records and, beside them, 288-byte compressed records as
they are stored, with 64 or 128 heads of 512 channels. Hopper's kernels are the older ones
(`legacy`): 584-byte records in decode, bfloat16 keys in prefill. The schedule of a call is made by
the call itself, on the device, so that a capture records it: a schedule that was made before a
capture would go on with lengths of that time.

Source: FlashMLA, sgl-flash-mla 1.0.0.
"""

from types import ModuleType

import torch
from torch import Tensor

from decodegrid.kernels.providers.wrapper import (
    Wrapper,
    bind,
    define,
    expect,
    expect_that,
)

LIBRARY = torch.library.Library("decodegrid_mla", "FRAGMENT")

HEADS = (64, 128)
DIM = 512
WINDOW_BYTES, COMPRESSED_BYTES, HOPPER_BYTES = 528, 288, 584
INDEX_MULTIPLE = 64
"""Indices of a token come in multiples of this; those that are none are -1."""
LEGACY_PREFILL_MULTIPLE = 128


def index_columns(count: int, multiple: int = INDEX_MULTIPLE) -> int:
    """Columns that an index of `count` keys is padded to."""
    return -(-count // multiple) * multiple


def _check_decode(
    query: Tensor,
    window: Tensor,
    window_index: Tensor,
    window_length: Tensor | None,
    sink: Tensor,
    scale: float,
    extra: Tensor | None,
    extra_index: Tensor | None,
    extra_length: Tensor | None,
    legacy: bool,
) -> None:
    op = "sparse_decode"
    expect(op, "query", query, torch.bfloat16, (None, 1, None, DIM))
    tokens, heads = query.shape[0], query.shape[2]
    expect_that(heads in HEADS, op, f"{heads} heads; 64 or 128 are allowed, pad with zeros")
    expect(op, "sink", sink, torch.float32, (heads,))
    record = HOPPER_BYTES if legacy else WINDOW_BYTES
    expect(op, "window", window, torch.uint8, (None, None, 1, record))
    _check_index(op, "window", window_index, window_length, tokens)
    expect_that(
        (extra is None) == (extra_index is None), op, "extra keys and their index come together"
    )
    if extra is None or extra_index is None:
        return
    record = HOPPER_BYTES if legacy else COMPRESSED_BYTES
    expect(op, "extra", extra, torch.uint8, (None, None, 1, record))
    _check_index(op, "extra", extra_index, extra_length, tokens)


def _check_index(op: str, name: str, index: Tensor, length: Tensor | None, tokens: int) -> None:
    expect(op, f"{name}_index", index, torch.int32, (tokens, 1, None))
    columns = index.shape[2]
    expect_that(
        columns % INDEX_MULTIPLE == 0,
        op,
        f"{name}_index has {columns} columns; a multiple of {INDEX_MULTIPLE} is needed",
    )
    if length is not None:
        expect(op, f"{name}_length", length, torch.int32, (tokens,))


def _fake_decode(
    query: Tensor,
    window: Tensor,
    window_index: Tensor,
    window_length: Tensor | None,
    sink: Tensor,
    scale: float,
    extra: Tensor | None,
    extra_index: Tensor | None,
    extra_length: Tensor | None,
    legacy: bool,
) -> Tensor:
    return torch.empty_like(query)


def _call_decode(
    module: ModuleType,
    query: Tensor,
    window: Tensor,
    window_index: Tensor,
    window_length: Tensor | None,
    sink: Tensor,
    scale: float,
    extra: Tensor | None,
    extra_index: Tensor | None,
    extra_length: Tensor | None,
    legacy: bool,
) -> Tensor:
    options = {"use_legacy": True} if legacy else {}
    out: Tensor = module.flash_mla_with_kvcache(
        query,
        window,
        None,
        None,
        DIM,
        module.FlashMLASchedMeta(),
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=window_index,
        attn_sink=sink,
        extra_k_cache=extra,
        extra_indices_in_kvcache=extra_index,
        topk_length=window_length,
        extra_topk_length=extra_length,
        **options,
    )[0]
    return out


def _check_prefill(
    query: Tensor,
    keys: Tensor,
    index: Tensor,
    length: Tensor | None,
    sink: Tensor,
    scale: float,
    legacy: bool,
) -> None:
    op = "sparse_prefill"
    expect(op, "query", query, torch.bfloat16, (None, None, DIM))
    tokens, heads = query.shape[:2]
    expect_that(heads in HEADS, op, f"{heads} heads; 64 or 128 are allowed, pad with zeros")
    expect(op, "keys", keys, torch.bfloat16, (None, 1, DIM))
    expect(op, "index", index, torch.int32, (tokens, 1, None))
    multiple = LEGACY_PREFILL_MULTIPLE if legacy else INDEX_MULTIPLE
    expect_that(
        index.shape[2] % multiple == 0,
        op,
        f"index has {index.shape[2]} columns; a multiple of {multiple} is needed",
    )
    expect(op, "sink", sink, torch.float32, (heads,))
    if length is not None:
        expect(op, "length", length, torch.int32, (tokens,))


def _fake_prefill(
    query: Tensor,
    keys: Tensor,
    index: Tensor,
    length: Tensor | None,
    sink: Tensor,
    scale: float,
    legacy: bool,
) -> Tensor:
    return torch.empty_like(query)


def _call_prefill(
    module: ModuleType,
    query: Tensor,
    keys: Tensor,
    index: Tensor,
    length: Tensor | None,
    sink: Tensor,
    scale: float,
    legacy: bool,
) -> Tensor:
    options = {"use_legacy": True} if legacy else {}
    out: Tensor = module.flash_mla_sparse_fwd(
        query, keys, index, scale, DIM, attn_sink=sink, topk_length=length, **options
    )[0]
    return out


WRAPPERS = (
    Wrapper(
        "sparse_decode(Tensor query, Tensor window, Tensor window_index, Tensor? window_length, "
        "Tensor sink, float scale, Tensor? extra, Tensor? extra_index, Tensor? extra_length, "
        "bool legacy) -> Tensor",
        _check_decode, _call_decode, _fake_decode,
    ),
    Wrapper(
        "sparse_prefill(Tensor query, Tensor keys, Tensor index, Tensor? length, Tensor sink, "
        "float scale, bool legacy) -> Tensor",
        _check_prefill, _call_prefill, _fake_prefill,
    ),
)  # fmt: skip
"""Both return attention outputs in the query's shape, the sink in the denominator."""

define(LIBRARY, WRAPPERS)


def bind_library(module: ModuleType) -> None:
    """Make the probed module's calls the CUDA implementations of these ops."""
    bind(LIBRARY, WRAPPERS, module)
