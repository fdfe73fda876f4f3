"""DeepGEMM's index logits behind our ops.

Owns the ops `decodegrid_index::*`: the schedule of a batch, logits over paged index keys for decode
and over gathered ones for prefill. Blackwell takes FP4 queries and keys (68 bytes an entry, each
page's codes before its scales) and one request id per token; Hopper takes FP8 keys (132 bytes) with
float32 scales, no ids, and has the queries' scales in the weights. Never imports the library.

Logits past a token's length are garbage: what reads them masks by length. All metadata is made on
the device, so it belongs into the graph.

Source: DeepGEMM, sgl-deep-gemm 0.2.2 and 0.2.5.
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

LIBRARY = torch.library.Library("decodegrid_index", "FRAGMENT")

FP4_ENTRY_BYTES = 64 + 4
FP8_ENTRY_BYTES = 128 + 4
PAGES = {FP4_ENTRY_BYTES: (32, 64, 128), FP8_ENTRY_BYTES: (64,)}
"""Entries of a page that the kernels take, by the bytes of an entry."""
LOGIT_COLUMNS = 512
"""Row stride of the logits is a multiple of this many bfloat16: 1024 bytes."""


def logit_columns(max_length: int) -> int:
    """Columns that rows of logits are allocated with."""
    return -(-max_length // LOGIT_COLUMNS) * LOGIT_COLUMNS


def _check_schedule(lengths: Tensor, page: int, num_sms: int, request: Tensor | None) -> None:
    op = "schedule"
    expect(op, "lengths", lengths, torch.int32, (None, 1))
    expect_that(num_sms > 0, op, f"num_sms is {num_sms}")
    expect_that(page in (32, 64, 128), op, f"a page has {page} entries; 32, 64 or 128 are allowed")
    if request is not None:
        expect(op, "request", request, torch.int32, (lengths.shape[0],))


def _fake_schedule(lengths: Tensor, page: int, num_sms: int, request: Tensor | None) -> Tensor:
    return lengths.new_empty((num_sms + 1, 2))


def _call_schedule(
    module: ModuleType, lengths: Tensor, page: int, num_sms: int, request: Tensor | None
) -> Tensor:
    if request is None:
        found: Tensor = module.get_paged_mqa_logits_metadata(lengths, page, num_sms)
    else:
        found = module.get_paged_mqa_logits_metadata(lengths, page, num_sms, indices=request)
    return found


def _check_logits(
    query: Tensor,
    query_scales: Tensor | None,
    pages: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    schedule: Tensor,
    request: Tensor | None,
    max_length: int,
) -> None:
    op, width = "paged_logits", pages.shape[-1]
    expect(op, "pages", pages, torch.uint8, (None, None, 1, None))
    expect_that(
        pages.shape[1] in PAGES.get(width, ()),
        op,
        f"pages of {pages.shape[1]} entries of {width} bytes; {PAGES} are allowed",
    )
    tokens, heads = query.shape[0], query.shape[2]
    if width == FP4_ENTRY_BYTES:
        expect(op, "query", query, torch.int8, (None, 1, None, 64))
        expect_that(query_scales is not None, op, "FP4 queries need their scales")
        expect_that(request is not None, op, "FP4 keys need the request of each token")
        if query_scales is not None:
            expect(op, "query_scales", query_scales, torch.int32, (tokens, 1, heads))
        if request is not None:
            expect(op, "request", request, torch.int32, (tokens,))
        expect(op, "weights", weights, torch.bfloat16, (tokens, heads))
    else:
        expect(op, "query", query, torch.float8_e4m3fn, (None, 1, None, 128))
        expect_that(query_scales is None, op, "FP8 queries have their scales in the weights")
        expect_that(request is None, op, "Hopper's kernel takes no request ids")
        expect(op, "weights", weights, torch.float32, (tokens, heads))
    expect(op, "lengths", lengths, torch.int32, (tokens, 1))
    expect(op, "block_table", block_table, torch.int32, (None, None))
    expect(op, "schedule", schedule, torch.int32, (None, 2))
    expect_that(max_length > 0, op, f"max_length is {max_length}")


def logits_dtype(entry_bytes: int) -> torch.dtype:
    """What the kernels of a key format write: bfloat16 on Blackwell, float32 on Hopper."""
    return torch.bfloat16 if entry_bytes == FP4_ENTRY_BYTES else torch.float32


def _fake_logits(
    query: Tensor,
    query_scales: Tensor | None,
    pages: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    schedule: Tensor,
    request: Tensor | None,
    max_length: int,
) -> Tensor:
    dtype, columns = logits_dtype(pages.shape[-1]), logit_columns(max_length)
    return query.new_empty_strided((query.shape[0], max_length), (columns, 1), dtype=dtype)


def _call_logits(
    module: ModuleType,
    query: Tensor,
    query_scales: Tensor | None,
    pages: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    schedule: Tensor,
    request: Tensor | None,
    max_length: int,
) -> Tensor:
    # What an argument of 0.2.2 chose, 0.2.5 has settled; both are called alike.
    found: Tensor = module.fp8_fp4_paged_mqa_logits(
        (query, query_scales),
        pages,
        weights,
        lengths,
        block_table,
        schedule,
        max_length,
        indices=request,
    )
    return found.to(logits_dtype(pages.shape[-1]))


def _check_gathered(
    query: Tensor,
    query_scales: Tensor | None,
    keys: Tensor,
    key_scales: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    max_length: int,
) -> None:
    op, (tokens, heads) = "gathered_logits", query.shape[:2]
    if query_scales is None:
        expect(op, "query", query, torch.float8_e4m3fn, (None, None, 128))
        expect(op, "keys", keys, torch.float8_e4m3fn, (None, 128))
        expect(op, "key_scales", key_scales, torch.float32, (keys.shape[0],))
    else:
        expect(op, "query", query, torch.int8, (None, None, 64))
        expect(op, "query_scales", query_scales, torch.int32, (tokens, heads))
        expect(op, "keys", keys, torch.int8, (None, 64))
        expect(op, "key_scales", key_scales, torch.int32, (keys.shape[0],))
    expect(op, "weights", weights, (torch.float32, torch.bfloat16), (tokens, heads))
    for name, bound in (("starts", starts), ("ends", ends)):
        expect(op, name, bound, torch.int32, (tokens,))
    expect_that(max_length > 0, op, f"max_length is {max_length}")


def _fake_gathered(
    query: Tensor,
    query_scales: Tensor | None,
    keys: Tensor,
    key_scales: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    max_length: int,
) -> Tensor:
    return query.new_empty((query.shape[0], max_length), dtype=torch.float32)


def _call_gathered(
    module: ModuleType,
    query: Tensor,
    query_scales: Tensor | None,
    keys: Tensor,
    key_scales: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    max_length: int,
) -> Tensor:
    found: Tensor = module.fp8_fp4_mqa_logits(
        (query, query_scales), (keys, key_scales), weights, starts, ends, max_seqlen_k=max_length
    )
    return found.to(torch.float32)


WRAPPERS = (
    Wrapper(
        "schedule(Tensor lengths, int page, int num_sms, Tensor? request) -> Tensor",
        _check_schedule, _call_schedule, _fake_schedule,
    ),
    Wrapper(
        "paged_logits(Tensor query, Tensor? query_scales, Tensor pages, Tensor weights, "
        "Tensor lengths, Tensor block_table, Tensor schedule, Tensor? request, int max_length) "
        "-> Tensor",
        _check_logits, _call_logits, _fake_logits,
    ),
    Wrapper(
        "gathered_logits(Tensor query, Tensor? query_scales, Tensor keys, Tensor key_scales, "
        "Tensor weights, Tensor starts, Tensor ends, int max_length) -> Tensor",
        _check_gathered, _call_gathered, _fake_gathered,
    ),
)  # fmt: skip
"""schedule: (num_sms + 1, 2) int32 parts of work; paged_logits: (T, max_length), rows padded to
1024 bytes; gathered_logits: (T, max_length) of keys starts[t] .. ends[t] - 1, moved to the left."""

define(LIBRARY, WRAPPERS)


def bind_library(module: ModuleType) -> None:
    """Make the probed module's calls the CUDA implementations of these ops."""
    bind(LIBRARY, WRAPPERS, module)
