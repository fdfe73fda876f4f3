"""How many blocks the pool gets, and the line that the start-up report says about the cache.

Owns the rules of `cache.num_blocks`, `cache.pool_bytes` and `cache.memory_fraction`. Does not
allocate, and measures memory only where a share of it is asked for.

Data flow: deployment, model config, free bytes -> whole blocks, the null block included.
"""

from dataclasses import dataclass

import torch

from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.compute_dtypes import DTYPES
from decodegrid.engine.free_memory import free_bytes
from decodegrid.graphs.cache_sizes import (
    block_bytes,
    record_sizes,
    state_sizes,
    token_bytes,
)
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import Capacity

_MIN_BLOCKS = 2
_SIGNIFICANT_BITS = 5


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The resolved size of the pool."""

    num_blocks: int
    """The null block included."""
    note: str
    """What the start-up report says beside it; empty for nothing."""


def size_pool(config: DeploymentConfig, model: ModelConfig, free: int | None) -> PoolSize:
    """The pool of a deployment: whole blocks within its limit, and no more than can be used.

    free: bytes that `cache.memory_fraction` is a share of. None where they are not known yet: the
    result is then the most that start-up may choose, and what is too small is found at start-up.
    A share of the free memory is rounded down to five significant bits, since captured code is made
    for one number of blocks and should be found again at the next start, when a little more or less
    is free. A pool may be too small for a request of `scheduler.max_model_len` tokens, which is
    refused when it comes. Raises ValueError for a limit that does not hold two blocks.
    """
    cache, most = config.cache, config.num_blocks
    if cache.pool_bytes:
        limit, key = int(cache.pool_bytes), f"cache.pool_bytes = {int(cache.pool_bytes)}"
    elif cache.memory_fraction and free is not None:
        limit = int(cache.memory_fraction * free)
        key = f"cache.memory_fraction = {cache.memory_fraction:g} of {free} free bytes"
    else:
        return PoolSize(most, "")
    records = record_sizes(model, cache.kv_cache, DTYPES[config.model.dtype])
    per_block = block_bytes(model, records, cache.block_size)
    if per_block == 0:  # a model of windows alone has nothing in its pool
        return PoolSize(most, "")
    num_blocks = limit // per_block
    if num_blocks < _MIN_BLOCKS:
        raise ValueError(
            f"{key} gives the pool {limit} bytes; a block of {cache.block_size} tokens takes "
            f"{per_block}, and the pool needs at least {_MIN_BLOCKS} of them (block 0 is the null "
            "block)"
        )
    if num_blocks < most and cache.memory_fraction:
        return PoolSize(_coarse(num_blocks), "")
    if num_blocks <= most:
        return PoolSize(num_blocks, "")
    return PoolSize(
        most,
        f"{key} has room for {num_blocks:,} blocks; scheduler.max_num_reqs = "
        f"{config.scheduler.max_num_reqs} requests of scheduler.max_model_len = "
        f"{config.scheduler.max_model_len} tokens can use {most:,}",
    )


def _coarse(value: int) -> int:
    """`value` less what its lower bits hold, under a sixteenth of it."""
    shift = max(0, value.bit_length() - _SIGNIFICANT_BITS)
    return value >> shift << shift


def resolve_num_blocks(config: DeploymentConfig, model: ModelConfig, free: int | None) -> int:
    """Blocks of the pool, the null block included; see `size_pool`."""
    return size_pool(config, model, free).num_blocks


def pool_key(config: DeploymentConfig, num_blocks: int) -> str:
    """The setting that decides that a pool has `num_blocks` blocks."""
    cache = config.cache
    if cache.num_blocks:
        return "cache.num_blocks"
    if num_blocks == config.num_blocks:  # what the requests can use, whatever the limit
        return f"scheduler.max_model_len = {config.scheduler.max_model_len}"
    return "cache.pool_bytes" if cache.pool_bytes else "cache.memory_fraction"


def measure_free_bytes(config: DeploymentConfig) -> int | None:
    """Free bytes of the deployment's device if its pool is a share of them, else None."""
    return free_bytes(config.model.device) if config.cache.memory_fraction else None


def cache_line(model: ModelConfig, capacity: Capacity, dtype: torch.dtype) -> str:
    """What the start-up report says of the cache: its size, what it holds, for how many."""
    sizes = state_sizes(model, capacity, dtype)
    per_token = token_bytes(model, record_sizes(model, capacity.kv_cache, dtype))
    return (
        f"cache: {capacity.num_blocks:,} blocks of {capacity.block_size} tokens, "
        f"{sizes.pools / 2**20:,.1f} MiB ({capacity.kv_cache}: {_plain(per_token)} bytes a token, "
        f"{sizes.request:,} a request); max concurrency at {capacity.max_model_len} tokens: "
        f"{max_concurrency(capacity):.1f}"
    )


def max_concurrency(capacity: Capacity) -> float:
    """Requests of the largest length that the pool and the slots can hold at once."""
    in_pool = (capacity.num_blocks - 1) / capacity.max_blocks_per_slot
    return min(float(capacity.num_slots - 1), in_pool)


def _plain(value: float) -> str:
    """A number of bytes with thousands marked, and half a byte only where there is one."""
    return f"{value:,.1f}".removesuffix(".0")
