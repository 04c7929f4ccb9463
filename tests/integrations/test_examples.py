"""Every example runs, asserts what it claims, and is listed."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9]*.py"))
SLOW = ("02", "03", "04", "09", "10")
SAYS = {
    "01": "Full()",
    "02": "And one that cannot be met",
    "03": "gradient_checkpointing=False",
    "04": "the same losses: True",
    "05": "the same losses: True",
    "06": "the same losses: True",
    "07": "0 outstanding",
    "08": "Targets that would match",
    "09": "the same losses as compiled plain training: True",
    "10": "8B, adapters, 4090: peak",
    "11": "declared: 131,072 bytes held",
}


@pytest.mark.filterwarnings("ignore")  # a script of a user runs with the interpreter's own filters
@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem[:2] in SLOW else []) for p in SCRIPTS]
)
def test_an_example_runs_and_says_what_it_found(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [path.name, str(tmp_path)])
    runpy.run_path(str(path), run_name="__main__")
    assert SAYS[path.stem[:2]] in capsys.readouterr().out


def test_the_index_lists_every_example_and_each_is_short() -> None:
    index = (EXAMPLES / "README.md").read_text()
    assert [p.name for p in SCRIPTS if f"]({p.name})" not in index] == []
    assert sorted(SAYS) == [p.stem[:2] for p in SCRIPTS]
    assert [p.name for p in SCRIPTS if len(p.read_text().splitlines()) > 80] == []
