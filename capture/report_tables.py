"""The report page's tables, as HTML: the same numbers as its drawings, and more.

Owns columns, units and escaping: every string that comes from the profile goes through
`html.escape`. Data flow: `Profile` -> HTML text -> decodegrid.capture.report_page.
"""

from collections.abc import Sequence
from html import escape

from decodegrid.capture.profile_document import (
    ContextSurface,
    GraphEntry,
    LiveRun,
    Profile,
    RegionEntry,
)
from decodegrid.capture.report_explorer import Exploration
from decodegrid.capture.report_series import MIB, Stair, position_shares, roofline_ratio

Cell = str | int | float | None


class Quantity(str):
    """A number as text with its unit, set to the right as numbers are."""

    __slots__ = ()


_NAMED = 4
"""Graphs that a closed list of kernels names."""
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table that scrolls sideways where it is too wide.

    Strings are escaped; numbers are set to the right; None is a dash. The first cell of a row is
    its heading.
    """
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in headings)
    body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
    label = escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption>{label}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        "</div>"
    )


def _row(cells: Sequence[Cell]) -> str:
    first, *rest = cells
    heading = f'<th scope="row"{_alignment(first)}>{_text(first)}</th>'
    return heading + "".join(f"<td{_alignment(cell)}>{_text(cell)}</td>" for cell in rest)


def _alignment(cell: Cell) -> str:
    is_words = isinstance(cell, str) and not isinstance(cell, Quantity)
    return "" if is_words else ' class="n"'


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return escape(str(cell))


def percent(share: float | None, signed: bool = False) -> Quantity:
    """A share with one decimal; a dash for None."""
    if share is None:
        return Quantity("-")
    return Quantity(f"{share * 100:+.1f} %" if signed else f"{share * 100:.1f} %")


def scaled(value: float, unit: str) -> Quantity:
    """A number with a decimal prefix: 1.5e9 bytes are "1.5 GB"."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return Quantity(f"{value / factor:.3g} {prefix}{unit}")
    return Quantity(f"{value:.3g} {unit}")


def mebibytes(count: int) -> Quantity:
    """Bytes of memory as MiB, or GiB where they are many."""
    if count >= 1 << 30:
        return Quantity(f"{count / (1 << 30):.3g} GiB")
    return Quantity(f"{count / MIB:.3g} MiB")


def surface_table(part: ContextSurface) -> str:
    """Every pair with the range of its repeats."""
    pairs = sorted(part.pairs, key=lambda pair: (pair.num_reqs, pair.num_query_tokens))
    return table(
        f"Step time of each pair at {part.context_len} tokens of context",
        ["requests", "query tokens", "median ms", "least ms", "most ms", "repeats"],
        [
            (
                pair.num_reqs,
                pair.num_query_tokens,
                pair.median_ms,
                pair.low_ms,
                pair.high_ms,
                pair.repeats,
            )
            for pair in pairs
        ],
    )


def staircase_table(staircases: dict[int, list[Stair]], context_len: int) -> str:
    """Every stair of every number of requests."""
    rows = [
        (
            num_reqs,
            stair.first_tokens,
            stair.last_tokens,
            str(stair.key),
            stair.point.median_ms,
            stair.point.median_ms / stair.last_tokens,
        )
        for num_reqs, stairs in staircases.items()
        for stair in stairs
    ]
    headings = ["requests", "from tokens", "to tokens", "runs in pair", "ms", "ms a token at most"]
    return table(f"What serves a batch at {context_len} tokens of context", headings, rows)


def start_up_table(profile: Profile) -> str:
    """The phases with their shares; the last row is their sum."""
    total = sum(line.seconds for line in profile.start_up)
    rows: list[Sequence[Cell]] = [
        (
            line.name,
            line.count or None,
            line.seconds,
            percent(line.seconds / total if total > 0 else None),
        )
        for line in profile.start_up
    ]
    rows.append(("wall clock", None, total, ""))
    return table("Phases of the start", ["phase", "entered", "seconds", "share"], rows)


