"""Curves of the committed training logs: `python -m training.curves`.

Owns one picture, training/logs/curves.png: what was still improving when a run ended, and what had
stopped. Data flow: training/logs/*.csv -> series -> matplotlib (installed with the tests).
"""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.goals import STORY_NATS, TOKENS_PER_ROUND
from training.run_log import LOGS

PICTURE = "curves.png"
SMOOTH = 12
"""Logged steps that a point of a noisy curve is the mean of."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve."""

    name: str
    tokens: list[float]
    """Seen by the run, in millions."""
    values: list[float]


def read_columns(path: Path, names: Sequence[str]) -> list[Series]:
    """Columns of a log over its tokens; rows in which one is nan are not points of it."""
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    found = []
    for name in names:
        points = [(float(row["tokens"]) / 1e6, float(row[name])) for row in rows]
        kept = [point for point in points if not np.isnan(point[1])]
        found.append(Series(name, [at for at, _ in kept], [value for _, value in kept]))
    return found


def smooth(series: Series, count: int = SMOOTH) -> Series:
    """Means over `count` points, ending at each point; the first ones over what there is."""
    sums = np.cumsum([0.0, *series.values])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - count, 0)
    means = (sums[ends] - sums[starts]) / (ends - starts)
    return Series(series.name, series.tokens, means.tolist())


def tokens_per_round(slots: Sequence[Series]) -> Series:
    """What a round of drafts gains, from the acceptance of each slot given the slots before it:
    the bonus, and each draft with the probability that all up to it are accepted."""
    survival = np.cumprod([slot.values for slot in slots], axis=0)
    return Series("tokens a round", slots[0].tokens, (1.0 + survival.sum(axis=0)).tolist())


def draw(logs: Path, output: Path) -> None:
    """Write the picture of the logs in a directory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss, value, indexer, rounds = figure.subplots(2, 2).flatten()
    heldout = read_columns(logs / "target_heldout.csv", ("heldout_stories", "heldout_templated"))
    for axes, series, title in (
        (loss, heldout[0], "held-out stories, nats a token"),
        (value, heldout[1], "held-out templated chats, nats a token"),
    ):
        axes.plot(series.tokens, series.values, marker=".")
        axes.set(title=title, xlabel="tokens of the target's run, millions")
    loss.axhline(STORY_NATS, linestyle="--", color="grey", label=f"goal {STORY_NATS}")
    loss.set_ylim(1.9, 3.0)
    value.set_ylim(0.4, 1.3)
    loss.legend()
    (divergence,) = read_columns(logs / "target.csv", ("index_kl",))
    kept = smooth(divergence)
    indexer.plot(kept.tokens, kept.values)
    indexer.set(title="indexer: divergence from the attention's mass, nats", yscale="log")
    indexer.set_xlabel("tokens of the target's run, millions")
    slots = read_columns(logs / "drafter.csv", [f"accept{n}" for n in range(1, 6)])
    gained = smooth(tokens_per_round(slots))
    rounds.plot(gained.tokens, gained.values, label="training rows, temperature 1")
    for (domain, temperature), limit in TOKENS_PER_ROUND.items():
        if temperature == "1":
            label = f"goal {limit}, {domain}"
            rounds.axhline(limit, linestyle="--", color="grey")
            rounds.annotate(label, (gained.tokens[0], limit), va="bottom")
    rounds.set(title="drafter: tokens a round", xlabel="tokens of the drafter's run, millions")
    rounds.legend(loc="lower right")
    figure.savefig(output, dpi=80)


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Draw the training logs.")
    parser.add_argument("--logs", type=Path, default=LOGS)
    parser.add_argument("--output", type=Path, default=LOGS / PICTURE)
    arguments = parser.parse_args()
    draw(arguments.logs, arguments.output)
    print(arguments.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
