"""The report's drawings as PNG files, for terminals and documents.

Owns the files' names and how they are drawn, with Matplotlib's Agg canvas and no global state. Data
flow: `Profile` -> figures -> files in a directory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from decodegrid.capture.profile_document import ContextSurface, GraphEntry, LiveRun, Profile
from decodegrid.capture.report_libraries import require_report_libraries
from decodegrid.capture.report_series import MIB, heat_map, position_shares, short_name, staircases

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 110


def write_plots(profile: Profile, directory: Path) -> list[Path]:
    """Draw what the profile holds; returns the written files in the order of the report.

    For each context `surface-N.png` and, where its pairs are a complete grid, `staircases-N.png`
    with N tokens of context; then `start_up.png`, `graph_cost.png` and, with a live run,
    `acceptance.png`. What the profile has nothing of is left out. Replaces files of these names.

    Args:
        directory: is made if it is not there.

    Raises:
        ReportLibraryError: Matplotlib is not installed.
        OSError: the directory or a file cannot be written.
    """
    require_report_libraries()
    drawn: list[tuple[str, Figure]] = []
    for part in profile.surfaces:
        drawn.append((f"surface-{part.context_len}", _surface(part)))
        found = _staircases(profile, part)
        if found is not None:
            drawn.append((f"staircases-{part.context_len}", found))
    if profile.start_up:
        drawn.append(("start_up", _start_up(profile)))
    if profile.graphs:
        drawn.append(("graph_cost", _graph_cost(profile.graphs)))
    if profile.live is not None and profile.live.positions.drafted:
        drawn.append(("acceptance", _acceptance(profile.live)))
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in drawn:
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=_DPI, format="png")
        paths.append(path)
    return paths


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _surface(part: ContextSurface) -> "Figure":
    map_ = heat_map(part)
    rows, columns = len(map_.num_reqs), len(map_.columns)
    figure = _figure(max(5.0, 2.0 + 0.75 * columns), max(3.0, 1.5 + 0.5 * rows))
    axes = figure.subplots()
    times = [
        [float("nan") if point is None else point.median_ms for point in row] for row in map_.points
    ]
    image = axes.imshow(times, aspect="auto", origin="lower", cmap="viridis")
    known = [ms for row in times for ms in row if ms == ms]
    middle = (min(known) + max(known)) / 2
    for y, row in enumerate(times):
        for x, ms in enumerate(row):
            if ms == ms:
                colour = "black" if ms > middle else "white"
                axes.text(x, y, f"{ms:.3g}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(columns), map_.columns)
    axes.set_yticks(range(rows), [str(count) for count in map_.num_reqs])
    axes.set_xlabel("query tokens a request" if map_.by_request else "query tokens")
    axes.set_ylabel("requests")
    axes.set_title(f"Step time, ms, at {part.context_len} tokens of context")
    figure.colorbar(image, ax=axes, label="ms")
    return figure


def _staircases(profile: Profile, part: ContextSurface) -> "Figure | None":
    """None where the pairs are no complete grid."""
    try:
        found = staircases(profile, part)
    except ValueError:
        return None
    figure = _figure(9.0, 5.0)
    axes = figure.subplots()
    for num_reqs, stairs in found.items():
        ends = [stair.last_tokens for stair in stairs]
        times = [stair.point.median_ms for stair in stairs]
        (line,) = axes.step(
            [stairs[0].first_tokens, *ends], [times[0], *times], where="pre", label=str(num_reqs)
        )
        below = [stair.point.median_ms - stair.point.low_ms for stair in stairs]
        above = [stair.point.high_ms - stair.point.median_ms for stair in stairs]
        axes.errorbar(
            ends,
            times,
            yerr=[below, above],
            fmt="o",
            markersize=4,
            elinewidth=0.8,
            color=line.get_color(),
        )
    most = max(stairs[-1].last_tokens for stairs in found.values())
    ticks = [1 << i for i in range(most.bit_length() + 1)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("query tokens of the batch (log scale)")
    axes.set_ylabel("step time, ms")
    axes.set_title(f"Staircases at {part.context_len} tokens of context")
    axes.grid(alpha=0.3)
    axes.legend(title="requests")
    return figure


def _start_up(profile: Profile) -> "Figure":
    lines = profile.start_up
    figure = _figure(8.0, 1.2 + 0.32 * len(lines))
    axes = figure.subplots()
    places = list(range(len(lines)))
    bars = axes.barh(places, [line.seconds for line in lines])
    axes.bar_label(bars, [f" {line.seconds:.3g} s" for line in lines], fontsize=9)
    axes.set_yticks(places)
    _name_ticks(axes, "y", [line.name for line in lines])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds")
    axes.set_title("Start-up phases")
    return figure


def _graph_cost(graphs: Sequence[GraphEntry]) -> "Figure":
    figure = _figure(max(7.0, 2.0 + 0.22 * len(graphs)), 7.0)
    time_axes, memory_axes = figure.subplots(2, 1, sharex=True)
    places = list(range(len(graphs)))
    time_axes.bar(places, [graph.capture_s for graph in graphs])
    time_axes.set_ylabel("capture, seconds")
    time_axes.set_title("Cost of each captured graph")
    pool = [graph.pool_bytes / MIB for graph in graphs]
    memory_axes.bar(places, pool, label="pool")
    memory_axes.bar(
        places,
        [graph.unseen_bytes / MIB for graph in graphs],
        bottom=pool,
        label="outside the pool",
    )
    memory_axes.set_ylabel("memory, MiB")
    memory_axes.legend()
    memory_axes.set_xticks(places)
    _name_ticks(memory_axes, "x", [graph.graph for graph in graphs])
    return figure


def _acceptance(live: LiveRun) -> "Figure":
    shares = position_shares(live.positions)
    figure = _figure(7.0, 4.0)
    axes = figure.subplots()
    series = (
        ("of those reached", -0.2, [share.of_reached for share in shares]),
        ("of those verified", 0.2, [share.of_verified for share in shares]),
    )
    for label, shift, values in series:
        known = [
            (share.position + shift, value)
            for share, value in zip(shares, values, strict=True)
            if value is not None
        ]
        axes.bar([x for x, _ in known], [y * 100 for _, y in known], width=0.4, label=label)
    axes.set_xticks([share.position for share in shares])
    axes.set_ylim(0.0, 100.0)
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted, %")
    axes.set_title(f"Acceptance by position, {live.num_requests} requests")
    axes.legend()
    return figure


def _name_ticks(axes: "Axes", which: str, names: Sequence[str]) -> None:
    """Names at the ticks that are set already; a dollar sign in one is no formula."""
    short = [short_name(name) for name in names]
    if which == "y":
        axes.set_yticklabels(short, parse_math=False)
    else:
        axes.set_xticklabels(short, parse_math=False, rotation=75, ha="right", fontsize=8)
