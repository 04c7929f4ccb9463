"""Tell two models, or two blocks, apart by names, classes, shapes and dtypes.

Wrappers (torch.compile, DDP, FSDP, ...) put a prefix before every name. They do not make another model, so they are
looked through: a plan that was made for a plain model fits the same model compiled.
"""

import hashlib
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# A child of this name is what its parent wraps, whatever the class of the parent.
_WRAPPED_CHILDREN = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# `module` is a name that users choose too, so here the class of the parent decides.
_WRAPPER_CLASSES = frozenset(
    {"DataParallel", "DistributedDataParallel", "DeepSpeedEngine", "FullyShardedDataParallel", "AveragedModel"}
)


Named = tuple[str, nn.Module]


class Placed(Protocol):
    """Be anything with a module path, such as a block."""

    @property
    def path(self) -> str:
        """The module path."""
        ...


def named_modules(module: nn.Module, *, repeats: bool = False) -> list[Named]:
    """Return a module and all below it with their paths; one that appears twice once, or each time with `repeats`."""
    # torch leaves this method without types.
    return list(module.named_modules(remove_duplicate=not repeats))  # pyright: ignore[reportUnknownArgumentType]


def plain_path(model: nn.Module, path: str) -> str:
    """Strip the prefixes that wrappers add from the path of a module or parameter.

    >>> import torch
    >>> model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    >>> plain_path(model, "module.0.weight")
    '0.weight'
    """
    kept: list[str] = []
    owner: object = model
    for segment in path.split(".") if path else []:
        if not _is_wrapped_child(owner, segment):
            kept.append(segment)
        owner = getattr(owner, segment, None)
    return ".".join(kept)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return what is inside the wrappers round a module: the module itself where there are none."""
    for name, child in module.named_children():
        if _is_wrapped_child(module, name):
            return unwrapped(child)
    return module


def is_wrapper_of(module: nn.Module) -> bool:
    """Tell whether a module only wraps another one.

    >>> is_wrapper_of(nn.DataParallel(nn.Linear(2, 2))), is_wrapper_of(nn.Linear(2, 2))
    (True, False)
    """
    children = vars(module)["_modules"]
    return not _WRAPPED_CHILDREN.isdisjoint(children) or ("module" in children and _is_wrapped_child(module, "module"))


def kind_of(module: nn.Module) -> str:
    """Name the structure of a block: equal for two blocks with equal submodules and equal parameters.

    >>> kind_of(nn.Linear(2, 2)) == kind_of(nn.Linear(2, 2)) != kind_of(nn.Linear(2, 3))
    True
    """
    inner = unwrapped(module)
    lines = [f"{plain_path(inner, path)} {type(unwrapped(child)).__qualname__}" for path, child in named_modules(inner)]
    lines += _parameter_lines(inner)
    return f"{type(inner).__name__}#{_digest(lines, length=6)}"


def fingerprint(model: nn.Module, blocks: Iterable[Placed]) -> str:
    """Return a short text that is equal for two models only if a plan of one fits the other.

    It covers names, shapes and dtypes of the parameters and the paths of the blocks, not the values of the weights.

    Args:
        model: the model, wrapped or not.
        blocks: its blocks, in order.

    >>> from actmem.structure import find_blocks
    >>> small = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> large = nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)])
    >>> wrapped = nn.DataParallel(small)
    >>> fingerprint(small, find_blocks(small)) == fingerprint(wrapped, find_blocks(wrapped))
    True
    >>> fingerprint(small, find_blocks(small)) == fingerprint(large, find_blocks(large))
    False
    """
    lines = _parameter_lines(model)
    lines += [f"block {plain_path(model, block.path)}" for block in blocks]
    return _digest(lines, length=16)


def _is_wrapped_child(owner: object, name: str) -> bool:
    return name in _WRAPPED_CHILDREN or (name == "module" and type(owner).__name__ in _WRAPPER_CLASSES)


def _parameter_lines(model: nn.Module) -> list[str]:
    return [f"{plain_path(model, name)} {_shape(tensor)} {tensor.dtype}" for name, tensor in model.named_parameters()]


def _shape(tensor: Tensor) -> str:
    # A lazy parameter gets its shape from the first forward, and raises before that.
    return "lazy" if is_lazy(tensor) else str(tuple(tensor.shape))


def _digest(lines: Iterable[str], *, length: int) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:length]
