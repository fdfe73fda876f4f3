"""Packed weights in the layouts that a device's kernels read, once at start.

Owns the walk over a step's weights: every packed matrix and every pair of packed experts goes
through the forms of the device, float weights and tables stay. What the forms do is not its
business (`decodegrid.kernels.providers.cuda_step`).

Memory: the packed matrices are taken over. Each list is emptied as soon as its new form is made, so
that of all weights one matrix, or the experts of one layer, is held twice at a time.

Data flow: `StepWeights` as a quantised checkpoint stores them -> `StepWeights` of equal values.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from decodegrid.graphs.step_weights import MATRICES, MoEWeights, StepWeights
from decodegrid.kernels.products import Matrix
from decodegrid.kernels.step_kernels import WeightForms


def lay_out_weights(weights: StepWeights, forms: WeightForms) -> StepWeights:
    """The weights with every packed one in the device's form; the given ones are used up."""
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
            changes[item.name] = form = forms.matrix(value)
            _use_up(value, form)
    if isinstance(part, MoEWeights) and isinstance(part.w13, list) and isinstance(part.w2, list):
        first, second = forms.experts(part.w13, part.w2)
        changes["w13"], changes["w2"] = first, second
        _use_up(part.w13, first)
        _use_up(part.w2, second)
    return replace(part, **changes)


def _use_up(old: list[Tensor], new: Matrix) -> None:
    if new is not old:
        old.clear()
