"""What the verify budget would do: the same choice as in a run, for made-up acceptance.

Owns the model of confidences and the averages over steps. The choice itself is
`decodegrid.capture.budget.VerifyBudget`, on the measured surface alone: no correction for context
or for time outside the graph. Data flow: a surface and three numbers -> many steps of made-up
survival rates -> the budget -> `Exploration`; the report page shows a table of them.

The model: each draft is accepted with its own confidence if those before it are, and the
confidences of all drafts are independent draws of one Beta distribution. Its mean is the acceptance
and its standard deviation is the spread times sqrt(mean (1 - mean)), the largest that a mean
allows; so Beta(a, b) has spread 1 / sqrt(a + b + 1). The draws are not random: the confidences of
each position are midpoint quantiles of the distribution in a fixed shuffled order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from decodegrid.capture.budget import BudgetChoice, VerifyBudget
from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.capture.surface import Surface

ACCEPTANCES = tuple(i / 20 for i in range(21))
"""Positions of the page's slider."""
SPREADS = tuple(i / 10 for i in range(9))
"""Positions of the page's slider; 0: all drafts alike."""
NUM_QUANTILES = 128
MIN_STEPS = 16
_MAX_POSITIONS = 20_000
"""Explorations of one page, over all its surfaces: seconds to compute, under 1 MB."""
_MAX_REQUEST_COUNTS = 24
_SEED = 0


@dataclass(frozen=True, slots=True)
class Exploration:
    """What the budget does on average over steps of one acceptance, spread and batch size."""

    num_reqs: int
    key: GraphKey
    """The pair that most steps run in; of equally frequent ones the smallest."""
    key_share: float
    """Share of the steps that run in it, above 0 to 1."""
    drafts_per_req: float
    """Drafts verified for a request and step, 0 to K."""
    tokens_per_step: float
    """Expected tokens that a step emits."""
    step_ms: float
    """Predicted time of a step."""
    gain_over_all: float
    """Expected tokens per ms over those of verifying every draft, less 1."""
    gain_over_none: float
    """Expected tokens per ms over those of verifying no draft, less 1."""


class SliderRange(NamedTuple):
    """What the page's sliders can be set to."""

    acceptances: Sequence[float]
    spreads: Sequence[float]
    num_reqs: Sequence[int]


def confidences(acceptance: float, spread: float, order: NDArray[np.int64]) -> NDArray[np.float64]:
    """Confidences of the model, in the order and shape of quantile indices.

    Args:
        order: int64 in 0 to NUM_QUANTILES - 1, any shape; as of `quantile_order`.

    Raises:
        ValueError: acceptance outside 0..1, or spread outside 0 to below 1.
    """
    if not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"acceptance is {acceptance}; allowed are 0..1")
    if not 0.0 <= spread < 1.0:
        raise ValueError(f"spread is {spread}; allowed are 0 to below 1")
    if spread == 0.0 or acceptance in (0.0, 1.0):
        return np.full(order.shape, acceptance)
    weight = 1.0 / spread**2 - 1.0
    shares = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    quantiles = betaincinv(acceptance * weight, (1.0 - acceptance) * weight, shares)
    drawn: NDArray[np.float64] = quantiles[order]
    return drawn


