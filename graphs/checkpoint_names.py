"""Which tensors a checkpoint holds, and where each one lies in the model.

Owns the Hugging Face tensor names of DeepSeek-V4.1 (experts one by one, where the model stacks
them), the dtypes in which each may be stored, and the error class. Opens no file.

Data flow: model -> one `TensorSlot` per stored tensor, a view of the parameter it fills.

Source: safetensors inventory of deepseek-ai/DeepSeek-V4.1-Flash.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decodegrid.graphs.model import is_wide_parameter

FLOAT_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""Stored dtypes that this version reads and writes, by their safetensors name."""

_EXPERTS = re.compile(r"(.+\.ffn\.experts)\.(w1|w2|w3)")
_VISION = re.compile(r"(vision\.|aligner\.).+|image_(start|end|newline)")


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be read: names the file, and the tensor if it is one."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One stored tensor and its place in the model."""

    name: str
    """As in the checkpoint, without the optional `model.` prefix."""
    target: Tensor
    """A parameter, or one expert's part of a stacked parameter; writing it fills the model."""
    is_wide: bool
    """Stored in float32 at least."""

    def allows(self, stored: str) -> bool:
        """Whether the safetensors dtype `stored` may hold this tensor."""
        return stored in FLOAT_DTYPES and not (self.is_wide and stored == "BF16")


def tensor_slots(model: nn.Module) -> list[TensorSlot]:
    """All tensors of the model's checkpoint, in the order of the model's parameters."""
    slots = []
    for name, parameter in model.named_parameters():
        stacked = _EXPERTS.fullmatch(name)
        if stacked is None:
            slots.append(TensorSlot(name, parameter.detach(), is_wide_parameter(name)))
            continue
        parent, leaf = stacked.groups()
        for expert, part in enumerate(parameter.detach()):
            slots.append(TensorSlot(f"{parent}.{expert}.{leaf}.weight", part, is_wide=False))
    return slots


def is_vision_tensor(name: str) -> bool:
    """Whether `name` belongs to the image path, whose tensors a text engine leaves unread."""
    return _VISION.fullmatch(name) is not None


def plain_name(name: str) -> str:
    """`name` without the optional `model.` prefix."""
    return name.removeprefix("model.")
