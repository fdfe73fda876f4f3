"""The torch types that `model.dtype` of a deployment names."""

from types import MappingProxyType

import torch

DTYPES = MappingProxyType(
    {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
)
