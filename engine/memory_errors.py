"""Want of memory, said so that a user can do something about it.

Owns the words: what was allocated, and which settings decide how large it is. Allocates nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.pool_size import pool_key
from decodegrid.graphs.state import Capacity


@contextmanager
def named_allocation(what: str) -> Iterator[None]:
    """Turn torch's want of memory into a ValueError.

    what: is allocated, with the settings that decide how large it is. Any other error passes.
    """
    try:
        yield
    except RuntimeError as error:
        # On the CPU torch has no class of its own for it.
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(
            error
        ):
            raise
        first_line = next(iter(str(error).splitlines()), "out of memory")
        raise ValueError(f"not enough memory for {what}: {first_line}") from error


def state_words(capacity: Capacity, deployment: DeploymentConfig | None) -> str:
    """The state that a capacity asks for, with the settings behind it; a capacity without a
    deployment was given its number of blocks."""
    blocks = capacity.num_blocks
    key = "cache.num_blocks" if deployment is None else pool_key(deployment, blocks)
    requests = f"scheduler.max_num_reqs = {capacity.num_slots - 1}"
    return f"a pool of {blocks} blocks ({key}) and {requests}"
