"""Find the repeating blocks of a model, or use the user's glob for them.

NOTE [ which stacks are the blocks ]

NOTE [ what a stack is ] says where a model repeats a module. Among those stacks:

1. Stacks belong together if most of their members have the same class (the stages of a ResNet, both halves of T5), or
   if their paths diverge at a pair of names such as `encoder` and `decoder`, `down` and `up`.
2. A group with less than a tenth of the parameters of the largest one is not a candidate.
3. Vision and audio towers are dropped if something else, the language model, remains.
4. If more than one group is left, only the user can decide. The error lists them.

A scope names towers instead. Then rules 1 and 2 apply inside each tower, and rule 4 inside the language model. In a
vision or audio tower all groups are blocks; if one of them has attention, those without it (stems, mergers) are not.

NOTE [ which tower a stack belongs to ]

Names are read from the blocks outwards, and the first one that gives a hint decides: the class of the blocks, then, for
each enclosing module, its attribute name and its `input_modalities` (transformers), unless these are mixed. A connector
(Q-Former, projector) belongs to the tower that it connects. Without any hint, a stack belongs to the language model.

NOTE [ what a stack is ]

A stack is a ModuleList, ModuleDict or Sequential, or a row of numbered attributes (`layer1`, `layer2`), whose children
are mostly of one class.

- A child counts if it has parameters and does more than one operation: a lone Linear, a norm or an LSTM is a leaf.
  A list of leaves of one class is a stack too, but every other stack takes precedence.
- The outermost stack wins: members are not searched. So experts inside a block, or the Sequential of its MLP, are not
  stacks of their own.
- Containers inside a container are looked through (`stages.0.1`), because a ModuleList is never called, and because
  a Sequential of blocks is a stage, not a block. A Sequential of leaves (conv, norm, relu) is a member.
- A module whose class is named a stage (SwinStage, ResNetStage) is looked through too, if it holds a stack.
- A ModuleList or ModuleDict contributes all children that count, of whatever class; a Sequential only those whose class
  appears at least twice, because it often holds the stem and the head too.
- A module that appears twice in the model is one member, at its first path.
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

from torch import nn
from torch.nn.parameter import is_lazy

from actmem.errors import ModeError, StructureError
from actmem.ops import did_you_mean
from actmem.structure.identity import Named, kind_of, named_modules, parameters_of, plain_path, unwrapped
from actmem.structure.targets import roles

_NUMBERED = re.compile(r"^(.*?)\d+$")
# Classes that hold blocks but are not blocks, by name.
_STAGE_NAMES = re.compile(r"stage$", re.IGNORECASE)
# Classes outside torch.nn that are a single operation, by name.
_LEAF_NAMES = re.compile(r"norm|linear|conv\dd|embedding", re.IGNORECASE)


@dataclass(frozen=True)
class Stack:
    """One place where a model repeats a module."""

    path: str
    """The path of the module that holds the members."""
    members: tuple[Named, ...] = field(repr=False)
    """Paths and modules, in order."""
    label: str
    """The class that most members have."""
    num_parameters: int
    """Number of parameters of all members together."""
    is_leaf: bool
    """Whether the members are single operations."""


def find_stacks(model: nn.Module) -> list[Stack]:
    """Return the outermost stacks of a model, in the order in which the model registered them."""
    found = list(_walk(model, "", set(), set()))
    # A layer that an attribute also refers to is met there first, and so is a stack inside it.
    inside = {id(part) for stack in found for _, member in stack.members for _, part in named_modules(member)[1:]}
    outermost = [stack for stack in found if not any(id(member) in inside for _, member in stack.members)]
    if len(outermost) < 2:
        return outermost
    order = {path: position for position, (path, _) in enumerate(named_modules(model, repeats=True))}
    return sorted(outermost, key=lambda stack: order[stack.members[0][0]])


def num_parameters(module: nn.Module) -> int:
    """Count the parameters of a module; a parameter without a shape yet counts as one."""
    return sum(1 if is_lazy(parameter) else parameter.numel() for parameter in parameters_of(module))


def is_never_called(module: nn.Module) -> bool:
    """Return whether a module is a mere container, without a forward of its own."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and _forward(type(module)) is _forward(nn.Module)


