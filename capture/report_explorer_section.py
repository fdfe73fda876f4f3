"""The report page's verify-budget explorer: sliders, and the numbers for each of their positions.

Owns the form and its table; the numbers are those of decodegrid.capture.report_explorer. Data flow:
the surfaces of a `Profile` -> a `Section` with a table that the page's script looks up.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

from decodegrid.capture.profile_document import ContextSurface, Profile
from decodegrid.capture.report_explorer import (
    MIN_STEPS,
    NUM_QUANTILES,
    Explorer,
    SliderRange,
    nearest,
    slider_range,
    slider_table,
)
from decodegrid.capture.report_figures import explorer_figure
from decodegrid.capture.report_sections import Section, folded, paragraph, place_of
from decodegrid.capture.report_series import grid_of, mean_acceptance
from decodegrid.capture.report_tables import exploration_table

NAME, TITLE = "explorer", "Verify-budget explorer"
_ACCEPTANCE, _SPREAD = 0.75, 0.3
"""Where the sliders stand at first; a live run's own acceptance takes the place of the former."""
MAX_EXPLORED = 8
"""Contexts that can be explored; each costs the time and size of its table."""
_RESULTS = (
    ("pair", "chosen pair (requests, query tokens)", "share"),
    ("drafts", "drafts verified a request", None),
    ("tokens", "expected tokens a step", None),
    ("ms", "step time, ms", None),
    ("all", "gain over verifying all", None),
    ("none", "gain over no drafts", None),
)


def explorer_section(profile: Profile) -> Section:
    """The explorer, or the reason why there is nothing to explore."""
    if profile.num_draft_tokens == 0:
        return Section(NAME, TITLE, paragraph("Without drafts there is no budget to choose."))
    if not profile.surfaces:
        return Section(NAME, TITLE, paragraph("No step time was measured."))
    parts = profile.surfaces[:MAX_EXPLORED]
    try:
        for part in parts:
            grid_of(profile, part)
    except ValueError as error:
        return Section(NAME, TITLE, paragraph(f"These pairs are no complete grid: {error}."))
    sliders = slider_range(profile.max_num_reqs, len(parts))
    measured = mean_acceptance(profile)
    start = (
        nearest(sliders.acceptances, _ACCEPTANCE if measured is None else measured),
        nearest(sliders.spreads, _SPREAD),
        len(sliders.num_reqs) - 1,
    )
    body = (
        _words(measured, len(profile.surfaces))
        + _form(parts, sliders, start)
        + "<noscript><p>The sliders need JavaScript; the table below does not.</p></noscript>"
        + _results()
        + "<h3>Gain by number of requests, at this acceptance and spread</h3>"
        + place_of("figure-explorer", "Lines. Gain over the number of requests.")
        + _start_table(parts[0], profile.num_draft_tokens, sliders, start)
    )
    drawn = {"figure-explorer": explorer_figure(list(sliders.num_reqs))}
    return Section(
        NAME,
        TITLE,
        body,
        drawn,
        {"explorer-table": _data(parts, profile.num_draft_tokens, sliders)},
    )


def _data(parts: Sequence[ContextSurface], num_drafts: int, sliders: SliderRange) -> dict[str, Any]:
    return {
        "acceptances": list(sliders.acceptances),
        "spreads": list(sliders.spreads),
        "num_reqs": list(sliders.num_reqs),
        "surfaces": [slider_table(part.surface(), num_drafts, sliders) for part in parts],
    }


def _words(measured: float | None, num_surfaces: int) -> str:
    text = paragraph(
        "What the engine's verify budget chooses for these step times: the captured pair, and so "
        "the number of drafts, with the most expected tokens per ms."
    )
    if num_surfaces > MAX_EXPLORED:
        text += paragraph(f"Of the {num_surfaces} contexts the first {MAX_EXPLORED} are here.")
    if measured is not None:
        text += paragraph(f"The live run's drafts had an acceptance of {measured:.2f}.")
    return text + folded(
        "The model behind it",
        paragraph(
            "Each draft is accepted with its own confidence if all before it are. Confidences "
            "are independent and follow one Beta distribution whose mean is the acceptance. Its "
            "standard deviation is the spread times sqrt(mean (1 - mean)), the largest that the "
            "mean allows: at spread 0 all drafts are alike, and Beta(a, b) has spread "
            "1 / sqrt(a + b + 1), so Beta(6, 2) is acceptance 0.75 and spread 0.33."
        )
        + paragraph(
            "Each position of the sliders was computed by the engine's own budget function, over "
            f"{MIN_STEPS} or more steps whose confidences are {NUM_QUANTILES} quantiles of the "
            "distribution in a fixed shuffled order; the page only looks the numbers up. Shown are "
            "means over the steps, and the pair that most of them run in. Step times are the "
            "measured ones, without a run's corrections for context and time outside the graph."
        ),
    )


def _form(
    parts: Sequence[ContextSurface], sliders: SliderRange, start: tuple[int, int, int]
) -> str:
    lengths = [len(sliders.acceptances), len(sliders.spreads), len(sliders.num_reqs)]
    shown = [
        f"{sliders.acceptances[start[0]]:.2f}",
        f"{sliders.spreads[start[1]]:.2f}",
        str(sliders.num_reqs[start[2]]),
    ]
    labels = [
        ("acceptance", "Acceptance of a draft (mean)"),
        ("spread", "Spread of the confidences"),
        ("requests", "Live requests"),
    ]
    fields = [
        f'<div><label for="explorer-{name}">{escape(label)}: '
        f'<output id="explorer-{name}-value" for="explorer-{name}">{text}</output></label>'
        f'<input type="range" id="explorer-{name}" min="0" max="{length - 1}" step="1" '
        f'value="{at}" aria-valuetext="{text}"></div>'
        for (name, label), length, at, text in zip(labels, lengths, start, shown, strict=True)
    ]
    options = "".join(
        f'<option value="{index}">{part.context_len} tokens</option>'
        for index, part in enumerate(parts)
    )
    fields.append(
        '<div><label for="explorer-context">Step times at a context of</label>'
        f'<select id="explorer-context">{options}</select></div>'
    )
    return f'<form autocomplete="off">{"".join(fields)}</form>'


def _results() -> str:
    cards = []
    for name, label, under in _RESULTS:
        small = "" if under is None else f'<small id="result-{under}"></small>'
        cards.append(
            f'<div class="card"><dt>{escape(label)}</dt>'
            f'<dd><span id="result-{name}"></span>{small}</dd></div>'
        )
    return f'<dl class="cards" aria-live="polite">{"".join(cards)}</dl>'


def _start_table(
    part: ContextSurface, num_drafts: int, sliders: SliderRange, start: tuple[int, int, int]
) -> str:
    """What the first position of the sliders gives for each number of requests."""
    acceptance, spread = sliders.acceptances[start[0]], sliders.spreads[start[1]]
    explorer = Explorer(part.surface(), num_drafts)
    found = [explorer.explore(acceptance, spread, count) for count in sliders.num_reqs]
    caption = f"Acceptance {acceptance:.2f}, spread {spread:.2f}, context {part.context_len} tokens"
    return folded(
        "As a table, for where the sliders stood at first", exploration_table(caption, found)
    )
