"""The page of a recording in a real browser: it opens offline and draws the curves that were recorded."""

from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from actmem.allocator import Attachment, read_snapshot, reenact, write_recording
from actmem.reporting import write_memory_page
from actmem.reporting.memory_page import memory_page
from tests.allocator.recorder import MIB, Recorder
from tests.page.test_browser import CHROMIUM
from tests.patience import PATIENCE_SECONDS


def long_run() -> Recorder:
    recorder = Recorder.example()
    for _ in range(3000):
        name = recorder.alloc(5 * MIB)
        assert name is not None
        recorder.free(name)
    return recorder


def test_a_long_curve_is_thinned_and_keeps_its_peaks(tmp_path: Path) -> None:
    recorder = long_run()
    high = recorder.alloc(90 * MIB)
    assert high is not None
    recorder.free(high)
    for _ in range(3000):
        name = recorder.alloc(5 * MIB)
        assert name is not None
        recorder.free(name)
    path = tmp_path / "step.pickle.xz"
    write_recording(path, recorder.snapshot(), Attachment({}, None, None, tuple(range(10_000))))
    snapshot = read_snapshot(path)
    found = reenact(snapshot, 0)
    page = memory_page(str(path), snapshot, [found], None)
    curve = page.devices[0].curve
    assert len(curve.moments) <= 4002 < found.allocations
    assert max(curve.allocated) == found.peak_allocated_bytes
    assert max(curve.reserved) == found.peak_reserved_bytes
    assert len(page.predicted) <= 4000 and page.predicted[-1] == 9999
    assert page.name == "step.pickle.xz"


@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no Chromium at {CHROMIUM}")
def test_the_page_opens_offline_and_draws_what_was_recorded(tmp_path: Path) -> None:
    recording, path = tmp_path / "step.pickle.xz", tmp_path / "page.html"
    write_recording(recording, Recorder.example().snapshot(), Attachment({}, None, 9 * MIB, (MIB, 9 * MIB)))
    snapshot = read_snapshot(recording)
    found = reenact(snapshot, 0)
    write_memory_page(path, "step", snapshot, [found], None)
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
        names = page.evaluate("document.getElementById('memory-0').data.map((trace) => trace.name)")
        drawn = page.evaluate("document.getElementById('memory-0').data.map((trace) => Math.max(...trace.y))")
        browser.close()
    assert names == ["reserved", "allocated", "predicted"]
    assert [round(height * MIB) for height in drawn] == [
        found.peak_reserved_bytes,
        found.peak_allocated_bytes,
        9 * MIB,
    ]
    assert [url for url in requests if not url.startswith(("file:", "blob:", "data:"))] == []
    assert complaints == []
