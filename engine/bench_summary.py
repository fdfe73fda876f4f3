"""The figures of one setting from its passes.

Owns which samples go into which figure. Percentiles are over the samples of all repeats together;
what is a figure of a whole pass is told as median, least and greatest over the repeats. Data flow:
`BenchPass` of each repeat -> `SettingSummary` -> tables and JSON.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decodegrid.capture.bench_numbers import (
    Percentiles,
    RepeatSpread,
    Tail,
    percentiles,
    repeat_spread,
)
from decodegrid.engine.bench_stats import BenchPass, RequestRecord
from decodegrid.engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """The five counts, and what else happened to tokens; sums over passes."""

    drafted: tuple[int, ...]
    """By draft position, as are the next four: drafts that existed when their step ran."""
    offered: tuple[int, ...]
    """Of those, the ones that the length and the request's own limit left room for."""
    verified: tuple[int, ...]
    accepted: tuple[int, ...]
    reached: tuple[int, ...]
    """Of the verified ones, those whose predecessors were all accepted."""
    emitted: int
    """Tokens that the requests gave out, counted from their outputs."""
    dropped: int
    """Tokens that the device emitted behind the end of a request."""
    rounds: int
    """Decode steps summed over the requests in them: emitted + dropped = rounds + accepted."""
    late_rows: int
    """Rows of requests that had ended when their step was launched."""

    @classmethod
    def of(cls, passes: Sequence[BenchPass]) -> "DraftCounts":
        """Sums over passes, at least one."""

        def total(position_counts: Callable[[EngineStats], list[int]]) -> tuple[int, ...]:
            lists = [position_counts(each.stats) for each in passes]
            return tuple(map(sum, zip(*lists, strict=True)))

        return cls(
            total(lambda stats: stats.drafted_per_position),
            total(lambda stats: stats.offered_per_position),
            total(lambda stats: stats.verified_per_position),
            total(lambda stats: stats.accepted_per_position),
            total(lambda stats: stats.reached_per_position),
            sum(each.num_emitted for each in passes),
            sum(each.stats.num_dropped for each in passes),
            sum(each.stats.num_decode_rows for each in passes),
            sum(each.stats.num_late_rows for each in passes),
        )

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens for each request and decode step."""
        return self.emitted / self.rounds

    @property
    def acceptance(self) -> list[float | None]:
        """accepted / verified by position; None where none was verified."""
        pairs = zip(self.accepted, self.verified, strict=True)
        return [accepted / verified if verified else None for accepted, verified in pairs]

    def as_json(self) -> dict[str, Any]:
        """Sums over the positions, and by position."""
        names = ("drafted", "offered", "verified", "accepted")
        return {
            **{name: sum(getattr(self, name)) for name in names},
            "emitted": self.emitted,
            "dropped": self.dropped,
            "rounds": self.rounds,
            "late_rows": self.late_rows,
            "by_position": {name: list(getattr(self, name)) for name in (*names, "reached")},
            "accepted_over_verified": self.acceptance,
        }


@dataclass(frozen=True, slots=True)
class SettingSummary:
    """All figures of a setting; times in ms, speeds in tokens/s. None where nothing was there to
    measure."""

    tokens_per_s: RepeatSpread
    """Of the device, prefill charged."""
    tokens_per_s_without_prefill: RepeatSpread
    user_tokens_per_s: Percentiles | None
    """Of requests behind their first token; the tail is the slow end."""
    user_median: RepeatSpread | None
    """Median of each repeat."""
    num_without_speed: int
    """Requests that got all their tokens in one step, which have no speed."""
    first_token_ms: Percentiles | None
    inter_token_ms: Percentiles | None
    wait_ms: Percentiles | None
    """Between one arrival of tokens and the next."""
    graph_ms: Percentiles | None
    """Of decode steps, the captured graph alone."""
    period_ms: Percentiles | None
    """Of decode steps, host work included."""
    counts: DraftCounts
    num_steps: int
    rows_per_step: float
    query_tokens_per_step: float
    captured_tokens_per_step: float
    """Query tokens of the captured pairs, pads included."""
    steps_per_s: float
    """Decode steps over the time of the decode steps."""
    prefill_share: float
    """Of the time with open requests."""
    num_preemptions: int
    requests_per_s: RepeatSpread
    """Ended requests over the time from the first arrival to the last end."""
    idle_share: float
    max_open: int
    graph_hits: Mapping[tuple[int, int], int]

    @property
    def pad_share(self) -> float:
        """Share of the captured query tokens that belonged to no row."""
        return 1.0 - self.query_tokens_per_step / self.captured_tokens_per_step

    def as_json(self) -> dict[str, Any]:
        """Every field by its name; graph hits as "(B, Q)"."""
        found: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            as_json = getattr(value, "as_json", None)
            found[name] = value if as_json is None else as_json()
        hits = {f"({b}, {q})": count for (b, q), count in self.graph_hits.items()}
        return {**found, "graph_hits": hits, "pad_share": self.pad_share}


def summarise(passes: Sequence[BenchPass]) -> SettingSummary:
    """The figures of a setting, from its passes; at least one, each with a decode step."""
    records = [record for each in passes for record in each.requests]
    steps = [step for each in passes for step in each.stats.steps]
    speeds = [_speeds(each) for each in passes]
    hits: Counter[tuple[int, int]] = Counter()
    for each in passes:
        hits.update(each.stats.graph_hits)
    wall = sum(each.wall_s for each in passes)
    busy = wall - sum(each.idle_s for each in passes)
    medians = [percentiles(each, "low") for each in speeds]

    def ms(samples: Callable[[RequestRecord], Sequence[float]]) -> Percentiles | None:
        return percentiles([1e3 * value for record in records for value in samples(record)])

    return SettingSummary(
        tokens_per_s=_spread([each.tokens_per_s for each in passes]),
        tokens_per_s_without_prefill=_spread(
            [each.tokens_per_s_without_prefill for each in passes]
        ),
        user_tokens_per_s=percentiles([speed for each in speeds for speed in each], "low"),
        user_median=repeat_spread(None if each is None else each.p50 for each in medians),
        num_without_speed=len(records) - sum(map(len, speeds)),
        first_token_ms=ms(lambda record: [record.first_token_s]),
        inter_token_ms=ms(lambda record: record.inter_token_s),
        wait_ms=ms(lambda record: record.waits_s),
        graph_ms=percentiles([1e3 * step.graph_s for step in steps]),
        period_ms=percentiles([1e3 * step.period_s for step in steps]),
        counts=DraftCounts.of(passes),
        num_steps=len(steps),
        rows_per_step=_mean([step.num_reqs for step in steps]),
        query_tokens_per_step=_mean([step.num_query_tokens for step in steps]),
        captured_tokens_per_step=_mean([step.key.num_query_tokens for step in steps]),
        steps_per_s=len(steps) / sum(step.period_s for step in steps),
        prefill_share=sum(each.stats.prefill_seconds for each in passes) / busy,
        num_preemptions=sum(record.num_preemptions for record in records),
        requests_per_s=_spread([len(each.requests) / each.wall_s for each in passes]),
        idle_share=1.0 - busy / wall,
        max_open=max(each.max_open for each in passes),
        graph_hits=dict(sorted(hits.items())),
    )


def pass_json(each: BenchPass, seed: int) -> dict[str, Any]:
    """One pass on its own, for who wants to look behind the spreads."""

    def of(samples: Sequence[float], tail: Tail = "high") -> dict[str, float] | None:
        found = percentiles(samples, tail)
        return None if found is None else found.as_json()

    stats = each.stats
    return {
        "seed": seed,
        "wall_s": each.wall_s,
        "idle_s": each.idle_s,
        "prefill_s": stats.prefill_seconds,
        "prefill_tokens": stats.num_prefill_tokens,
        "decode_s": stats.decode_seconds,
        "graph_s": stats.graph_seconds,
        "decode_steps": stats.num_decode_steps,
        "emitted": each.num_emitted,
        "tokens_per_s": each.tokens_per_s,
        "tokens_per_s_without_prefill": each.tokens_per_s_without_prefill,
        "user_tokens_per_s": of(_speeds(each), "low"),
        "first_token_ms": of([1e3 * record.first_token_s for record in each.requests]),
        "finish_reasons": dict(Counter(str(record.finish_reason) for record in each.requests)),
        "counts": DraftCounts.of([each]).as_json(),
    }


def _speeds(each: BenchPass) -> list[float]:
    return [speed for record in each.requests if (speed := record.tokens_per_s) is not None]


def _spread(figures: Sequence[float]) -> RepeatSpread:
    found = repeat_spread(figures)
    assert found is not None, "a setting has at least one pass"
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
