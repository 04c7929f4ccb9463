"""JSON documents: the output of each command with `--json`, and its schema.

Each command declares its document as a dataclass next to the function that fills it, and includes the library's own
dataclasses where they say the same. The schema that `actmem schema COMMAND` prints, and that docs/schema/ publishes, is
derived from these declarations, so there is no second one to keep in step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter

__all__ = ["Document", "Failed", "project", "schema_of", "to_json"]


@dataclass(frozen=True, kw_only=True)
class Document:
    """Base of everything that is printed as JSON: no unknown fields, and docstrings become descriptions."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, json_schema_serialization_defaults_required=True
    )


@dataclass(frozen=True, kw_only=True)
class Failed(Document):
    """Output of any command that fails."""

    error: str
    """Kind of error, such as `BudgetError`."""
    message: str
    exit_code: Annotated[int, Field(ge=1)]


_Kind = TypeVar("_Kind", bound=Document)


def project(kind: type[_Kind], source: object, **own: Any) -> _Kind:
    """Build a document from the attributes of `source` that it has too, and from its own fields.

    >>> class Error:
    ...     error, message, traceback = "BudgetError", "no plan fits", "..."
    >>> project(Failed, Error, exit_code=1)
    Failed(error='BudgetError', message='no plan fits', exit_code=1)
    """
    shared = [field.name for field in fields(kind) if field.name not in own and hasattr(source, field.name)]
    return kind(**{name: getattr(source, name) for name in shared}, **own)


def to_json(document: Document) -> str:
    """Return a document as JSON text.

    >>> print(to_json(Failed(error="ModeError", message="no such mode", exit_code=2)))
    {
      "error": "ModeError",
      "message": "no such mode",
      "exit_code": 2
    }
    """
    return _adapter(type(document)).dump_json(document, indent=2).decode()


def schema_of(kind: type[Document]) -> dict[str, Any]:
    """Return the JSON schema of a kind of document.

    >>> schema_of(Failed)["required"]
    ['error', 'message', 'exit_code']
    """
    schema = _adapter(kind).json_schema(mode="serialization")
    for each in (schema, *schema.get("$defs", {}).values()):
        if "description" in each:  # a class docstring may go on with an example
            each["description"] = cast(str, each["description"]).partition("\n\n")[0]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


@cache
def _adapter(kind: type[Document]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
