"""Leave a model as it was after a step that was run only to observe it."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from actmem.measuring import tensors_in
from actmem.torchcompat import (
    FakeTensor,
    TorchDispatchMode,
    as_outside,
    has_storage,
    named_buffers,
    never_compile,
    without_dispatch_modes,
)

__all__ = ["Preserved", "Restored", "generator_states", "inputs_of", "set_generator_states"]

_OWN = frozenset({"_parameters", "_buffers", "_modules"})
"""What holds the tensors and the children of a module, which are restored one by one."""
_LEFT_ALONE = (nn.Module, Optimizer, DataLoader, Dataset)
_FOREIGN = {*sys.stdlib_module_names, "torch", "lightning", "pytorch_lightning", "accelerate", "deepspeed"} - {"types"}
"""Packages whose objects a model may point to without owning them, such as its trainer or a logger."""


def inputs_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch that get a gradient, by name."""
    named: Any = batch.items() if hasattr(batch, "items") else enumerate(batch)
    return {f"input {k}": t for k, t in named if isinstance(t, Tensor) and t.is_leaf and t.requires_grad}


def generator_states(model: nn.Module | None) -> dict[str, Any]:
    """Return the states of the random generators that a step may draw from, or that a seed may change.

    Those are of the CPU, Python and numpy, of every device of the accelerator if it is in use, and of the devices of
    the model. A generator that its backend does not show is left out.
    """
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "Python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    of_model = () if model is None else (t.device for t in (*model.parameters(), *model.buffers()))
    for device in sorted({*_accelerators(), *of_model}, key=str):
        if device.type not in ("cpu", "meta") and (get_state := _function(device, "get_rng_state")) is not None:
            states[str(device)] = get_state(device)
    return states


def _accelerators() -> Iterable[torch.device]:
    """Return the devices of the accelerator; none before the program has used it: asking would start it."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not (_function(kind, "is_initialized") or (lambda: True))():
        return ()
    return (torch.device(kind.type, n) for n in range(torch.accelerator.device_count()))


def _function(device: torch.device, name: str) -> Callable[..., Any] | None:
    """Return a function of a device's module, or None if its backend has no such."""
    return getattr(torch.get_device_module(device), name, None)


def set_generator_states(states: dict[str, Any]) -> None:
    """Restore what `generator_states` returned."""
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
    """Restores gradients, buffers, the modules' Python attributes and the random generators on exit."""

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


class Preserved(TorchDispatchMode):
    """Restores, on exit, the bytes of every tensor that an operator wrote to, and the gradients of every leaf.

    A storage is copied before the first operator that writes to it, unless an operator made it in the meantime. The
    same goes for the states of generators passed to operators. Buffers are copied when they are found: batch norm
    writes to them without declaring it.
    """

    only_watches = True
    """See NOTE [ in place unless watched ] in `measuring/inplace_formulas.py`."""

    supports_higher_order_operators = True
    sees_regions = True
    """Sees the call of a compiled graph as one operator. See NOTE [ Compiled regions ]."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled."""
        return True

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
        self._random = generator_states(None)
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._born: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._copied: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._facts: dict[Any, tuple[tuple[int, str], ...]] = {}

    def keep(self, tensor: Tensor) -> None:
        """Copy the bytes of a tensor, unless it was made in the meantime."""
        if isinstance(tensor, FakeTensor) or tensor.is_meta or not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        if id(storage) in self._copied or id(storage) in self._born or not storage.nbytes():
            return
        with without_dispatch_modes(), torch.no_grad():
            self._copied[id(storage)] = storage, _bytes_of(storage).clone()

    def restore(self) -> None:
        """Put everything back."""
        set_generator_states(self._random)
        for generator, state in self._generators.values():
            generator.set_state(state)
        with without_dispatch_modes(), torch.no_grad():
            for storage, copied in self._copied.values():
                _bytes_of(storage).copy_(copied)
        for leaf, gradient in self._gradients.values():
            if leaf.grad is not gradient:
                leaf.grad = gradient

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and id(value) not in self._generators:
                self._generators[id(value)] = value, value.get_state()
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad and id(tensor) not in self._gradients and self._is_old_leaf(tensor):
                self._gradients[id(tensor)] = tensor, tensor.grad
        for place, name in self._writes(func):
            for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(name)):
                self.keep(tensor)
        with as_outside(func):
            result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if not isinstance(tensor, FakeTensor) and has_storage(tensor):
                self._meet(tensor.untyped_storage(), args, kwargs)
        return result

    def _is_old_leaf(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor) or tensor._is_view() or not tensor.is_leaf or not has_storage(tensor):  # pyright: ignore[reportPrivateUsage]
            return False
        return id(tensor.untyped_storage()) not in self._born

    def _writes(self, func: Any) -> tuple[tuple[int, str], ...]:
        """Return the arguments that an operator writes to."""
        found = self._facts.get(func)
        if found is None:
            schema = getattr(func, "_schema", None)
            arguments: Any = () if schema is None else schema.arguments
            written = ((n, a) for n, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
            found = self._facts[func] = tuple((n, str(a.name)) for n, a in written)
        return found

    def _meet(self, storage: torch.UntypedStorage, args: Any, kwargs: Any) -> None:
        key = id(storage)
        if key in self._born or key in self._copied:
            return
        if any(t.untyped_storage() is storage for t in tensors_in((args, kwargs)) if has_storage(t)):
            return
        self._born[key] = weakref.ref(storage, lambda _: self._born.pop(key, None))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Attributes:
    """What the modules of a model hold in plain attributes: counters, lists, caches, tensors that are not buffers.

    The objects keep their identity, whatever else points to them: only their contents are restored.
    """

    def __init__(self, model: nn.Module) -> None:
        self._contents: list[tuple[Any, Any]] = []
        """Objects, each with a copy of what it contains."""
        self._known = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._found: list[Any] = []
        """Objects that were found and not searched yet."""
        for module in model.modules():
            inside = {name: value for name, value in vars(module).items() if name not in _OWN}
            self._contents.append((module, {name: self._met(value) for name, value in inside.items()}))
        while self._found:
            value = self._found.pop()
            if (content := self._content(value)) is not None:
                self._contents.append((value, content))

    def _met(self, value: Any) -> Any:
        """Queue a value to be searched. Return it, or a copy of it if it cannot be changed back."""
        if hasattr(value, "__next__") and not hasattr(value, "__dict__"):  # such as itertools.count
            return _copied(value)
        if id(value) not in self._known:
            self._known.add(id(value))
            self._found.append(value)
        return value

    def _content(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.layout != torch.strided or value.is_inference():
                return None
            gradient = value.grad if value.is_leaf else None
            return value.detach().clone(), value._version, None if gradient is None else self._met(gradient)
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
    """Restore an object's contents, if they have changed."""
    if isinstance(value, Tensor):
        copied, version, gradient = content
        if value._version != version and value.shape == copied.shape:
            with torch.no_grad():
                value.copy_(copied)
        if value.is_leaf and value.grad is not gradient:
            value.grad = gradient
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
