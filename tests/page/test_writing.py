"""The page is one file that holds everything and asks for nothing."""

from __future__ import annotations

import base64
import gzip
import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

import actmem
from actmem.reporting import write_page
from actmem.reporting.page_writer import render
from tests.page.conftest import Case


class Read(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[tuple[str, str, str]] = []
        self.data = ""
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [
            (tag, k, v or "") for k, v in attrs if k in ("src", "href", "action", "srcset", "data", "poster")
        ]
        self._in_data = tag == "script" and ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False


def test_the_page_embeds_exactly_its_data_and_points_nowhere(small: Case, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    write_page(small.data, path)
    text = path.read_text(encoding="utf-8")
    page = Read()
    page.feed(text)
    assert json.loads(gzip.decompress(base64.b64decode(page.data))) == json.loads(small.data.model_dump_json())
    assert all(link.startswith("#") for _, _, link in page.links)
    assert "://" not in text
    assert "default-src 'none'" in text


def test_a_name_cannot_break_the_page(small: Case) -> None:
    assert "</script>" in small.data.name
    assert render(small.data).count("</script>") == 3


def test_the_page_of_a_large_model_is_below_3_megabytes(llama: Case) -> None:
    assert len(llama.data.plans) >= 24
    assert len(render(llama.data).encode()) < 3_000_000


def test_a_card_that_would_be_empty_is_left_out(small: Case) -> None:
    assert 'id="measured"' not in render(small.data)
    assert 'id="panel"' in render(small.data)
    assert 'id="panel"' not in render(small.data.model_copy(update={"kinds": []}))


@pytest.mark.parametrize("package", ["jinja2", "plotly.offline"])
def test_without_the_extra_the_error_says_what_to_install(
    package: str, small: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails, as where it is not installed
    with pytest.raises(actmem.ActmemError) as raised:
        write_page(small.data, tmp_path / "out.html")
    assert str(raised.value) == snapshot
    assert not (tmp_path / "out.html").exists()


def test_a_folder_that_is_not_there_is_named(small: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(actmem.ModeError, match=r"cannot write the page 'nowhere/out.html': No such file or directory"):
        write_page(small.data, "nowhere/out.html")
