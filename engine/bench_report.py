"""What a comparison says: tables for a person.

Owns words and columns. Data flow: settings with their passes -> summaries -> lines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decodegrid.capture.bench_numbers import (
    AssumedPoint,
    ParetoPoint,
    Percentiles,
    RepeatSpread,
    assumed_factor,
    paired_spread,
    pareto_front,
)
from decodegrid.capture.bench_table import format_table
from decodegrid.engine.bench_drive import ClosedLoop
from decodegrid.engine.bench_policies import TableVerify
from decodegrid.engine.bench_summary import SettingSummary, summarise
from decodegrid.engine.bench_sweep import Setting, SweepPlan, SweepResult


@dataclass(frozen=True, slots=True)
class Line:
    """A setting with its figures."""

    setting: Setting
    summary: SettingSummary
    over_first: RepeatSpread | None
    """Tokens/s over those of the first policy under the same traffic, repeat by repeat."""
    num_same: int
    """Requests whose tokens are those of the same request in the first setting of its context."""
    num_compared: int

    @property
    def names(self) -> list[str]:
        """Context, traffic and policy as cells."""
        setting = self.setting
        where = "as is" if setting.context_len is None else str(setting.context_len)
        traffic = setting.traffic
        load = str(traffic.batch) if isinstance(traffic, ClosedLoop) else f"{traffic.rate:g}"
        return [where, load, setting.policy.name]


def make_lines(result: SweepResult) -> list[Line]:
    """The figures of every setting, in the order in which they were asked for."""
    lines: list[Line] = []
    for setting, passes in result.passes.items():
        first = next(
            other
            for other in result.passes
            if (other.context_len, other.traffic) == (setting.context_len, setting.traffic)
        )
        reference = next(
            other for other in result.passes if other.context_len == setting.context_len
        )
        same = [
            left == right
            for own, other in zip(passes, result.passes[reference], strict=True)
            for left, right in zip(own.outputs, other.outputs, strict=True)
        ]
        over = None
        if setting != first:
            over = paired_spread(
                [each.tokens_per_s for each in passes],
                [each.tokens_per_s for each in result.passes[first]],
            )
        lines.append(Line(setting, summarise(passes), over, sum(same), len(same)))
    return lines


def speed_table(lines: Sequence[Line]) -> str:
    """Tokens/s of the device and of a user; closed loop."""
    head = [
        "context", "batch", "policy", "tokens/s a device", "without prefill", "over the first",
        "tokens/s a user P50 / P90 / P99", "tokens a round", "prefill", "rows a step",
    ]  # fmt: skip
    rows = [
        [
            *line.names,
            str(line.summary.tokens_per_s),
            str(line.summary.tokens_per_s_without_prefill),
            "1" if line.over_first is None else _ratio(line.over_first),
            _shown(line.summary.user_tokens_per_s),
            f"{line.summary.counts.tokens_per_round:.2f}",
            f"{line.summary.prefill_share:.0%}",
            f"{line.summary.rows_per_step:.2f}",
        ]
        for line in lines
    ]
    return format_table(head, rows, 3)


def load_table(lines: Sequence[Line]) -> str:
    """What users of an open loop get."""
    head = [
        "context", "rate/s", "policy", "ended/s", "tokens/s a device", "first token ms P50/P90/P99",
        "inter-token ms P50/P90/P99", "tokens/s a user P50/P90/P99", "most open", "idle",
    ]  # fmt: skip
    rows = [
        [
            *line.names,
            f"{line.summary.requests_per_s.median:.3g}",
            str(line.summary.tokens_per_s),
            _shown(line.summary.first_token_ms),
            _shown(line.summary.inter_token_ms),
            _shown(line.summary.user_tokens_per_s),
            str(line.summary.max_open),
            f"{line.summary.idle_share:.0%}",
        ]
        for line in lines
    ]
    return format_table(head, rows, 3)


def step_table(lines: Sequence[Line]) -> str:
    """Times of decode steps and waits."""
    head = [
        "context", "load", "policy", "graph ms P50 / P90 / P99", "step ms P50 / P90 / P99",
        "query tokens", "captured", "pads", "first token ms P50 / P90 / P99",
        "inter-token ms P50 / P90 / P99",
    ]  # fmt: skip
    rows = [
        [
            *line.names,
            _shown(line.summary.graph_ms),
            _shown(line.summary.period_ms),
            f"{line.summary.query_tokens_per_step:.2f}",
            f"{line.summary.captured_tokens_per_step:.2f}",
            f"{line.summary.pad_share:.0%}",
            _shown(line.summary.first_token_ms),
            _shown(line.summary.inter_token_ms),
        ]
        for line in lines
    ]
    return format_table(head, rows, 3)


def count_table(lines: Sequence[Line]) -> str:
    """The five counts apart, and acceptance by position."""
    head = [
        "context", "load", "policy", "drafted", "offered", "verified", "accepted", "emitted",
        "dropped", "accepted / verified by position",
    ]  # fmt: skip
    rows = []
    for line in lines:
        counts = line.summary.counts
        shares = ("-" if share is None else f"{share:.2f}" for share in counts.acceptance)
        numbers = (
            sum(counts.drafted), sum(counts.offered), sum(counts.verified), sum(counts.accepted),
            counts.emitted, counts.dropped,
        )  # fmt: skip
        rows.append([*line.names, *map(str, numbers), " ".join(shares)])
    return format_table(head, rows, 3)


def equality_lines(lines: Sequence[Line], are_comparable: bool) -> Iterator[str]:
    """Whether all settings gave the same tokens for the same prompts and seeds."""
    if not are_comparable:
        yield (
            "output equality: not compared; under rejection sampling at a temperature above 0 the "
            "tokens depend on which drafts are verified"
        )
        return
    same, compared = sum(line.num_same for line in lines), sum(line.num_compared for line in lines)
    yield (
        f"output equality: {same} of {compared} outputs ({same / compared:.2%}) have the tokens of "
        "the same prompt and seed in the first setting of their context"
    )
    for line in lines:
        if line.num_same < line.num_compared:
            yield f"  {line.setting}: {line.num_same} of {line.num_compared}"


def pareto_points(lines: Sequence[Line]) -> list[ParetoPoint]:
    """The closed loop's measured points; a setting without a speed of a user has none."""
    points = []
    for line in lines:
        setting, speed = line.setting, line.summary.user_tokens_per_s
        if isinstance(setting.traffic, ClosedLoop) and speed is not None:
            device = line.summary.tokens_per_s.median
            name, batch = setting.policy.name, setting.traffic.batch
            points.append(ParetoPoint(name, batch, setting.context_len, speed.p50, device))
    return points


