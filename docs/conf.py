"""Build the site: `make docs` writes it to build/docs. Nothing is fetched, and every warning is an error."""

import re
from importlib.metadata import version as version_of
from typing import Any

project = "actmem"
author = "actmem contributors"
release = version = version_of("actmem")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["schema/**"]  # what machines read
source_suffix = {".md": "markdown"}

# Headings can be linked to by the names that GitHub gives them.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
autodoc_class_signature = "mixed"
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"actmem {release}"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
smartquotes_action = "D"  # dashes only: what stands in quotes is often to be typed

_told: dict[str, list[str]] = {}


def _read_markdown(_app: Any, what: str, name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Read `code` in docstrings as Markdown does, and remember what stands under a field."""
    lines[:] = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", "\n".join(lines)).split("\n")
    if what in ("attribute", "property"):
        _told[name] = list(lines)


def _keep_sentences(_app: Any, _what: str, name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Undo what napoleon does under a field, where it takes all before a colon for a type."""
    lines[:] = _told.pop(name, lines)


def setup(app: Any) -> None:
    """Put both round napoleon, which comes at 500."""
    app.connect("autodoc-process-docstring", _read_markdown, priority=400)
    app.connect("autodoc-process-docstring", _keep_sentences, priority=600)
