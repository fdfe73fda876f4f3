"""The sections of the report page: which drawings, tables and words stand under which heading.

Owns the texts. A part of the profile that is not there has a sentence in its place, never an empty
drawing. Data flow: `Profile` -> `Section` -> decodegrid.capture.report_page.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import Any

from decodegrid.capture import report_figures as figures
from decodegrid.capture import report_tables as tables
from decodegrid.capture.profile_document import LiveRun, Peaks, Profile
from decodegrid.capture.report_series import mean_acceptance, staircases

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page under one heading."""

    name: str
    """Its place in the page's addresses."""
    title: str
    body: str
    """HTML; whatever came from the profile is escaped."""
    figures: dict[str, Json] = field(default_factory=dict)
    """Drawings by the name of their place in the body."""
    data: dict[str, Json] = field(default_factory=dict)
    """Tables for the page's script, by the name of their element."""


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def place_of(name: str, label: str) -> str:
    """Where a drawing goes; the label says what it shows to those who do not see it."""
    return f'<div class="figure" id="{name}" role="img" aria-label="{escape(label)}"></div>'


def folded(summary: str, body: str) -> str:
    """Something to be opened."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def surface_section(profile: Profile) -> Section:
    """A heat map and a table for each context."""
    drawn: dict[str, Json] = {}
    body = paragraph(
        "Time of one decode step in each captured pair, draft and sampling included: median of "
        "the timed replays. A row is a number of requests; a cell names ms."
    )
    for index, part in enumerate(profile.surfaces):
        name = f"figure-surface-{index}"
        drawn[name] = figures.surface_figure(part)
        title = f"Step times at {part.context_len} tokens of context"
        body += f"<h3>{escape(title)}</h3>" + place_of(name, f"Heat map. {title}; a table follows.")
        body += folded("As a table", tables.surface_table(part))
    if not profile.surfaces:
        body += paragraph("No step time was measured.")
    return Section("surface", "Step-time surface", body, drawn)


def staircase_section(profile: Profile) -> Section:
    """A drawing with a line for each captured number of requests, for each context."""
    drawn: dict[str, Json] = {}
    body = paragraph(
        "What a batch costs by its query tokens. Between two captured sizes the cost is flat: the "
        "rest of the pair is padding. A marker stands where a pair is full, its bar spans the "
        "repeats."
    )
    for index, part in enumerate(profile.surfaces):
        title = f"Staircases at {part.context_len} tokens of context"
        body += f"<h3>{escape(title)}</h3>"
        try:
            found = staircases(profile, part)
        except ValueError as error:
            body += paragraph(f"These pairs are no complete grid: {error}.")
            continue
        name = f"figure-staircase-{index}"
        drawn[name] = figures.staircase_figure(found)
        body += place_of(name, f"Lines. {title}; a table follows.")
        body += folded("As a table", tables.staircase_table(found, part.context_len))
    return Section("staircases", "Staircase of each row", body, drawn)


def start_up_section(profile: Profile) -> Section:
    """The phases."""
    if not profile.start_up:
        return Section("start-up", "Start-up", paragraph("No phase was timed."))
    name = "figure-start-up"
    body = (
        paragraph("Where the start's time went; the phases sum to the wall clock.")
        + place_of(name, "Bars. Seconds of each start-up phase; a table follows.")
        + tables.start_up_table(profile)
    )
    return Section("start-up", "Start-up", body, {name: figures.start_up_figure(profile)})


def graphs_section(profile: Profile) -> Section:
    """Cost, memory, ledger and roofline of the captured graphs, and the regions."""
    graphs = profile.graphs
    if graphs:
        drawn = {
            "figure-capture": figures.capture_time_figure(graphs),
            "figure-memory": figures.memory_figure(graphs),
        }
        seconds = sum(graph.capture_s for graph in graphs)
        pool = sum(graph.pool_bytes for graph in graphs)
        unseen = sum(graph.unseen_bytes for graph in graphs)
        body = (
            paragraph(
                f"{len(graphs)} graphs took {seconds:.3g} s to capture and hold "
                f"{tables.mebibytes(pool)} in the allocator's pool and "
                f"{tables.mebibytes(unseen)} outside it."
            )
            + "<h3>Capture cost</h3>"
            + _wide("figure-capture", "Bars. Capture seconds of each graph; a table follows.")
            + "<h3>Memory</h3>"
            + _wide("figure-memory", "Bars. Memory of each graph; a table follows.")
            + "<h3>Ledger and roofline</h3>"
            + _peaks_text(profile.peaks)
            + tables.ledger_table(graphs)
            + tables.kernel_tables(graphs)
        )
    else:
        drawn, body = {}, paragraph("The ledger has no graph.") + _peaks_text(profile.peaks)
    if profile.regions:
        body += "<h3>Compiled regions</h3>" + tables.regions_table(profile.regions)
    return Section("graphs", "Captured graphs", body, drawn)


def _wide(name: str, label: str) -> str:
    """A place that is scrolled sideways where its names would not fit."""
    return f'<div class="scroll wide" tabindex="0">{place_of(name, label)}</div>'


def _peaks_text(peaks: Peaks | None) -> str:
    if peaks is None:
        return paragraph(
            "The machine's peaks were not measured, so there is no roofline to compare with."
        )
    return paragraph(
        f"In the same run {peaks.num_threads} thread{'s' * (peaks.num_threads > 1)} read "
        f"{tables.scaled(peaks.read_bytes_per_s, 'B')} a second and did "
        f"{tables.scaled(peaks.flops_per_s, 'FLOP')} a second. The roofline time of a graph is "
        "the longer of what it must move over the first and its matrix work over the second; the "
        "last column is that time over the replay's, so 100 % is as fast as the machine allows."
    )


def prefill_section(profile: Profile) -> Section:
    """Latency of the chunks."""
    if not profile.prefill:
        return Section("prefill", "Prefill", paragraph("No prefill chunk was measured."))
    name = "figure-prefill"
    body = (
        paragraph("Time of one captured prefill chunk that is full of tokens.")
        + place_of(name, "Lines. Time of a chunk over its tokens; a table follows.")
        + tables.prefill_table(profile)
    )
    return Section("prefill", "Prefill latency", body, {name: figures.prefill_figure(profile)})


def live_sections(profile: Profile) -> list[Section]:
    """Acceptance and hits, which only a live run counts."""
    parts: list[tuple[str, str, Callable[[Profile, LiveRun], Section]]] = [
        ("acceptance", "Acceptance by position", _acceptance_section),
        ("hits", "Graph hits", _hits_section),
    ]
    if profile.live is None:
        missing = paragraph("There was no live run with this profile, so nothing was counted here.")
        return [Section(name, title, missing) for name, title, _ in parts]
    return [make(profile, profile.live) for _, _, make in parts]


def _acceptance_section(profile: Profile, live: LiveRun) -> Section:
    mean = mean_acceptance(profile)
    if mean is None:
        text = paragraph("No draft was verified in the live run.")
        return Section("acceptance", "Acceptance by position", text)
    name = "figure-acceptance"
    body = (
        paragraph(
            f"{live.num_requests} requests: of the drafts whose predecessors were all accepted, "
            f"{tables.percent(mean)} were accepted. The first bar is that share at each position; "
            "the second is of all verified drafts, also those behind a rejected one."
        )
        + place_of(name, "Bars. Acceptance of each draft position; a table follows.")
        + tables.acceptance_table(live)
    )
    drawn = {name: figures.acceptance_figure(live)}
    return Section("acceptance", "Acceptance by position", body, drawn)


def _hits_section(_: Profile, live: LiveRun) -> Section:
    if not live.hits:
        return Section("hits", "Graph hits", paragraph("The live run replayed no graph."))
    name = "figure-hits"
    body = (
        paragraph(
            f"{live.num_decode_steps} decode steps emitted {live.num_emitted} tokens. "
            f"{tables.percent(live.pad_row_share)} of all rows were padding and "
            f"{tables.percent(live.surplus_token_share)} of all query tokens belonged to no row."
        )
        + place_of(name, "Bars. Replays of each pair; a table follows.")
        + tables.hits_table(live)
    )
    return Section("hits", "Graph hits", body, {name: figures.hits_figure(live)})
