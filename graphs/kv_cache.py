"""How keys are kept: in the model's dtype, or as the released model's cache records.

Owns the one place that knows which. A `KeyCodec` is what the regions of a step write and read
rings and pools with; its `round` is what the uncached forward applies at the same places, so that
both see the same keys. Formats by place: window keys and all of the drafter's keys Q8, compressed
keys (after their rotation) Q4N, index keys and index queries Q4X.

Source: DeepSeek-V4.1-Flash `inference/model.py`; DeepInfer's cache engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.kernels.records import CHANNEL_MULTIPLE, RecordFormat, record_bytes
from decodegrid.kernels.step_kernels import OPS, PLAIN, StepKernels, Store

KvCache = Literal["compute", "v41"]
"""`compute`: keys in the model's dtype. `v41`: records of FP8 and FP4 codes."""

Rounding = Callable[[Tensor, int], Tensor]
"""Values (..., dim) and a RecordFormat -> the values as they read once they were stored."""


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of `table` at `index`, zeros where the index is -1; never reads a masked row."""
    rows = table[index.clamp(min=0)]
    zero = torch.zeros((), dtype=table.dtype, device=table.device)
    return rows.where((index >= 0).unsqueeze(-1), zero)


def keep_values(x: Tensor, format: int) -> Tensor:
    """The rounding of a cache in the model's dtype: none."""
    return x


def _take_values(rows: Tensor, index: Tensor, format: int, dim: int, dtype: torch.dtype) -> Tensor:
    return take_rows(rows, index)


@dataclass(frozen=True, slots=True)
class KeyCodec:
    """Between keys (..., dim) and the rows of rings and pools."""

    encode: Rounding
    """Keys, format -> rows to store, (..., columns)."""
    take: Callable[[Tensor, Tensor, int, int, torch.dtype], Tensor]
    """Stored rows, index (T, N), format, dim, dtype -> keys (T, N, dim), zeros where it is -1."""
    round: Rounding
    """Of what is read without being stored."""
    store: Store
    """Rows written, index (T,), keys (T, dim), format."""


def _store_encoded(encode: Rounding) -> Store:
    def store(rows: Tensor, index: Tensor, keys: Tensor, format: int) -> None:
        rows[index] = encode(keys, format)

    return store


def step_codec(kv_cache: KvCache, kernels: StepKernels) -> KeyCodec:
    """The codec of a deployment's steps, with these kernels."""
    if kv_cache == "compute":
        return KeyCodec(keep_values, _take_values, keep_values, _store_encoded(keep_values))
    store = _store_encoded(kernels.encode) if kernels.store is None else kernels.store
    return KeyCodec(kernels.encode, kernels.take, kernels.round, store)


def key_codec(kv_cache: KvCache, *, as_ops: bool) -> KeyCodec:
    """The codec of a deployment; `as_ops` calls native ops if any."""
    return step_codec(kv_cache, OPS if as_ops else PLAIN)


def key_columns(kv_cache: KvCache, format: RecordFormat, dim: int) -> int:
    """Columns of a ring or pool of keys with `dim` channels."""
    return dim if kv_cache == "compute" else record_bytes(format, dim)


def key_dtype(kv_cache: KvCache, dtype: torch.dtype) -> torch.dtype:
    """Dtype of rings and pools of a model in `dtype`."""
    return dtype if kv_cache == "compute" else torch.uint8


def check_channels(config: ModelConfig, kv_cache: KvCache) -> None:
    """Raise ValueError where keys of this model do not fill whole blocks of the records."""
    if kv_cache == "compute":
        return
    dims = {"head_dim": config.head_dim}
    if config.kv_source_layer_ids:
        dims["index_head_dim"] = config.index_head_dim
    for name, dim in dims.items():
        if dim % CHANNEL_MULTIPLE:
            raise ValueError(
                f"cache.kv_cache is {kv_cache}, whose records need a {name} that is a multiple of "
                f"{CHANNEL_MULTIPLE}; the checkpoint's {name} is {dim}"
            )
