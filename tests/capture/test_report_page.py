"""The report page as a file: what stands in it, that it loads nothing, and that nothing runs."""

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from decodegrid.capture import report_libraries
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.profile_document import Profile
from decodegrid.capture.report_explorer import explore, slider_range
from decodegrid.capture.report_libraries import ReportLibraryError, require_report_libraries
from decodegrid.capture.report_page import report_text, write_report
from decodegrid.capture.report_series import grid_of, heat_map, mean_acceptance, staircase

MakeProfile = Callable[..., Profile]
SECTIONS = (
    "surface",
    "staircases",
    "explorer",
    "start-up",
    "graphs",
    "prefill",
    "acceptance",
    "hits",
)
LOADING = ("src", "href", "srcset", "data", "action", "poster", "background", "formaction")


@dataclass
class Script:
    kind: str
    name: str
    text: str = ""


class Page(HTMLParser):
    """Elements, attributes, scripts and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[Script] = []
        self.words = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self._inside = tag
        if tag == "script":
            self.scripts.append(Script(found.get("type") or "", found.get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1].text += data
        elif self._inside != "style":
            self.words += data + " "

    def ids(self) -> list[str]:
        return [found["id"] or "" for _, found in self.tags if "id" in found]

    def block(self, name: str) -> Any:
        (text,) = [script.text for script in self.scripts if script.name == name]
        return json.loads(text)


@pytest.fixture(scope="module")
def profile(make_profile: MakeProfile) -> Profile:
    """A profile with every part."""
    return make_profile()


@pytest.fixture(scope="module")
def text(profile: Profile) -> str:
    """Its page."""
    return report_text(profile)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    """Its page, read."""
    return Page(text)


def small_page(make_profile: MakeProfile, **changes: Any) -> Page:
    """A page whose explorer has little to compute."""
    return Page(report_text(make_profile(**{"max_num_reqs": 1, "contexts": (256,), **changes})))


def test_page_has_every_section_and_fact(page: Page) -> None:
    ids = page.ids()
    assert len(ids) == len(set(ids))
    assert [name for name in ids if name in SECTIONS] == list(SECTIONS)
    links = [found["href"] for tag, found in page.tags if tag == "a"]
    assert links == [f"#{name}" for name in SECTIONS]
    for fact in (
        "A processor",
        "2.13.0",
        "0123456789abcdef" * 4,
        "2027-01-15 08:00:00 UTC",
        "decodegrid profile --config 'a deployment.yaml'",
        "import torch",
        "(4, 16) rich",
        "cpp_fused_add_0",
        "mix",
        "256 tokens of context",
        "1024 tokens of context",
    ):
        assert fact in page.words, fact
    # 12 GB/s and 65 GFLOP/s; 25 % of the roofline; 320 MFLOP; 200 steps with 900 tokens.
    for number in ("12 GB", "65 GFLOP", "25.0 %", "320 MFLOP", "4.5 tokens a step", "12.5 %"):
        assert number in page.words, number


def test_every_drawing_has_its_place_and_is_valid(page: Page) -> None:
    from plotly.graph_objects import Figure

    figures = page.block("figures")
    places = {found["id"] for _, found in page.tags if found.get("class") == "figure"}
    assert set(figures) == places
    assert {name.rsplit("-", 1)[0] for name in figures} >= {"figure-surface", "figure-staircase"}
    assert len(figures) == 4 + 7
    for figure in figures.values():
        Figure(figure)  # raises for what Plotly does not know


def test_page_loads_nothing(page: Page, text: str) -> None:
    for tag, found in page.tags:
        for name in LOADING:
            value = found.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)
        assert not (tag == "link" and found.get("rel") != "icon")
        assert tag not in ("iframe", "object", "embed", "img", "base")
        assert not any(name.startswith("on") or name == "style" for name in found)
    for script in page.scripts[-2:-1]:
        text = text.replace(script.text, "")
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(", text)


def test_only_the_two_scripts_may_run(page: Page) -> None:
    running = [script for script in page.scripts if script.kind != "application/json"]
    assert len(running) == 2 and "Plotly.react" in running[1].text
    (policy,) = [
        found["content"] or ""
        for tag, found in page.tags
        if tag == "meta" and found.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    digests = [hashlib.sha256(script.text.encode()).digest() for script in running]
    assert rules["script-src"].split() == [
        f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests
    ]
    assert rules["default-src"] == "'none'"


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!--"


def test_hostile_names_stay_text(make_profile: MakeProfile) -> None:
    """Every string of the document at once, as keys and as values."""
    clean = make_profile(max_num_reqs=1, contexts=(256,))
    hostile = make_profile(
        max_num_reqs=1,
        contexts=(256,),
        command=["decodegrid", HOSTILE],
        machine={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
        config_sha256=HOSTILE,
        start_up=[{"name": HOSTILE, "count": 1, "seconds": 1.0}],
        graphs=[
            {
                **clean.graphs[0].model_dump(),
                "graph": HOSTILE,
                "nodes_by_kind": {HOSTILE: 1},
                "kernels": {HOSTILE: 2},
            }
        ],
        regions=[{**clean.regions[0].model_dump(), "region": HOSTILE, "kernels": [HOSTILE]}],
    )
    page, usual = Page(report_text(hostile)), Page(report_text(clean))
    assert page.words.count(HOSTILE) >= 9
    assert len(page.scripts) == len(usual.scripts)
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, found in page.tags for name in found)
    figures = page.block("figures")
    drawn = [json.dumps(figures["figure-start-up"]), json.dumps(figures["figure-capture"])]
    for one in drawn:  # Plotly reads markup in texts: it gets none
        assert "<script" not in one and "<img" not in one and "&lt;" in one


def test_parts_that_are_not_there(make_profile: MakeProfile) -> None:
    page = small_page(
        make_profile, live=None, peaks=None, graphs=[], regions=[], prefill=[], start_up=[]
    )
    assert [name for name in page.ids() if name in SECTIONS] == list(SECTIONS)
    assert set(page.block("figures")) == {
        "figure-surface-0",
        "figure-staircase-0",
        "figure-explorer",
    }
    assert page.words.count("There was no live run") == 2
    for sentence in (
        "peaks were not measured",
        "ledger has no graph",
        "No prefill chunk",
        "No phase was timed",
    ):
        assert sentence in page.words, sentence


def test_a_live_run_without_drafts(make_profile: MakeProfile) -> None:
    live = make_profile().live
    assert live is not None
    nothing = {name: [0, 0, 0] for name in type(live.positions).model_fields}
    without = {**live.model_dump(), "positions": nothing, "hits": []}
    page = small_page(make_profile, live=without)
    assert "No draft was verified" in page.words and "replayed no graph" in page.words
    assert mean_acceptance(make_profile(live=without)) is None


def test_no_drafts(make_profile: MakeProfile) -> None:
    page = small_page(make_profile, num_drafts=0)
    assert "Without drafts there is no budget" in page.words
    assert "figure-explorer" not in page.block("figures")
    assert "figure-staircase-0" in page.block("figures")


def test_one_pair(make_profile: MakeProfile) -> None:
    page = small_page(make_profile, num_drafts=1, surfaces=[ONE_PAIR])
    table = page.block("explorer-table")
    assert table["surfaces"][0]["pairs"] == [[1, 2]]
    assert set(table["surfaces"][0]["over_all"]) == {0.0}


ONE_PAIR = {
    "context_len": 256,
    "measured_at": 1.8e9,
    "pairs": [
        {
            "num_reqs": 1,
            "num_query_tokens": 2,
            "median_ms": 9.0,
            "low_ms": 8.0,
            "high_ms": 9.5,
            "repeats": 3,
        }
    ],
}


def test_pairs_that_are_no_grid_are_named(make_profile: MakeProfile) -> None:
    page = small_page(make_profile, max_num_reqs=2, num_drafts=1, surfaces=[ONE_PAIR])
    assert page.words.count("no captured pair covers 2 requests with 2 query tokens") == 2
    assert set(page.block("figures")) >= {"figure-surface-0"}
    assert "figure-staircase-0" not in page.block("figures")


def test_explorer_takes_the_first_contexts(make_profile: MakeProfile) -> None:
    contexts = tuple(range(100, 110))
    page = small_page(make_profile, num_drafts=1, contexts=contexts)
    assert len(page.block("explorer-table")["surfaces"]) == 8
    options = [found["value"] for tag, found in page.tags if tag == "option"]
    assert options == [str(index) for index in range(8)]
    assert "Of the 10 contexts the first 8 are here" in page.words
    assert "figure-surface-9" in page.block("figures")


def test_explorer_table_is_what_explore_says(page: Page, profile: Profile) -> None:
    table = page.block("explorer-table")
    assert table["num_reqs"] == [1, 2, 3, 4]
    acceptances, spreads = table["acceptances"], table["spreads"]
    seen = set()
    for place in range(0, len(table["surfaces"][1]["pair"]), 53):
        rest, s = divmod(place, len(spreads))
        r, a = divmod(rest, len(acceptances))
        found = explore(
            profile.surfaces[1].surface(), 3, acceptances[a], spreads[s], table["num_reqs"][r]
        )
        column = table["surfaces"][1]
        pair = column["pairs"][column["pair"][place]]
        assert GraphKey(*pair) == found.key
        assert column["over_all"][place] == pytest.approx(found.gain_over_all, abs=6e-5)
        seen.add(found.key)
    assert len(seen) >= 3


def test_sliders_begin_at_the_measured_acceptance(
    make_profile: MakeProfile, page: Page, profile: Profile
) -> None:
    """(400 + 320 + 240) / (500 + 410 + 320) = 0.7805 is nearest to the 0.80 of position 16."""
    assert mean_acceptance(profile) == pytest.approx(960 / 1230)
    sliders = {found["id"]: found for _, found in page.tags if found.get("type") == "range"}
    assert sliders["explorer-acceptance"]["value"] == "16"
    assert sliders["explorer-requests"]["value"] == "3"
    labels = {found.get("for") for tag, found in page.tags if tag == "label"}
    assert set(sliders) < labels
    without = small_page(make_profile, max_num_reqs=2, live=None)
    started = [found["value"] for _, found in without.tags if found.get("type") == "range"]
    assert started == ["15", "3", "1"]


def test_tables_say_what_the_drawings_show(page: Page, profile: Profile) -> None:
    for pair in profile.surfaces[0].pairs:
        assert f"{pair.median_ms:.4g}" in page.words
    # 64 tokens in 15.8 ms; position 2 of the live run: 320 of 410 reached, of 450 verified.
    for number in ("4051", "78.0 %", "71.1 %"):
        assert number in page.words, number


def test_heat_map_places_every_pair(make_profile: MakeProfile) -> None:
    map_ = heat_map(make_profile().surfaces[0])
    assert (map_.num_reqs, map_.columns, map_.by_request) == ([1, 2, 4], ["1", "2", "3", "4"], True)
    for row, num_reqs in enumerate(map_.num_reqs):
        for column, text in enumerate(map_.columns):
            assert map_.keys[row][column] == GraphKey(num_reqs, num_reqs * int(text))
            point = map_.points[row][column]
            assert point is not None
            ms = 6.0 + num_reqs * (0.3 + 0.9 * int(text))
            assert point.median_ms == pytest.approx(ms)


def test_staircase_is_what_a_run_picks(make_profile: MakeProfile) -> None:
    profile = make_profile()
    part = profile.surfaces[0]
    grid = grid_of(profile, part)
    stairs = staircase(grid, part, 3)
    # Three rows run in pairs of four: 3 and 4 tokens in (4, 4), up to 8 in (4, 8), and so on.
    assert [(one.first_tokens, one.last_tokens, one.key) for one in stairs] == [
        (3, 4, GraphKey(4, 4)),
        (5, 8, GraphKey(4, 8)),
        (9, 12, GraphKey(4, 12)),
    ]
    assert stairs[1].point.median_ms == pytest.approx(6.0 + 1.2 + 7.2)


def test_report_is_written_whole_or_not_at_all(
    make_profile: MakeProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    write_report(make_profile(max_num_reqs=1, num_drafts=2), path)
    first = path.read_text(encoding="utf-8")
    assert first.startswith("<!DOCTYPE html>") and first.endswith("</html>\n")
    assert len(first) < 8_000_000
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", _fail)
        with pytest.raises(OSError, match="disk full"):
            write_report(make_profile(num_drafts=0), path)
    assert path.read_text(encoding="utf-8") == first
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(FileNotFoundError):
        write_report(make_profile(num_drafts=0), tmp_path / "absent" / "report.html")


def _fail(*_: object) -> None:
    raise OSError("disk full")


def test_a_large_deployment_stays_small() -> None:
    """The explorer's share; the rest is Plotly's script of 5 MB and some numbers a graph."""
    for surfaces in (1, 3, 8):
        sliders = slider_range(1024, surfaces)
        positions = len(sliders.num_reqs) * len(sliders.acceptances) * len(sliders.spreads)
        # Seven numbers of at most eight characters.
        assert positions * surfaces * 7 * 8 < 1_500_000


def test_missing_library_is_named(
    make_profile: MakeProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_report_libraries()
    monkeypatch.setattr(report_libraries, "find_spec", lambda name: None if "t" in name else name)
    with pytest.raises(ReportLibraryError, match=r"needs plotly and matplotlib.*\[report\]'"):
        require_report_libraries()
    with pytest.raises(ValueError, match=r"pip install 'decodegrid\[report\]'"):
        write_report(make_profile(), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(
        report_libraries, "find_spec", lambda name: None if name == "matplotlib" else name
    )
    with pytest.raises(ReportLibraryError, match="a report needs matplotlib, which"):
        require_report_libraries()
