"""Every message that actmem raises, as it stands in the source: a change of one shows in the snapshot."""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

import actmem
from actmem import errors

SOURCE = Path(actmem.__file__).parent
ERRORS = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ActmemError)}


def raised(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the class and the text of each error that is raised with a text, with the names of what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = ast.unparse(node.exc.func).split(".")[-1]
            if kind in ERRORS:
                yield kind, worded(node.exc.args[0])


def worded(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(worded(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return worded(node.left) + worded(node.right)
    return f"{{{ast.unparse(node)}}}"


@cache
def messages() -> dict[str, list[str]]:
    found = {
        str(path.relative_to(SOURCE)): [f"{kind}: {text}" for kind, text in raised(ast.parse(path.read_text()))]
        for path in sorted(SOURCE.rglob("*.py"))
    }
    return {name: texts for name, texts in found.items() if texts}


@pytest.mark.parametrize("name", messages())
def test_every_message_is_the_one_that_was_agreed_on(name: str, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(messages()[name]) == snapshot


def test_every_message_is_a_sentence_or_ends_with_the_command_to_run() -> None:
    texts = [text for found in messages().values() for text in found]
    assert len(texts) > 200
    ends = (".", "}", ")", '"', "'", "`")
    assert [text for text in texts if not text.rstrip().endswith(ends) and "Run: " not in text] == []
