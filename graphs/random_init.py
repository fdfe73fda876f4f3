"""Random weights of sensible scale, for tests and benches.

Owns how each kind of parameter is drawn, such that every part of the model has an effect: norms
around 1, sinks and biases away from zero, mHC scales and bases that leave the mixers far from
uniform. Not an initialisation for training.

Data flow: (model, seed) -> parameters overwritten in place, the same values on every machine and
for every dtype up to rounding.
"""

import torch
from torch import Tensor

from decodegrid.graphs.drafter import DraftModel


def randomise(model: DraftModel, seed: int) -> None:
    """Overwrite all parameters of `model` with values that depend on `seed` and their order."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter.shape, generator))


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    leaf = name.rsplit(".", 1)[-1]
    if leaf.endswith("_scale"):
        return 0.1 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)
    if leaf.endswith("_base") or leaf == "attn_sink":
        return noise
    if leaf in ("bias", "bias_vl"):
        # Below the spread of the router's scores, so that the input still decides.
        return 0.1 * noise
    if leaf in ("q_weight", "k_weight") or len(shape) == 1:
        return 1.0 + 0.1 * noise
    if name.endswith("embed.weight"):
        return noise
    return noise * shape[-1] ** -0.5
