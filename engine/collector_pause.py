"""Starts without the passes of Python's cyclic collector.

Owns the pause. A start makes much and drops little, and every pass of the collector looks at all
that torch has made, which is more than all the rest.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Leave the cyclic collector off in the block; one that was off stays off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
