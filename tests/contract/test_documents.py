"""Every JSON output is declared once: a document includes the library's dataclasses and does not copy them."""

import dataclasses
import importlib
import pkgutil
from typing import Any

import pytest

import actmem
from actmem.cli.runner import DOCUMENTED, document_of
from actmem.cli.schema import Document, schema_of

OPTIONAL = ("actmem.compat", "actmem.integrations", "actmem.__main__")
"""Modules that need other libraries, or run something, when they are imported."""


def names_of(kind: Any) -> frozenset[str]:
    """Return the fields of a dataclass, each with its type: two kinds of devices may both be called so."""
    return frozenset(f"{field.name}: {field.type}" for field in dataclasses.fields(kind) if field.name != "command")


def declared() -> set[type]:
    """Return every dataclass that a module of the package defines."""
    found: set[type] = set()
    for info in pkgutil.walk_packages(actmem.__path__, "actmem."):
        if not info.name.startswith(OPTIONAL):
            module = importlib.import_module(info.name)
            kinds = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == info.name]
            found.update(kind for kind in kinds if dataclasses.is_dataclass(kind))
    return found


def test_no_document_repeats_a_dataclass_of_the_library() -> None:
    everything = declared()
    documents = {kind for kind in everything if issubclass(kind, Document) and dataclasses.fields(kind)}
    assert {document_of(command) for command in DOCUMENTED} <= documents
    repeated = {
        (document.__name__, other.__name__)
        for document in documents
        for other in everything - {document}
        if names_of(document) <= names_of(other)
    }
    assert repeated == set()


@pytest.mark.parametrize("command", DOCUMENTED)
def test_every_field_of_a_document_is_always_printed_and_no_other(command: str) -> None:
    schema = schema_of(document_of(command))
    for each in (schema, *schema.get("$defs", {}).values()):
        assert each["additionalProperties"] is False, each["title"]
        assert sorted(each["required"]) == sorted(each["properties"]), each["title"]
