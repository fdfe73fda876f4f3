"""What a target run does and where it stands: sizes, the learning rate, when parts switch on.

Owns the plan of a leg and the count of its progress. A leg is one cycle of the learning rate over a
number of tokens; shares are shares of the leg. Does not own the steps (`train_target`).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """What a target run does; lengths in tokens, times in seconds."""

    shape: tuple[int, int] = (4, 512)
    """Rows of a step and tokens of a row; held-out rows have the same."""
    long_rows: tuple[tuple[int, int], ...] = ((16, 2048), (256, 4096))
    """(n, length): every n-th step is one row of `length` tokens; the last that fits counts."""
    rates: tuple[float, float] = (4e-3, 3e-3)
    """Learning rates of Muon and AdamW at a peak of 1."""
    peak: float = 1.0
    """Peak of the leg over `rates`; a leg that goes on from a trained model wants less than 1."""
    warmup_steps: int = 20
    flat_until: float = 0.35
    """Share of the leg before the linear decay."""
    final_factor: float = 0.02
    dense_until: float = 0.6
    """Share of the leg in which every layer sees every compressed entry."""
    quantised_from: float = 2.0
    """Share of the leg from which weights and cache records are rounded to their stored form;
    above 1: never."""
    prompt_weight: float = 0.3
    """Weight of a target in the loss that no assistant wrote; an answer's is 1."""
    copy_rows: int = 0
    """Rows of a step that are of the text that copies, where there is any; long rows are not."""
    copy_weights: tuple[float, float] = (0.1, 2.0)
    """As `prompt_weight`, and an answer's weight, in these rows."""
    index_every: int = 4
    """Steps between updates of the indexer while dense; afterwards each step updates it."""
    spread_weight: float = 0.0
    """Weight of the loss on compressed mass outside the indexer's selection, summed over layers; in
    dense steps that update the indexer."""
    max_norm: float = 1.0
    bias_steps: int = 100
    bias_rates: tuple[float, float] = (1e-2, 2e-3)
    """Router-bias speed in the first `bias_steps` steps and later."""
    log_every: int = 10
    heldout_every: int = 100
    save_seconds: float = 240.0


@dataclass(slots=True)
class Progress:
    """Where a run stands; saved and restored. A leg's schedule counts from its first token."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    leg_step: int = 0
    """Steps done when the leg began."""
    leg_start: int = 0
    """Tokens seen when the leg began."""
    leg_tokens: int = 0
    """Length of the leg in tokens."""

    def begin_leg(self, tokens: int) -> None:
        """Start a new cycle of the learning rate over `tokens` tokens."""
        self.leg_step, self.leg_start, self.leg_tokens = self.step, self.tokens, tokens

    def enter_leg(self, tokens: int | None, *, fresh: bool) -> None:
        """Begin a leg of `tokens` if `fresh` or if there is none; else go on with the saved one,
        `tokens` being its new length. Raises ValueError when a new leg has no length."""
        if fresh or not self.leg_tokens:
            if not tokens:
                raise ValueError("--tokens is needed: the length of the leg")
            self.begin_leg(tokens)
        elif tokens:
            self.leg_tokens = tokens

    def share(self) -> float:
        """Share of the leg that is done."""
        return (self.tokens - self.leg_start) / self.leg_tokens


def progress_of(row: Mapping[str, str]) -> Progress:
    """Where a run stood that logged this row; a leg has yet to begin."""
    return Progress(int(row["step"]), int(row["tokens"]), float(row["seconds"]))


def rate_factor(plan: Plan, step: int, share: float) -> float:
    """Learning rate over `plan.rates` at `step` of a leg, `share` of the leg being done."""
    warm = min(1.0, (step + 1) / plan.warmup_steps)
    late = max(0.0, (share - plan.flat_until) / (1.0 - plan.flat_until))
    return plan.peak * warm * (1.0 - (1.0 - plan.final_factor) * min(late, 1.0))
