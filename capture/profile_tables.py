"""A profile as tables on a terminal.

Owns columns, units and the order of the tables. Reads a `Profile` alone, so that an old one prints
as a fresh one does. `decodegrid.capture.profile_csv` has the same rows for programs.
"""

from collections.abc import Sequence
from statistics import median

from decodegrid.capture.bench_table import format_table
from decodegrid.capture.profile_document import (
    ContextSurface,
    LiveRun,
    PrefillTime,
    Profile,
)
from decodegrid.capture.report_series import position_shares, roofline_ratio
from decodegrid.capture.surface import Surface

MIB = 2**20
_VARIANTS = ("prefill", "fused", "prompt logprobs", "rich")
"""In the order of their capture."""
_GENERATED = ("cpp_", "triton_")
"""How inductor names the kernels that it generates."""


def format_profile(profile: Profile, *, ledger: bool = False) -> str:
    """Every table; ledger: the lines of single graphs and regions, too."""
    tables = [format_surface(surface) for surface in profile.surfaces]
    tables += [format_prefill(profile.prefill), format_captures(profile)]
    if ledger:
        tables += [format_graphs(profile), format_regions(profile)]
    if profile.live is not None:
        tables.append(format_live(profile.live))
    return "\n\n".join(table for table in tables if table)


def format_surface(surface: ContextSurface) -> str:
    """Step times of the pairs at one context."""
    return surface.surface().format()


def format_difference(first: Surface, second: Surface) -> str:
    """How much a later measurement of the same pairs differs, and what of it is another load on
    the machine, which changes no choice between pairs."""
    ratios = [second.ms(key) / first.ms(key) for key in first.points]
    shared = median(ratios)
    beside = median(abs(ratio / shared - 1.0) for ratio in ratios)
    return (
        f"measured again later at context {first.context_len}: {_differences(ratios)}; beside the "
        f"factor {shared:.3f} that they share by {beside:.1%} in the median"
    )


def format_error(first: Surface, second: Surface) -> str:
    """How much two measurements differ whose rounds took turns."""
    ratios = [second.ms(key) / first.ms(key) for key in first.points]
    return f"measured twice in turns at context {first.context_len}: {_differences(ratios)}"


def _differences(ratios: Sequence[float]) -> str:
    shares = [abs(ratio - 1.0) for ratio in ratios]
    return (
        f"the step times of {len(ratios)} pairs differ by {median(shares):.1%} in the median and "
        f"{max(shares):.1%} at most"
    )


def format_prefill(times: Sequence[PrefillTime]) -> str:
    """Chunks: tokens a step against latency."""
    rows = [
        (
            str(item.num_tokens),
            str(item.context_len),
            f"{item.median_ms:.4g}",
            f"{item.low_ms:.4g}..{item.high_ms:.4g}",
            f"{item.num_tokens / item.median_ms * 1e3:.0f}" if item.median_ms else "-",
        )
        for item in sorted(times, key=lambda item: (item.num_tokens, item.context_len))
    ]
    header = ("tokens", "behind", "ms", "range", "tokens/s")
    return _table("prefill: one chunk, by tokens and by tokens of the text before it", header, rows)


def format_captures(profile: Profile) -> str:
    """What start-up and its captures cost, by variant; counters and peaks."""
    rows = []
    for variant in _VARIANTS:
        graphs = [graph for graph in profile.graphs if graph.variant == variant]
        if graphs:
            rows.append(
                (
                    variant,
                    str(len(graphs)),
                    f"{sum(graph.capture_s for graph in graphs):.3f}",
                    f"{sum(graph.pool_bytes for graph in graphs) / MIB:.1f}",
                    f"{sum(graph.unseen_bytes for graph in graphs) / MIB:.1f}",
                    f"{max(graph.num_nodes for graph in graphs)}",
                )
            )
    header = ("captured", "graphs", "capture s", "pool MiB", "unseen MiB", "most nodes")
    compile_s = sum(region.compile_s for region in profile.regions)
    seconds = sum(line.seconds for line in profile.start_up)
    title = (
        f"start-up {seconds:.2f} s: {profile.num_compilations} compilations in {compile_s:.2f} s, "
        f"{profile.num_loaded} regions from a cache, {profile.num_captured} captured graphs"
    )
    text = _table(title, header, rows)
    if profile.peaks is not None:
        text += (
            f"\npeaks of the same run: {profile.peaks.read_bytes_per_s / 1e9:.2f} GB/s read, "
            f"{profile.peaks.flops_per_s / 1e9:.1f} GFLOP/s in a matrix product, "
            f"{profile.peaks.num_threads} threads"
        )
    return text


