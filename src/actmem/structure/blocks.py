"""Find the repeating blocks of a model, or take the user's glob for them.

NOTE [ which stacks are the blocks ]

`stacks.py` lists where a model repeats a module. Among those stacks:

1. Stacks belong together if most of their members have one class (the stages of a ResNet, both halves of T5), or if
   their paths part at a pair of names such as `encoder` and `decoder`, `down` and `up`.
2. A group with less than a tenth of the parameters of the largest one is no candidate.
3. A vision or audio tower steps back where something else, the language model, remains.
4. If more than one group is left, only the user can know. The error lists them.

A scope names towers instead. Then rules 1 and 2 hold inside each tower, and rule 4 inside the language model. Of a
vision or audio tower all groups are taken; where one of them has attention, those without (stems, mergers) are not.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from actmem.errors import ModeError, StructureError
from actmem.structure.identity import Named, kind_of, named_modules, plain_path
from actmem.structure.stacks import Stack, find_stacks, is_never_called, join, label_of, num_parameters
from actmem.structure.targets import roles
from actmem.structure.towers import TOWERS, checked_scope, towers_of

# Two stacks whose paths part at such a pair of names are halves of one model.
_PAIRS = (("enc", "dec"), ("down", "up"), ("single", "double"), ("single_transformer", "transformer"))
# Towers that feed another model, by a part of a name in their paths.
_SIDE_TOWER = re.compile(
    r"vision|visual|image|video|audio|speech|qformer|perceiver|resampler|backbone|feature_extractor"
)
_MINOR_FRACTION = 0.1
_WHOLE_MODEL = "."
_MAX_LISTED = 8


@dataclass(frozen=True)
class Block:
    """Be one repeating unit of a model, such as a decoder layer."""

    index: int
    """Its place among the blocks, from 0."""
    path: str
    """Its module path; empty where the whole model is the block."""
    module: nn.Module = field(repr=False)
    """The module itself."""
    kind: str
    """Its class and a hash of its structure: equal for blocks that are built alike."""


def check_module(model: Any) -> None:
    """Raise if something other than a module is given as the model."""
    if not isinstance(model, nn.Module):
        raise ModeError(
            f"the model is of type {type(model).__name__}. Expected an nn.Module, the one to train, as the first "
            "argument: actmem.apply(model, actmem.Full())."
        )


def find_blocks(
    model: nn.Module, pattern: str | Sequence[str] | None = None, scope: Sequence[str] | None = None
) -> tuple[Block, ...]:
    """Find the repeating blocks of an unmodified model, in the order in which the model registered them.

    Args:
        model: any module, wrapped or not.
        pattern: where the blocks are, for models in which they cannot be found: a glob over module paths, matched
            name by name, so that `model.layers.*` means the layers and not what is in them. Several globs are
            a list, or separated by commas. Prefixes of wrappers may be left out. `.` makes the whole model one block.
        scope: whose blocks to find in a multimodal model: a list out of "language", "vision" and "audio". None means
            the language model where there is one.

    Raises:
        StructureError: nothing was found, several unrelated stacks were, or the pattern or scope does not fit. The
            message lists the candidates.

    >>> model = nn.Sequential(nn.Embedding(9, 4), *[nn.TransformerEncoderLayer(4, 2, 8) for _ in range(3)])
    >>> [block.path for block in find_blocks(model)]
    ['1', '2', '3']
    >>> [block.path for block in find_blocks(model, "*.self_attn")]
    ['1.self_attn', '2.self_attn', '3.self_attn']
    >>> [block.path for block in find_blocks(model, ["1", "3.self_attn"])]
    ['1', '3.self_attn']
    """
    check_module(model)
    globs = None if pattern is None else _globs(pattern)
    if pattern is None and next(model.parameters(), None) is None:
        raise StructureError(
            f"{type(model).__name__} has no parameters, so there is no activation to decide on. "
            "Give the module that holds the layers to train."
        )
    stacks = find_stacks(model)
    if globs is not None and scope is not None:
        pattern = ",".join(globs)
        raise StructureError(
            f'blocks="{pattern}" and scope={scope!r} are both given, but each says on its own which blocks are meant. '
            f'Leave one of them out, for example: blocks="{pattern}"'
        )
    if globs is not None:
        found = _matching(model, globs, stacks)
    else:
        found = _chosen(model, stacks) if scope is None else _in_scope(model, stacks, scope)
    return tuple(
        Block(index=index, path=path, module=module, kind=kind_of(module)) for index, (path, module) in enumerate(found)
    )


def _chosen(model: nn.Module, stacks: Sequence[Stack]) -> list[Named]:
    candidates = _candidates(model, stacks)
    groups = _major(_groups(candidates))
    groups = [group for group in groups if not _is_side_tower(group)] or groups
    if len(groups) > 1:
        every = ",".join(_glob(model, group) for group in groups)
        raise StructureError(
            f"{type(model).__name__} has {len(groups)} stacks of blocks that do not belong together, and actmem cannot "
            f"tell which of them to treat. Choose one:\n{_lines(_described(model, groups))}\n"
            f'or take them all: blocks="{every}"'
        )
    return _in_order(model, (module for stack in groups[0] for _, module in stack.members))


def _in_scope(model: nn.Module, stacks: Sequence[Stack], scope: Sequence[str]) -> list[Named]:
    wanted = checked_scope(scope)
    candidates = _candidates(model, stacks)
    by_tower: dict[str, list[Stack]] = {}
    for stack, tower in zip(candidates, towers_of(model, candidates), strict=True):
        by_tower.setdefault(tower, []).append(stack)
    present = [tower for tower in TOWERS if tower in by_tower]
    for tower in wanted:
        if tower not in by_tower:
            raise StructureError(
                f"scope names {tower!r}, but {type(model).__name__} has no {tower} blocks. Towers that it has: "
                f'{", ".join(present)}, as in scope=["{present[0]}"], or give their paths, for example:\n'
                f"{_lines(_described(model, _groups(candidates)))}"
            )
    modules = [module for _, module in _chosen(model, by_tower["language"])] if "language" in wanted else []
    for tower in set(wanted) - {"language"}:
        modules += [m for group in _mixing(_major(_groups(by_tower[tower]))) for s in group for _, m in s.members]
    return _in_order(model, modules)


def _mixing(groups: list[list[Stack]]) -> list[list[Stack]]:
    """Leave out the groups that mix no tokens, where others do."""
    mixers = {"attention", "linear_attn"}
    found = [group for group in groups if mixers & {r for s in group for _, m in s.members[:2] for r in roles(m)}]
    return found or groups


def _candidates(model: nn.Module, stacks: Sequence[Stack]) -> list[Stack]:
    candidates = [stack for stack in stacks if not stack.is_leaf] or list(stacks)
    if not candidates:
        raise StructureError(
            f"no repeating blocks found in {type(model).__name__}: it has no list of modules of one class. "
            f"Say where they are, for example:\n{_lines(_modules_in(model))}"
        )
    return candidates


def _major(groups: list[list[Stack]]) -> list[list[Stack]]:
    largest = max(_size(group) for group in groups)
    return [group for group in groups if _size(group) >= _MINOR_FRACTION * largest]


def _groups(stacks: Iterable[Stack]) -> list[list[Stack]]:
    groups: list[list[Stack]] = []
    for stack in stacks:
        related = [group for group in groups if any(_belong_together(stack, other) for other in group)]
        groups = [group for group in groups if group not in related]
        groups.append([other for group in related for other in group] + [stack])
    return groups


def _belong_together(left: Stack, right: Stack) -> bool:
    if left.label == right.label:
        return True
    for one, other in zip(left.path.split("."), right.path.split("."), strict=False):
        if one != other:
            return any(one.replace(a, b) == other or other.replace(a, b) == one for a, b in _PAIRS)
    return False


def _size(group: Iterable[Stack]) -> int:
    return sum(stack.num_parameters for stack in group)


def _is_side_tower(group: Iterable[Stack]) -> bool:
    return all(_SIDE_TOWER.search(stack.path) for stack in group)


def _globs(pattern: Any) -> list[str]:
    globs: list[Any] = list(pattern) if isinstance(pattern, (list, tuple)) else [pattern]  # pyright: ignore[reportUnknownArgumentType]
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise StructureError(
            f"blocks = {pattern!r} names no modules. Expected a glob over module paths, or a list of them: "
            'blocks="model.layers.*" or blocks=["encoder.layers.*", "decoder.layers.*"].'
        )
    return [part.strip() for glob in globs for part in glob.split(",")]


def _matching(model: nn.Module, globs: Sequence[str], stacks: Sequence[Stack]) -> list[Named]:
    first_paths = {id(module): path for path, module in named_modules(model)}
    chosen: dict[str, nn.Module] = {}
    for glob in globs:
        matched = [
            (first_paths[id(module)], module)
            for path, module in named_modules(model, repeats=True)
            if _matches(path, glob) or _matches(plain_path(model, path), glob)
        ]
        if not matched:
            raise StructureError(_nothing_matched(model, glob, stacks))
        chosen.update(matched)
    _check_called(model, chosen)
    _check_nesting(chosen)
    return _in_order(model, chosen.values())


def _in_order(model: nn.Module, modules: Iterable[nn.Module]) -> list[Named]:
    """Return modules with their paths, each once, at the first path it has."""
    wanted = {id(module) for module in modules}
    return [(path, module) for path, module in named_modules(model) if id(module) in wanted]


def _matches(path: str, glob: str) -> bool:
    if not path:
        return glob == _WHOLE_MODEL
    segments, globs = path.split("."), glob.split(".")
    return len(segments) == len(globs) and all(map(fnmatchcase, segments, globs))


def _nothing_matched(model: nn.Module, glob: str, stacks: Sequence[Stack]) -> str:
    paths = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path, _ in named_modules(model) if path))
    near = difflib.get_close_matches(glob, paths, n=3, cutoff=0.5)
    nearest = f" The nearest module paths are {', '.join(near)}." if near else ""
    candidates = _described(model, _groups(stacks)) or _modules_in(model)
    return f'blocks="{glob}" matches no module of {type(model).__name__}.{nearest} Candidates:\n{_lines(candidates)}'


def _check_called(model: nn.Module, chosen: dict[str, nn.Module]) -> None:
    for path, module in chosen.items():
        if is_never_called(module):
            name = path or type(model).__name__
            raise StructureError(
                f"{name} is a {type(module).__name__}, which is never called itself, so it cannot be a block. "
                f'Take what is in it: blocks="{join(path, "*")}"'
            )


def _check_nesting(chosen: dict[str, nn.Module]) -> None:
    for path in chosen:
        for other in chosen:
            if path != other and (not path or other.startswith(f"{path}.")):
                raise StructureError(
                    f"block {other} lies inside block {path or 'the whole model'}, but an activation can belong to one "
                    f'block only. Leave one of them out, for example: blocks="{path or _WHOLE_MODEL}"'
                )


def _described(model: nn.Module, groups: Iterable[Iterable[Stack]]) -> list[tuple[str, str]]:
    described: list[tuple[str, str]] = []
    for group in map(list, groups):
        num_members = sum(len(stack.members) for stack in group)
        labels = " + ".join(dict.fromkeys(stack.label for stack in group))
        described.append((_glob(model, group), f"{num_members} x {labels}, {_size(group):,} parameters"))
    return described


def _glob(model: nn.Module, group: Iterable[Stack]) -> str:
    """Return a pattern that matches the members of some stacks and nothing else, as short as can be."""
    paths = [path for stack in group for path, _ in stack.members]
    parents = dict.fromkeys(path.rpartition(".")[0] for path in paths)
    globs: list[str] = []
    for parent in parents:
        inside = [path for path in paths if path.rpartition(".")[0] == parent]
        everything = [join(parent, name) for name, _ in model.get_submodule(parent).named_children()]
        globs += [join(parent, "*")] if inside == everything else inside
    return ",".join(globs)


def _modules_in(model: nn.Module) -> list[tuple[str, str]]:
    """Describe the modules that a user could choose where nothing repeats."""
    listed = [
        (path, f"{label_of(module)}, {num_parameters(module):,} parameters")
        for path, module in named_modules(model)
        if path and not is_never_called(module) and next(module.parameters(), None) is not None
    ]
    shallow = sorted(listed, key=lambda item: item[0].count("."))[: _MAX_LISTED - 1]
    return [*shallow, (_WHOLE_MODEL, f"the whole {type(model).__name__} as one block")]


def _lines(candidates: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f'  blocks="{glob}"  # {what}' for glob, what in candidates[:_MAX_LISTED])
