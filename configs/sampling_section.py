"""The `sampling` section of a deployment: how the command line and open requests sample.

Owns the names, bounds and defaults of its fields. Reads no file and no environment.
"""

from typing import Annotated

from pydantic import AfterValidator, Field

from decodegrid.configs.sections import Section


def _check_top_k(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 (all tokens) or at least 1")
    return value


def _check_temperature(value: float) -> float:
    if value != 0 and not 1e-5 <= value <= 100.0:
        raise ValueError("must be 0 (greedy) or 1e-05 to 100")
    return value


class SamplingSection(Section):
    """What the command line samples with where its flags say nothing."""

    temperature: Annotated[float, AfterValidator(_check_temperature)] = 0.7
    """Divides the logits, 1e-5 to 100; 0 takes the most probable token."""

    max_tokens: Annotated[int, Field(ge=1)] = 128
    """Most tokens to emit for a prompt, at least 1."""

    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the distribution whose most probable tokens are drawn from, above 0 to 1 (all)."""

    top_k: Annotated[int, AfterValidator(_check_top_k)] = -1
    """Number of most probable tokens that are drawn from, at least 1; -1 for all."""