def ledger_table(graphs: Sequence[GraphEntry]) -> str:
    """One row for each captured graph."""
    headings = [
        "graph",
        "capture s",
        "nodes",
        "of kinds",
        "kernel calls",
        "pool MiB",
        "outside it MiB",
        "replay ms",
        "must move",
        "matrix work",
        "roofline ms",
        "of roofline",
    ]
    rows = [
        (
            graph.graph,
            graph.capture_s,
            graph.num_nodes,
            ", ".join(f"{count} {kind}" for kind, count in sorted(graph.nodes_by_kind.items())),
            sum(graph.kernels.values()),
            graph.pool_bytes / MIB,
            graph.unseen_bytes / MIB,
            graph.replay_ms,
            None if graph.bytes_moved is None else scaled(graph.bytes_moved, "B"),
            None if graph.flops is None else scaled(graph.flops, "FLOP"),
            graph.roofline_ms,
            percent(roofline_ratio(graph)),
        )
        for graph in graphs
    ]
    return table("Ledger of the captured graphs", headings, rows)


def kernel_tables(graphs: Sequence[GraphEntry]) -> str:
    """Calls by kernel, once for all graphs that call the same kernels equally often."""
    groups: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for graph in graphs:
        ordered = sorted(graph.kernels.items(), key=lambda item: (-item[1], item[0]))
        groups.setdefault(tuple(ordered), []).append(graph.graph)
    parts = []
    for calls, names in groups.items():
        if calls:
            some = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            label = (
                f"{len(calls)} kernels, {sum(count for _, count in calls)} calls a replay, in "
                f"{len(names)} graph{'s' * (len(names) > 1)}: {some}"
            )
            parts.append(
                f"<details><summary>{escape(label)}</summary><p>{escape(', '.join(names))}</p>"
                + table("Calls a replay", ["kernel", "calls"], calls)
                + "</details>"
            )
    return "".join(parts)


def regions_table(regions: Sequence[RegionEntry]) -> str:
    """One row for each compiled region."""
    rows = [
        (
            region.region,
            region.variants,
            region.num_loaded,
            region.compile_s,
            len(region.kernels),
            ", ".join(region.kernels),
        )
        for region in regions
    ]
    headings = ["region", "variants", "from a cache", "compile s", "kernels", "their names"]
    return table("Compile time and generated kernels", headings, rows)


def prefill_table(profile: Profile) -> str:
    """One row for each measured chunk."""
    rows = [
        (
            line.num_tokens,
            line.context_len,
            line.median_ms,
            line.low_ms,
            line.high_ms,
            line.num_tokens / line.median_ms * 1e3 if line.median_ms > 0 else None,
        )
        for line in sorted(profile.prefill, key=lambda line: (line.context_len, line.num_tokens))
    ]
    headings = ["tokens", "context before", "median ms", "least ms", "most ms", "tokens a second"]
    return table("Prefill chunks", headings, rows)


def acceptance_table(live: LiveRun) -> str:
    """One row for each draft position."""
    rows = [
        (
            share.position,
            share.drafted,
            share.offered,
            share.verified,
            share.reached,
            share.accepted,
            percent(share.of_reached),
            percent(share.of_verified),
        )
        for share in position_shares(live.positions)
    ]
    headings = [
        "position",
        "drafted",
        "offered",
        "verified",
        "reached",
        "accepted",
        "of reached",
        "of verified",
    ]
    return table("Drafts by position", headings, rows)


def hits_table(live: LiveRun) -> str:
    """One row for each replayed pair."""
    total = sum(hit.replays for hit in live.hits)
    rows = [
        (
            f"({hit.num_reqs}, {hit.num_query_tokens})",
            hit.replays,
            percent(hit.replays / total if total else None),
            hit.pad_rows,
            percent(_share(hit.pad_rows, hit.replays * hit.num_reqs)),
            hit.surplus_tokens,
            percent(_share(hit.surplus_tokens, hit.replays * hit.num_query_tokens)),
        )
        for hit in live.hits
    ]
    headings = [
        "pair",
        "replays",
        "share",
        "pad rows",
        "of its rows",
        "surplus tokens",
        "of its tokens",
    ]
    return table("Replays by pair", headings, rows)


def exploration_table(caption: str, found: Sequence[Exploration]) -> str:
    """One row for each exploration."""
    rows = [
        (
            one.num_reqs,
            str(one.key),
            percent(one.key_share),
            Quantity(f"{one.drafts_per_req:.2f}"),
            Quantity(f"{one.tokens_per_step:.2f}"),
            one.step_ms,
            percent(one.gain_over_all, signed=True),
            percent(one.gain_over_none, signed=True),
        )
        for one in found
    ]
    headings = [
        "requests",
        "pair",
        "of the steps",
        "drafts verified a request",
        "expected tokens a step",
        "step ms",
        "over verifying all",
        "over no drafts",
    ]
    return table(caption, headings, rows)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
