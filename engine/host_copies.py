"""What crosses between the host and a step's static buffers, without one waiting for the other.

Owns the staging memory of both directions. A step's inputs are written while the step before may
still run, and its outputs are read while the next one may already overwrite them: on the CPU the
host works on the tensors themselves and copies what it reads, on another device both directions go
through pinned memory that is used again only when its last copy is done.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_STEPS_ON_THEIR_WAY = 2
"""Steps that are launched and not collected: one that runs, one behind it."""

Arrays = Mapping[str, NDArray[Any]]


class HostInput:
    """A small tensor that the host writes before a step."""

    __slots__ = ("_device_tensor", "_done", "_place", "_staging", "array")

    def __init__(self, tensor: Tensor) -> None:
        self._device_tensor = tensor
        self._staging: list[Tensor] = []
        self._done: list[torch.cuda.Event] = []
        self._place = 0
        source = tensor
        if tensor.device.type != "cpu":
            for _ in range(MAX_STEPS_ON_THEIR_WAY):
                self._staging.append(torch.zeros_like(tensor, device="cpu").pin_memory())
                self._done.append(torch.cuda.Event())
            source = self._staging[0]
        self.array: NDArray[Any] = source.numpy()
        """What the host fills before the next `push`; its old contents mean nothing after one."""

    def push(self) -> None:
        """Make what the host wrote visible to the steps launched from now on."""
        if not self._staging:
            return
        self._device_tensor.copy_(self._staging[self._place], non_blocking=True)
        self._done[self._place].record()
        self._place = (self._place + 1) % len(self._staging)
        # Waits for the copy from this memory alone, which was launched a step ago.
        self._done[self._place].synchronize()
        self.array = self._staging[self._place].numpy()


class PendingCopies(Protocol):
    """Copies of outputs that may still be under way."""

    def wait(self) -> Arrays:
        """The arrays, once the device has written them; the caller owns them."""
        ...


class _Copied:
    """Copies in the host's memory. They are looked at as late as those of another device."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def wait(self) -> Arrays:
        return {name: tensor.numpy() for name, tensor in self._tensors.items()}


class _Pinned:
    """One set of pinned copies, with the event behind the last of them."""

    __slots__ = ("_done", "_tensors")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {
            name: torch.zeros_like(tensor, device="cpu").pin_memory()
            for name, tensor in tensors.items()
        }
        self._done = torch.cuda.Event()

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor, non_blocking=True)
        self._done.record()

    def wait(self) -> Arrays:
        self._done.synchronize()
        return {name: np.array(tensor.numpy()) for name, tensor in self._tensors.items()}


class HostOutputs:
    """Tensors that the host reads after a step.

    A set of copies may be waited for until MAX_STEPS_ON_THEIR_WAY later ones were taken.
    """

    __slots__ = ("_pinned", "_place", "_tensors")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """tensors: all on one device."""
        self._tensors = dict(tensors)
        on_host = all(tensor.device.type == "cpu" for tensor in self._tensors.values())
        count = 0 if on_host else MAX_STEPS_ON_THEIR_WAY
        self._pinned = [_Pinned(self._tensors) for _ in range(count)]
        self._place = 0

    def take(self) -> PendingCopies:
        """Copy behind everything launched so far; does not wait on a device."""
        if not self._pinned:
            return _Copied(self._tensors)
        copies = self._pinned[self._place]
        self._place = (self._place + 1) % len(self._pinned)
        copies.take(self._tensors)
        return copies
