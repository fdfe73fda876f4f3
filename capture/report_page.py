"""The report page: one HTML file that shows a profile and needs nothing else.

Owns the head, the headline numbers and how the page is put together. Plotly's script, the style and
the numbers stand in the file; a content policy lets no other script run and nothing be loaded. Data
flow: `Profile` -> sections -> the file. The page's own script only draws and looks up.
"""

import base64
import hashlib
import json
import os
import shlex
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from decodegrid.capture.profile_document import Profile
from decodegrid.capture.report_explorer_section import explorer_section
from decodegrid.capture.report_libraries import require_report_libraries
from decodegrid.capture.report_sections import (
    Section,
    graphs_section,
    live_sections,
    prefill_section,
    staircase_section,
    start_up_section,
    surface_section,
)

_HERE = Path(__file__).resolve().parent


def write_report(profile: Profile, path: Path) -> None:
    """Write the page; a file that was there stays whole until the new one is complete.

    Raises:
        ReportLibraryError: Plotly is not installed.
        OSError: the file cannot be written.
    """
    require_report_libraries()
    text = report_text(profile)
    part = path.parent / f".{path.name}.{uuid4().hex}.tmp"
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def report_text(profile: Profile) -> str:
    """The page as HTML. Needs Plotly, for its script."""
    from plotly.offline import get_plotlyjs

    sections = [
        surface_section(profile),
        staircase_section(profile),
        explorer_section(profile),
        start_up_section(profile),
        graphs_section(profile),
        prefill_section(profile),
        *live_sections(profile),
    ]
    drawn = {name: figure for part in sections for name, figure in part.figures.items()}
    blocks = {"figures": drawn}
    for part in sections:
        blocks |= part.data
    scripts = [get_plotlyjs(), (_HERE / "report_page.js").read_text(encoding="utf-8")]
    title = f"decodegrid profile {_when(profile)}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{escape(title)}</title><link rel="icon" href="data:,">',
            f"<style>{(_HERE / 'report_page.css').read_text(encoding='utf-8')}</style>",
            "</head><body>",
            _header(profile),
            _navigation(sections),
            "<main>",
            *(_section(part) for part in sections),
            "</main>",
            *(_data_block(name, block) for name, block in blocks.items()),
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _policy(scripts: list[str]) -> str:
    """Only these scripts run, and nothing is loaded; drawings may be saved as images."""
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _data_block(name: str, block: dict[str, Any]) -> str:
    """JSON inside an element that no script engine runs and that no text in it can end."""
    text = json.dumps(block, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _when(profile: Profile) -> str:
    return datetime.fromtimestamp(profile.measured_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _header(profile: Profile) -> str:
    facts = [
        ("measured", _when(profile)),
        *profile.machine.items(),
        *profile.versions.items(),
        ("configuration sha256", profile.config_sha256),
    ]
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    command = escape(shlex.join(profile.command))
    cards = "".join(
        f'<div class="card"><dt>{escape(label)}</dt><dd>{escape(value)}'
        f"<small>{escape(under)}</small></dd></div>"
        for label, value, under in _headlines(profile)
    )
    return (
        "<header><h1>What was captured, and what it costs</h1>"
        f'<p class="soft">A decodegrid profile</p><dl class="facts">{lines}'
        f"<dt>command</dt><dd><code>{command}</code></dd></dl>"
        f'<dl class="cards">{cards}</dl></header>'
    )


def _headlines(profile: Profile) -> list[tuple[str, str, str]]:
    seconds = sum(line.seconds for line in profile.start_up)
    times = [pair.median_ms for pair in profile.surfaces[0].pairs] if profile.surfaces else []
    found = [
        (
            "captured graphs",
            str(profile.num_captured),
            f"{profile.max_num_reqs} requests, {profile.num_draft_tokens} drafts",
        ),
        (
            "compilations",
            str(profile.num_compilations),
            f"and {profile.num_loaded} loaded from a cache",
        ),
        ("start-up", f"{seconds:.3g} s", "wall clock"),
    ]
    if times:
        found.append(
            ("step time", f"{min(times):.3g} to {max(times):.3g} ms", "fastest to slowest pair")
        )
    live = profile.live
    if live is not None and live.num_decode_steps:
        a_step = live.num_emitted / live.num_decode_steps
        found.append(("live run", f"{a_step:.3g} tokens a step", f"{live.num_requests} requests"))
        if live.decode_seconds > 0:
            speed = live.num_emitted / live.decode_seconds
            found.append(("live speed", f"{speed:.4g} tokens/s", "all requests, while decoding"))
    return found


def _navigation(sections: list[Section]) -> str:
    items = "".join(
        f'<li><a href="#{part.name}">{escape(part.title)}</a></li>' for part in sections
    )
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>'


def _section(part: Section) -> str:
    return (
        f'<section id="{part.name}" aria-labelledby="{part.name}-title">'
        f'<h2 id="{part.name}-title">{escape(part.title)}</h2>{part.body}</section>'
    )