def label_of(module: nn.Module) -> str:
    """Return the class name of a module; for a plain Sequential, with the class names of its children."""
    inner = unwrapped(module)
    if not _is_plain_sequential(inner):
        return type(inner).__name__
    return f"Sequential({', '.join(type(child).__name__ for child in inner.children())})"


def join(path: str, name: str) -> str:
    """Return the path of a child."""
    return f"{path}.{name}" if path else name


def _walk(module: nn.Module, path: str, visited: set[int], taken: set[int]) -> Iterator[Stack]:
    if id(module) in visited or id(module) in taken:
        return
    visited.add(id(module))
    for row in _rows(module):
        stack = _stack_of(module, path, row, taken)
        if stack is not None:
            yield stack
            taken.update(id(part) for _, member in stack.members for _, part in named_modules(member))
    for name, child in module.named_children():
        yield from _walk(child, join(path, name), visited, taken)


def _rows(module: nn.Module) -> list[list[Named]]:
    """Return the rows of numbered children: one for a container, one per name for any other module."""
    rows: dict[str, list[Named]] = {}
    for name, child in module.named_children():
        match = _NUMBERED.match(name)
        if match:
            rows.setdefault("" if _is_container(module) else match[1], []).append((name, child))
    return list(rows.values())


def _stack_of(owner: nn.Module, path: str, row: list[Named], taken: set[int]) -> Stack | None:
    named = [(join(path, name), child) for name, child in row if id(child) not in taken]
    members = [(p, child) for p, child in _looked_through(named) if _is_block_like(child) and id(child) not in taken]
    members = list({id(child): (p, child) for p, child in reversed(members)}.values())[::-1]
    is_leaf = not members
    if is_leaf:
        members = _leaves(owner, named)
    counts = Counter(label_of(child) for _, child in members)
    if not is_never_called(owner):
        members = [(p, child) for p, child in members if counts[label_of(child)] > 1]
        counts = Counter(label_of(child) for _, child in members)
    if not counts:
        return None
    label, num_label = counts.most_common(1)[0]
    repeats = num_label > 1 or len(members) == 1
    mostly_one_class = 2 * num_label >= len(members) or 2 * len(counts) <= len(members)
    if not (repeats and mostly_one_class):
        return None
    return Stack(path, tuple(members), label, sum(num_parameters(child) for _, child in members), is_leaf)


def _looked_through(named: list[Named]) -> Iterator[Named]:
    """Replace containers of blocks by the blocks in them."""
    for path, child in named:
        inner = [(join(path, name), grandchild) for name, grandchild in child.named_children()]
        parts = [grandchild for _, grandchild in inner if _has_parameters(grandchild)]
        stage = _is_plain_sequential(child) and bool(parts) and all(_is_block_like(part) for part in parts)
        if is_never_called(child) or stage:
            yield from _looked_through(inner)
        else:
            yield from _in_stage(path, child) or [(path, child)]


def _in_stage(path: str, module: nn.Module) -> list[Named]:
    if not _STAGE_NAMES.search(type(unwrapped(module)).__name__):
        return []
    return [member for stack in _walk(module, path, set(), set()) if not stack.is_leaf for member in stack.members]


def _leaves(owner: nn.Module, named: list[Named]) -> list[Named]:
    same_class = len({type(child) for _, child in named}) == 1
    if not _is_container(owner) or not same_class or len(named) < 2:
        return []
    return [(path, child) for path, child in named if _has_parameters(child)]


def _is_container(module: nn.Module) -> bool:
    return is_never_called(module) or _is_plain_sequential(module)


def _is_plain_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and _forward(type(module)) is _forward(nn.Sequential)


def _forward(cls: type[nn.Module]) -> object:
    return cls.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_block_like(module: nn.Module) -> bool:
    if is_never_called(module) or not _has_parameters(module):
        return False
    inner = unwrapped(module)
    if next(inner.children(), None) is not None:
        return True
    return not (type(inner).__module__.startswith("torch.nn.") or _LEAF_NAMES.search(type(inner).__name__))


Tower = Literal["language", "vision", "audio"]
TOWERS: tuple[Tower, ...] = ("language", "vision", "audio")
"""The towers that a scope can name."""

