"""The report page's drawings as Plotly describes them: plain objects, made without Plotly.

Owns traces, axes and sizes. Does not own colours of text and grid lines, which the page sets for
light and dark. Data flow: `Profile` -> dicts with `data` and `layout` -> JSON in the page -> drawn
by Plotly's script there. Every string of the profile is escaped, because Plotly reads markup in
texts.
"""

from html import escape
from typing import Any

from decodegrid.capture.profile_document import ContextSurface, GraphEntry, LiveRun, Profile
from decodegrid.capture.report_series import MIB, Stair, heat_map, position_shares, short_name

Json = dict[str, Any]

BLUE, ORANGE, GREEN = "#4c86c6", "#e08a2e", "#3f9e6e"
LINES = (BLUE, ORANGE, GREEN, "#b565a7", "#d1495b", "#8c7a5b", "#2aa5b8", "#98a32b")
"""Colours that can be told apart on white and on dark grey."""


def surface_figure(part: ContextSurface) -> Json:
    """Heat map: rows are requests, columns query tokens, for each request where that is denser."""
    map_ = heat_map(part)
    texts, details = [], []
    for points, keys in zip(map_.points, map_.keys, strict=True):
        texts.append(["" if point is None else f"{point.median_ms:.3g}" for point in points])
        details.append(
            [
                ""
                if point is None
                else f"pair {key}<br>median {point.median_ms:.4g} ms<br>"
                f"{point.low_ms:.4g} to {point.high_ms:.4g} ms in {point.repeats} repeats"
                for point, key in zip(points, keys, strict=True)
            ]
        )
    trace = {
        "type": "heatmap",
        "x": map_.columns,
        "y": [str(count) for count in map_.num_reqs],
        "z": [
            [None if point is None else point.median_ms for point in points]
            for points in map_.points
        ],
        "text": texts,
        "texttemplate": "%{text}",
        "customdata": details,
        "hovertemplate": "%{customdata}<extra></extra>",
        "hoverongaps": False,
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": "ms"}, "thickness": 14},
        "xgap": 2,
        "ygap": 2,
    }
    x = "query tokens a request" if map_.by_request else "query tokens"
    layout = _layout(x, "requests", 130 + 38 * len(map_.num_reqs))
    layout["xaxis"]["type"] = layout["yaxis"]["type"] = "category"
    return {"data": [trace], "layout": layout}


def staircase_figure(staircases: dict[int, list[Stair]]) -> Json:
    """A line for each number of requests: what a batch costs by its query tokens."""
    traces = [
        _stair_trace(num_reqs, stairs, LINES[index % len(LINES)])
        for index, (num_reqs, stairs) in enumerate(staircases.items())
    ]
    most = max(stairs[-1].last_tokens for stairs in staircases.values())
    ticks = [1 << i for i in range(most.bit_length() + 1)]
    layout = _layout("query tokens of the batch (log scale)", "step time, ms", 460)
    layout["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [str(n) for n in ticks]}
    layout["yaxis"]["rangemode"] = "tozero"
    layout["legend"] = {"title": {"text": "requests"}}
    return {"data": traces, "layout": layout}


def _stair_trace(num_reqs: int, stairs: list[Stair], colour: str) -> Json:
    """From the row's fewest tokens; a marker stands where its captured pair is full."""
    points = [stair.point for stair in stairs]
    hover = [
        f"{num_reqs} requests, {_run(stair)} query tokens<br>pair {stair.key}: "
        f"{stair.point.median_ms:.4g} ms ({stair.point.low_ms:.4g} to {stair.point.high_ms:.4g})"
        for stair in stairs
    ]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": str(num_reqs),
        "x": [stairs[0].first_tokens, *(stair.last_tokens for stair in stairs)],
        "y": [points[0].median_ms, *(point.median_ms for point in points)],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [0.0, *(point.high_ms - point.median_ms for point in points)],
            "arrayminus": [0.0, *(point.median_ms - point.low_ms for point in points)],
            "thickness": 1,
            "width": 2,
        },
        "customdata": [hover[0], *hover],
        "hovertemplate": "%{customdata}<extra></extra>",
        "line": {"shape": "vh", "width": 2, "color": colour},
        "marker": {"size": [0, *(8 for _ in stairs)], "color": colour, "line": {"width": 0}},
    }


def _run(stair: Stair) -> str:
    if stair.first_tokens == stair.last_tokens:
        return str(stair.last_tokens)
    return f"{stair.first_tokens} to {stair.last_tokens}"


def start_up_figure(profile: Profile) -> Json:
    """A bar for each phase, in their order from the top."""
    names = [_label(line.name) for line in profile.start_up]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [line.seconds for line in profile.start_up],
        "y": list(range(len(names))),
        "text": [f"{line.seconds:.3g} s" for line in profile.start_up],
        "textposition": "auto",
        "customdata": [
            f"{name}: {line.seconds:.4g} s, entered {line.count} times"
            for name, line in zip(names, profile.start_up, strict=True)
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": BLUE},
    }
    layout = _layout("seconds", "", 110 + 30 * len(names))
    # By place and not by name: two phases may share a shortened name.
    layout["yaxis"] |= _names_axis(names) | {"autorange": "reversed"}
    return {"data": [trace], "layout": layout}