def format_graphs(profile: Profile) -> str:
    """The ledger of the graphs. Share: roofline time over replay time."""
    rows = [
        (
            graph.graph,
            ", ".join(f"{count} {kind}" for kind, count in graph.nodes_by_kind.items()) or "0",
            str(sum(graph.kernels.values())),
            f"{graph.capture_s * 1e3:.1f}",
            f"{graph.pool_bytes / MIB:.2f}",
            f"{graph.unseen_bytes / MIB:.2f}",
            _number(graph.replay_ms, "{:.4g}"),
            _number(graph.bytes_moved, "{:.3f}", 1 / MIB),
            _number(graph.flops, "{:.2f}", 1e-6),
            _number(graph.roofline_ms, "{:.4g}"),
            _share(roofline_ratio(graph)),
        )
        for graph in profile.graphs
    ]
    title = "ledger of the graphs; share: of the roofline that a replay reaches"
    header = (
        "graph", "nodes", "kernel calls", "capture ms", "pool MiB", "unseen MiB", "replay ms",
        "MiB moved", "MFLOP", "roofline ms", "share",
    )  # fmt: skip
    return _table(title, header, rows, num_names=2)


def format_regions(profile: Profile) -> str:
    """The ledger of the regions."""
    rows = [
        (
            region.region,
            ", ".join(name for name in region.kernels if not name.startswith(_GENERATED)),
            str(len(region.kernels)),
            str(region.variants),
            f"{region.compile_s:.2f}",
            str(region.num_loaded),
        )
        for region in profile.regions
    ]
    header = ("region", "kernels that are not generated", "kernels", "variants", "compile s",
              "loaded")  # fmt: skip
    return _table("ledger of the regions", header, rows, num_names=2)


def format_live(live: LiveRun) -> str:
    """What a live run replayed, and what became of its drafts."""
    rows = [
        (
            f"({item.num_reqs}, {item.num_query_tokens})",
            str(item.replays),
            f"{item.pad_rows / item.replays:.2f}" if item.replays else "-",
            f"{item.surplus_tokens / item.replays:.2f}" if item.replays else "-",
        )
        for item in live.hits
    ]
    title = (
        f"live run: {live.num_requests} requests, {live.num_emitted} tokens in "
        f"{live.num_decode_steps} decode steps of {live.decode_seconds:.2f} s "
        f"({live.graph_seconds:.2f} s in graphs); padding {live.pad_row_share:.1%} of rows, "
        f"{live.surplus_token_share:.1%} of query tokens"
    )
    hits = _table(title, ("pair", "replays", "pad rows each", "surplus tokens each"), rows)
    positions = [
        (
            str(line.position),
            str(line.drafted),
            str(line.offered),
            str(line.verified),
            str(line.accepted),
            _share(line.of_verified),
            _share(line.of_reached),
        )
        for line in position_shares(live.positions)
    ]
    header = (
        "draft",
        "drafted",
        "offered",
        "verified",
        "accepted",
        "of verified",
        "of those reached",
    )
    return "\n\n".join(part for part in (hits, _table("drafts", header, positions)) if part)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)


def _table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], num_names: int = 1
) -> str:
    """Empty without rows. num_names: leading columns that stand at the left."""
    return f"{title}\n{format_table(header, rows, num_names)}" if rows else ""