def assumed_points(
    lines: Sequence[Line], num_draft_tokens: int, acceptance: float
) -> list[AssumedPoint]:
    """What the steps of the policy that verifies everything would give by the assumed factor."""
    factor = assumed_factor(num_draft_tokens, acceptance)
    return [
        AssumedPoint(
            line.setting.traffic.batch, line.setting.context_len, line.summary.steps_per_s, factor
        )
        for line in lines
        if isinstance(line.setting.traffic, ClosedLoop)
        and num_draft_tokens > 0
        and line.setting.policy.num_drafts == num_draft_tokens
    ]


def pareto_table(points: Sequence[ParetoPoint], assumed: Sequence[AssumedPoint]) -> str:
    """The measured points, those of the front marked, then what was assumed, marked as such."""
    head = ["context", "batch", "policy", "tokens/s a user", "tokens/s a device", "front"]
    contexts = dict.fromkeys(point.context_len for point in points)
    fronts = [
        each for context in contexts for each in pareto_front(
            [point for point in points if point.context_len == context]
        )
    ]  # fmt: skip
    rows = [
        [
            _context(point.context_len), str(point.batch), point.label,
            f"{point.user_tokens_per_s:.4g}", f"{point.device_tokens_per_s:.4g}",
            "*" if point in fronts else "",
        ]
        for point in points
    ]  # fmt: skip
    rows += [
        [
            _context(point.context_len), str(point.batch), f"ASSUMED x{point.factor:.3g}",
            f"{point.user_tokens_per_s:.4g}", f"{point.device_tokens_per_s:.4g}", "not measured",
        ]
        for point in assumed
    ]  # fmt: skip
    return format_table(head, rows, 3)


def method_lines(plan: SweepPlan, result: SweepResult, prompts: str) -> list[str]:
    """How it was measured, and what the words of the tables mean."""
    samples = f"{counted(len(plan.prompts[0][0]), 'request')} x {counted(plan.repeats, 'repeat')}"
    return [
        f"prompts: {prompts}; {samples}, up to {plan.max_tokens} tokens each, "
        f"temperature {plan.temperature:g}, seeds from {plan.seed} on, "
        f"{'past the end of text' if plan.ignore_eos else 'to the end of text'}; no two repeats "
        "share a seed, all policies of a repeat do",
        "denominator: 1 device (all threads of the engine). tokens/s a device: emitted tokens, "
        "counted from the outputs, over the whole pass, prefill charged; without prefill: over the "
        "time outside prefill chunks",
        "tokens/s a user: tokens behind a request's first step over the time since then; its P90 "
        "is what 90 % of the requests reach or exceed",
        "percentiles: linear between samples, over the samples of all repeats; a (b..c): median "
        "and least..greatest over the repeats",
        f"not counted: {counted(result.num_uncounted, 'pass')} that warmed up ({plan.warm_up} for "
        "each setting) or told the texts for oracle and random; no other pass or sample is left "
        "out",
        "prefix cache: off, so that every pass computes its prompts",
        *(f"policy {policy.name}: {policy.meaning}" for policy in plan.policies),
        *_foreseen(result),
    ]


def counted(number: int, word: str) -> str:
    """A number with its noun: 1 pass, 2 passes."""
    ending = "es" if word.endswith("s") else "s"
    return f"{number} {word}{'' if number == 1 else ending}"


def _foreseen(result: SweepResult) -> Iterator[str]:
    """How often the tables of oracle and random told what happened, warm-up included."""
    tabled = [policy for policy in result.policies.values() if isinstance(policy, TableVerify)]
    num_rows = sum(policy.num_rows for policy in tabled)
    if num_rows:
        as_foreseen = sum(policy.num_as_foreseen for policy in tabled)
        yield (
            f"oracle and random: {as_foreseen} of {num_rows} rows ({as_foreseen / num_rows:.2%}) "
            "verified and accepted what the first pass told"
        )


def _shown(value: Percentiles | None) -> str:
    return "-" if value is None else str(value)


def _ratio(value: RepeatSpread) -> str:
    return f"x{value.median:.2f} ({value.low:.2f}..{value.high:.2f})"


def _context(context_len: int | None) -> str:
    return "as is" if context_len is None else str(context_len)