def capture_time_figure(graphs: list[GraphEntry]) -> Json:
    """Seconds to capture each graph, in the ledger's order."""
    trace = _graph_bars(graphs, [graph.capture_s for graph in graphs], "capture", BLUE, "s")
    return {"data": [trace], "layout": _graph_layout(graphs, "capture, seconds")}


def memory_figure(graphs: list[GraphEntry]) -> Json:
    """MiB that each graph took: the allocator's pool, and beside it."""
    pool = [graph.pool_bytes / MIB for graph in graphs]
    unseen = [graph.unseen_bytes / MIB for graph in graphs]
    traces = [
        _graph_bars(graphs, pool, "pool", GREEN, "MiB"),
        _graph_bars(graphs, unseen, "outside the pool", ORANGE, "MiB"),
    ]
    layout = _graph_layout(graphs, "memory, MiB")
    layout |= {"barmode": "stack", "legend": _legend_on_top()}
    return {"data": traces, "layout": layout}


def _graph_bars(
    graphs: list[GraphEntry], values: list[float], name: str, colour: str, unit: str
) -> Json:
    return {
        "type": "bar",
        "name": name,
        "x": list(range(len(graphs))),
        "y": values,
        "customdata": [
            f"{_label(graph.graph)}<br>{name}: {value:.4g} {unit}"
            for graph, value in zip(graphs, values, strict=True)
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": colour},
    }


def _graph_layout(graphs: list[GraphEntry], y: str) -> Json:
    layout = _layout("", y, 420)
    layout["xaxis"] |= _names_axis([_label(graph.graph) for graph in graphs])
    layout["xaxis"]["tickangle"] = -60
    return layout


def prefill_figure(profile: Profile) -> Json:
    """Time of a full chunk over its tokens, a line for each context."""
    traces = []
    for index, context in enumerate(sorted({line.context_len for line in profile.prefill})):
        lines = sorted(
            (line for line in profile.prefill if line.context_len == context),
            key=lambda line: line.num_tokens,
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": str(context),
                "x": [line.num_tokens for line in lines],
                "y": [line.median_ms for line in lines],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [line.high_ms - line.median_ms for line in lines],
                    "arrayminus": [line.median_ms - line.low_ms for line in lines],
                    "thickness": 1,
                },
                "hovertemplate": "%{x} tokens: %{y:.4g} ms<extra></extra>",
                "line": {"color": LINES[index % len(LINES)]},
            }
        )
    layout = _layout("tokens of the chunk", "ms", 380)
    layout["yaxis"]["rangemode"] = "tozero"
    layout |= {"showlegend": True, "legend": {"title": {"text": "tokens before the chunk"}}}
    return {"data": traces, "layout": layout}


def acceptance_figure(live: LiveRun) -> Json:
    """Two bars for each draft position."""
    shares = position_shares(live.positions)
    x = [str(share.position) for share in shares]
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": x,
            "y": values,
            "hovertemplate": "position %{x}: %{y:.1%}<extra>" + name + "</extra>",
            "marker": {"color": colour},
        }
        for name, values, colour in (
            ("of those reached", [share.of_reached for share in shares], BLUE),
            ("of those verified", [share.of_verified for share in shares], ORANGE),
        )
    ]
    layout = _layout("draft position", "accepted", 360)
    layout["yaxis"] |= {"tickformat": ".0%", "range": [0, 1]}
    layout["xaxis"]["type"] = "category"
    layout |= {"barmode": "group", "legend": _legend_on_top()}
    return {"data": traces, "layout": layout}


def hits_figure(live: LiveRun) -> Json:
    """Replays of each pair."""
    trace = {
        "type": "bar",
        "x": [f"({hit.num_reqs}, {hit.num_query_tokens})" for hit in live.hits],
        "y": [hit.replays for hit in live.hits],
        "customdata": [[hit.pad_rows, hit.surplus_tokens] for hit in live.hits],
        "hovertemplate": "%{x}: %{y} replays<br>%{customdata[0]} pad rows, "
        "%{customdata[1]} surplus tokens<extra></extra>",
        "marker": {"color": BLUE},
    }
    layout = _layout("pair (requests, query tokens)", "replays", 360)
    layout["xaxis"] |= {"type": "category", "tickangle": -60}
    return {"data": [trace], "layout": layout}


def explorer_figure(num_reqs: list[int]) -> Json:
    """Gains over the number of requests; the page fills in the heights."""
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": num_reqs,
            "y": [None] * len(num_reqs),
            "hovertemplate": "%{x} requests: %{y:+.1%}<extra>" + name + "</extra>",
            "line": {"color": colour},
        }
        for name, colour in (("over verifying all", BLUE), ("over no drafts", ORANGE))
    ]
    layout = _layout("live requests", "gain", 360)
    layout["yaxis"] |= {"tickformat": "+.0%", "rangemode": "tozero"}
    layout["legend"] = _legend_on_top()
    return {"data": traces, "layout": layout}


def _legend_on_top() -> Json:
    return {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}


def _layout(x: str, y: str, height: int) -> Json:
    return {
        "height": height,
        "margin": {"l": 60, "r": 20, "t": 40, "b": 50},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True},
    }


def _names_axis(names: list[str]) -> Json:
    return {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": names}


def _label(name: str) -> str:
    """A name without markup."""
    return escape(short_name(name))
