"""Leaving a model as it was, after a step that was only run to look at it."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from actmem.torchcompat import named_buffers

__all__ = ["Restored", "generator_states", "inputs_of", "set_generator_states"]

_OWN = frozenset({"_parameters", "_buffers", "_modules"})
"""What holds the tensors and the children of a module, which are restored one by one."""
_LEFT_ALONE = (nn.Module, Optimizer, DataLoader, Dataset)
_FOREIGN = {*sys.stdlib_module_names, "torch", "lightning", "pytorch_lightning", "accelerate", "deepspeed"} - {"types"}
"""Packages whose objects a model may point to without owning them, such as its trainer or a logger."""


def inputs_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch that get a gradient, by name."""
    named: Any = batch.items() if hasattr(batch, "items") else enumerate(batch)
    return {f"input {k}": t for k, t in named if isinstance(t, Tensor) and t.is_leaf and t.requires_grad}


def generator_states(model: nn.Module) -> dict[str, Any]:
    """Return the states of the random generators that a step may draw from, the CPU's first."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "Python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    for device in {t.device for t in (*model.parameters(), *model.buffers())}:
        if device.type not in ("cpu", "meta"):
            states[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Put back what `generator_states` returned."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == "Python":
            random.setstate(state)
        elif name == "numpy":
            sys.modules["numpy"].random.set_state(state)
        else:
            device = torch.device(name)
            torch.get_device_module(device).set_rng_state(state, device)


class Restored:
    """Put gradients, buffers, the modules' Python attributes and the random generators back on leaving."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._gradients = [(p, p.grad) for p in (*model.parameters(), *inputs_of(batch).values())]
        self._buffers = [(slot, name, b, None if b is None else b.clone()) for slot, name, b in named_buffers(model)]
        self._attributes = _Attributes(model)
        self._random = generator_states(model)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        set_generator_states(self._random)
        for p, gradient in self._gradients:
            p.grad = gradient
        self._attributes.restore()
        with torch.no_grad():
            for slot, name, buffer, copied in self._buffers:
                slot[name] = buffer
                if buffer is not None and copied is not None:
                    buffer.copy_(copied)


class _Attributes:
    """What the modules of a model hold in plain attributes: counters, lists, caches, tensors that are not buffers.

    The objects stay the ones that they are, whoever else points to them: only what they contain is put back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._contents: list[tuple[Any, Any]] = []
        """Objects, each with a copy of what it contains."""
        self._known = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._found: list[Any] = []
        """Objects that were met and not looked into yet."""
        for module in model.modules():
            inside = {name: value for name, value in vars(module).items() if name not in _OWN}
            self._contents.append((module, {name: self._met(value) for name, value in inside.items()}))
        while self._found:
            value = self._found.pop()
            if (content := self._content(value)) is not None:
                self._contents.append((value, content))

    def _met(self, value: Any) -> Any:
        """Remember to look into a value. Return it, or a copy of it, where it cannot be changed back."""
        if hasattr(value, "__next__") and not hasattr(value, "__dict__"):  # such as itertools.count
            return _copied(value)
        if id(value) not in self._known:
            self._known.add(id(value))
            self._found.append(value)
        return value

    def _content(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            plain = type(value) is Tensor and value.layout == torch.strided and not value.is_inference()
            return (value.detach().clone(), value._version) if plain else None
        if isinstance(value, dict):
            return {k: self._met(v) for k, v in cast("dict[Any, Any]", value).items()}
        if isinstance(value, (list, deque, set, tuple, frozenset)):
            return [self._met(v) for v in cast("list[Any]", value)]
        if isinstance(value, torch.Generator):
            return value.get_state()
        if isinstance(value, random.Random):
            return value.getstate()
        package = type(value).__module__.partition(".")[0]
        if package == "numpy":
            return _copied(value)
        if package in _FOREIGN or isinstance(value, (type, *_LEFT_ALONE)) or not hasattr(value, "__dict__"):
            return None
        return {k: self._met(v) for k, v in _namespace(value).items()}

    def restore(self) -> None:
        """Put everything back."""
        for value, content in self._contents:
            _refill(value, content)


def _refill(value: Any, content: Any) -> None:
    """Give an object the content that it had, if it has another now."""
    if isinstance(value, Tensor):
        copied, version = content
        if value._version != version and value.shape == copied.shape:
            with torch.no_grad():
                value.copy_(copied)
    elif isinstance(value, (list, deque)):
        several = cast("list[Any]", value)
        if not _same(several, content):
            several.clear()
            several.extend(content)
    elif isinstance(value, set):
        several_once = cast("set[Any]", value)
        several_once.clear()
        several_once.update(content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif type(value).__module__ == "numpy":
        if getattr(value, "shape", ()) and value.flags.writeable:
            value[...] = content
    elif isinstance(value, dict):
        named = cast("dict[Any, Any]", value)
        if not _same([*named], [*content]) or not _same([*named.values()], [*content.values()]):
            named.clear()
            named.update(content)
    elif not isinstance(value, (tuple, frozenset)):
        own = _namespace(value)
        for name in [n for n in own if n not in content and not (isinstance(value, nn.Module) and n in _OWN)]:
            del own[name]
        own.update(content)


def _namespace(value: object) -> dict[str, Any]:
    return vars(value)


def _same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _copied(value: Any) -> Any:
    try:
        return copy.copy(value)
    except TypeError:  # a generator, for one
        return value