# Substrings of attribute names and class names.
_WORDS = {
    "language": re.compile(r"language|(^|_)(text|lm|llm)(_|$)"),
    "vision": re.compile(r"vision|visual|image|video"),
    "audio": re.compile(r"audio|speech|sound|acoustic|conformer"),
    "connector": re.compile(r"qformer|perceiver|resampler|projector|connector"),
}
# The modalities of transformers, by tower.
_MODALITIES: dict[str, Tower] = {"text": "language", "image": "vision", "video": "vision", "audio": "audio"}


def towers_of(model: nn.Module, stacks: Sequence[Stack]) -> list[Tower]:
    """Return the tower of each stack."""
    said = [next(_said_of(model, stack), "language") for stack in stacks]
    connected: Tower = "audio" if "audio" in said and "vision" not in said else "vision"
    return [connected if word == "connector" else cast(Tower, word) for word in said]


def checked_scope(scope: object) -> tuple[Tower, ...]:
    """Return a scope, or raise if it is not a list of towers."""
    permitted = f"Permitted: a list of {', '.join(TOWERS)}"
    if not isinstance(scope, list | tuple):
        instead = scope if scope in TOWERS else "language"
        raise StructureError(f'scope = {scope!r} is not a list. {permitted}, as in scope=["{instead}"].')
    names = cast("Sequence[object]", scope)
    for name in names:
        if name not in TOWERS:
            hint = did_you_mean(name, TOWERS) if isinstance(name, str) else ""
            raise StructureError(f'scope names {name!r}. {permitted}, as in scope=["language", "vision"].{hint}')
    if not names:
        raise StructureError(f'scope = {scope!r} names no tower. {permitted}, as in scope=["language"].')
    return cast("tuple[Tower, ...]", tuple(names))


def _said_of(model: nn.Module, stack: Stack) -> Iterator[str]:
    """Return the hints in the names, from the blocks outwards."""
    yield from _in_words(stack.label)
    names = stack.path.split(".") if stack.path else []
    for depth in range(len(names), -1, -1):
        if depth:
            yield from _in_words(names[depth - 1])
        modalities: object = getattr(model.get_submodule(".".join(names[:depth])), "input_modalities", None)
        # A bare "text" is the default of a model that does not declare its modalities.
        listed = [modalities] if isinstance(modalities, str) and modalities != "text" else modalities
        if isinstance(listed, list | tuple):
            read = {_MODALITIES.get(str(modality)) for modality in cast("Sequence[object]", listed)}
            yield from (tower for tower in read if tower and len(read) == 1)


def _in_words(name: str) -> list[str]:
    return [tower for tower, pattern in _WORDS.items() if pattern.search(name.lower())]


# Two stacks whose paths diverge at such a pair of names are halves of one model.
_PAIRS = (("enc", "dec"), ("down", "up"), ("single", "double"), ("single_transformer", "transformer"))
# Towers that feed another model, recognised by part of a name in their paths.
_SIDE_TOWER = re.compile(
    r"vision|visual|image|video|audio|speech|qformer|perceiver|resampler|backbone|feature_extractor"
)
_MINOR_FRACTION = 0.1
_WHOLE_MODEL = "."
_MAX_LISTED = 8


@dataclass(frozen=True)
class Block:
    """One repeating unit of a model, such as a decoder layer."""

    index: int
    """Index among the blocks, from 0."""
    path: str
    """Module path; empty if the whole model is the block."""
    module: nn.Module = field(repr=False)
    """The module itself."""
    kind: str
    """Class name and a hash of the structure; equal for blocks of the same structure."""


def check_module(model: Any) -> None:
    """Raise if the model is not a module."""
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
            name by name, so that `model.layers.*` means the layers and not the modules inside them. Several globs are
            written as a list, or separated by commas. Prefixes added by wrappers may be omitted. `.` makes the whole
            model one block.
        scope: the towers of a multimodal model whose blocks to find: a list of "language", "vision" and "audio".
            Default: the language model, if there is one.

    Raises:
        StructureError: nothing was found, several unrelated stacks were found, or the pattern or scope does not match.
            The message lists the candidates.

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
            f"{type(model).__name__} has no parameters, so there are no activations to decide on. "
            "Pass the module that holds the layers to train."
        )
    stacks = find_stacks(model)
    if globs is not None and scope is not None:
        pattern = ",".join(globs)
        raise StructureError(
            f'blocks="{pattern}" and scope={scope!r} cannot be combined: each selects the blocks on its own. '
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
            f"{type(model).__name__} has {len(groups)} unrelated stacks of blocks, and actmem cannot tell which of "
            f"them to use. Choose one:\n{_lines(_described(model, groups))}\n"
            f'or use them all: blocks="{every}"'
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
                f"scope names {tower!r}, but {type(model).__name__} has no {tower} blocks. Its towers: "
                f'{", ".join(present)}, as in scope=["{present[0]}"]; or give the paths of the blocks, for example:\n'
                f"{_lines(_described(model, _groups(candidates)))}"
            )
    modules = [module for _, module in _chosen(model, by_tower["language"])] if "language" in wanted else []
    for tower in set(wanted) - {"language"}:
        modules += [m for group in _mixing(_major(_groups(by_tower[tower]))) for s in group for _, m in s.members]
    return _in_order(model, modules)


