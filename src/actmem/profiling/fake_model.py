"""Run a step on tensors without bytes: a fake copy of a model, and stand-ins for data that would decide shapes.

NOTE [ What is real in a fake step ]
Activations and weights are fake: shapes and dtypes, no bytes. Integers and booleans stay real as long as nothing fake
went into them: token ids, positions, masks. So a program that looks at them (is there padding? which documents?) takes
the same branches as in training. What a router would choose depends on numbers that a fake step does not have. Its
choice is assumed, as real integers: balanced, or worst, where the same experts get every token. A balanced router
prefers no expert. The loads of the experts still differ, so the first and the last, where a step's peak may be, get
three standard deviations more than the mean, and the ones between them correspondingly less. Whatever sorts, counts and
gathers by that choice then runs as it would in training.

Libraries replace the forward of a model by a function that remembers that model: in its closure, as the object that a
method is bound to, or in a partial. `copy.deepcopy` does not copy functions, so the copy would keep running the
original.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from actmem.errors import UnsupportedError
from actmem.expert_loads import Routing
from actmem.measuring import tensors_in
from actmem.profiling.complaints import as_plain, for_real
from actmem.profiling.layouts import LAYOUTS
from actmem.profiling.router_choice import EXCHANGES, RouterChoice
from actmem.splitting import carry_split
from actmem.structure import buffers_of, named_modules, parameters_of
from actmem.torchcompat import (
    FakeTensor,
    TorchDispatchMode,
    active_fake_mode,
    has_storage,
    never_compile,
    without_fake_mode,
)

__all__ = ["Assuming", "StandIns", "fake_batch", "fake_copy", "fake_part", "rebind", "refuse_recurrent"]

_MOST_REAL = 1 << 26
"""Elements up to which integers are real."""


def fake_copy(
    model: nn.Module, mode: Any, device: torch.device, same: Sequence[tuple[nn.Module, nn.Module]] = ()
) -> nn.Module:
    """Return a copy of a model whose parameters and buffers have no bytes. The model may be on the meta device.

    Args:
        model: the model.
        mode: the fake mode.
        device: the device that the copy claims to be on.
        same: pairs of modules of which the first stands for both.
    """
    refuse_recurrent(model)
    memo: dict[int, Any] = {}
    others, firsts = ({id(pair[n]): pair[n] for pair in same}.values() for n in (1, 0))
    left_out = {id(t) for m in others for t in (*parameters_of(m), *buffers_of(m))}
    left_out -= {id(t) for m in firsts for t in (*parameters_of(m), *buffers_of(m))}
    for p in parameters_of(model):
        if id(p) not in left_out:
            memo[id(p)] = nn.Parameter(_fake(p, mode, device), requires_grad=p.requires_grad)
        if p.grad is not None:
            memo[id(p.grad)] = None
    for b in buffers_of(model):
        if id(b) not in left_out:
            memo[id(b)] = _fake(b, mode, device)
    for first, other in same:
        if id(first) not in memo:
            memo[id(first)] = copy.deepcopy(first, memo)
        memo[id(other)] = memo[id(first)]
    copied = copy.deepcopy(model, memo)
    rebind(copied, {id(m): memo[id(m)] for _, m in named_modules(model) if isinstance(memo.get(id(m)), nn.Module)})
    carry_split(model, copied)
    return copied


def fake_part(part: nn.Module) -> nn.Module:
    """Return a copy of a module without bytes, on the CPU, for the fake mode that is active."""
    return fake_copy(part, active_fake_mode(), torch.device("cpu"))


def refuse_recurrent(model: nn.Module) -> None:
    """Refuse a model whose memory a fake step does not fully show."""
    if any(isinstance(m, nn.RNNBase) for _, m in named_modules(model)):
        raise UnsupportedError(
            "the model has a recurrent layer of torch.nn, whose fused kernel keeps a workspace that no fake tensor "
            f"shows. Profile a real step: {for_real()}."
        )


class StandIns:
    """Stand-ins without bytes for tensors, of the same geometry, with storages shared in the same way."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        """id -> a tensor, held so that the id stays its own, and its stand-in."""
        self._storages: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the stand-in for a tensor; the tensor itself if it is real in a fake step, or has a history."""
        if isinstance(tensor, FakeTensor) or tensor.grad_fn is not None:
            return tensor
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta):
            return tensor
        known = self._made.get(id(tensor))
        if known is None:
            if type(tensor) not in (Tensor, nn.Parameter) or not has_storage(tensor):
                raise UnsupportedError(
                    f"the step uses a {type(tensor).__name__} of the layout {tensor.layout}, for which there is no "
                    f"stand-in without bytes. Profile a real step: {for_real()}."
                )
            known = self._made[id(tensor)] = tensor, self._make(tensor)
            if tensor.grad is not None:
                known[1].grad = self(tensor.grad)
        return known[1]

    def _make(self, tensor: Tensor) -> Tensor:
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        if not tensor.dim() and not tensor.requires_grad and device.type == "cpu" and not tensor.is_meta:
            # A number such as an optimizer's count of steps stays known.
            return self._mode.fake_tensor_converter.from_real_tensor(
                self._mode, tensor.detach().clone(), make_constant=True
            )
        storage = tensor.untyped_storage()
        bare = self._storages.get(id(storage))
        if bare is None:
            bare = self._storages[id(storage)] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
        with torch.no_grad():
            seen = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
                bare.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        made: Tensor = FakeTensor(self._mode, seen, device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            made.requires_grad_(tensor.requires_grad)
        vars(made).update(vars(tensor))
        if tensor.requires_grad:
            hooks: Any = getattr(tensor, "_backward_hooks", None) or {}
            for hook in hooks.values():
                made.register_hook(hook)  # pyright: ignore[reportUnknownMemberType]
            hooks = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
            for hook in hooks.values():
                made.register_post_accumulate_grad_hook(hook)  # pyright: ignore[reportUnknownMemberType]
        return made


def fake_batch(batch: Any, mode: Any, device: torch.device) -> Any:
    """Return a batch in which floating tensors have no bytes."""
    if isinstance(batch, Tensor):
        if batch.is_floating_point() or batch.is_complex() or batch.device.type == "meta":
            return _fake(batch, mode, device).requires_grad_(batch.requires_grad)
        return batch.to(device)
    if isinstance(batch, dict):
        return {k: fake_batch(v, mode, device) for k, v in batch.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(batch, (list, tuple)):
        return type(batch)(fake_batch(v, mode, device) for v in batch)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return batch


def _fake(tensor: Tensor, mode: Any, device: torch.device) -> Tensor:
    with torch.no_grad():
        bare = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, bare, device)


class Assuming(TorchDispatchMode):
    """Keeps integers real, and assumes what a router chooses. See NOTE [ What is real in a fake step ]."""

    only_watches = True
    """See NOTE [ in place unless watched ]."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
        self.router = RouterChoice(routing)

    @property
    def routing(self) -> str:
        """What was assumed of routers; "none" if nothing had to be."""
        return self.router.words if self.router.assumed else "none"

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "_overloadpacket", func))
        given = list(tensors_in((args, kwargs)))
        if not any(isinstance(t, FakeTensor) for t in given):
            return self._real(func, name, args, kwargs, given)
        if name in _FINITE:
            return _FINITE[name](self.router, func, args, kwargs)
        if name in _CHOICES:
            self.router.assumed = True
            return _CHOICES[name](self.router, func, args, kwargs)
        if name in LAYOUTS:
            return LAYOUTS[name](func, args, kwargs)
        try:
            made = func(*args, **kwargs)
        except RuntimeError as error:
            if "data-dependent" in str(error) or "Dynamic" in type(error).__name__ or "DataDep" in type(error).__name__:
                raise UnsupportedError(
                    f"{name} looks at the numbers in a tensor, and a fake tensor has none. "
                    f"Profile a real step: {for_real()}."
                ) from error
            raise as_plain(func, args, kwargs, error) from None
        if name.startswith("aten._foreach_") and name.endswith("_") and not torch.is_inference_mode_enabled():
            torch.autograd.graph.increment_version(args[0])  # as on real tensors: see `torchcompat.as_outside`
        return made

    def _real(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """Run an operator with only real inputs: for real, if it returns integers."""
        whole = all(not t.is_floating_point() and t.numel() <= _MOST_REAL for t in given)
        if given and whole and (name in _LOOKS or name in EXCHANGES or func._schema.is_mutable):
            with without_fake_mode():
                made = func(*args, **kwargs)
                self.router.answer(name, args, made)
                return made
        seen = func(*args, **kwargs)
        made = list(tensors_in(seen))
        if not made or any(t.is_floating_point() or t.is_complex() or t.numel() > _MOST_REAL for t in made):
            return seen
        with without_fake_mode():
            made = func(*args, **kwargs)
            self.router.answer(name, args, made)
            return made


_LOOKS = frozenset(
    {
        "aten._local_scalar_dense",
        "aten.nonzero",
        "aten.is_nonzero",
        "aten.equal",
        "aten.unique_consecutive",
        "aten._unique2",
        "aten.masked_select",
        "aten.index",
        "aten.repeat_interleave",
        "aten.bincount",
        "aten.item",
    }
)
"""Operators whose result, or its shape, depends on the numbers in a tensor."""


def _top(router: RouterChoice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    values, indices = func(*args, **kwargs)
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return values, router.choose(indices, args[0].shape[dim])


def _sorted(_: RouterChoice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    found = func(*args, **kwargs)
    if isinstance(found, Tensor):
        return _identity(found)
    return (*found[:-1], _identity(found[-1]))


def _best(_: RouterChoice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    found = func(*args, **kwargs)
    if isinstance(found, Tensor):
        return _zeros(found)
    return (found[0], _zeros(found[1]))


def _none(_: RouterChoice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Numbers are finite."""
    return _zeros(func(*args, **kwargs))


def _identity(like: Tensor) -> Tensor:
    with without_fake_mode():
        last = like.shape[-1] if like.dim() else 1
        return torch.arange(last).expand(like.shape).contiguous()


def _zeros(like: Tensor) -> Tensor:
    with without_fake_mode():
        return torch.zeros(like.shape, dtype=like.dtype)


_CHOICES: dict[str, Any] = {
    "aten.topk": _top,
    "aten.sort": _sorted,
    "aten.argsort": _sorted,
    "aten.argmax": _best,
    "aten.argmin": _best,
}
_FINITE: dict[str, Any] = {"aten.isnan": _none, "aten.isinf": _none}


def rebind(copied: nn.Module, originals: dict[int, nn.Module]) -> None:
    """Replace the modules that functions on a copy remember by their copies.

    Args:
        copied: the copy.
        originals: id of a module of the original -> its copy.

    >>> model = nn.Linear(2, 2)
    >>> model.forward = lambda x: model.weight  # type: ignore[assignment]
    >>> import copy
    >>> again = copy.deepcopy(model)
    >>> again.forward(None) is model.weight
    True
    >>> rebind(again, {id(model): again})
    >>> again.forward(None) is again.weight
    False
    """
    for module in copied.modules():
        for name, found in [*vars(module).items()]:
            if isinstance(found, (types.FunctionType, types.MethodType, partial)):
                changed = _rebound(found, originals, {})  # pyright: ignore[reportUnknownArgumentType]
                if changed is not found:
                    vars(module)[name] = changed


def _rebound(found: Any, originals: dict[int, nn.Module], seen: dict[int, Any]) -> Any:
    """Return a function, method, partial or module that refers to the copies; itself if it refers to none."""
    key = id(found)
    if key in seen:
        return seen[key]
    seen[key] = found  # a function that remembers itself
    if isinstance(found, nn.Module):
        return originals.get(id(found), found)
    changed: Any = found
    if isinstance(found, types.MethodType):
        owner, function = (_rebound(x, originals, seen) for x in (found.__self__, found.__func__))
        if owner is not found.__self__ or function is not found.__func__:
            changed = types.MethodType(function, owner)
    elif isinstance(found, partial):
        held: list[Any] = [found.func, *found.args, *found.keywords.values()]  # pyright: ignore[reportUnknownMemberType]
        now = [_rebound(x, originals, seen) for x in held]
        if any(a is not b for a, b in zip(held, now, strict=True)):
            num = 1 + len(found.args)
            changed = partial(now[0], *now[1:num], **dict(zip(found.keywords, now[num:], strict=True)))
    elif isinstance(found, types.FunctionType):
        changed = _function(found, originals, seen)
    else:
        return found
    seen[key] = changed
    return changed


def _function(found: types.FunctionType, originals: dict[int, nn.Module], seen: dict[int, Any]) -> Any:
    def content(cell: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not filled yet
            return cell

    cells = found.__closure__ or ()
    defaults, named = found.__defaults__ or (), found.__kwdefaults__ or {}
    held = [*(content(cell) for cell in cells), *defaults, *named.values()]
    now = [_rebound(x, originals, seen) for x in held]
    wrapped = getattr(found, "__wrapped__", None)
    if all(a is b for a, b in zip(held, now, strict=True)):
        return found
    num, last = len(cells), len(cells) + len(defaults)
    closure = tuple(c if a is b else types.CellType(b) for c, a, b in zip(cells, held[:num], now[:num], strict=True))
    given = found.__defaults__ and tuple(now[num:last])
    changed = types.FunctionType(found.__code__, found.__globals__, found.__name__, given, closure)
    changed.__kwdefaults__ = found.__kwdefaults__ and dict(zip(named, now[last:], strict=True))
    changed.__dict__.update(found.__dict__)
    if wrapped is not None:
        changed.__dict__["__wrapped__"] = _rebound(wrapped, originals, seen)
    return changed
