"""Which tensors a checkpoint holds, and where each one lies in the model.

Owns the Hugging Face tensor names of DeepSeek-V4.1 (experts one by one, where the model stacks
them), the float dtypes that are read, and the error class. Opens no file.

Data flow: model -> one `TensorSlot` per stored weight, a view of what it fills.

Source: safetensors inventory of deepseek-ai/DeepSeek-V4.1-Flash.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decodegrid.graphs.model import is_wide_parameter
from decodegrid.graphs.packed_modules import PackedExperts, PackedLinear, PackedTable

FLOAT_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""Stored dtypes of floats that this version reads and writes, by their safetensors name."""

_EXPERTS = re.compile(r"(.+\.ffn\.experts)\.(w1|w2|w3)")
_VISION = re.compile(r"(vision\.|aligner\.).+|image_(start|end|newline)")


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be read: names the file, and the tensor if it is one."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One stored weight and its place in the model."""

    name: str
    """As in the checkpoint, without the optional `model.` prefix."""
    target: Tensor
    """A parameter, or one expert's part of a stacked parameter; writing it fills the model. In a
    packed module the uint8 codes."""
    is_wide: bool
    """Stored in float32 at least."""
    scales: Tensor | None = None
    """The uint8 scales of a packed module; None for floats."""


def tensor_slots(model: nn.Module) -> list[TensorSlot]:
    """All weights of the model's checkpoint, in the order of the model's parameters."""
    slots = []
    for path, module in model.named_modules():
        if isinstance(module, PackedExperts):
            slots += _packed_expert_slots(path, module)
        elif isinstance(module, PackedLinear | PackedTable):
            slots.append(TensorSlot(f"{path}.weight", module.codes, False, module.scales))
        for leaf, parameter in module.named_parameters(recurse=False):
            slots += _float_slots(f"{path}.{leaf}" if path else leaf, parameter.detach())
    return slots


def _float_slots(name: str, parameter: Tensor) -> list[TensorSlot]:
    stacked = _EXPERTS.fullmatch(name)
    if stacked is None:
        return [TensorSlot(name, parameter, is_wide_parameter(name))]
    parent, leaf = stacked.groups()
    return [
        TensorSlot(f"{parent}.{expert}.{leaf}.weight", part, is_wide=False)
        for expert, part in enumerate(parameter)
    ]


def _packed_expert_slots(path: str, experts: PackedExperts) -> list[TensorSlot]:
    slots = []
    for leaf in ("w1", "w3", "w2"):
        codes, scales = getattr(experts, f"{leaf}_codes"), getattr(experts, f"{leaf}_scales")
        for expert, pair in enumerate(zip(codes, scales, strict=True)):
            slots.append(TensorSlot(f"{path}.{expert}.{leaf}.weight", pair[0], False, pair[1]))
    return slots


def is_vision_tensor(name: str) -> bool:
    """Whether `name` belongs to the image path, whose tensors a text engine leaves unread."""
    return _VISION.fullmatch(name) is not None


def plain_name(name: str) -> str:
    """`name` without the optional `model.` prefix."""
    return name.removeprefix("model.")
