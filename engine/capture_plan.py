"""What a deployment would compile and capture, said without doing it.

Owns the counts, the words about coverage, and the static buffers that each graph is bound to. The
lists come from the functions that start-up runs: the grid, the regions, the order of captures.

Data flow: deployment, model config -> `CapturePlan`; the plan and buffers without memory -> bytes
of each graph.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from decodegrid.capture.grid import CoverageError, Grid, StepVariant, build_grid
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.memory_plan import total_bytes
from decodegrid.engine.step_graphs import PrefillKey, StepKey, num_graphs
from decodegrid.graphs.bounded_replay import num_kept_rows
from decodegrid.graphs.decode_step import slice_pair
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions import build_regions
from decodegrid.graphs.state import Capacity
from decodegrid.graphs.step_buffers import MIN_ROWS, StepBuffers, slice_tokens


@dataclass(frozen=True, slots=True)
class RegionCounts:
    """What is compiled."""

    compiled: int
    """Regions."""
    compilations: int
    """Of the regions, all their variants."""
    opaque: int
    """Calls that run as they are."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Whether every batch that the scheduler may form has a captured pair."""

    num_batches: int
    """Admissible (requests, query tokens)."""
    problem: str | None
    """Names the first batch without a pair; None where all have one."""


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What start-up captures."""

    grid: Grid
    prefill_sizes: tuple[int, ...]
    variants: tuple[StepVariant, ...]
    coverage: Coverage

    @property
    def num_graphs(self) -> int:
        """Captures, decode pairs and prefill sizes of all variants together."""
        return num_graphs(self.grid, len(self.prefill_sizes), rich=len(self.variants) > 1)

    def graph_keys(self) -> Iterator[PrefillKey | StepKey]:
        """Every graph, in the order of the captures."""
        for variant in self.variants:
            for size in sorted(self.prefill_sizes, reverse=True):
                yield PrefillKey(size, variant)
            for pair in self.grid.capture_order():
                yield StepKey(pair, variant)


def grid_of(config: DeploymentConfig) -> Grid:
    """The grid that start-up captures. Raises ValueError, CoverageError among them."""
    return build_grid(
        config.scheduler.max_num_reqs,
        config.speculation.num_draft_tokens,
        config.grid.num_reqs,
        config.grid.num_query_tokens_per_req,
        config.grid.pairs,
    )


def check_grid(grid: Grid) -> Coverage:
    """The theorem: every (b, q) with b <= q <= b * (K + 1) and b <= max_num_reqs has a pair that
    covers it."""
    most, drafts = grid.max_num_reqs, grid.num_draft_tokens
    # b requests have 0 to b * K query tokens beside their one.
    num_batches = most + drafts * most * (most + 1) // 2
    try:
        grid.check_coverage()
    except CoverageError as error:
        return Coverage(num_batches, str(error))
    return Coverage(num_batches, None)


def capture_plan(config: DeploymentConfig, grid: Grid) -> CapturePlan:
    """What start-up captures with that grid."""
    rich = (StepVariant.RICH,) if config.grid.rich else ()
    return CapturePlan(
        grid,
        config.scheduler.prefill_chunk_sizes,
        (StepVariant.FUSED, *rich),
        check_grid(grid),
    )


def count_regions(model: ModelConfig, capacity: Capacity) -> RegionCounts:
    """What start-up compiles, where no package and no cache has it."""
    specs = build_regions(model, capacity, as_ops=True).values()
    compiled = [spec for spec in specs if not spec.opaque]
    return RegionCounts(
        len(compiled), sum(spec.variants for spec in compiled), len(specs) - len(compiled)
    )


def graph_bytes(key: PrefillKey | StepKey, buffers: StepBuffers, capacity: Capacity) -> int:
    """Bytes of the static buffers that a graph reads and writes: leading slices of those that all
    graphs share. State and weights are not among them."""
    if isinstance(key, PrefillKey):
        return _prefill_bytes(key, buffers, capacity)
    parts = slice_pair(buffers, *key.sizes)
    num_tokens, num_rows = parts.tokens.positions.shape[0], parts.rows.slots.shape[0]
    found: list[object] = [parts, buffers.total]
    if buffers.draft is not None and buffers.draft_logits is not None:
        block = buffers.draft_logits.shape[1]
        found.append(slice_tokens(buffers.draft, num_rows * block))
        rows = (buffers.draft_logits, buffers.draft_hidden, buffers.draft_previous)
        found += [tensor[:num_rows] for tensor in rows if tensor is not None]
        found.append(buffers.draft_steps[: capacity.num_draft_tokens])
    if key.variant is StepVariant.RICH and buffers.rich is not None:
        rich = buffers.rich
        reports = (rich.masks, rich.chosen, rich.top_ids, rich.top_logprobs)
        found += [rich.adjusted[:num_tokens], *(tensor[:num_rows] for tensor in reports)]
    return total_bytes(found)


def _prefill_bytes(key: PrefillKey, buffers: StepBuffers, capacity: Capacity) -> int:
    count = max(key.num_tokens, MIN_ROWS)
    if key.variant is StepVariant.RICH:
        assert buffers.rich is not None
        rich, target = buffers.rich, buffers.target
        reports = (
            target.stream, target.pre_a, rich.following, rich.prompt_chosen, rich.prompt_top_ids,
            rich.prompt_top_logprobs,
        )  # fmt: skip
        logits = buffers.output.logits
        return total_bytes([*(tensor[:count] for tensor in reports), logits[:count]])
    inputs = buffers.prefill
    found: list[object] = [
        slice_tokens(buffers.target, count), inputs.token_ids[:count], inputs.facts,
        buffers.history_index, buffers.compressor_history, buffers.window_workspace,
        buffers.compressor_workspace,
    ]  # fmt: skip
    if buffers.late is not None:
        kept = num_kept_rows(capacity.bounded_replay, capacity.keep_tokens, count)
        found += [slice_tokens(buffers.late, max(kept, MIN_ROWS)), inputs.lower]
    return total_bytes(found)
