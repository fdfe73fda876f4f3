"""Filling a model that has no memory yet from the files of a checkpoint.

Owns where the memory comes from (allocated, or mapped from the files for Engram tables) and the
order of reading: file by file, weight by weight, so that beside the model at most one file is
resident. Quantised weights are expanded in pieces, or copied as bytes; NaN codes are refused. The
headers have been checked before.

Data flow: model without memory + stored tensors -> allocated -> filled.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from decodegrid.graphs.checkpoint_files import ShardReader, StoredTensor
from decodegrid.graphs.checkpoint_names import CheckpointError, TensorSlot, tensor_slots
from decodegrid.graphs.model import EngramTable, is_wide_parameter
from decodegrid.graphs.packed_modules import PackedModule, PackedTable
from decodegrid.graphs.quant_layout import (
    StoredKind,
    as_bytes,
    expand_into,
    has_nan_code,
    has_nan_scale,
    scale_name,
    stored_kind,
)


def allocate(
    model: nn.Module, device: torch.device, dtype: torch.dtype, mapped: Sequence[str] = ()
) -> None:
    """Give every parameter memory of its final dtype, and every packed module its bytes, without
    values. `mapped`: names of modules that get none."""
    wide = torch.promote_types(dtype, torch.float32)
    for path, module in model.named_modules():
        if path in mapped:
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            kept = wide if is_wide_parameter(f"{path}.{leaf}") else dtype
            empty = torch.empty(parameter.shape, dtype=kept, device=device)
            setattr(module, leaf, nn.Parameter(empty, requires_grad=False))
        if isinstance(module, PackedModule):
            for leaf, buffer in module.named_buffers(recurse=False):
                setattr(module, leaf, torch.empty_like(buffer, device=device))


def map_tables(model: nn.Module, stored: dict[str, StoredTensor], names: Sequence[str]) -> None:
    """Give the Engram tables `names` (modules of the model) views of their mapped files.

    No value is read, so NaN codes are not refused here; floats have the dtype of their file.
    """
    reader = ShardReader()
    for name in names:
        module = model.get_submodule(name)
        weight = stored[f"{name}.weight"]
        if isinstance(module, PackedTable):
            module.codes = as_bytes(reader.get(weight))
            module.scales = as_bytes(reader.get(stored[scale_name(f"{name}.weight")]))
        elif isinstance(module, EngramTable):
            module.weight = nn.Parameter(reader.get(weight), requires_grad=False)
        else:
            raise TypeError(f"{name} is {type(module).__name__}, no Engram table")


def fill(
    model: nn.Module,
    stored: dict[str, StoredTensor],
    *,
    quantized: bool,
    mapped: Sequence[str] = (),
    progress: bool = False,
) -> None:
    """Read every weight of the model into its memory, except for the `mapped` tables.

    progress: draw a bar over bytes on standard error. Raises CheckpointError for a file that cannot
    be read and for a quantised weight with a NaN.
    """
    skipped = {f"{name}.weight" for name in mapped}
    slots = [slot for slot in tensor_slots(model) if slot.name not in skipped]
    total = sum(stored[name].nbytes for slot in slots for name in _names(slot.name, quantized))
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=not progress) as bar:
        for slot, reader in by_file(slots, stored):
            _fill_slot(slot, stored, reader, quantized=quantized, advance=bar.update)


def _names(weight_name: str, quantized: bool) -> tuple[str, ...]:
    """Stored tensors of one weight."""
    if quantized and stored_kind(weight_name) is not StoredKind.FLOAT:
        return weight_name, scale_name(weight_name)
    return (weight_name,)


def by_file(
    slots: Sequence[TensorSlot], stored: dict[str, StoredTensor]
) -> Iterator[tuple[TensorSlot, ShardReader]]:
    """The slots ordered by the file of their weight, with a reader that maps this file, and another
    one only where a scale lies there."""
    files: dict[Path, list[TensorSlot]] = {}
    for slot in slots:
        files.setdefault(stored[slot.name].path, []).append(slot)
    for group in files.values():
        reader = ShardReader()
        for slot in group:
            yield slot, reader
        reader.close()


def read_quantised(
    name: str, stored: dict[str, StoredTensor], reader: ShardReader
) -> tuple[Tensor, Tensor]:
    """uint8 codes and scales of a quantised weight, as views of its file.

    Raises CheckpointError for a NaN among them.
    """
    weight, scale = stored[name], stored[scale_name(name)]
    codes, scales = as_bytes(reader.get(weight)), as_bytes(reader.get(scale))
    if has_nan_code(stored_kind(name), codes):
        raise CheckpointError(f"{weight.path}: tensor {name} has a NaN (code 0x7f or 0xff)")
    if has_nan_scale(scales):
        raise CheckpointError(f"{scale.path}: tensor {scale_name(name)} has a NaN (byte 255)")
    return codes, scales


def _fill_slot(
    slot: TensorSlot,
    stored: dict[str, StoredTensor],
    reader: ShardReader,
    *,
    quantized: bool,
    advance: Callable[[float], object],
) -> None:
    kind = stored_kind(slot.name) if quantized else StoredKind.FLOAT
    if kind is StoredKind.FLOAT:
        slot.target.copy_(reader.get(stored[slot.name]))
    else:
        codes, scales = read_quantised(slot.name, stored, reader)
        if slot.scales is None:
            expand_into(kind, codes, scales, slot.target)
        else:
            slot.target.copy_(codes)
            slot.scales.copy_(scales)
    advance(sum(stored[name].nbytes for name in _names(slot.name, quantized)))
