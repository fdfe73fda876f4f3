"""DeepSelect's top-k behind our op.

Owns the op `decodegrid_select::top_k`: the k largest logits of each row below its end, as positions
in ascending order. Blackwell alone. The kernel does not promise which of equal logits it takes, so
an engine whose choice must not depend on the card uses the TileLang kernel, which takes the lower.
Never imports the library.

Source: DeepSelect, tokenspeed-deepselect 1.0.0.
"""

from types import ModuleType

import torch
from torch import Tensor

from decodegrid.kernels.providers.wrapper import Wrapper, bind, define, expect, expect_that

LIBRARY = torch.library.Library("decodegrid_select", "FRAGMENT")

ROW_BYTES = 1024
OUT_ROW_BYTES = 32
MAX_K = 4096


def _check(logits: Tensor, ends: Tensor, out: Tensor) -> None:
    op = "top_k"
    expect(op, "logits", logits, (torch.bfloat16, torch.float32), (None, None))
    step = logits.stride(0) * logits.element_size()
    expect_that(
        logits.stride(1) == 1 and step % ROW_BYTES == 0,
        op,
        f"logits have strides {logits.stride()}; rows at multiples of {ROW_BYTES} bytes are needed",
    )
    expect(op, "ends", ends, torch.int32, (logits.shape[0],))
    expect(op, "out", out, torch.int32, (logits.shape[0], None))
    count, step = out.shape[1], out.stride(0) * out.element_size()
    expect_that(
        0 < count <= MAX_K and out.stride(1) == 1 and step % OUT_ROW_BYTES == 0,
        op,
        f"out has {count} columns and strides {out.stride()}; up to {MAX_K} are allowed, rows at "
        f"multiples of {OUT_ROW_BYTES} bytes",
    )


def _call(module: ModuleType, logits: Tensor, ends: Tensor, out: Tensor) -> None:
    module.topk(
        logits,
        out.shape[1],
        end=ends,
        indices_type=torch.int32,
        sorted_index=True,
        output_idx=out,
        idx_oob_fill_value=-1,
        return_value=False,
    )


WRAPPERS = (Wrapper("top_k(Tensor logits, Tensor ends, Tensor(a!) out) -> ()", _check, _call),)
"""Writes the positions of the largest logits below ends[t], -1 where there are fewer."""

define(LIBRARY, WRAPPERS)


def bind_library(module: ModuleType) -> None:
    """Make the probed module's call the CUDA implementation of this op."""
    bind(LIBRARY, WRAPPERS, module)
