"""The Pareto plot: tokens/s a user against tokens/s a device, as a PNG.

Owns the drawing. What an assumed acceptance would give has panels of its own, which say that it was
not measured. matplotlib is an optional dependency, imported
when a plot is made. Data flow: points -> a file.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from decodegrid.capture.bench_numbers import AssumedPoint, ParetoPoint, pareto_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vP*X<>hd"
_PANEL_INCHES = (6.4, 8.4)
_HEIGHTS = (5, 3)
"""Shares of the measured panel and of the one below it."""


def require_matplotlib(option: str) -> None:
    """Raise ValueError, naming the option that needs it, where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"{option} needs matplotlib, which is not installed: pip install 'decodegrid[report]'"
        )


def plot_pareto(
    path: Path, points: Sequence[ParetoPoint], assumed: Sequence[AssumedPoint], caption: str
) -> None:
    """Write the plot, a panel for each context, and one below for what was assumed, if anything.

    points: measured ones, at least one. caption: machine and denominator, under the panels. Raises
    OSError for the file.
    """
    # Not pyplot: it keeps figures and a back end for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    contexts = list(dict.fromkeys(point.context_len for point in points))
    labels = list(dict.fromkeys(point.label for point in points))
    width, height = _PANEL_INCHES
    num_rows = 2 if assumed else 1
    size = (width * len(contexts), height * sum(_HEIGHTS[:num_rows]) / sum(_HEIGHTS))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        num_rows, len(contexts), squeeze=False, height_ratios=_HEIGHTS[:num_rows]
    )
    for column, context_len in enumerate(contexts):
        here = [point for point in points if point.context_len == context_len]
        curve = [point for point in assumed if point.context_len == context_len]
        where = "prompts as they are" if context_len is None else f"context {context_len}"
        _draw_measured(panels[0][column], here, labels)
        panels[0][column].set_title(f"measured, {where}")
        if assumed:
            _draw_assumed(panels[1][column], here, curve)
    figure.supxlabel(caption, fontsize="small")
    figure.savefig(path, format="png", dpi=120)


def _draw_measured(panel: "Axes", points: Sequence[ParetoPoint], labels: Sequence[str]) -> None:
    for index, label in enumerate(labels):
        own = sorted((p for p in points if p.label == label), key=lambda p: p.batch)
        panel.plot(
            *_coordinates(own),
            marker=_MARKERS[index % len(_MARKERS)],
            color=f"C{index % 10}",
            linewidth=1,
            label=label,
        )
        for point in own:
            panel.annotate(
                str(point.batch),
                (point.user_tokens_per_s, point.device_tokens_per_s),
                textcoords="offset points",
                xytext=(5, 5),
                fontsize="x-small",
            )
    _draw_front(panel, points)
    panel.set_xlabel("tokens/s a user (median; numbers at the points: requests at once)")
    panel.set_ylabel("emitted tokens/s a device, prefill charged")
    _finish(panel)


def _draw_assumed(
    panel: "Axes", points: Sequence[ParetoPoint], assumed: Sequence[AssumedPoint]
) -> None:
    """Apart from the measured points, because its scale would hide them; their front is in it."""
    _draw_front(panel, points)
    panel.plot(
        *_coordinates(assumed),
        color="grey",
        linestyle="--",
        marker="x",
        label="steps/s times that factor",
    )
    factors = ", ".join(sorted({f"{point.factor:.3g}" for point in assumed}))
    panel.set_title(f"ASSUMED, not measured: {factors} tokens a step", fontsize="medium")
    panel.set_xlabel("assumed tokens/s a user")
    panel.set_ylabel("assumed tokens/s a device")
    _finish(panel)


def _draw_front(panel: "Axes", points: Sequence[ParetoPoint]) -> None:
    panel.plot(
        *_coordinates(pareto_front(points)),
        color="black",
        linewidth=3,
        marker="o",
        markersize=13,
        markerfacecolor="none",
        alpha=0.25,
        label="front of the measured points",
    )


def _coordinates(
    points: Sequence[ParetoPoint] | Sequence[AssumedPoint],
) -> tuple[list[float], list[float]]:
    return (
        [point.user_tokens_per_s for point in points],
        [point.device_tokens_per_s for point in points],
    )


def _finish(panel: "Axes") -> None:
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small")
