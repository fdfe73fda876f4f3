"""Packed weights in the layouts that a device's kernels read, once at start.

Owns the walk over a step's weights: every packed matrix and every pair of packed experts goes
through the forms of the device, float weights and tables stay. What the forms do is not its
business (`decodegrid.kernels.providers.cuda_step`).

Data flow: `StepWeights` as a quantised checkpoint stores them -> `StepWeights` of equal values.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from decodegrid.graphs.step_weights import MATRICES, MoEWeights, StepWeights
from decodegrid.kernels.step_kernels import WeightForms


def lay_out_weights(weights: StepWeights, forms: WeightForms) -> StepWeights:
    """The weights with every packed one in the device's form."""
    found: StepWeights = _lay_out(weights, forms)
    return found


def _lay_out(part: Any, forms: WeightForms) -> Any:
    changes: dict[str, Any] = {}
    for item in fields(part):
        value = getattr(part, item.name)
        if isinstance(value, tuple):
            changes[item.name] = tuple(_lay_out(inner, forms) for inner in value)
        elif is_dataclass(value):
            changes[item.name] = _lay_out(value, forms)
        elif isinstance(value, list) and item.name in MATRICES and item.name not in ("w13", "w2"):
            changes[item.name] = forms.matrix(value)
    if isinstance(part, MoEWeights) and isinstance(part.w13, list) and isinstance(part.w2, list):
        changes["w13"], changes["w2"] = forms.experts(part.w13, part.w2)
    return replace(part, **changes)
