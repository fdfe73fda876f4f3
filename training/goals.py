"""What the embedded model was meant to reach, beside what it reached.

Owns the goals and the table of them in the model card. Data flow: the report of `evaluate`, with
the answers, calibration and long range that other commands measured -> `goals` -> Markdown.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["quantised", "float"]
"""How a checkpoint stores its weights: as DeepSeek-V4.1 does, or in bfloat16."""
STORY_NATS = 2.1
"""Most that held-out stories may cost a token."""
MEGABYTES = {"quantised": 16.0, "float": 40.0}
"""Form -> most that model.safetensors may take."""
TOKENS_PER_ROUND = {
    ("structured", "1"): 4.8,
    ("structured", "0.6"): 5.4,
    ("stories", "1"): 2.7,
    ("stories", "0.6"): 2.9,
}


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure; `met` compares unrounded numbers."""

    figure: str
    goal: str
    reached: str
    met: bool


def _at_most(figure: str, limit: float, value: float, form: str) -> Goal:
    return Goal(figure, f"<= {limit:{form}}", f"{value:{form}}", value <= limit)


def _at_least(figure: str, limit: float, value: float, form: str) -> Goal:
    return Goal(figure, f">= {limit:{form}}", f"{value:{form}}", value >= limit)


def goals(report: dict[str, Any], size: int, form: Form) -> Iterator[Goal]:
    """Goals of the parts that `report` has; `size`: bytes of the form's model.safetensors."""
    stories = report["domains"]["stories"]
    yield _at_most("stories, nats a token", STORY_NATS, stories["nats_per_token"], ".3f")
    rounding = max(
        domain["stored_nats_per_token"] - domain["nats_per_token"]
        for domain in report["domains"].values()
    )
    yield _at_most("loss by rounding, nats a token", 0.01, rounding, ".4f")
    yield _at_most("weights, MB", MEGABYTES[form], size / 1e6, ".1f")
    yield _at_most("most loaded expert over the mean", 1.6, max(report["expert_load"]), ".2f")
    kept = min(report["index_recall"].values())
    yield _at_least("attention mass in the indexer's selection, worst layer", 0.9, kept, ".2f")
    if "answers" in report:
        answers = report["answers"]
        yield _at_least("templated answers that parse", 0.95, answers["parsed"]["all"], ".3f")
        yield _at_least("values copied into them", 0.8, answers["copied"]["all"], ".3f")
        for (domain, temperature), limit in TOKENS_PER_ROUND.items():
            name = f"tokens a round, {domain}, temperature {temperature}"
            value = answers["tokens_per_round"][domain][temperature]
            yield _at_least(name, limit, value, ".2f")
    if "calibration" in report:
        for mode, figures in report["calibration"].items():
            for domain in ("stories", "templated"):
                error = max(figures[f"heldout_{domain}_survival_after"])
                name = f"calibration error, worst slot, {domain}, {mode}"
                yield _at_most(name, 0.03, error, ".3f")
    if "long_range" in report:
        far = report["long_range"]
        name = f"a name {far['gap']:.0f} tokens back: with compressed attention over without"
        yield _at_least(name, 5.0, far["ratio"], ".2f")


def goal_table(report: dict[str, Any], size: int, form: Form) -> str:
    """The card's section."""
    lines = ["\n## Goals\n\n| figure | goal | reached | |\n|---|---|---|---|\n"]
    for goal in goals(report, size, form):
        verdict = "met" if goal.met else "**missed**"
        lines.append(f"| {goal.figure} | {goal.goal} | {goal.reached} | {verdict} |\n")
    return "".join(lines)
