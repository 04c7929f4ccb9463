"""The page of a job in a real browser: it opens offline and shows its stages side by side."""

from pathlib import Path

import pytest
import torch
from playwright.sync_api import sync_playwright

import actmem
from actmem.catalogue import build, example, tiny
from actmem.reporting import write_job_page
from actmem.reporting.job_page import job_page
from tests.flat_device import FLAT
from tests.page.test_browser import CHROMIUM
from tests.patience import PATIENCE_SECONDS

CONFIG = tiny("llama-3.1-8b")
LAYOUT = actmem.Layout(pp=2, microbatches=4)
BUDGET_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def stages() -> list[tuple[actmem.StageProfile, actmem.Plan]]:
    model, batch = build(CONFIG, dtype=torch.float32), example(CONFIG, sequence=64)
    seen = actmem.profile_stages(model, batch, LAYOUT)
    return [(stage, actmem.fit(stage.profile, budget=BUDGET_BYTES, device=FLAT)) for stage in seen]


def test_each_stage_has_its_peak_by_category_its_plan_and_what_is_in_flight(
    stages: list[tuple[actmem.StageProfile, actmem.Plan]],
) -> None:
    page = job_page("job", LAYOUT, *zip(*stages, strict=True), FLAT, BUDGET_BYTES)
    assert [view.in_flight for view in page.stages] == [2, 1]
    for view, (stage, plan) in zip(page.stages, stages, strict=True):
        assert sum(view.parts) == view.peak_bytes == actmem.predict(stage.profile, plan, FLAT).live_bytes
        assert view.plan == str(plan)
        assert view.peak_bytes <= page.budget_bytes


@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no Chromium at {CHROMIUM}")
def test_the_page_opens_offline_and_draws_a_bar_for_each_stage(
    tmp_path: Path, stages: list[tuple[actmem.StageProfile, actmem.Plan]]
) -> None:
    path = tmp_path / "job.html"
    write_job_page(path, "job", LAYOUT, *zip(*stages, strict=True), FLAT, BUDGET_BYTES)
    requests: list[str] = []
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * PATIENCE_SECONDS
        )
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        page.locator("html[data-ready=yes]").wait_for(state="attached", timeout=1000 * PATIENCE_SECONDS)
        heights = page.evaluate("document.getElementById('stages').data.map((trace) => trace.y)")
        rows = page.locator("tr[data-place]").all()
        shown = [(row.get_attribute("data-bytes"), row.get_attribute("data-in-flight")) for row in rows]
        plans = [page.locator(f"pre[data-plan='{n}']").text_content() for n in (0, 1)]
        browser.close()
    told = [actmem.predict(stage.profile, plan, FLAT).live_bytes for stage, plan in stages]
    assert [round(sum(each) * 2**20) for each in zip(*heights, strict=True)] == told
    assert shown == [(str(told[0]), "2"), (str(told[1]), "1")]
    assert plans == [str(plan) for _, plan in stages]
    assert [url for url in requests if not url.startswith(("file:", "blob:", "data:"))] == []
    assert complaints == []
