"""Windows of finished texts on the device: copies of what the rings of a slot held at a boundary.

Owns the snapshot store, one tensor a window ring of the state, and the copies between it and the
rings. Knows neither requests nor which snapshot means what (engine/prefix_cache.py does).

Of the state that a later step reads, only windows depend on the slot. Entries and index keys lie in
blocks; a compressor ring holds half of an open pair, and there is none at a boundary, since blocks
cover an even number of positions; the tokens before a position come from the request.
Source: DeepInfer's prefix store keeps the same windows (of its encoder; here of every layer).
"""

import torch
from torch import Tensor

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import DecodeState

STEPS_ON_THEIR_WAY = 3
"""Steps whose tokens the host may not know when it asks for a copy, those it dropped included."""


def window_slack(block_size: int, num_draft_tokens: int) -> int:
    """Extra positions of a ring with which the window before the last block boundary can always be
    copied, whatever part of the block and of steps on their way was written behind it."""
    return block_size + STEPS_ON_THEIR_WAY * (num_draft_tokens + 1)


class WindowSnapshots:
    """Room for `num_snapshots` windows of all layers, the drafter's included."""

    def __init__(self, config: ModelConfig, state: DecodeState, num_snapshots: int) -> None:
        """Allocates on the state's device, in the rings' dtype.

        Raises ValueError for rings without the slack that save() relies on.
        """
        capacity = state.capacity
        needed = window_slack(capacity.block_size, capacity.num_draft_tokens)
        if capacity.window_slack < needed:
            raise ValueError(
                f"window_slack is {capacity.window_slack}; snapshots at boundaries of "
                f"{capacity.block_size} tokens need {needed}"
            )
        self.num_snapshots = num_snapshots
        self._window = config.sliding_window
        self._ring_len = state.ring_len
        self._rings = state.window_rings
        self._stores = tuple(
            ring.new_zeros(num_snapshots, self._window, ring.shape[1]) for ring in self._rings
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the store."""
        return sum(store.nbytes for store in self._stores)

    def note(self) -> str:
        """The line that the start-up report says about it."""
        return f"prefix cache: {self.num_snapshots} windows, {self.num_bytes / 2**20:,.1f} MiB"

    def save(self, slot: int, snapshot: int, position: int) -> None:
        """Copy the window before `position` out of the slot's rings; reads nothing from the device.

        Rows of positions before the start of the text are copied as they are; nobody reads them.
        """
        rows = self._rows(slot, position)
        for ring, store in zip(self._rings, self._stores, strict=True):
            torch.index_select(ring, 0, rows, out=store[snapshot])

    def load(self, slot: int, snapshot: int, position: int) -> None:
        """Write a snapshot saved at `position` to the slot's rings."""
        rows = self._rows(slot, position)
        for ring, store in zip(self._rings, self._stores, strict=True):
            ring.index_copy_(0, rows, store[snapshot])

    def _rows(self, slot: int, position: int) -> Tensor:
        """(window,) ring rows of the positions before `position`, oldest first."""
        device = self._rings[0].device
        positions = torch.arange(position - self._window, position, device=device)
        return positions.remainder_(self._ring_len).add_(slot * self._ring_len)
