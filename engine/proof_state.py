"""The rows of state that the requests of a proof own, and everything else in state and buffers.

Owns which rows those are, how they are kept and put back, the poison for all the rest, and the
check that the poison is still there, which serves as the checksum of what a step must not touch.
Holds copies of owned rows alone: a pool may fill the device.

Data flow: slots and their blocks -> OwnedRows of every state tensor -> save, load, poison, touched.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from decodegrid.graphs.state import DecodeState
from decodegrid.graphs.step_buffers import StepBuffers
from decodegrid.graphs.target_step import StepModel

POISONS = (2**61, -1)
"""What integers of pads are filled with: far outside every table, and a length that is none."""

CONSTANTS = frozenset({"draft_steps"})
"""Buffers that no step writes and every step reads."""

_ROWS_AT_ONCE = 1 << 16
"""Rows that are compared at a time, so that the comparison needs little memory."""


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """How the rows of one state tensor belong to slots or to blocks."""

    name: str
    tensor: Tensor
    per_slot: int
    """Rows of each slot, slot after slot; 0 where rows belong to blocks, or to nobody."""
    per_block: int
    """Rows of each block; 0 where rows belong to slots, or to nobody."""

    def rows(self, slot: int, blocks: Sequence[int]) -> Iterator[int]:
        """Rows of one request."""
        yield from range(slot * self.per_slot, (slot + 1) * self.per_slot)
        for block in blocks if self.per_block else ():
            yield from range(block * self.per_block, (block + 1) * self.per_block)


def row_places(model: StepModel) -> Iterator[RowPlaces]:
    """Every state tensor that has rows of requests, with its rows' owners."""
    state: DecodeState = model.state
    for name, tensor in state.tensors():
        kind, *rest = name.split(".")
        per_slot, per_block = 1, 0
        if kind == "window_rings":
            per_slot = state.ring_len
        elif kind == "pools":
            ratio = model.config.compress_ratios[int(rest[0])]
            if rest[1] != "compressor":
                per_slot, per_block = 0, state.capacity.block_size // ratio
            else:
                # A source of ratio 1 has no compressor state; two rows stand for it.
                per_slot = state.compressor_len if ratio > 1 else 0
        if tensor.numel():
            yield RowPlaces(name, tensor, per_slot, per_block)


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Rows of one state tensor that some requests own."""

    name: str
    tensor: Tensor
    index: Tensor
    """(rows,) int64 on the tensor's device."""
    owner: Tensor
    """(rows,) int64 on the CPU: which of the requests each row belongs to, counted from 0."""
    spared: int
    """Leading rows of the null slot or the null block, which any step may write."""


class LiveState:
    """State that some requests own, by their slots and blocks.

    Args:
        model: whose state it is.
        slots: one for each request, above 0, all different.
        blocks: of each request, above 0, all different.
    """

    def __init__(
        self, model: StepModel, slots: Sequence[int], blocks: Sequence[Sequence[int]]
    ) -> None:
        self.parts: list[OwnedRows] = []
        for places in row_places(model):
            index: list[int] = []
            owner: list[int] = []
            for request, (slot, own) in enumerate(zip(slots, blocks, strict=True)):
                rows = list(places.rows(slot, own))
                index += rows
                owner += [request] * len(rows)
            self.parts.append(
                OwnedRows(
                    places.name,
                    places.tensor,
                    torch.tensor(index, dtype=torch.int64, device=places.tensor.device),
                    torch.tensor(owner, dtype=torch.int64),
                    max(places.per_slot, places.per_block),
                )
            )

    def save(self) -> list[Tensor]:
        """Copies of the owned rows, in the order of `parts`."""
        return [part.tensor[part.index] for part in self.parts]

    def load(self, saved: Sequence[Tensor]) -> None:
        """Write the owned rows back."""
        for part, rows in zip(self.parts, saved, strict=True):
            part.tensor[part.index] = rows

    def poison(self, value: int) -> None:
        """Overwrite every row that is not owned, the null slot and the null block included."""
        for part, rows in zip(self.parts, self.save(), strict=True):
            poison(part.tensor, value)
            part.tensor[part.index] = rows

    def clear(self) -> None:
        """Put zeros where the poison was, so that a run from here is one without poison."""
        for part, rows in zip(self.parts, self.save(), strict=True):
            part.tensor.zero_()
            part.tensor[part.index] = rows

    def touched(self, value: int) -> list[str]:
        """Tensors in which a row is not as `poison(value)` left it, though no request of these owns
        it and it is no null row."""
        found = []
        for part in self.parts:
            allowed = torch.zeros(part.tensor.shape[0], dtype=torch.bool, device=part.tensor.device)
            allowed[part.index] = True
            allowed[: part.spared] = True
            if bool((_changed_rows(part.tensor, value) & ~allowed).any()):
                found.append(part.name)
        return found


def poison_value(dtype: torch.dtype, value: int) -> float | int | bool:
    """What a tensor of that dtype is poisoned with: NaN, code 255 of a record (NaN as a number and
    as a scale), `value` as far as the dtype goes, or True for a large one."""
    if dtype.is_floating_point:
        return math.nan
    if dtype == torch.uint8:
        return 255
    if dtype == torch.bool:
        return value > 0
    limits = torch.iinfo(dtype)
    return min(max(value, limits.min), limits.max)


def poison(tensor: Tensor, value: int) -> None:
    """Fill a tensor with poison."""
    tensor.fill_(poison_value(tensor.dtype, value))


def _changed_rows(tensor: Tensor, value: int) -> Tensor:
    """(rows,) bool: which rows hold anything but poison."""
    wanted, found = poison_value(tensor.dtype, value), []
    for start in range(0, tensor.shape[0], _ROWS_AT_ONCE):
        part = tensor[start : start + _ROWS_AT_ONCE]
        changed = ~part.isnan() if part.is_floating_point() else part != wanted
        found.append(changed.reshape(part.shape[0], -1).any(1))
    return torch.cat(found)


def buffer_tensors(buffers: StepBuffers) -> Iterator[tuple[str, Tensor]]:
    """Every buffer with its name, constants apart."""
    yield from _tensors(buffers, "")


def _tensors(part: object, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield prefix, part
    elif isinstance(part, tuple):
        for index, item in enumerate(part):
            yield from _tensors(item, f"{prefix}.{index}")
    elif is_dataclass(part):
        for item in fields(part):
            if item.name not in CONSTANTS:
                name = f"{prefix}.{item.name}" if prefix else item.name
                yield from _tensors(getattr(part, item.name), name)
