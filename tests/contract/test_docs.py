"""The examples in the documentation run, what it shows is printed, what it lists is complete, and the site builds."""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

import actmem
from actmem import Applied, Budget, Full, Rule, Rules, Selective, Targets, ops
from actmem.decision_rules import TARGETS
from actmem.modes import Mode
from actmem.native import build
from tests import children
from tests.contract.pages import DOCS, ROOT, Example, anchors, examples, links, prose, run, switches
from tests.zoo import ZOO

PAGES = sorted(path.name for path in DOCS.glob("*.md"))
# Read as one script. What takes minutes is left to the long run.
SCRIPTS = [
    pytest.param("quickstart.md"),
    pytest.param("idea.md"),
    pytest.param("recipes.md", marks=pytest.mark.slow),
]
# Run by the tests of what they are about.
ELSEWHERE = {"offload.md"}
# What the examples call the user's models.
MODELS = {
    "model": "qwen3",
    "moe_model": "qwen3_moe",
    "sliding_model": "gemma3_sliding",
    "vision_language": "vision_language",
}


def alone() -> list[Any]:
    """Return the examples that stand for themselves."""
    others = ELSEWHERE | {page.values[0] for page in SCRIPTS}
    # What the compiler warns of is its own.
    marks = {"compile.md": [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]}
    return [
        pytest.param(example, id=f"{page}:{example.line}", marks=marks.get(page, ()))
        for page in PAGES
        if page not in others
        for example in examples(page)
    ]


def stepper(case: str) -> Callable[[nn.Module], None]:
    def train_step(model: nn.Module) -> None:
        ZOO[case].step(model).backward()

    return train_step


@pytest.fixture
def one_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    """Be the only rank of a group, for the page about many."""
    example = request.node.callspec.params["example"]
    if example.page != "distributed.md":
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("example", alone())
def test_an_example_runs_and_what_it_applies_trains(example: Example, tmp_path: Path, one_rank: None) -> None:
    given: dict[str, Any] = {"actmem": actmem, "torch": torch, "folder": str(tmp_path)}
    given["speed"] = actmem.device("h100-80gb").tensors_only()  # the pages say so where they first use it
    for name, case in MODELS.items():
        if re.search(rf"\b{name}\b", example.code):
            built = ZOO[case].build()
            given |= {name: built, "train_step": stepper(case), "batch": ZOO[case].batch(built)}
            given["optimizer"] = torch.optim.AdamW(built.parameters())
    if "native=True" in example.code:
        try:
            build()
        except actmem.UnsupportedError as why:
            pytest.skip(str(why))
    torch._dynamo.reset()  # the compiler stops compiling a function that it compiled too often
    printed = run(example, given)
    assert example.shown in (None, printed)
    applied = given.get("applied")
    if not isinstance(applied, Applied):
        return
    for name in MODELS:
        if name in given:
            given["train_step"](given[name])
    report = applied.report()
    if report.compiled:
        return
    if applied.plan.offload is None:
        assert report.num_replayed > 0
    else:
        assert report.moved is not None
        assert report.moved.out_bytes == report.moved.back_bytes > 0
    applied.remove()


@pytest.mark.parametrize("page", SCRIPTS)
def test_a_page_runs_from_top_to_bottom_and_prints_what_it_shows(page: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"folder": str(tmp_path)}
    for example in examples(page):
        printed = run(example, given)
        assert printed == (example.shown or ""), (
            f"{page}:{example.line}; write it again: python -m tests.contract.pages"
        )


@pytest.mark.parametrize("page", [page for page in PAGES if switches(page)])
def test_the_new_import_of_a_switch_works(page: str) -> None:
    for lines in switches(page):
        exec(lines, {})


