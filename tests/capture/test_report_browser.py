"""The report page in a real browser: it draws, loads nothing, and its sliders tell the truth.

Needs Debian's chromium and chromium-driver and the Python package selenium: `pytest -m browser`.
Where one is missing the tests fail; they are only run when asked for.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from decodegrid.capture.profile_document import Profile
from decodegrid.capture.report_explorer import ACCEPTANCES, SPREADS, Exploration, explore
from decodegrid.capture.report_page import write_report

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.browser

MakeProfile = Callable[..., Profile]
RIGHT, LEFT, HOME, END = "\ue014", "\ue012", "\ue011", "\ue010"
"""Keys as WebDriver names them."""
DRAWN_OUTSIDE = """
return [...document.querySelectorAll(".figure")].filter((place) => {
  const drawn = place.querySelector("svg.main-svg").getBoundingClientRect();
  const room = place.getBoundingClientRect();
  const height = figures[place.id].layout.height;
  const differs = (other) => Math.abs(height - other) > 1;
  return differs(drawn.height) || differs(room.height) || drawn.width > room.width + 1;
}).map((place) => place.id)
"""
"""Drawings that have not their own height, or lie over what stands around them."""
HOSTILE = (
    "<b></b></script><script>window.hostile=1</script><img src=x onerror='window.hostile=2'>&lt;b"
)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Chrome]":
    """Headless Chromium that logs its console and every request."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.fail("no chromium or chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options, Service(driver))
    chrome.set_window_size(1280, 900)
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def profile(make_profile: MakeProfile) -> Profile:
    """A profile with every part."""
    return make_profile()


@pytest.fixture(scope="module")
def page(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its page."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(profile, path)
    return path


def open_page(browser: "Chrome", path: Path) -> None:
    """Open a page; the logs begin with it."""
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())


def requests_of(browser: "Chrome") -> list[str]:
    """Addresses that were asked for since the last look."""
    found = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
            params = message["params"]
            found.append(params["request"]["url"] if "request" in params else params["url"])
    return found


def text_of(browser: "Chrome", name: str) -> str:
    return browser.find_element("id", name).text


def press(browser: "Chrome", name: str, *keys: str) -> None:
    browser.find_element("id", f"explorer-{name}").send_keys(*keys)


def assert_shows(browser: "Chrome", found: Exploration) -> None:
    assert text_of(browser, "result-pair") == str(found.key)
    share, words = text_of(browser, "result-share").split(" ", 1)
    assert words == "% of the steps" and float(share) == pytest.approx(
        found.key_share * 100, abs=0.6
    )
    numbers = {name: text_of(browser, f"result-{name}") for name in ("drafts", "tokens", "ms")}
    assert float(numbers["drafts"]) == pytest.approx(found.drafts_per_req, abs=0.006)
    assert float(numbers["tokens"]) == pytest.approx(found.tokens_per_step, abs=0.006)
    assert float(numbers["ms"]) == pytest.approx(found.step_ms, rel=1e-3)
    for name, gain in (("all", found.gain_over_all), ("none", found.gain_over_none)):
        number, unit = text_of(browser, f"result-{name}").split()
        assert unit == "%" and float(number) == pytest.approx(gain * 100, abs=0.06)


def test_page_draws_without_errors_or_requests(browser: "Chrome", page: Path) -> None:
    open_page(browser, page)
    places = browser.find_elements("class name", "figure")
    assert len(places) == 11
    for place in places:
        name = place.get_attribute("id")
        assert place.find_elements("css selector", "svg.main-svg .cartesianlayer .subplot"), name
        assert browser.execute_script("return arguments[0].data.length", place) >= 1, name
        assert place.size["width"] > 800 and place.size["height"] > 150, name
    assert browser.get_log("browser") == []
    asked = requests_of(browser)
    assert [address for address in asked if address.startswith("file:")] == [browser.current_url]
    others = [address for address in asked if not address.startswith(("file:", "data:", "blob:"))]
    assert others == []


def test_keys_move_the_sliders_to_what_explore_says(
    browser: "Chrome", page: Path, profile: Profile
) -> None:
    open_page(browser, page)
    surfaces = [part.surface() for part in profile.surfaces]
    at = {"acceptance": 16, "spread": 3, "requests": 3}
    keys = {RIGHT: 1, LEFT: -1}
    seen = set()
    for name, presses in (
        ("spread", [LEFT]),
        ("requests", [LEFT]),
        ("acceptance", [LEFT] * 6),
        ("spread", [RIGHT] * 5),
        ("requests", [LEFT] * 2),
        ("acceptance", [RIGHT] * 9),
        ("requests", [RIGHT] * 3),
        ("acceptance", [LEFT] * 14),
        ("spread", [LEFT] * 4),
    ):
        press(browser, name, *presses)
        at[name] += sum(keys[key] for key in presses)
        acceptance, spread = ACCEPTANCES[at["acceptance"]], SPREADS[at["spread"]]
        found = explore(surfaces[0], 3, acceptance, spread, at["requests"] + 1)
        assert text_of(browser, "explorer-acceptance-value") == f"{acceptance:.2f}"
        assert text_of(browser, "explorer-spread-value") == f"{spread:.2f}"
        assert text_of(browser, "explorer-requests-value") == str(at["requests"] + 1)
        assert_shows(browser, found)
        seen.add(text_of(browser, "result-pair"))
    assert len(seen) >= 4, seen
    assert browser.get_log("browser") == []