def _mixing(groups: list[list[Stack]]) -> list[list[Stack]]:
    """Drop the groups that do not mix tokens, if others do."""
    mixers = {"attention", "linear_attn"}
    found = [group for group in groups if mixers & {r for s in group for _, m in s.members[:2] for r in roles(m)}]
    return found or groups


def _candidates(model: nn.Module, stacks: Sequence[Stack]) -> list[Stack]:
    candidates = [stack for stack in stacks if not stack.is_leaf] or list(stacks)
    if not candidates:
        raise StructureError(
            f"no repeating blocks found in {type(model).__name__}: it has no list of modules of one class. "
            f"Say where the blocks are, for example:\n{_lines(_modules_in(model))}"
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
    """Return modules with their paths; each module once, at its first path."""
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
    nearest = f" The closest module paths are {', '.join(near)}." if near else ""
    candidates = _described(model, _groups(stacks)) or _modules_in(model)
    return f'blocks="{glob}" matches no module of {type(model).__name__}.{nearest} Candidates:\n{_lines(candidates)}'


def _check_called(model: nn.Module, chosen: dict[str, nn.Module]) -> None:
    for path, module in chosen.items():
        if is_never_called(module):
            name = path or type(model).__name__
            raise StructureError(
                f"{name} is a {type(module).__name__}, which is never called itself, so it cannot be a block. "
                f'Use the modules in it: blocks="{join(path, "*")}"'
            )


def _check_nesting(chosen: dict[str, nn.Module]) -> None:
    for path in chosen:
        for other in chosen:
            if path != other and (not path or other.startswith(f"{path}.")):
                raise StructureError(
                    f"block {other} is inside block {path or 'the whole model'}, but an activation can belong to only "
                    f'one block. Leave one of them out, for example: blocks="{path or _WHOLE_MODEL}"'
                )


def _described(model: nn.Module, groups: Iterable[Iterable[Stack]]) -> list[tuple[str, str]]:
    described: list[tuple[str, str]] = []
    for group in map(list, groups):
        num_members = sum(len(stack.members) for stack in group)
        labels = " + ".join(dict.fromkeys(stack.label for stack in group))
        described.append((_glob(model, group), f"{num_members} x {labels}, {_size(group):,} parameters"))
    return described


def _glob(model: nn.Module, group: Iterable[Stack]) -> str:
    """Return the shortest pattern that matches the members of some stacks and nothing else."""
    paths = [path for stack in group for path, _ in stack.members]
    parents = dict.fromkeys(path.rpartition(".")[0] for path in paths)
    globs: list[str] = []
    for parent in parents:
        inside = [path for path in paths if path.rpartition(".")[0] == parent]
        everything = [join(parent, name) for name, _ in model.get_submodule(parent).named_children()]
        globs += [join(parent, "*")] if inside == everything else inside
    return ",".join(globs)


def _modules_in(model: nn.Module) -> list[tuple[str, str]]:
    """Describe the modules that a user could choose when nothing repeats."""
    listed = [
        (path, f"{label_of(module)}, {num_parameters(module):,} parameters")
        for path, module in named_modules(model)
        if path and not is_never_called(module) and next(module.parameters(), None) is not None
    ]
    shallow = sorted(listed, key=lambda item: item[0].count("."))[: _MAX_LISTED - 1]
    return [*shallow, (_WHOLE_MODEL, f"the whole {type(model).__name__} as one block")]


def _lines(candidates: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f'  blocks="{glob}"  # {what}' for glob, what in candidates[:_MAX_LISTED])
