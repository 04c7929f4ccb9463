"""Every operator that torch has samples for, in each form that it can be called in, as a block to train."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from actmem.engine.holdings import storage_of
from actmem.engine.operators import Operator, describe
from actmem.engine.overwrites import written_by
from actmem.torchcompat import as_outside, is_composite, storage_key

FORMS = ("functional", "in place", "out", "no_grad", "inference", "inference in place")
_CONTEXTS: dict[str, Any] = {"no_grad": torch.no_grad, "out": torch.no_grad, "inference": torch.inference_mode}
_PARAMETER = object()


def operators() -> list[Any]:
    """Return torch's own database of operators with samples. Importing it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def samples(operator: Any, dtype: torch.dtype, most: int) -> list[Any]:
    """Return a few samples, spread over all that there are; none where the operator does not take the dtype."""
    if dtype not in operator.supported_dtypes("cpu"):
        return []
    torch.manual_seed(0)
    found = list(operator.sample_inputs("cpu", dtype))
    return found if len(found) <= most else [found[i * len(found) // most] for i in range(most)]


def forms(operator: Any) -> Iterator[str]:
    for form in FORMS:
        if ("in place" in form and operator.inplace_variant is None) or (form == "out" and not operator.supports_out):
            continue
        yield form


class Sampled(nn.Module):
    """A block that calls one operator on values that were computed in the block, and saves something of the result."""

    def __init__(self, operator: Any, form: str, sample: Any, most_trainable: int = 1 << 30) -> None:
        super().__init__()
        self.operator, self.form = operator, form
        leaves, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        trained = [i for i, x in enumerate(leaves) if _trainable(x)][:most_trainable]
        self.parameters_of = nn.ParameterList(nn.Parameter(leaves[i].detach().clone()) for i in trained)
        self.leaves = [_PARAMETER if i in trained else x for i, x in enumerate(leaves)]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        given = iter(self.parameters_of)
        leaves = [next(given) * 1 if x is _PARAMETER else _copied(x) for x in self.leaves]
        y = x * self.scale
        for z in tree_flatten(self.call(*tree_unflatten(leaves, self.spec)))[0]:
            if isinstance(z, Tensor) and z.numel():
                y = y + self._used(z)
        return y

    def call(self, first: Any, args: Any, kwargs: Any) -> Any:
        """Call the operator in its form."""
        function = self.operator.inplace_variant if "in place" in self.form else self.operator.op
        with _CONTEXTS.get(self.form.removesuffix(" in place"), nullcontext)():
            if self.form != "out":
                return function(first, *args, **kwargs)
            # Into memory that nothing was written to, and over what an operator wrote, in turn.
            made = tree_flatten(function(first, *args, **kwargs))[0]
            out = tuple(torch.empty_like(t) if i % 2 == 0 else t + t for i, t in enumerate(reversed(made)))
            return function(first, *args, **kwargs, out=out[::-1] if len(out) > 1 else out[0])

    def _used(self, z: Tensor) -> Tensor:
        z = z if z.layout is torch.strided else z.to_dense()
        z = torch.view_as_real(z.resolve_conj()) if z.is_complex() else z
        z = z if z.is_floating_point() else z.to(torch.float32)
        z = ((z.clone() if z.is_inference() else z) * self.scale.to(z.dtype)).sin().float()
        return (z * torch.linspace(-1, 1, z.numel()).reshape(z.shape)).sum()


def _trainable(x: Any) -> bool:
    plain = isinstance(x, Tensor) and x.layout is torch.strided and x.element_size() > 1
    return plain and (x.is_floating_point() or x.is_complex())


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def trained(model: nn.Module) -> dict[str, Tensor | None]:
    """Run one step from a seed, and return all that plain training gives."""
    model.zero_grad()
    torch.manual_seed(0)
    x = torch.ones(3, requires_grad=True)
    loss = model(x).sum()
    loss.backward()
    found: dict[str, Tensor | None] = {"loss": loss.detach().clone(), "x.grad": x.grad}
    found |= {f"{n}.grad": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    found |= {n: p.detach().clone() for n, p in model.named_parameters()}
    return found | {"generator": torch.get_rng_state()}


def difference(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> str:
    """Name the first thing that has other bits; "" if there is none."""
    return next((name for name, t in a.items() if not same_bits(t, b[name])), "")


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(t: Tensor) -> Tensor:
    t = t.detach() if t.layout is torch.strided else t.detach().to_dense()
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
    return t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)  # one element may lie anyhow


class Nothing(TorchDispatchMode):
    """Does nothing but let kernels heed conj bits: what differs under it, differs under any mode, by torch's doing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_outside(func):
            return func(*args, **(kwargs or {}))


class Truth(TorchDispatchMode):
    """Compare what is said of an operator with what it does: what it writes, overwrites and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.lies: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = describe(func)
        if operator.view or is_composite(func):  # the tape records the parts of composite operators, never the whole
            return func(*args, **kwargs)
        self.seen.add(operator.name)
        state = torch.get_rng_state()
        before = _clones((args, kwargs))
        written = {storage_key(t.untyped_storage()) for _, _, t in written_by(operator, args, kwargs)}
        kept = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        with as_outside(func):
            out = func(*args, **kwargs)
        for t, copy in zip(kept, (t for t in tree_flatten(before)[0] if isinstance(t, Tensor)), strict=True):
            if storage_of(t) is not None and storage_key(t.untyped_storage()) not in written and not same_bits(t, copy):
                self.lies.add(f"{operator.name} writes an argument, and nothing says so")
        after = torch.get_rng_state()
        if not torch.equal(state, after) and not operator.draws(args, kwargs):
            self.lies.add(f"{operator.name} draws random numbers, and nothing says so")
        if operator.overwritten and operator.forbids(args, kwargs, None) is None:
            torch.set_rng_state(state)
            self._overwrite(operator, before, (args, kwargs))
            torch.set_rng_state(after)
        return out

    def _overwrite(self, operator: Operator, before: Any, after: Any) -> None:
        """Run the operator again on what it was given, but with other bytes in what it is said to overwrite."""
        args, kwargs = before
        filled = [(w, j, t) for w, j, t in written_by(operator, args, kwargs) if w in operator.overwritten]
        for _, _, t in filled:
            t.copy_(torch.full_like(t, 1) if t.dtype is torch.bool else torch.full_like(t, 85))
        with as_outside(operator.func):
            operator.func(*args, **kwargs)
        for where, item, t in filled:
            found = (after[0] if isinstance(where, int) else after[1])[where]
            if not same_bits(found if item < 0 else found[item], t):
                self.lies.add(f"{operator.name} reads or spares what it is said to overwrite ({where})")


def _clones(tree: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, tree)
