"""Tell two models, or two blocks, apart by names, classes, shapes and dtypes.

Wrappers (torch.compile, DDP, FSDP, ...) add a prefix to every name. A wrapped model is still the same model, so
wrappers are looked through: a plan that was made for a plain model fits the same model compiled.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["find_head"]

# A child with this name is the module that its parent wraps, whatever the class of the parent.
_WRAPPED_CHILDREN = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# Users name modules `module` too, so here the class of the parent decides.
_WRAPPER_CLASSES = frozenset(
    {"DataParallel", "DistributedDataParallel", "DeepSpeedEngine", "FullyShardedDataParallel", "AveragedModel"}
)


Named = tuple[str, nn.Module]


class Placed(Protocol):
    """Anything with a module path, such as a block."""

    @property
    def path(self) -> str:
        """The module path."""
        ...


def named_modules(module: nn.Module, *, repeats: bool = False) -> list[Named]:
    """Return a module and all below it with their paths, each once, or at every path with `repeats`.

    As `module.named_modules()` does, which passes each module on through a generator for each level above it.
    """
    found: list[Named] = []
    seen: set[int] = set()
    waiting: list[Named] = [("", module)]
    while waiting:
        path, current = waiting.pop()
        if type(current).named_modules is not nn.Module.named_modules:
            # torch leaves this method untyped.
            return list(module.named_modules(remove_duplicate=not repeats))  # pyright: ignore[reportUnknownArgumentType]
        if id(current) in seen:
            continue
        if not repeats:
            seen.add(id(current))
        found.append((path, current))
        children: dict[str, nn.Module | None] = vars(current)["_modules"]
        if children:
            prefix = path and f"{path}."
            waiting += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
    return found


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return `module.named_parameters()` as a list, as `named_modules` finds the modules."""
    if type(module).named_parameters is not nn.Module.named_parameters:
        return list(module.named_parameters())
    return _named(module, "_parameters")


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return `module.parameters()` as a list, as `named_modules` finds the modules."""
    kind = type(module)
    if kind.parameters is not nn.Module.parameters or kind.named_parameters is not nn.Module.named_parameters:
        return list(module.parameters())
    return _stored(named_modules(module), "_parameters")


def buffers_of(module: nn.Module) -> list[Tensor]:
    """Return `module.buffers()` as a list, as `named_modules` finds the modules."""
    kind = type(module)
    if kind.buffers is not nn.Module.buffers or kind.named_buffers is not nn.Module.named_buffers:
        return list(module.buffers())
    return _stored(named_modules(module), "_buffers")


def _stored(modules: list[Named], store: str) -> list[Any]:
    """Return what all modules have in a store of theirs, each once."""
    found = {id(tensor): tensor for _, part in modules for tensor in vars(part)[store].values()}
    found.pop(id(None), None)
    return list(found.values())


def _named(module: nn.Module, store: str) -> list[tuple[str, Any]]:
    """Return what all modules have in a store of theirs, each once, under its first name."""
    found: dict[int, tuple[str, Any]] = {}
    for path, part in named_modules(module):
        tensors: dict[str, Any] = vars(part)[store]
        if tensors:
            prefix = path and f"{path}."
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in found:
                    found[id(tensor)] = prefix + name, tensor
    return list(found.values())


def plain_path(model: nn.Module, path: str) -> str:
    """Strip the prefixes that wrappers add from the path of a module or parameter.

    >>> import torch
    >>> model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    >>> plain_path(model, "module.0.weight")
    '0.weight'
    """
    segments = path.split(".") if path else []
    if "module" not in segments and _WRAPPED_CHILDREN.isdisjoint(segments):
        return path  # nearly always, and a large model has thousands of paths
    kept: list[str] = []
    owner: object = model
    for segment in segments:
        if not _is_wrapped_child(owner, segment):
            kept.append(segment)
        owner = getattr(owner, segment, None)
    return ".".join(kept)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers around a module: the module itself if there are none."""
    if not is_wrapper_of(module):
        return module
    for name, child in module.named_children():
        if _is_wrapped_child(module, name):
            return unwrapped(child)
    return module


def is_wrapper_of(module: nn.Module) -> bool:
    """Return whether a module only wraps another one.

    >>> is_wrapper_of(nn.DataParallel(nn.Linear(2, 2))), is_wrapper_of(nn.Linear(2, 2))
    (True, False)
    """
    children = vars(module)["_modules"]
    return not _WRAPPED_CHILDREN.isdisjoint(children) or ("module" in children and _is_wrapped_child(module, "module"))


def kind_of(module: nn.Module) -> str:
    """Return a name for the structure of a block, equal for two blocks with equal submodules and parameter shapes.

    >>> kind_of(nn.Linear(2, 2)) == kind_of(nn.Linear(2, 2)) != kind_of(nn.Linear(2, 3))
    True
    """
    inner = unwrapped(module)
    lines = [f"{plain_path(inner, path)} {type(unwrapped(child)).__qualname__}" for path, child in named_modules(inner)]
    lines += _parameter_lines(inner)
    return f"{type(inner).__name__}#{_digest(lines, length=6)}"


def fingerprint(model: nn.Module, blocks: Iterable[Placed]) -> str:
    """Return a short digest that is equal for two models only if a plan for one fits the other.

    It covers the names, shapes and dtypes of the parameters and the paths of the blocks, not the values of the weights.

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
    return [f"{plain_path(model, name)} {_shape(tensor)} {tensor.dtype}" for name, tensor in named_parameters(model)]


def _shape(tensor: Tensor) -> str:
    # A lazy parameter gets its shape in the first forward pass, and raises before that.
    return "lazy" if is_lazy(tensor) else str(tuple(tensor.shape))


def _digest(lines: Iterable[str], *, length: int) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:length]


_HEADS = (
    *("output.linear", "output", "lm_head", "decoder.output", "decoder.lm_head", "embed_out", "score", "classifier"),
    *("head", "final_layer_norm", "ln_f"),
)
"""Paths relative to the model, in order of preference."""

_INSIDE = ("base_model", "model")
"""Where wrappers that add parameters of their own, such as PEFT's, keep the model."""


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the output head of a model, looking through wrappers; None if none is found.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.lm_head = nn.Linear(2, 2), nn.Linear(2, 4)
    >>> find_head(Model())
    Linear(in_features=2, out_features=4, bias=True)
    """
    seen: set[int] = set()
    inner: nn.Module | None = unwrapped(model)
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        for path in _HEADS:
            found = _at(inner, path)
            if found is not None:
                return found
        children = dict(inner.named_children())
        inner = next((unwrapped(children[name]) for name in _INSIDE if name in children), None)
    return None


def _at(model: nn.Module, path: str) -> nn.Module | None:
    # Not get_submodule: an output that is tied to the embedding may be a plain object that holds the module.
    found: object = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None
