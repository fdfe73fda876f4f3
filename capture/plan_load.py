"""A made-up load on the engine's own budget function: which batches a grid would see.

Owns the simulation: Poisson arrivals, log-normal output lengths, Beta confidences, one request a
slot, one decode step after the other. Runs no model. Data flow: a load, a grid and its step times
-> steps by batch (`GridTrace`), tokens and time.

The rules are the engine's: a request's first step has no drafts; the total comes from the rates of
the step before last, 1 until there are any; the split goes by the rates of the drafts themselves; a
draft is accepted with its confidence if all before it are. What is left out: prefill beyond a fixed
time for each request, host work, preemption, requests that end early. All random numbers of a
request are drawn at its start from the seed and its number, so that two grids serve the same load.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from decodegrid.capture.budget import VerifyBudget
from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.capture.plan_trace import GridTrace, PairUse
from decodegrid.capture.surface import Surface

Floats = NDArray[np.float32]

MAX_TOKENS = 2_000_000
"""Most tokens of a load, so that a simulation ends in minutes."""
MAX_SIGMA = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests as they come, how long they get, and how sure their drafts are."""

    rate: float
    """Requests a second, Poisson."""
    requests: int = 200
    tokens: float = 100.0
    """Median of the output lengths."""
    sigma: float = 0.5
    """Of the logarithm of the lengths; 0 for equal ones, at most MAX_SIGMA."""
    alpha: float = 6.0
    """Of the Beta distribution of confidences, each draft's own."""
    beta: float = 2.0
    prefill_ms: float = 0.0
    """Time that a request takes from all decode steps when it starts."""
    seed: int = 0
    max_tokens: int = 4096
    """Longer outputs are cut."""

    def __post_init__(self) -> None:
        above_zero = ("rate", "tokens", "alpha", "beta")
        for name in (*above_zero, "sigma", "prefill_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 if name in above_zero else value >= 0)):
                least = "above 0" if name in above_zero else "of at least 0"
                raise ValueError(f"{name} is {value}; a finite number {least} is needed")
        for count, minimum in (("requests", 1), ("max_tokens", 1), ("seed", 0)):
            if getattr(self, count) < minimum:
                raise ValueError(f"{count} is {getattr(self, count)}; at least {minimum} is needed")
        if self.sigma > MAX_SIGMA:
            raise ValueError(f"sigma is {self.sigma:g}; at most {MAX_SIGMA:g} is allowed")
        if self.requests > MAX_TOKENS or self.requests * self.tokens > MAX_TOKENS:
            raise ValueError(
                f"requests = {self.requests} of tokens = {self.tokens:g} are more than the "
                f"{MAX_TOKENS} tokens that are simulated"
            )

    def describe(self) -> str:
        """All of it on one line."""
        return (
            f"{self.requests} requests at {self.rate:g}/s, {self.tokens:g} tokens "
            f"(sigma {self.sigma:g}), confidences Beta({self.alpha:g}, {self.beta:g}), "
            f"prefill {self.prefill_ms:g} ms, seed {self.seed}"
        )


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a grid did with a load."""

    trace: GridTrace
    num_emitted: int
    decode_ms: float
    """Sum of the step times."""

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens a second of decode steps."""
        return self.num_emitted / self.decode_ms * 1e3


@dataclass(slots=True)
class _Row:
    """A running request."""

    remaining: int
    confidence: Floats
    """(steps, K) of the drafts that each of its steps makes."""
    draws: Floats
    """(steps, K) uniform; a draft is accepted below its confidence."""
    step: int = 0
    older: Floats = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """(K,) rates of the step before last."""


class _Simulation:
    """One load on one grid."""

    def __init__(self, load: Load, grid: Grid, surface: Surface, limit: int | None) -> None:
        self.load, self.grid, self.surface, self.limit = load, grid, surface, limit
        self.width = grid.num_draft_tokens
        self.budget = VerifyBudget(grid, surface, self.width)
        generator = np.random.default_rng(load.seed)
        gaps = generator.exponential(1e3 / load.rate, load.requests)
        self.arrivals = np.cumsum(gaps)
        lengths = load.tokens * np.exp(load.sigma * generator.standard_normal(load.requests))
        lengths = np.clip(np.rint(lengths), 1, min(load.max_tokens, MAX_TOKENS + 1))
        if lengths.sum() > MAX_TOKENS:
            raise ValueError(
                f"the outputs that sigma = {load.sigma:g} and max_tokens = {load.max_tokens} allow "
                f"have {lengths.sum():.4g} tokens; at most {MAX_TOKENS} are simulated"
            )
        self.lengths = lengths.astype(np.int64)
        self.rows: list[_Row] = []
        self.steps: Counter[tuple[int, int]] = Counter()
        self.uses: dict[GraphKey, list[int]] = {}
        self.num_emitted, self.decode_ms = 0, 0.0

    def run(self) -> None:
        """Serve all requests to their ends."""
        now, waiting = 0.0, deque(range(self.load.requests))
        while waiting or self.rows:
            if not self.rows:
                now = max(now, float(self.arrivals[waiting[0]]))
            while (
                waiting
                and len(self.rows) < self.grid.max_num_reqs
                and self.arrivals[waiting[0]] <= now
            ):
                self.rows.append(self._start(waiting.popleft()))
                now += self.load.prefill_ms
            now += self._step()

    def _start(self, index: int) -> _Row:
        generator = np.random.default_rng((self.load.seed, index))
        length = int(self.lengths[index])
        shape = (length, self.width)
        confidence = generator.beta(self.load.alpha, self.load.beta, shape).astype(np.float32)
        draws = generator.random(shape, dtype=np.float32)
        return _Row(length, confidence, draws, older=np.ones(self.width, dtype=np.float32))

    def _step(self) -> float:
        """Run one step; its time, ms."""
        rows, count = self.rows, len(self.rows)
        # The drafts of a row are those that its last step made; its first step has none.
        usable = np.array(
            [min(self.width, row.remaining - 1) if row.step else 0 for row in rows], dtype=np.int64
        )
        drafted = np.stack([row.confidence[max(row.step - 1, 0)] for row in rows])
        rates = np.multiply.accumulate(drafted, axis=1)
        total = self._total(np.stack([row.older for row in rows]), usable)
        key = self.grid.select(count, total)
        verified = _split(rates, usable, total - count)
        draws = np.stack([row.draws[row.step] for row in rows])
        right = np.logical_and.accumulate(draws < drafted, axis=1)
        right &= np.arange(self.width) < verified[:, None]
        emitted = right.sum(axis=1) + 1
        for row, rate, num in zip(rows, rates, emitted.tolist(), strict=True):
            if row.step:
                row.older = rate
            row.step += 1
            row.remaining -= num
        self.rows = [row for row in rows if row.remaining]
        self._count(count, total, key, int(emitted.sum()))
        return self.surface.ms(key)

    def _total(self, older: Floats, usable: NDArray[np.int64]) -> int:
        if self.limit is None:
            return self.budget.choose(older, usable).num_query_tokens
        count = len(usable)
        return min(count + int(usable.sum()), max(self.limit, count))

    def _count(self, num_reqs: int, total: int, key: GraphKey, emitted: int) -> None:
        self.steps[num_reqs, total] += 1
        use = self.uses.setdefault(key, [0, 0, 0])
        use[0] += 1
        use[1] += key.num_reqs - num_reqs
        use[2] += key.num_query_tokens - total
        self.num_emitted += emitted
        self.decode_ms += self.surface.ms(key)


def simulate_load(load: Load, grid: Grid, surface: Surface, limit: int | None = None) -> LoadResult:
    """Serve a load on a grid.

    Args:
        surface: times of all its pairs.
        limit: most query tokens of a step, and no schedule; None for the schedule.

    Raises:
        SurfaceError: a pair has no time.
        ValueError: the outputs that were drawn are too long together.
    """
    simulation = _Simulation(load, grid, surface, limit)
    simulation.run()
    trace = GridTrace(
        grid.max_num_reqs,
        grid.num_draft_tokens,
        f"simulated: {load.describe()}",
        simulation.steps,
        {key: PairUse(*use) for key, use in simulation.uses.items()},
    )
    return LoadResult(trace, simulation.num_emitted, simulation.decode_ms)


def _split(rates: Floats, usable: NDArray[np.int64], num_drafts: int) -> NDArray[np.int64]:
    """(rows,) drafts that each row verifies: the most probable ones of all."""
    width = rates.shape[1]
    ranked = np.where(np.arange(width) < usable[:, None], rates, np.float32(-1.0)).ravel()
    wins = np.zeros(ranked.size, dtype=np.int64)
    wins[np.argsort(-ranked, kind="stable")[:num_drafts]] = 1
    return np.asarray(wins.reshape(rates.shape).sum(axis=1))