def quantile_order(num_reqs: int, num_drafts: int) -> NDArray[np.int64]:
    """(num_steps, num_reqs, num_drafts) int64: which quantile each draft of each step has.

    The same for the same arguments. At each position every quantile stands equally often, but for
    the less than num_reqs rows that do not fill a step. There are at least MIN_STEPS steps.
    """
    times = -(-MIN_STEPS * num_reqs // NUM_QUANTILES)
    num_rows = times * NUM_QUANTILES
    rows = np.broadcast_to(np.arange(num_rows)[:, None] // times, (num_rows, num_drafts))
    order = np.random.default_rng(_SEED).permuted(rows, axis=0)
    num_steps = num_rows // num_reqs
    return order[: num_steps * num_reqs].reshape(num_steps, num_reqs, num_drafts)


class Explorer:
    """Explorations of one surface; one thread at a time, as the budget.

    Args:
        surface: times of all captured pairs of a deployment.
        num_drafts: K, 1 or more.

    Raises:
        ValueError: num_drafts below 1, or pairs that do not cover every batch of up to as many
            requests as the largest pair has (CoverageError).
    """

    def __init__(self, surface: Surface, num_drafts: int) -> None:
        if num_drafts < 1:
            raise ValueError(f"num_drafts is {num_drafts}; without drafts nothing is chosen")
        self.num_drafts = num_drafts
        self.max_num_reqs = max(key.num_reqs for key in surface.points)
        grid = Grid(surface.points, self.max_num_reqs, num_drafts, surface.selection_cost)
        self._budget = VerifyBudget(grid, surface, num_drafts)
        self._orders: dict[int, NDArray[np.int64]] = {}

    def choices(self, acceptance: float, spread: float, num_reqs: int) -> list[BudgetChoice]:
        """The budget's choice for each made-up step.

        Raises:
            ValueError: as `confidences`, or num_reqs outside 1..max_num_reqs.
        """
        if not 1 <= num_reqs <= self.max_num_reqs:
            raise ValueError(f"num_reqs is {num_reqs}; allowed are 1..{self.max_num_reqs}")
        order = self._orders.get(num_reqs)
        if order is None:
            order = self._orders[num_reqs] = quantile_order(num_reqs, self.num_drafts)
        if spread == 0.0 or acceptance in (0.0, 1.0):
            order = order[:1]  # all steps are equal
        rates = np.cumprod(confidences(acceptance, spread, order), axis=2).astype(np.float32)
        usable = np.full(num_reqs, self.num_drafts)
        return [self._budget.choose(batch, usable) for batch in rates]

    def explore(self, acceptance: float, spread: float, num_reqs: int) -> Exploration:
        """The averages over the steps. Raises ValueError as `choices`."""
        choices = self.choices(acceptance, spread, num_reqs)
        pairs = Counter(choice.key for choice in choices)
        key, count = min(pairs.items(), key=lambda item: (-item[1], item[0]))
        tokens = sum(choice.expected_tokens for choice in choices)
        ms = sum(_known(choice.step_ms) for choice in choices)
        all_tokens = sum(choice.all_tokens for choice in choices)
        all_ms = sum(_known(choice.all_ms) for choice in choices)
        none_ms = sum(_known(choice.none_ms) for choice in choices)
        num_steps = len(choices)
        drafts = sum(choice.num_query_tokens for choice in choices) - num_steps * num_reqs
        return Exploration(
            num_reqs=num_reqs,
            key=key,
            key_share=count / num_steps,
            drafts_per_req=drafts / num_steps / num_reqs,
            tokens_per_step=tokens / num_steps,
            step_ms=ms / num_steps,
            gain_over_all=tokens / ms / (all_tokens / all_ms) - 1.0,
            gain_over_none=tokens / ms / (num_steps * num_reqs / none_ms) - 1.0,
        )


def explore(
    surface: Surface, num_drafts: int, acceptance: float, spread: float, num_reqs: int
) -> Exploration:
    """One exploration of a surface.

    Args:
        surface: times of all captured pairs of a deployment.
        num_drafts: K, 1 or more.
        acceptance: mean of the confidences, 0..1.
        spread: of the confidences, as a share of the largest that the mean allows, 0 to below 1.
        num_reqs: live requests.

    Raises:
        ValueError: as `Explorer` and `Explorer.choices`.
    """
    return Explorer(surface, num_drafts).explore(acceptance, spread, num_reqs)


def slider_range(max_num_reqs: int, num_surfaces: int) -> SliderRange:
    """What the sliders of a page with that many surfaces can be set to.

    All request counts where they are few, else a geometric selection with 1 and the largest.
    """
    positions = len(ACCEPTANCES) * len(SPREADS) * num_surfaces
    most = max(2, min(_MAX_REQUEST_COUNTS, _MAX_POSITIONS // positions))
    counts = list(range(1, max_num_reqs + 1))
    if max_num_reqs > most:
        counts = sorted({round(float(n)) for n in np.geomspace(1, max_num_reqs, most)})
    return SliderRange(ACCEPTANCES, SPREADS, counts)


def slider_table(surface: Surface, num_drafts: int, sliders: SliderRange) -> dict[str, Any]:
    """The exploration of every slider position, as columns of plain numbers.

    Returns:
        `pairs`: the pairs that occur, [requests, query tokens]; the rest are lists with one entry
        for each position, acceptance within requests and spread within acceptance: `pair` (index
        into pairs), `share`, `drafts`, `tokens`, `ms`, `over_all`, `over_none`, rounded.

    Raises:
        ValueError: as `Explorer`, or more requests than the surface has.
    """
    explorer = Explorer(surface, num_drafts)
    found = [
        explorer.explore(acceptance, spread, num_reqs)
        for num_reqs in sliders.num_reqs
        for acceptance in sliders.acceptances
        for spread in sliders.spreads
    ]
    pairs = sorted({one.key for one in found})
    index = {key: place for place, key in enumerate(pairs)}
    return {
        "pairs": [[key.num_reqs, key.num_query_tokens] for key in pairs],
        "pair": [index[one.key] for one in found],
        "share": [round(one.key_share, 4) for one in found],
        "drafts": [round(one.drafts_per_req, 3) for one in found],
        "tokens": [round(one.tokens_per_step, 3) for one in found],
        "ms": [float(f"{one.step_ms:.5g}") for one in found],
        "over_all": [round(one.gain_over_all, 4) for one in found],
        "over_none": [round(one.gain_over_none, 4) for one in found],
    }


def nearest(values: Sequence[float], value: float) -> int:
    """Index of the value that is nearest; the first of equals."""
    return min(range(len(values)), key=lambda index: abs(values[index] - value))


def _known(ms: float | None) -> float:
    assert ms is not None, "a budget with a surface predicts times"
    return ms
