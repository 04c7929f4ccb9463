"""The page in a real browser: it opens offline, and whatever is chosen, all its numbers are those of its data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from actmem.reporting import write_page
from actmem.reporting.page_data import MeasuredRow, PageData
from actmem.units import UNITS, size
from tests.page.conftest import Case
from tests.patience import PATIENCE_SECONDS

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no Chromium at {CHROMIUM}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * PATIENCE_SECONDS
        )
        yield opened
        opened.close()


def in_unit_of(num_bytes: int, largest: int) -> str:
    """Write bytes in the unit of the largest of a column, with as many digits."""
    unit = size(largest).split()[1]
    text = f"{num_bytes / UNITS[unit]:.2f}"
    return f"< 0.01 {unit}" if num_bytes and float(text) == 0 else f"{text} {unit}"


class Opened:
    """A page that is open, what it asked for and what it complained about."""

    def __init__(self, browser: Browser, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 850}, **options})
        self.context.set_default_timeout(1000 * PATIENCE_SECONDS)
        self.page: Page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri())
        self.page.locator("html[data-ready=yes]").wait_for(state="attached")  # it has unpacked itself
        self.data: dict[str, Any] = json.loads(self.page.evaluate("JSON.stringify(data)"))

    @property
    def chosen(self) -> int:
        return int(self.page.locator("#budget").input_value())

    def check(self) -> int:
        """Compare every number on the page with the data of the chosen plan. Return how many were compared."""
        plan = self.data["plans"][self.chosen]
        shown: list[list[str]] = self.page.eval_on_selector_all(
            "[data-key]", "all => all.map(e => [e.dataset.key, e.dataset.value, e.textContent])"
        )
        for key, value, text in shown:
            path = key.split(".")
            found: Any = self.data if path[0] in ("modes", "measured", "asked_bytes") else plan
            for part in path:
                found = found[int(part) if part.isdigit() else part]
            assert found == (value if isinstance(found, str) else type(found)(value)), key
            if key.endswith("_bytes"):
                assert text == size(found), key
        parts: list[list[str]] = self.page.eval_on_selector_all(
            "[data-category]", "all => all.map(e => [e.dataset.category, e.dataset.bytes, e.lastChild.textContent])"
        )
        assert sum(int(num_bytes) for _, num_bytes, _ in parts) == plan["peak_bytes"]
        assert all(text == in_unit_of(int(num_bytes), plan["peak_bytes"]) for _, num_bytes, text in parts)
        assert self.page.locator("#plan").text_content() == plan["plan_json"]
        letters = [
            w[0] for w in self.page.eval_on_selector_all("[data-decision]", "a => a.map(e => e.dataset.decision)")
        ]
        tab = self.page.locator('[role=tab][aria-selected="true"]').get_attribute("id") or ""
        assert "".join(letters) == plan["groups"][int(tab.split("-")[1])]["decisions"].replace("-", "f")
        drawn: list[float] = self.page.evaluate("document.getElementById('memory').data.at(-2).y")
        highest = max(drawn) * {"G": 2**30, "M": 2**20, "K": 2**10}[size(plan["peak_bytes"]).split()[1][0]]
        assert round(highest) == plan["peak_bytes"]
        point = self.page.evaluate("(d => [d.x[0], d.y[0]])(document.getElementById('frontier').data.at(-1))")
        assert point[1] == plan["step_time_ratio"]
        return len(shown)


@pytest.fixture(scope="module")
def path(small: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(small.data, tmp_path_factory.mktemp("page"))


def written(data: PageData, folder: Path) -> Path:
    path = folder / "out.html"
    write_page(data, path)
    return path


def test_it_opens_offline_without_complaint_and_the_slider_changes_every_number(browser: Browser, path: Path) -> None:
    opened = Opened(browser, path, offline=True)
    assert opened.data["plans"][opened.chosen]["asked"]
    assert opened.check() > 20
    before = opened.page.locator("#headline").text_content()
    slider = opened.page.locator("#budget")
    for key, expected in (("Home", 0), ("ArrowRight", 1), ("End", len(opened.data["plans"]) - 1)):
        slider.press(key)
        assert opened.chosen == expected
        opened.check()
        assert opened.page.locator("#headline").text_content() != before
    assert opened.requests == [path.as_uri()]
    assert opened.complaints == []
    opened.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plan_can_be_chosen_and_shows_its_own_numbers(
    browser: Browser, llama: Case, tmp_path: Path, scheme: str
) -> None:
    opened = Opened(browser, written(llama.data, tmp_path), color_scheme=scheme)
    opened.page.locator("#budget").press("Home")
    headlines: set[str | None] = set()
    for nth in range(len(opened.data["plans"])):
        assert opened.chosen == nth
        opened.check()
        headlines.add(opened.page.locator("#headline").text_content())
        opened.page.locator("#budget").press("ArrowRight")
    assert len(headlines) == len(opened.data["plans"])
    opened.page.locator("#asked").click()
    assert opened.data["plans"][opened.chosen]["asked"]
    assert opened.complaints == []
    opened.context.close()


@pytest.mark.slow
def test_a_point_of_the_frontier_can_be_clicked(browser: Browser, path: Path) -> None:
    opened = Opened(browser, path)
    points = opened.page.locator("#frontier .scatterlayer .trace").first.locator(".point")
    points.nth(3).scroll_into_view_if_needed()
    box = points.nth(3).bounding_box()
    assert box is not None
    opened.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.page.wait_for_function("document.getElementById('budget').value === '3'")
    opened.check()
    opened.context.close()


@pytest.mark.slow
def test_hovering_names_the_module_and_the_operator(browser: Browser, path: Path) -> None:
    opened = Opened(browser, path)
    box = opened.page.locator("#memory .nsewdrag").first.bounding_box()
    assert box is not None
    opened.page.locator("#memory").scroll_into_view_if_needed()
    opened.page.locator("#memory .nsewdrag").first.hover(position={"x": box["width"] * 0.1, "y": box["height"] * 0.5})
    text = opened.page.locator("#memory .hovertext").first.text_content() or ""
    assert "after" in text and "forward" in text and "operator" in text and "Parameters" in text
    opened.context.close()


@pytest.mark.slow
def test_everything_can_be_reached_with_the_keyboard_and_the_focus_is_seen(browser: Browser, path: Path) -> None:
    opened = Opened(browser, path)
    reached: list[str] = []
    while True:
        opened.page.keyboard.press("Tab")
        found = opened.page.evaluate(
            "(e => [e.id || e.className || e.tagName, getComputedStyle(e).outlineStyle, e.matches(':focus-visible')])"
            "(document.activeElement)"
        )
        if found[0] == "BODY":
            break  # past the last one
        reached.append(found[0])
        assert found[1:] == ["solid", True], found
    for wanted in ("theme", "budget", "tab-0", "panel", "copy", "plan"):
        assert wanted in reached
    for named in opened.page.locator("input, button").all():
        name = (
            named.get_attribute("aria-label")
            or named.inner_text()
            or opened.page.locator("label[for=budget]").inner_text()
        )
        assert name.strip()
    several = next(n for n, plan in enumerate(opened.data["plans"]) if len(plan["groups"]) > 1)
    opened.page.evaluate(f"show({several})")
    opened.page.locator("#tab-0").focus()
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.locator("#tab-1").get_attribute("aria-selected") == "true"
    assert opened.page.evaluate("document.activeElement.id") == "tab-1"
    opened.check()
    opened.context.close()


@pytest.mark.slow
def test_light_and_dark_follow_the_system_and_the_switch(browser: Browser, path: Path) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    pages = {scheme: Opened(browser, path, color_scheme=scheme) for scheme in ("light", "dark")}
    seen = {scheme: opened.page.evaluate(colour) for scheme, opened in pages.items()}
    assert seen["light"] != seen["dark"]
    for scheme, opened in pages.items():
        opened.page.locator("#theme").press("Enter")
        other = "dark" if scheme == "light" else "light"
        assert opened.page.evaluate(colour) == seen[other]
        assert opened.page.locator("#theme").get_attribute("aria-pressed") == str(other == "dark").lower()
        opened.check()
        assert opened.complaints == []
        opened.context.close()


@pytest.mark.slow
def test_the_copy_button_copies_the_plan_file_of_the_chosen_plan(browser: Browser, path: Path) -> None:
    opened = Opened(browser, path, permissions=["clipboard-read", "clipboard-write"])
    opened.page.locator("#budget").press("End")
    opened.page.locator("#copy").press("Enter")
    opened.page.wait_for_function("document.getElementById('copied').textContent === 'Copied.'")
    assert opened.page.evaluate("navigator.clipboard.readText()") == opened.data["plans"][-1]["plan_json"]
    opened.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_narrow_screen_needs_no_sideways_scrolling(browser: Browser, path: Path, width: int) -> None:
    opened = Opened(browser, path, viewport={"width": width, "height": 800})
    for key in ("Home", "End"):
        opened.page.locator("#budget").press(key)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.context.close()


@pytest.mark.slow
def test_a_measurement_stands_in_its_table_and_without_one_there_is_no_empty_card(
    browser: Browser, small: Case, path: Path, tmp_path: Path
) -> None:
    opened = Opened(browser, path)
    assert opened.page.locator("#measured").count() == 0
    assert "actmem.measure(" in opened.page.locator("section:has(#plan)").inner_text()
    opened.context.close()
    peak = small.plan.predicted.peak_bytes  # type: ignore[union-attr]
    row = MeasuredRow(name="Peak", unit="bytes", predicted=peak, measured=peak + 4096)
    opened = Opened(browser, written(small.data.model_copy(update={"measured": [row]}), tmp_path))
    assert opened.page.locator("#measured tbody td").all_inner_texts() == [
        "Peak",
        size(peak),
        size(peak + 4096),
        "+4.0 KiB",
    ]
    opened.check()
    opened.context.close()


@pytest.mark.slow
def test_a_model_with_a_single_plan_has_a_page_too(browser: Browser, small: Case, tmp_path: Path) -> None:
    only = [view for view in small.data.plans if view.asked]
    opened = Opened(browser, written(small.data.model_copy(update={"plans": only, "exhausted": True}), tmp_path))
    opened.check()
    assert "no other budget yields another plan" in opened.page.locator("#note-frontier").inner_text()
    assert opened.complaints == []
    opened.context.close()


def test_a_plan_that_is_larger_than_the_card_is_warned_of(browser: Browser, small: Case, tmp_path: Path) -> None:
    between = (small.data.plans[0].peak_bytes + small.data.plans[-1].peak_bytes) // 2
    data = small.data.model_copy(update={"device_bytes": between, "device_name": "a small card"})
    opened = Opened(browser, written(data, tmp_path))
    warning = opened.page.locator("#warning")
    opened.page.locator("#budget").press("Home")
    assert not warning.is_visible()
    opened.page.locator("#budget").press("End")
    over = size(opened.data["plans"][-1]["peak_bytes"] - between)
    assert (
        warning.inner_text() == f"This plan does not fit: its peak is {over} above the {size(between)} of a small card."
    )
    opened.context.close()


def test_the_headline_names_the_budget_that_was_asked_for_and_the_peak_is_told_in_words(
    browser: Browser, small: Case, tmp_path: Path
) -> None:
    opened = Opened(browser, written(small.data.model_copy(update={"asked_bytes": 3 * 2**20}), tmp_path))
    assert "within the requested 3.0 MiB" in opened.page.locator("#headline").inner_text()
    words = next(view for view in small.data.plans if view.asked).peak_words
    assert opened.page.locator("#peak p").all_inner_texts() == words
    assert words[0].startswith("The peak of ") and words[-1].startswith("What would lower it: ")
    opened.page.locator("#budget").press("End")
    assert "(requested: 3.0 MiB)" in opened.page.locator("#headline").inner_text()
    assert opened.page.locator("#peak p").all_inner_texts() == small.data.plans[-1].peak_words
    opened.context.close()


def test_the_memory_can_be_drawn_over_time(browser: Browser, path: Path) -> None:
    opened = Opened(browser, path)
    drawn = "document.getElementById('memory').data.at(-2).x"
    curve = opened.data["plans"][opened.chosen]["curve"]
    assert opened.page.evaluate(drawn) == [moment + 1 for moment in curve["moments"]]
    opened.page.locator("input[value=time]").check()
    over_time = opened.page.evaluate(drawn)
    scale = curve["seconds"][-1] / over_time[-1]
    assert over_time == pytest.approx([seconds / scale for seconds in curve["seconds"]])
    assert "time by the roofline" in opened.page.locator("#memory").inner_text()
    opened.check()
    assert opened.complaints == []
    opened.context.close()


def test_ratios_have_equally_many_digits(browser: Browser, path: Path) -> None:
    opened = Opened(browser, path)
    for key in ("Home", "End"):
        opened.page.locator("#budget").press(key)
        shown = opened.page.locator("[data-key$=step_time_ratio], [data-key=bound]").all_inner_texts()
        assert len(shown) > 5
        assert all(re.fullmatch(r"\d\.\d{4}\N{MULTIPLICATION SIGN}", text) for text in shown), shown
    opened.context.close()
