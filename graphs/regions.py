"""All regions of an engine in one table, and the typed handle through which steps call them.

Owns the list of what is compiled. A step never calls torch itself: everything it runs is here, so
a captured step is exactly its list of region calls.
"""

from collections.abc import Callable
from dataclasses import dataclass

from decodegrid.graphs.bounded_replay import bounded_regions
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions_decode import draft_regions, output_regions
from decodegrid.graphs.regions_layer import (
    Region,
    RegionSpec,
    attention_regions,
    mix_regions,
    moe_regions,
)
from decodegrid.graphs.regions_metadata import metadata_regions
from decodegrid.graphs.regions_rich import rich_regions
from decodegrid.graphs.regions_verify import verify_regions
from decodegrid.graphs.state import Capacity
from decodegrid.kernels.select_entries import select_entries_op
from decodegrid.kernels.step_kernels import OPS, PLAIN, StepKernels


def build_regions(
    config: ModelConfig,
    capacity: Capacity,
    *,
    as_ops: bool,
    kernels: StepKernels | None = None,
) -> dict[str, RegionSpec]:
    """Every region of this model and deployment by name.

    as_ops: call opaque ops, native ones if any, instead of what a compiler can look into.
    kernels: what the regions close over; None takes the CPU's, in the form that `as_ops` says.
    """
    if kernels is None:
        kernels = OPS if as_ops else PLAIN
    specs: dict[str, RegionSpec] = {}
    specs.update(metadata_regions(config, capacity))
    specs.update(mix_regions(config, kernels))
    specs.update(attention_regions(config, capacity.kv_cache, kernels))
    specs.update(moe_regions(config, kernels, with_drafter=capacity.num_draft_tokens > 0))
    specs.update(output_regions(config, kernels))
    specs.update(verify_regions(config, capacity))
    specs.update(draft_regions(config, capacity, kernels))
    specs.update(rich_regions(config, capacity))
    specs.update(bounded_regions(config, capacity.bounded_replay))
    if config.kv_source_layer_ids:
        specs["select_entries"] = RegionSpec(select_entries_op, {}, opaque=True)
    return specs


@dataclass(frozen=True, slots=True)
class RegionTable:
    """Callables by region name; a name that the deployment does not have is an error to call."""

    calls: dict[str, Callable[..., None]]

    def __getitem__(self, name: str) -> Region:
        return self.calls[name]


def plain_regions(specs: dict[str, RegionSpec]) -> RegionTable:
    """The region functions as they are, uncompiled: the eager step."""
    return RegionTable({name: spec.function for name, spec in specs.items()})
