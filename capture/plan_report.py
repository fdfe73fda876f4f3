"""A plan in words: the table, the one sentence, and the YAML fragment.

Owns texts only. Data flow: `decodegrid.capture.plan.Plan` -> lines.
"""

from collections import Counter
from collections.abc import Iterator

from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.capture.plan import MIN_GAIN, Plan, worst_unseen
from decodegrid.capture.plan_times import Origin

_SIGNS = {Origin.MEASURED: " ", Origin.INTERPOLATED: "~", Origin.BOUND: "<"}
_EQUAL = 0.0005
"""Share of a step time that is not worth a word."""


def format_plan(plan: Plan) -> str:
    """The whole report; its last line is `sentence`."""
    return "\n".join([*_summary(plan), "", *_pairs(plan), "", *_notes(plan), sentence(plan)])


def sentence(plan: Plan) -> str:
    """The plan on one line, such as "drop 14 pairs, save 1.8 GiB and 9 s, lose 0.3 %"."""
    if not plan.has_gain:
        return (
            f"no gain: keep the deployment's {_count(len(plan.deployed), 'pair')}; no grid within "
            f"the bounds is smaller, or faster by {MIN_GAIN:.1%}"
        )
    dropped, added = plan.dropped, plan.added
    parts = []
    if dropped:
        parts.append(f"drop {_count(len(dropped), 'pair')}")
    if added:
        parts.append(f"add {len(added)}" if dropped else f"add {_count(len(added), 'pair')}")
    parts += _saved(plan)
    if abs(plan.loss) < _EQUAL:
        parts.append("the same step time")
    else:
        parts.append(f"{'lose' if plan.loss > 0 else 'gain'} {abs(plan.loss) * 100:.1f} %")
    return ", ".join(parts)


def yaml_fragment(plan: Plan) -> str:
    """`grid.pairs` with the limits that it holds for; a deployment file of its own."""
    grid = plan.grid
    rows: dict[int, list[str]] = {}
    for key in grid.keys:
        rows.setdefault(key.num_reqs, []).append(f"[{key.num_reqs}, {key.num_query_tokens}]")
    lists = ",\n".join(f"    {', '.join(items)}" for items in rows.values())
    return (
        f"# Planned on this trace: {_one_line(plan.trace.source)}\n"
        f"# {sentence(plan)}\n"
        "# Holds for these two limits. In a deployment, grid.pairs stands in place of\n"
        "# grid.num_reqs and grid.num_query_tokens_per_req.\n"
        f"scheduler:\n  max_num_reqs: {grid.max_num_reqs}\n"
        f"speculation:\n  num_draft_tokens: {grid.num_draft_tokens}\n"
        f"grid:\n  pairs: [\n{lists},\n  ]\n"
    )


def _saved(plan: Plan) -> list[str]:
    before, after = plan.cost_of(plan.deployed), plan.cost_of(plan.grid)
    if before is None or after is None:
        return []
    memory = before.memory_bytes - after.memory_bytes
    seconds = before.capture_s - after.capture_s
    saved: list[str] = []
    taken: list[str] = []
    for value, text in ((memory, _bytes(abs(memory))), (seconds, f"{abs(seconds):.3g} s")):
        if value:
            (saved if value > 0 else taken).append(text)
    words = [f"save {' and '.join(saved)}"] if saved else []
    return [*words, f"take {' and '.join(taken)} more"] if taken else words


def _summary(plan: Plan) -> Iterator[str]:
    origins = Counter(item.origin for item in plan.times.values())
    counts = ", ".join(f"{origins[origin]} {origin.value}" for origin in Origin if origins[origin])
    yield f"trace: {plan.trace.num_steps} decode steps, {_one_line(plan.trace.source)}"
    yield f"candidates: {plan.candidates}; step times: {counts}"
    if plan.unseen:
        yield f"steps of any batch, spread evenly over the candidates' sizes: {plan.unseen:.1%}"
    yield f"{'':<28}{'deployment':>12}{'plan':>12}"
    rows = [
        ("captured pairs", str(len(plan.deployed)), str(len(plan.grid))),
        ("expected step ms", f"{plan.deployed_ms:.4g}", f"{plan.expected_ms:.4g}"),
    ]
    before, after = _pads(plan, plan.deployed), _pads(plan, plan.grid)
    rows += [
        (name, f"{old:.1%}", f"{new:.1%}")
        for name, old, new in zip(
            ("pads of replayed rows", "pads of query tokens"), before, after, strict=True
        )
    ]
    old, new = plan.cost_of(plan.deployed), plan.cost_of(plan.grid)
    if old is not None and new is not None:
        rows.append(("memory of the graphs", _bytes(old.memory_bytes), _bytes(new.memory_bytes)))
        rows.append(("seconds to capture", f"{old.capture_s:.3g}", f"{new.capture_s:.3g}"))
    for name, left, right in rows:
        yield f"{name:<28}{left:>12}{right:>12}"
    batch, factor = worst_unseen(plan)
    yield (
        f"slowed down most, in the trace or not: ({batch[0]}, {batch[1]}), x{factor:.3f}; "
        f"the best grid is faster by {plan.gap:.2%} at most (solver's gap)"
    )


def _pairs(plan: Plan) -> Iterator[str]:
    """A line for each pair of both grids, with the share of the trace's steps that it serves."""
    before, after = _shares(plan, plan.deployed), _shares(plan, plan.grid)
    yield f"{'pair':>12}{'step ms':>11}{'deployment':>12}{'plan':>9}"
    for key in sorted({*plan.deployed.keys, *plan.grid.keys}):
        item = plan.times[key]
        word = ""
        if key not in plan.grid.keys:
            word = "dropped"
        elif key not in plan.deployed.keys:
            word = "added"
        old, new = (f"{shares[key]:.1%}" if key in shares else "-" for shares in (before, after))
        value = f"{_SIGNS[item.origin]}{item.value:.4g}"
        yield f"{key!s:>12}{value:>11}{old:>12}{new:>9}  {word}".rstrip()


def _notes(plan: Plan) -> Iterator[str]:
    shown = {plan.times[key].origin for key in (*plan.deployed.keys, *plan.grid.keys)}
    if Origin.INTERPOLATED in shown:
        yield "~ interpolated between measured pairs"
    if Origin.BOUND in shown:
        yield "< not measured; that of the fastest measured pair that covers it"


def _shares(plan: Plan, grid: Grid) -> dict[GraphKey, float]:
    shares = dict.fromkeys(grid.keys, 0.0)
    for batch, steps in plan.trace.batches.items():
        shares[grid.select(*batch)] += steps / plan.trace.num_steps
    return shares


def _pads(plan: Plan, grid: Grid) -> tuple[float, float]:
    """Shares of the replayed rows and query tokens that no request of the trace needs."""
    live_rows = live_tokens = rows = tokens = 0
    for (num_reqs, total), steps in plan.trace.batches.items():
        key = grid.select(num_reqs, total)
        live_rows += steps * num_reqs
        live_tokens += steps * total
        rows += steps * key.num_reqs
        tokens += steps * key.num_query_tokens
    return 1 - live_rows / rows, 1 - live_tokens / tokens


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _bytes(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _one_line(text: str) -> str:
    """A text from a file, as it can stand in a comment or on a screen."""
    words = "".join(c if c.isprintable() else " " for c in text[:200]).split()
    return " ".join(words) or "a trace"
