"""Write a page: one HTML file that contains its data, styles and scripts and makes no network requests."""

from __future__ import annotations

import base64
import gzip
import importlib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from actmem.errors import ActmemError, ModeError
from actmem.reporting.page_data import PageData

__all__ = ["check_installed", "render", "rendered", "write_page", "write_text"]

_NEEDED = ("jinja2", "plotly.offline")
_SCRIPTS = ("formats.js", "charts.js", "blocks.js", "page.js")


def check_installed() -> None:
    """Check that a page can be written, before plans are solved for it.

    >>> check_installed()

    Raises:
        ActmemError: if plotly or jinja2 is not installed.
    """
    for name in _NEEDED:
        _import(name)


def write_page(data: PageData, path: str | os.PathLike[str]) -> None:
    """Write the data from `build` as one self-contained `.html` file, overwriting an existing file.

    Raises:
        ActmemError: if plotly or jinja2 is not installed.
        ModeError: if the file cannot be written.
    """
    write_text(path, render(data))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a page's text.

    Raises:
        ModeError: if the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ModeError(
            f"cannot write the page {str(path)!r}: {error.strerror}. Name a file in a folder that exists."
        ) from error


def render(data: PageData) -> str:
    """Return the page as HTML.

    Raises:
        ActmemError: if plotly or jinja2 is not installed.
    """
    return rendered("page.html.jinja", data, _SCRIPTS)


def rendered(template: str, data: BaseModel, scripts: Sequence[str]) -> str:
    """Return the HTML of a template with its data, the style sheet, the library for charts, and the named scripts.

    Raises:
        ActmemError: if plotly or jinja2 is not installed.
    """
    jinja2, offline = (_import(name) for name in _NEEDED)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    assets = resources.files("actmem.reporting") / "assets"

    def read(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    return environment.from_string(read(template)).render(
        data=data,
        embedded=_packed(data.model_dump_json()),
        style=read("page.css"),
        plotly=_packed(offline.get_plotlyjs()),
        scripts="\n".join(read(name) for name in scripts),
    )


def _packed(text: str) -> str:
    """Compress a text and encode it in characters that need no escaping in HTML; the page unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".", maxsplit=1)[0]
        raise ActmemError(
            f"the report page needs {package}, which is not installed. It is part of an optional extra: "
            "pip install 'actmem[report]'"
        ) from error
