"""Docstrings, comments, messages and pages are plain engineering English: known slips stay out."""

import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.contract.pages import ROOT

PARTS = (
    *("src/actmem", "benchmarks", "examples", "README.md", "CHANGELOG.md"),
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "hazards"),  # made by tests
)
SLIPS = {
    r"(?<!there )(?<!There )\bis no (?!longer\b|more\b|less\b)": "'is not a ...'",
    r"\bLeft out:": "'Default:'",
    r"\bTell whether\b": "'Return whether' or 'Whether'",
    r"^Be (?:a|an|one|the)\b": "a noun phrase for a class",
    r"\bbeside\b": "'with', 'next to', 'for comparison'",
    r"\bsen(?:t|ds?) away\b": "'offloaded'",
    r"\bma(?:de|kes?) again\b": "'recomputed'",
    r"\b(?:anew|foretold|foretells?|for ever|dear)\b": "'again', 'predicted', 'forever', 'expensive'",
    r"\bround (?:a|an|the|it)\b": "'around'",
    r"\bto the bit\b": "'bitwise' or 'bit for bit'",
}
TEXTS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def texts(path: Path) -> list[str]:
    """Return what people read of a file: strings and comments of source, pages without their code."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        found = [token.string.strip("rbf\"'# \n") for token in tokens if token.type in TEXTS]
        return [" ".join(text.split()) for text in found]
    if path.suffix == ".md":
        prose = re.sub(r"^```.*?^```", "", source, flags=re.DOTALL | re.MULTILINE)
        return re.sub(r"`[^`\n]*`", "", prose).splitlines()
    return source.splitlines()


@pytest.mark.parametrize("part", PARTS)
def test_known_slips_stay_out(part: str) -> None:
    place = ROOT / part
    files = [place] if place.is_file() else [p for p in place.rglob("*") if p.suffix in (".py", ".md", ".js", ".jinja")]
    assert files, f"{part} is gone: correct PARTS"
    slips = [
        f"{path.relative_to(ROOT)}: {text[:120]!r}: write {instead}"
        for path in sorted(files)
        for text in texts(path)
        for slip, instead in SLIPS.items()
        if re.search(slip, text)
    ]
    assert slips == []


@pytest.mark.parametrize(
    "text", ["'x' is no mode", "Left out: this machine", "Be one repeating unit", "what is sent away", "made again"]
)
def test_a_slip_is_found(text: str) -> None:
    assert any(re.search(slip, text) for slip in SLIPS)
