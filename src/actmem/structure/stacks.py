"""List the places where a model repeats a module.

NOTE [ what a stack is ]

A stack is a ModuleList, ModuleDict or Sequential, or a row of numbered attributes (`layer1`, `layer2`), whose children
are mostly of one class.

- A child counts if it has parameters and does more than one operation: a lone Linear, a norm or an LSTM is a leaf.
  A list of leaves of one class is a stack too, but every other stack comes before it.
- The outermost stack wins: nobody looks inside a member. So experts inside a block, or the Sequential of its MLP,
  are no stacks of their own.
- Containers inside a container are looked through (`stages.0.1`), because a ModuleList is never called, and because
  a Sequential of blocks is a stage, not a block. A Sequential of leaves (conv, norm, relu) is a member.
- A module whose class is called a stage (SwinStage, ResNetStage) is looked through too, where it holds a stack.
- A ModuleList or ModuleDict gives all children that count, of whatever class; a Sequential only those whose class
  appears at least twice, because it often holds the stem and the head too.
- A module that appears twice in the model is one member, at its first path.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import is_lazy

from actmem.structure.identity import Named, named_modules, unwrapped

_NUMBERED = re.compile(r"^(.*?)\d+$")
# Classes that hold blocks but are none, by their names.
_STAGE_NAMES = re.compile(r"stage$", re.IGNORECASE)
# Classes outside torch.nn that are one operation, by their names.
_LEAF_NAMES = re.compile(r"norm|linear|conv\dd|embedding", re.IGNORECASE)


@dataclass(frozen=True)
class Stack:
    """Be one place where a model repeats a module."""

    path: str
    """The path of the module that holds the members."""
    members: tuple[Named, ...] = field(repr=False)
    """Paths and modules, in order."""
    label: str
    """The class that most members have."""
    num_parameters: int
    """Parameters of all members together."""
    is_leaf: bool
    """Whether the members are single operations."""


def find_stacks(model: nn.Module) -> list[Stack]:
    """List the outermost stacks of a model, in the order in which the model registered them."""
    order = {path: position for position, (path, _) in enumerate(named_modules(model, repeats=True))}
    found = list(_walk(model, "", set(), set()))
    # A layer that is tied to an attribute of its own is first met there, and so is a stack inside it.
    inside = {id(part) for stack in found for _, member in stack.members for part in list(member.modules())[1:]}
    outermost = [stack for stack in found if not any(id(member) in inside for _, member in stack.members)]
    return sorted(outermost, key=lambda stack: order[stack.members[0][0]])


def num_parameters(module: nn.Module) -> int:
    """Count the parameters of a module; those that have no shape yet count as one each."""
    return sum(1 if is_lazy(parameter) else parameter.numel() for parameter in module.parameters())


def is_never_called(module: nn.Module) -> bool:
    """Tell whether a module is a mere list of others, without a forward of its own."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and _forward(type(module)) is _forward(nn.Module)


def label_of(module: nn.Module) -> str:
    """Return the class name of a module; for a plain Sequential, with those of its children."""
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
            taken.update(id(part) for _, member in stack.members for part in member.modules())
    for name, child in module.named_children():
        yield from _walk(child, join(path, name), visited, taken)


def _rows(module: nn.Module) -> list[list[Named]]:
    """Return the rows of numbered children: of a container one, of another module one for each name."""
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
