"""Load the names of a room when they are first asked for.

A room whose parts cost different amounts to import (torch, the solver, the page's libraries) gives its names out one by
one: `import actmem` loads no torch, and `actmem explain` answers without it.

Importing makes many objects that stay, which would start Python's collector: it walks through all of torch, longer than
the import itself takes.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules

from actmem.collector import uncollected

__all__ = ["on_first_use"]


def on_first_use(
    room: str, homes: Mapping[str, str], rooms: str = ""
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports a name when it is first asked for.

    >>> get, _ = on_first_use("actmem", {"actmem.errors": "ActmemError ModeError"})
    >>> get("ModeError").__name__
    'ModeError'

    Args:
        room: the name of the package.
        homes: for each module, the names that it has.
        rooms: packages inside that are given out whole.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}
    inside = rooms.split()

    @uncollected()
    def get(name: str) -> object:
        if name in inside:
            return import_module(f"{room}.{name}")
        if name not in home:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(modules[room], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(modules[room]), *home, *inside})

    return get, names