def test_ends_of_the_sliders_and_the_other_context(
    browser: "Chrome", page: Path, profile: Profile
) -> None:
    open_page(browser, page)
    for name in ("acceptance", "spread", "requests"):
        press(browser, name, HOME)
    assert_shows(browser, explore(profile.surfaces[0].surface(), 3, 0.0, 0.0, 1))
    press(browser, "context", "1")
    assert_shows(browser, explore(profile.surfaces[1].surface(), 3, 0.0, 0.0, 1))
    press(browser, "acceptance", END)
    press(browser, "requests", END)
    assert_shows(browser, explore(profile.surfaces[1].surface(), 3, 1.0, 0.0, 4))
    gains = browser.execute_script("return document.getElementById('figure-explorer').data[1].y")
    for num_reqs, gain in enumerate(gains, start=1):
        found = explore(profile.surfaces[1].surface(), 3, 1.0, 0.0, num_reqs)
        assert gain == pytest.approx(found.gain_over_none, abs=6e-5)


def test_sliders_are_named_and_follow_the_keyboard(browser: "Chrome", page: Path) -> None:
    open_page(browser, page)
    for name, label in (
        ("acceptance", "Acceptance of a draft"),
        ("spread", "Spread of the confidences"),
        ("requests", "Live requests"),
        ("context", "Step times at a context of"),
    ):
        element = browser.find_element("id", f"explorer-{name}")
        assert element.accessible_name.startswith(label)
    browser.execute_script("document.getElementById('explorer-acceptance').focus()")
    order = []
    for _ in range(3):
        browser.switch_to.active_element.send_keys("\ue004")  # the tabulator
        order.append(browser.switch_to.active_element.get_attribute("id"))
    assert order == ["explorer-spread", "explorer-requests", "explorer-context"]
    spread = browser.find_element("id", "explorer-spread")
    spread.send_keys(RIGHT)
    assert spread.get_attribute("aria-valuetext") == "0.40"


def test_hostile_names_do_not_run(
    browser: "Chrome", make_profile: MakeProfile, tmp_path: Path
) -> None:
    graph = {
        "graph": HOSTILE,
        "variant": "fused",
        "num_reqs": 1,
        "num_query_tokens": 1,
        "capture_s": 0.5,
        "num_nodes": 1,
        "nodes_by_kind": {HOSTILE: 1},
        "kernels": {HOSTILE: 1},
        "pool_bytes": 1,
        "unseen_bytes": 0,
        "replay_ms": None,
        "bytes_moved": None,
        "flops": None,
        "roofline_ms": None,
    }
    hostile = make_profile(
        max_num_reqs=1,
        contexts=(256,),
        machine={HOSTILE: HOSTILE},
        graphs=[graph],
        start_up=[{"name": HOSTILE, "count": 1, "seconds": 1.0}],
    )
    write_report(hostile, tmp_path / "report.html")
    open_page(browser, tmp_path / "report.html")
    assert browser.execute_script("return window.hostile") is None
    assert not browser.find_elements("css selector", "img, iframe, foreignObject img")
    body = browser.find_element("tag name", "body")
    assert HOSTILE in body.text.replace("\n", " ")
    ticks = browser.find_elements("css selector", "#figure-start-up .ytick text")
    assert [tick.text for tick in ticks] == [HOSTILE[:37] + "..."]
    assert browser.get_log("browser") == []
    assert len(requests_of(browser)) >= 1


def settles(browser: "Chrome", script: str, wanted: object) -> None:
    """Wait until a script returns the wanted value: the page redraws after the next frame."""
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.wait import WebDriverWait

    try:
        WebDriverWait(browser, 20).until(lambda page: page.execute_script(script) == wanted)
    except TimeoutException:
        assert browser.execute_script(script) == wanted


def test_dark_and_narrow(browser: "Chrome", page: Path) -> None:
    open_page(browser, page)
    look = "const style = getComputedStyle(document.body); "
    tick = "getComputedStyle(document.querySelector('#figure-surface-0 .xtick text')).fill"
    wide = "return document.documentElement.scrollWidth <= innerWidth && innerWidth"
    seen = []
    try:
        for scheme in ("light", "dark"):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
            settles(browser, f"{look} return style.color === {tick}", True)
            seen.append(
                browser.execute_script(look + "return [style.color, style.backgroundColor]")
            )
        for one, other in zip(*seen, strict=True):
            assert one != other
        for width in (390, 1000):
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            settles(browser, wide, width)
            settles(browser, DRAWN_OUTSIDE, [])
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
