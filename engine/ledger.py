"""The ledger of a ready runner: what was compiled and captured, what it costs, how fast it is.

Owns which measurement and which count stands beside which graph. Measures nothing itself
(`decodegrid.engine.profile_run`). Data flow: a runner with its `StartUp`, what was measured on it,
and the deployment -> `Profile`, the form of profile.json and of a package's ledger.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.ledger_backend import CaptureCost
from decodegrid.capture.ledger_nodes import NodeReader
from decodegrid.capture.profile_document import (
    ContextSurface,
    GraphEntry,
    LiveRun,
    Peaks,
    PhaseLine,
    PrefillTime,
    Profile,
    RegionEntry,
    SurfacePair,
    profile_text,
)
from decodegrid.capture.surface import Surface
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.ledger_start import NamedGraph, StartUp
from decodegrid.engine.ledger_work import (
    KeyBytes,
    Span,
    StepShape,
    StepWork,
    prefill_work,
    report_work,
    step_work,
)
from decodegrid.engine.run_facts import command, config_hash, machine, versions
from decodegrid.engine.runner import Runner
from decodegrid.engine.step_graphs import PrefillKey


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured on a runner."""

    surfaces: tuple[Surface, ...]
    """Of fused steps, at least one; the graphs' times and counts are those of the first."""
    prefill: tuple[PrefillTime, ...] = ()
    """The first of each size is the time of its graph."""
    rich: Surface | None = None
    """Of the rich variant, at the first surface's context."""
    prompt_reports: tuple[PrefillTime, ...] = ()
    """Of the graphs that report log-probabilities of a chunk."""
    peaks: Peaks | None = None
    live: LiveRun | None = None


def make_profile(
    runner: Runner, loaded: LoadedConfig, measured: Measured, words: Sequence[str] | None = None
) -> Profile:
    """The whole document.

    words: the command that asked for it; None takes the process's own. Raises ValueError for a
    runner that was not made by start-up, and where nodes of CUDA graphs cannot be read.
    """
    start_up = runner.start_up
    if start_up is None:
        raise ValueError("the runner was made by hand: nothing is known of its captures")
    counters, reader = runner.counters, NodeReader()
    graphs = _graph_entries(runner, start_up, measured, reader)
    return Profile(
        command=command() if words is None else list(words),
        measured_at=time.time(),
        machine=machine(runner.model.state.slots.last_token.device),
        versions=versions(),
        config_sha256=config_hash(loaded),
        max_num_reqs=runner.max_num_reqs,
        num_draft_tokens=runner.num_draft_tokens,
        num_compilations=counters.num_compilations,
        num_loaded=counters.num_loaded,
        num_captured=counters.num_captured,
        start_up=[
            PhaseLine(name=line.name, count=line.count, seconds=line.seconds)
            for line in start_up.phases
        ],
        surfaces=[context_surface(surface) for surface in measured.surfaces],
        prefill=list(measured.prefill),
        graphs=graphs,
        regions=_region_entries(counters, start_up, reader),
        peaks=measured.peaks,
        live=measured.live,
    )


def ledger_text(
    runner: Runner, loaded: LoadedConfig, measured: Measured, words: Sequence[str] | None = None
) -> str:
    """`make_profile` as the text of a ledger.json."""
    return profile_text(make_profile(runner, loaded, measured, words))


def context_surface(surface: Surface) -> ContextSurface:
    """A surface in the document's form, its facts left out."""
    return ContextSurface(
        context_len=surface.context_len,
        measured_at=surface.measured_at,
        pairs=[
            SurfacePair(
                num_reqs=key.num_reqs,
                num_query_tokens=key.num_query_tokens,
                median_ms=point.median_ms,
                low_ms=point.low_ms,
                high_ms=point.high_ms,
                repeats=point.repeats,
            )
            for key, point in surface.points.items()
        ],
    )


