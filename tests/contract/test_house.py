"""How the source is built: doors of rooms, names of modules, and data that stays data."""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import actmem

SOURCE = Path(actmem.__file__).parent
PUBLIC_ROOMS = ("actmem.compat", "actmem.integrations")
"""Their modules are doors themselves: a user imports from them."""


def name_of(path: Path) -> str:
    return ".".join(("actmem", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


@cache
def modules() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def is_room(name: str) -> bool:
    return (SOURCE.parent / name.replace(".", "/") / "__init__.py").exists()


def room_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a module imports, late and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (full for a in node.names if (full := f"{node.module}.{a.name}") in modules())
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names)


# ---------------------------------------------------------------- doors and names


def test_a_room_is_imported_through_its_door_only() -> None:
    past = sorted(
        f"{name} imports {other}"
        for name, tree in modules().items()
        for other in imported(tree)
        if other.count(".") > 1 and other in modules() and room_of(other) != room_of(name)
        # A name that a room gives out may be called as one of its modules is.
        if not (room_of(other) in PUBLIC_ROOMS and not other.rpartition(".")[2].startswith("_"))
    )
    assert past == []


def test_what_a_door_gives_out_is_no_module_of_the_room() -> None:
    rooms = [name for name in modules() if is_room(name) and name != "actmem"]
    assert len(rooms) > 8
    for room in rooms:
        inside = {name.rpartition(".")[2] for name in modules() if name.rpartition(".")[0] == room}
        assert inside & {*getattr(importlib.import_module(room), "__all__", ())} == set(), room


def test_no_two_modules_have_the_same_name() -> None:
    names = Counter(name.rpartition(".")[2].lstrip("_") for name in modules() if not is_room(name))
    assert [name for name, count in names.items() if count > 1] == []


def test_modules_are_nouns() -> None:
    named_elsewhere = {"actmem.integrations.lightning"}
    gerunds = [name for name in modules() if not is_room(name) and re.search(r"[a-z]{2}ing$", name)]
    assert [name for name in gerunds if name not in named_elsewhere] == []


def test_every_file_that_a_docstring_of_a_room_names_is_there() -> None:
    for room in (name for name in modules() if is_room(name)):
        folder = SOURCE.parent / room.replace(".", "/")
        named = re.findall(r"`(\w+\.py)`", ast.get_docstring(modules()[room]) or "")
        assert [name for name in named if not (folder / name).exists()] == [], room


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


# ---------------------------------------------------------------- no text that is read back


FILES = {("actmem.shapes", "read_shape"), ("actmem.profiles", "read_shape")}
"""Files hold shapes as text: what reads plan files and profiles reads it."""


def test_no_text_of_a_plan_is_read_back() -> None:
    readers = ("startswith", "endswith", "split", "partition", "removeprefix")
    found: set[tuple[str, str]] = set()
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Name, ast.Attribute)):
                continue
            written = ast.unparse(node)
            if re.fullmatch(rf"(\w+\.)*plan\.mode\.({'|'.join(readers)})|read_shape", written):
                found.add((name, written))
    assert found == FILES
