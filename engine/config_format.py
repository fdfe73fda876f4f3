"""The report of `decodegrid config check` as lines of text.

Owns what is said and in which order, and the number of the report's form. Imports no torch: what is
wrong with the file itself is said without it. Data flow: one plain object -> lines.
"""

from collections.abc import Iterator
from typing import Any, Final

from decodegrid.engine.cli_inspect import CARDS
from decodegrid.engine.terminal_text import printable

FORMAT: Final = 1
"""Of the JSON object; counted up when a field changes its meaning or goes."""

_SHOWN_GRAPHS: Final = 12


def empty_report(deployment: str | None) -> dict[str, Any]:
    """Every field of a report about which nothing is known yet."""
    return {
        "format": FORMAT,
        "deployment": deployment,
        "model": None,
        "plan": None,
        "coverage": None,
        "memory": None,
        "graphs": [],
        "problems": [],
        "warnings": [],
        "not_checked": [],
    }


def format_report(report: dict[str, Any]) -> Iterator[str]:
    """The lines of a report whose plan could be made; refusals go to standard error instead."""
    model = report["model"]
    if model is not None:
        yield printable(f"model: {model['source']}, {model['weights']}")
    yield from _format_plan(report["plan"])
    yield from _format_coverage(report["coverage"])
    if report["memory"] is not None:
        yield from _format_memory(report["memory"])
        yield from _format_graphs(report["graphs"])
    yield from (printable(f"warning: {line}") for line in report["warnings"])
    yield from (printable(f"not checked: {line}") for line in report["not_checked"])


def _format_plan(plan: dict[str, Any]) -> Iterator[str]:
    pairs, variants = plan["pairs"], plan["variants"]
    yield "\nplan"
    yield f"  {len(pairs)} pairs of (requests, query tokens)"
    by_reqs: dict[int, list[int]] = {}
    for num_reqs, num_tokens in pairs:
        by_reqs.setdefault(num_reqs, []).append(num_tokens)
    for num_reqs, tokens in by_reqs.items():
        yield f"    {num_reqs:>4} with {' '.join(map(str, tokens))}"
    yield f"  variants: {', '.join(variants)}"
    yield f"  prefill sizes: {' '.join(map(str, plan['prefill_sizes']))} tokens"
    yield f"  graphs to capture: {plan['num_graphs']}"
    regions = plan["regions"]
    if regions is not None:
        yield (
            f"  regions to compile: {regions['compiled']}, in {regions['compilations']} "
            f"compilations, less what a package or the cache has; {regions['opaque']} called as is"
        )


def _format_coverage(coverage: dict[str, Any]) -> Iterator[str]:
    yield "\ncoverage"
    if coverage["problem"] is not None:
        yield f"  {coverage['problem']}"
        return
    yield (
        f"  each of the {coverage['batches']:,} batches of 1..{coverage['max_num_reqs']} requests "
        f"with 1..{coverage['max_query_tokens_per_req']} query tokens has a pair that covers it"
    )


def _format_memory(memory: dict[str, Any]) -> Iterator[str]:
    processes = memory["processes"]
    where = f"{memory['device']}, each of {processes} processes" if processes > 1 else ""
    yield f"\nmemory on {where or memory['device']}, in bytes"
    for pool, size in memory["pools"].items():
        yield f"  {pool:<38} {size:>19,}"
        for part in memory["parts"]:
            if part["pool"] == pool and part["place"] == "device":
                share = f", 1/{part['shared_by']}" if part["shared_by"] > 1 else ""
                yield f"    {part['what'] + share:<36} {part['bytes']:>19,}"
    yield f"  {'total':<38} {memory['total_bytes']:>19,}  {_gib(memory['total_bytes'])}"
    if memory["start_up_bytes"]:
        yield f"  {'more while it starts':<38} {memory['start_up_bytes']:>19,}"
    for part in memory["parts"]:
        if part["place"] == "files":
            yield f"  {part['what'] + ', in the files':<38} {part['bytes']:>19,}"
    kv = memory["kv"]
    per_token = f"{kv['bytes_per_token']:,.1f}".removesuffix(".0")
    yield (
        f"  {kv['blocks']:,} blocks with the null block, {kv['tokens']:,} tokens; {per_token} "
        f"bytes a token, {kv['bytes_per_request']:,} a request; requests of the largest length "
        f"at once: {kv['max_concurrency']:.1f}"
    )
    if memory["device"] == "cuda":
        yield from _format_cards(memory["total_bytes"])
    grammars = memory["host"]["grammar_cache_bytes"]
    if grammars:
        yield f"  and up to {grammars:,} of the host for compiled grammars"
    yield from (f"  {line}" for line in (*memory["notes"], memory["not_counted"]))


def _format_cards(total: int) -> Iterator[str]:
    """How much of known cards it is."""
    shares = (f"{name}: {total / (size * 10**9):.0%}" for name, size in CARDS)
    yield f"  share of a card: {', '.join(shares)}"


def _format_graphs(graphs: list[dict[str, Any]]) -> Iterator[str]:
    yield "\nstatic buffers of each graph, slices of the graph buffers above, in bytes"
    for row in graphs[:_SHOWN_GRAPHS]:
        yield f"  {row['graph']:<38} {row['static_bytes']:>19,}"
    if len(graphs) > _SHOWN_GRAPHS:
        yield f"  and {len(graphs) - _SHOWN_GRAPHS} more (--json has all)"


def _gib(value: int) -> str:
    return f"({value / 2**30:,.2f} GiB)" if value >= 2**30 else f"({value / 2**20:,.1f} MiB)"
