"""Read the targets that a model names itself, in the attribute `actmem_targets`.

NOTE [ actmem_targets ]

A class or an instance of a block, or of any module that holds blocks, may carry

    actmem_targets = {"norm": ("ln_*",), "own:adapter": ("down", "up")}

It maps a target to globs over module paths inside a block, and replaces what would be found for that target there. The
nearest attribute wins, target by target: a block's own, then that of the module that holds it, and so on outwards. As
in `Rule(module=...)`, a glob is matched against whole paths and `*` also matches dots. `.` is the block itself. An
empty tuple says that the target is not there. A target of one's own is called `own:` and an identifier.
"""

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from actmem.errors import ModeError, StructureError
from actmem.ops import did_you_mean
from actmem.plan import check_target
from actmem.structure.identity import Placed, named_modules, plain_path, unwrapped

Targets = Mapping[str, Sequence[str]]

_ATTRIBUTE = "actmem_targets"
_EXAMPLE = f'{_ATTRIBUTE} = {{"norm": ("ln_*",)}}'
_MAX_LISTED = 12


@dataclass(frozen=True)
class Declaration:
    """Be one attribute, and where it is."""

    owner: str
    """The class that carries it, for messages."""
    path: str
    """The path of the module that carries it."""
    targets: Targets
    """What it says, checked but for whether the globs match."""


def declared_on(module: nn.Module) -> Targets:
    """Return the targets that a module declares, checked; none where it has no such attribute."""
    inner = unwrapped(module)
    # Wrappers such as PEFT's hand on every attribute of what they wrap. It is read where it is.
    if inspect.getattr_static(inner, _ATTRIBUTE, None) is None:
        return {}
    return _checked(getattr(inner, _ATTRIBUTE), type(inner).__name__)


def declarations(model: nn.Module, block_path: str) -> list[Declaration]:
    """List the attributes that speak of a block, those farther out first. The block's own is the last."""
    found: list[Declaration] = []
    for path in _outwards(block_path):
        module = model.get_submodule(path)
        targets = declared_on(module)
        if targets:
            found.append(Declaration(type(unwrapped(module)).__name__, path, targets))
    return found[::-1]


def matching(paths: Sequence[str], globs: Sequence[str]) -> list[str]:
    """Return the paths that a glob names, in order, without those below another: a path covers what is below it."""
    named = [path for path in paths if any(_matches(path, glob) for glob in globs)]
    return [path for path in named if not any(path != top and _below(path, top) for top in named)]


def check_every_glob_matches(model: nn.Module, blocks: Sequence[Placed]) -> None:
    """Raise if a declared glob names no module of any block that it is for."""
    unmatched: dict[tuple[str, str, str], Declaration] = {}
    matched: set[tuple[str, str, str]] = set()
    for block in blocks:
        paths = paths_in(model.get_submodule(block.path))
        for declaration in declarations(model, block.path):
            for target, globs in declaration.targets.items():
                for glob in globs:
                    # A block's own attribute is mostly that of its class: one of the blocks that match is enough.
                    place = declaration.owner if declaration.path == block.path else declaration.path
                    key = (place, target, glob)
                    if any(_matches(path, glob) for path in paths):
                        matched.add(key)
                    unmatched.setdefault(key, declaration)
    for (place, target, glob), declaration in unmatched.items():
        if (place, target, glob) not in matched:
            inside = [b for b in blocks if not declaration.path or _below(b.path, declaration.path)] or list(blocks)
            raise StructureError(_nothing_matched(model, inside[0], declaration, target, glob))


def paths_in(block: nn.Module) -> list[str]:
    """List the paths of the modules inside a block, without what wrappers add to them. The block is the empty one."""
    return list(dict.fromkeys(plain_path(block, path) for path, _ in named_modules(block)))


def _checked(value: object, owner: str) -> Targets:
    found = f"{owner}.{_ATTRIBUTE}"
    if not isinstance(value, Mapping):
        raise StructureError(
            f"{found} = {value!r} is no dict. Expected target -> tuple of globs over module paths inside a block: "
            f"{_EXAMPLE}"
        )
    for target, globs in cast("Mapping[object, object]", value).items():
        try:
            check_target(str(target))
        except ModeError as error:
            raise StructureError(f"{found}: {error} Write, for example: {_EXAMPLE}") from None
        every = cast("Sequence[object]", globs)
        if not isinstance(globs, tuple | list) or not all(isinstance(glob, str) and glob for glob in every):
            line = f'{_ATTRIBUTE} = {{"{target}": ({globs!r},)}}' if isinstance(globs, str) and globs else _EXAMPLE
            raise StructureError(
                f"{found}[{target!r}] = {globs!r} is no tuple of globs over module paths inside a block. Write: {line}"
            )
    return cast("Targets", value)


def _nothing_matched(model: nn.Module, block: Placed, declaration: Declaration, target: str, glob: str) -> str:
    paths = [path for path in paths_in(model.get_submodule(block.path)) if path]
    listed = f"{', '.join(paths[:_MAX_LISTED])}{', ...' if len(paths) > _MAX_LISTED else ''}"
    near = difflib.get_close_matches(glob, paths, n=1)
    example = near[0] if near else next(iter(paths), ".")
    return (
        f"{declaration.owner}.{_ATTRIBUTE}[{target!r}] names {glob!r}, which matches no module in any block that it is "
        f"for.{did_you_mean(glob, paths)} Module paths inside {block.path or 'the block'}: {listed or 'none'}. "
        f'Take it out, or name one of these: {_ATTRIBUTE} = {{"{target}": ("{example}",)}}'
    )


def _outwards(path: str) -> Iterator[str]:
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _matches(path: str, glob: str) -> bool:
    return fnmatchcase(path, glob) if path else glob == "."


def _below(path: str, top: str) -> bool:
    return not top or path == top or path.startswith(f"{top}.")
