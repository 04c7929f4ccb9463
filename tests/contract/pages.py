"""Read the pages of the documentation, run their examples, and write down what they print.

`python -m tests.contract.pages docs/recipes.md` runs a page from top to bottom and writes its outputs again.
"""

import contextlib
import io
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_EXAMPLE = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A block of code on a page."""

    page: str
    line: int
    code: str
    shown: str | None
    """What the page says it prints; None where it says nothing."""


def examples(page: str) -> list[Example]:
    """Return the blocks of Python code of a page."""
    text = (DOCS / page).read_text()
    return [
        Example(page, text[: found.start()].count("\n") + 2, found["code"], found["shown"])
        for found in _EXAMPLE.finditer(text)
    ]


def run(example: Example, given: dict[str, Any]) -> str:
    """Run a block with the given names, to which it adds its own. Return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (example.line - 1) + example.code, str(DOCS / example.page), "exec"), given)
    return printed.getvalue()


def switches(page: str) -> list[str]:
    """Return the new lines of the blocks that show an old line and a new one."""
    blocks = re.findall(r"^```diff\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return ["\n".join(re.findall(r"^\+(.*)", block, re.MULTILINE)) for block in blocks]


def prose(path: Path) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """Return the names under which the headings of a page can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(path: Path) -> list[str]:
    """Return where a page links to, inside this repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(path)))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def main(path: Path) -> None:
    """Run a page from top to bottom, and write what its blocks print under each that shows something."""
    text, given, done = path.read_text(), {"folder": tempfile.mkdtemp()}, 0
    pieces: list[str] = []
    for found, example in zip(_EXAMPLE.finditer(text), examples(path.name), strict=True):
        printed = run(example, given)
        end = found.end() if found["shown"] is None else found.start("shown")
        pieces += [text[done:end], *([] if found["shown"] is None else [printed])]
        done = found.end() if found["shown"] is None else found.end("shown")
    path.write_text("".join(pieces) + text[done:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
