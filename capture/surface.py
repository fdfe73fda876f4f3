"""The step-time surface t(B, Q): how long each captured pair takes, measured and kept.

Owns the numbers and how they are measured over a callable. Does not own what a step computes nor
the files (`decodegrid.capture.surface_store`), and chooses nothing. Data flow: start-up asks the
store for a surface of its keys and facts; when it has none, `measure_surface` replays every
captured pair; the verify budget and the reports read `Surface.ms`.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, ValidationError

from decodegrid.capture.grid import GraphKey

TOLERANCE = 0.15
"""Share by which a larger pair may seem faster before it is believed to be."""


class SurfaceError(ValueError):
    """A surface that cannot be measured, read, written or asked for what it was asked for."""


class _PointFile(BaseModel):
    """A point in a file; SurfacePoint and GraphKey check the values."""

    model_config = ConfigDict(strict=True, extra="forbid")
    num_reqs: int
    num_query_tokens: int
    median_ms: FiniteFloat
    low_ms: FiniteFloat
    high_ms: FiniteFloat
    repeats: int


class _SurfaceFile(BaseModel):
    """The fields of a file, their types and limits."""

    model_config = ConfigDict(strict=True, extra="forbid")
    format: Literal[1]
    measured_at: FiniteFloat = Field(gt=0)
    context_len: NonNegativeInt
    facts: dict[str, str]
    points: list[_PointFile] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class SurfacePoint:
    """Time of one captured pair over some repeats, ms."""

    median_ms: float
    low_ms: float
    """Least of the repeats, the load that all pairs shared divided out."""
    high_ms: float
    """Greatest of the repeats, likewise."""
    repeats: int

    def __post_init__(self) -> None:
        times_fit = 0.0 < self.low_ms <= self.median_ms <= self.high_ms < math.inf
        if self.repeats < 1 or not times_fit:
            raise SurfaceError(f"{self}: need 0 < low <= median <= high, finite, and repeats >= 1")

    @property
    def spread(self) -> float:
        """Half the range of the repeats as a share of the median."""
        return (self.high_ms - self.low_ms) / 2 / self.median_ms


@dataclass(frozen=True, slots=True)
class Surface:
    """The measured times of all captured pairs, with what they are valid for."""

    points: Mapping[GraphKey, SurfacePoint]
    """At least one."""
    context_len: int
    """Tokens in each row's context while measuring, 0 or more."""
    measured_at: float
    """End of the measurement, seconds since 1970."""
    facts: Mapping[str, str]
    """What the times depend on, for example model hash, torch version, device, threads."""

    def __post_init__(self) -> None:
        if not self.points:
            raise SurfaceError("a surface needs at least one point")
        if self.context_len < 0:
            raise SurfaceError(f"context_len is {self.context_len}; at least 0 is needed")
        if not 0.0 < self.measured_at < math.inf:
            raise SurfaceError(f"measured_at is {self.measured_at}; need seconds since 1970")
        object.__setattr__(self, "points", MappingProxyType(dict(sorted(self.points.items()))))
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))

    def ms(self, key: GraphKey) -> float:
        """Median time of one captured pair; usable as a grid's cost.

        Raises:
            SurfaceError: the pair was not measured.
        """
        point = self.points.get(key)
        if point is None:
            raise SurfaceError(f"no step time for {key}; measured are {len(self.points)} pairs")
        return point.median_ms

    def selection_cost(self, key: GraphKey) -> float:
        """Cost by which a grid picks a pair: like `ms`, with differences below the noise ignored.

        A pair that covers another one does all of its work, so where it was measured up to
        TOLERANCE faster that is noise: both get the lesser time, and the smaller pair is picked.
        """
        own = self.ms(key)
        covering = [
            point.median_ms
            for other, point in self.points.items()
            if other.covers(key.num_reqs, key.num_query_tokens)
        ]
        return max(min(covering), own * (1.0 - TOLERANCE))

    def age(self, now: float) -> float:
        """Seconds from the measurement to `now`, which is seconds since 1970."""
        return now - self.measured_at

    def format(self) -> str:
        """A table: a row for each B, a column for each Q/B, median +- half the range."""
        when = datetime.fromtimestamp(self.measured_at, UTC).isoformat(timespec="seconds")
        columns = sorted({key.num_query_tokens / key.num_reqs for key in self.points})
        cells = {
            (key.num_reqs, key.num_query_tokens / key.num_reqs): (
                f"{point.median_ms:.4g} +-{point.spread:.0%}"
            )
            for key, point in self.points.items()
        }
        width = max(8, *(len(cell) for cell in cells.values()))
        lines = [
            f"step ms, median +- half the range; context {self.context_len}, measured {when}",
            f"{'B  Q/B=':>8} " + " ".join(f"{column:>{width}.4g}" for column in columns),
        ]
        for num_reqs in sorted({key.num_reqs for key in self.points}):
            row = " ".join(f"{cells.get((num_reqs, column), '-'):>{width}}" for column in columns)
            lines.append(f"{num_reqs:>8} {row}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads; plain objects, lists, strings and numbers."""
        return {
            "format": 1,
            "measured_at": self.measured_at,
            "context_len": self.context_len,
            "facts": dict(self.facts),
            "points": [
                {"num_reqs": key.num_reqs, "num_query_tokens": key.num_query_tokens} | asdict(point)
                for key, point in self.points.items()
            ],
        }

    @classmethod
    def from_json(cls, data: object, source: str) -> "Surface":
        """Read the form of `as_json`; unknown and missing fields and other types are errors.

        Args:
            data: a parsed JSON value.
            source: the file, for messages.

        Raises:
            SurfaceError: names `source` and the field.
        """
        try:
            file = _SurfaceFile.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the file"
            raise SurfaceError(f"{source}: {field}: {first['msg']}") from error
        points: dict[GraphKey, SurfacePoint] = {}
        try:
            for item in file.points:
                key = GraphKey(item.num_reqs, item.num_query_tokens)
                if key in points:
                    raise SurfaceError(f"the pair {key} is there twice")
                points[key] = SurfacePoint(item.median_ms, item.low_ms, item.high_ms, item.repeats)
        except ValueError as error:
            raise SurfaceError(f"{source}: points.{len(points)}: {error}") from error
        return cls(points, file.context_len, file.measured_at, file.facts)


@dataclass(frozen=True, slots=True)
class StepProbe:
    """How one captured pair is made ready and run while it is measured."""

    run: Callable[[GraphKey], None]
    """The replay; this is what is timed."""
    prepare: Callable[[GraphKey], None] | None = None
    """Called before each run, outside the timing; for example fills the slots."""
    synchronize: Callable[[], None] | None = None
    """Waits for the device, before the clock is started and before it is read."""


def measure_surface(
    keys: Iterable[GraphKey],
    probe: StepProbe,
    *,
    context_len: int,
    facts: Mapping[str, str],
    warmup: int = 1,
    repeats: int = 5,
    now: Callable[[], float] = time.time,
    clock: Callable[[], float] = time.perf_counter,
) -> Surface:
    """Run every pair `warmup` times untimed and then `repeats` times timed.

    Largest first; the repeats go round all pairs, so that a slow spell of the machine costs every
    pair one repeat and not one pair all of its repeats. What a round's pairs share, another load on
    the machine above all, is divided out: a choice between pairs lives on their ratios.

    Args:
        now: seconds since 1970, read once at the end.
        clock: a monotonic clock in seconds.

    Raises:
        SurfaceError: no keys, warmup < 0, repeats < 1, or a run in which the clock stood still.
    """
    if warmup < 0 or repeats < 1:
        raise SurfaceError(f"warmup {warmup}, repeats {repeats}: need 0 or more, 1 or more")
    order = _largest_first(keys)
    times = _timed_rounds(order, probe, warmup, repeats, clock)
    return _surface_of(order, times, _About(context_len, now(), facts))


def measure_twice(
    keys: Iterable[GraphKey],
    probe: StepProbe,
    *,
    context_len: int,
    facts: Mapping[str, str],
    repeats: int = 5,
    now: Callable[[], float] = time.time,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Surface, Surface]:
    """Two surfaces whose rounds take turns: what they differ by is the error of one measurement.

    Two measurements one after the other differ by what the machine's speed did in between, too.
    Arguments and errors as those of `measure_surface`.
    """
    if repeats < 1:
        raise SurfaceError(f"repeats {repeats}: need 1 or more")
    order = _largest_first(keys)
    times = _timed_rounds(order, probe, 1, 2 * repeats, clock)
    about = _About(context_len, now(), facts)
    return _surface_of(order, times[0::2], about), _surface_of(order, times[1::2], about)


def without_shared_load(rounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Times (rounds, pairs) > 0 with what the pairs of a round have in common divided out.

    A round's factor is the median over its pairs of time over the pair's own median; the typical
    round keeps its times.
    """
    factors = np.median(rounds / np.median(rounds, axis=0), axis=1, keepdims=True)
    shared: NDArray[np.float64] = rounds * (np.median(factors) / factors)
    return shared


class _About(NamedTuple):
    """What a surface says beside its times."""

    context_len: int
    measured_at: float
    facts: Mapping[str, str]


def _largest_first(keys: Iterable[GraphKey]) -> list[GraphKey]:
    order = sorted(set(keys), key=lambda key: (key.num_query_tokens, key.num_reqs), reverse=True)
    if not order:
        raise SurfaceError("a surface needs at least one point")
    return order


def _timed_rounds(
    order: list[GraphKey],
    probe: StepProbe,
    warmup: int,
    repeats: int,
    clock: Callable[[], float],
) -> NDArray[np.float64]:
    """Milliseconds (repeats, pairs) of rounds over all pairs, behind `warmup` untimed ones."""
    prepare = probe.prepare or (lambda key: None)
    wait = probe.synchronize or (lambda: None)
    rounds = np.empty((warmup + repeats, len(order)))
    for turn in range(warmup + repeats):
        for column, key in enumerate(order):
            prepare(key)
            wait()
            began = clock()
            probe.run(key)
            wait()
            rounds[turn, column] = (clock() - began) * 1e3
            if turn >= warmup and rounds[turn, column] <= 0.0:
                raise SurfaceError(
                    f"the clock measured {rounds[turn, column]} ms for {key}; it is too coarse"
                )
    return rounds[warmup:]


def _surface_of(order: list[GraphKey], rounds: NDArray[np.float64], about: _About) -> Surface:
    """The surface of timed rounds (repeats, pairs), ms."""
    points = {
        key: SurfacePoint(float(np.median(ms)), float(ms.min()), float(ms.max()), len(rounds))
        for key, ms in zip(order, without_shared_load(rounds).T, strict=True)
    }
    return Surface(points, about.context_len, about.measured_at, about.facts)