@dataclass(frozen=True, slots=True)
class _Figures:
    """Of one graph."""

    replay_ms: float | None
    work: StepWork | None


def _graph_entries(
    runner: Runner, start_up: StartUp, measured: Measured, reader: NodeReader
) -> list[GraphEntry]:
    entries = []
    for item in start_up.named_graphs():
        nodes = reader.read(*item.graphs)
        cost = start_up.costs.get(item.key, CaptureCost())
        figures = _figures(runner, item, measured)
        work, peaks = figures.work, measured.peaks
        floor_s = None
        if work is not None and peaks is not None:
            floor_s = work.floor_seconds(peaks.read_bytes_per_s, peaks.flops_per_s)
        sizes = _sizes(item)
        entries.append(
            GraphEntry(
                graph=str(item.key),
                variant=item.kind,
                num_reqs=sizes[0],
                num_query_tokens=sizes[1],
                capture_s=cost.seconds,
                num_nodes=nodes.kinds.total(),
                nodes_by_kind=dict(nodes.kinds),
                kernels=dict(nodes.kernels.most_common()),
                pool_bytes=cost.pool_bytes,
                unseen_bytes=cost.unseen_bytes,
                replay_ms=figures.replay_ms,
                bytes_moved=None if work is None else round(work.num_bytes),
                flops=None if work is None else round(work.flops),
                roofline_ms=None if floor_s is None else floor_s * 1e3,
            )
        )
    return entries


def _sizes(item: NamedGraph) -> tuple[int, int]:
    """Requests and tokens; no requests for prefill."""
    if isinstance(item.key, PrefillKey):
        return 0, item.key.num_tokens
    return item.key.sizes


def _figures(runner: Runner, item: NamedGraph, measured: Measured) -> _Figures:
    """Time and least work of a graph, both at the context at which it was timed."""
    if isinstance(item.key, PrefillKey):
        return _prefill_figures(runner, item.key.num_tokens, item.kind == "prefill", measured)
    surface = measured.surfaces[0] if item.kind == "fused" else measured.rich
    context = measured.surfaces[0].context_len
    work = _decode_work(runner, item.key.pair, context)
    return _Figures(None if surface is None else surface.ms(item.key.pair), work)


def _decode_work(runner: Runner, pair: GraphKey, context: int) -> StepWork:
    """The rich variant does no less; how much more depends on what its rows ask for."""
    model = runner.model
    shape = StepShape(pair.num_reqs, pair.num_query_tokens, context, runner.num_draft_tokens)
    return step_work(model.weights, model.config, shape, KeyBytes.of_state(model.state))


def _prefill_figures(
    runner: Runner, num_tokens: int, is_chunk: bool, measured: Measured
) -> _Figures:
    times = measured.prefill if is_chunk else measured.prompt_reports
    time_of = next((item for item in times if item.num_tokens == num_tokens), None)
    model = runner.model
    if not is_chunk:
        work = report_work(model.weights, num_tokens)
        return _Figures(None if time_of is None else time_of.median_ms, work)
    # A bounded prefill leaves out rows in the decoder's layers; what is left is not counted.
    if time_of is None or model.state.capacity.bounded_replay != "off":
        return _Figures(None if time_of is None else time_of.median_ms, None)
    span, keys = Span(time_of.context_len, num_tokens), KeyBytes.of_state(model.state)
    return _Figures(time_of.median_ms, prefill_work(model.weights, model.config, span, keys))


def _region_entries(
    counters: CaptureCounters, start_up: StartUp, reader: NodeReader
) -> list[RegionEntry]:
    seconds = {line.name: line.seconds for line in start_up.phases}
    return [
        RegionEntry(
            region=name,
            variants=variants,
            compile_s=seconds.get(f"compile {name}", 0.0),
            num_loaded=counters.loaded_by_region[name],
            kernels=sorted(reader.by_region.get(name, ())),
        )
        for name, variants in counters.planned_by_region.items()
    ]