def test_every_new_line_of_the_page_about_migrating_can_be_written() -> None:
    text = prose(DOCS / "migrating.md").replace("\\|", "|")
    lines = {line for line in re.findall(r"`(actmem\.[^`]*\))`", text) if "step" not in line}
    assert len(lines) > 20
    for line in sorted(lines):
        given: dict[str, Any] = {"actmem": actmem}
        if re.search(r"\b(model|batch)\b", line):
            model = ZOO["qwen3"].build()
            given |= {"model": model, "batch": ZOO["qwen3"].batch(model), "mode": Full()}
        made = eval(line, given)
        if hasattr(made, "remove"):
            made.remove()  # some change a setting of the whole process


# ---------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it as `make docs` does."""
    out = tmp_path_factory.mktemp("site")
    done = children.run("-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(out))
    assert done.returncode == 0, done.stderr
    return out


def test_the_site_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    assert [page for page in PAGES if not (site / page).with_suffix(".html").exists()] == []


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    address = r"=?[(\"]+(?:https?:)?//"
    loaded = re.compile(rf"<(?:script|img|iframe)[^>]*\ssrc{address}|<link[^>]*\shref{address}|url{address}")
    sheets = [*site.rglob("*.html"), *(site / "_static").rglob("*.css")]
    assert len(sheets) > len(PAGES)
    assert [path.name for path in sheets if loaded.search(path.read_text())] == []


def test_every_public_name_has_an_entry_in_the_api_and_is_on_the_site(site: Path) -> None:
    text, built = (DOCS / "api.md").read_text(), (site / "api.html").read_text()
    entries = set(re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)", text, re.MULTILINE))
    assert sorted(set(actmem.__all__) - entries) == []
    assert [name for name in actmem.__all__ if not re.search(rf'id="actmem[\w.]*\.{name}"', built)] == []


# ---------------------------------------------------------------- what the pages promise


def test_every_page_is_in_the_table_of_contents() -> None:
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    listed = {f"{line}.md" for tree in trees for line in tree.split("\n") if line and not line.startswith(":")}
    assert listed == {*PAGES} - {"index.md"}


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}" for page in PAGES)])
def test_no_link_of_a_page_is_dead(page: str) -> None:
    path = ROOT / page
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}; there are {sorted(anchors(target))}"


def test_the_messages_that_the_quick_start_explains_are_those_of_the_code() -> None:
    pattern = r"^\| (?:in the report: )?`(?:\w+Error: )?([^`]+)` \|"
    rows = re.findall(pattern, prose(DOCS / "quickstart.md"), re.MULTILINE)
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r"\"\s+f?\"", "", source)
    assert len(rows) > 8
    for row in rows:
        said = max(re.split(r"\.\.\. |model\.| = 'host'| = True", row), key=len)
        assert said.strip() in source, row


def test_the_design_page_lists_every_note_and_every_room_of_the_source() -> None:
    text = (DOCS / "design.md").read_text()
    package = ROOT / "src" / "actmem"
    for path in package.rglob("*.py"):
        for name in re.findall(r"^NOTE \[ (.*) \]$", path.read_text(), re.MULTILINE):
            rows = [row for row in text.split("\n") if row.startswith("|") and name in row.split("|")[1]]
            assert any(f"`{path.relative_to(package)}`" in row for row in rows), f"NOTE [ {name} ] of {path}"
    rooms = re.findall(r"\w+", re.findall(r"^```\n(cli.*?)^```", text, re.DOTALL | re.MULTILINE)[0])
    found = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(rooms) == sorted(found - {"__init__", "__main__"})


def test_the_page_of_modes_names_every_mode_group_target_and_option() -> None:
    text = (DOCS / "modes.md").read_text()
    options = {field.name for kind in (Rule, Rules, Full, Selective, Targets, Budget) for field in fields(kind)}
    wanted = {*ops.GROUPS, *TARGETS, *options} - {"_", "names", "listed"}  # these are written without their names
    assert [name for name in sorted(wanted) if f"`{name}`" not in text and f"{name}=" not in text] == []
    assert [mode.__name__ for mode in get_args(Mode) if f"`{mode.__name__}(" not in text] == []
