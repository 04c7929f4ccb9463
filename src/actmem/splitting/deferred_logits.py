"""A head's output that is not there yet.

NOTE [ Logits in chunks ]

The logits of a language model are its largest tensor, and the loss makes several of them. What is wanted of them is
small: a number, or a few for each token. A token's row of logits depends on no other row, so rows can be computed chunk
by chunk, used, and let go. For that the model need not be edited: the head returns a `DeferredLogits`, a tensor with
shape, dtype and device but without values, which knows the head's input (`hidden`) and what has been done to the rows
since (`node`).

- Views that leave rows whole are views of `hidden`. Operators that treat every row by itself are noted down
  (`row_rules`).
- Functions that reduce rows (a loss, log-probabilities of given tokens, an entropy) run in chunks (`row_chunks`).
  torch's own chunked loss runs where it can; the others find the gradients in the forward pass, if they are sums over
  all rows, or compute the logits of each chunk again in the backward pass.
- Everything else makes the tensor real: once, by the operators that would have run without the split, so that autograd
  sees what it always saw. Who asked for it is counted.
- Overrides happen at the level of torch functions, above autograd. A call that comes in below has lost the gradient
  already: it is refused.
- FSDP registers a hook on what a model returns, to gather parameters before the backward pass begins. It goes to what
  is computed of the logits. Other hooks want the gradient of the logits, and make them real.
- Weights may change between the head's call and a later use, by an optimizer's step. A tensor would have kept the old
  values; a deferred one is refused then.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from actmem.errors import UnsupportedError, VersionError
from actmem.splitting.row_chunks import Head
from actmem.splitting.weight_versions import WeightVersions
from actmem.torchcompat import without_overrides, wrapper_tensor

__all__ = [
    "LOGITS",
    "METADATA",
    "RULES",
    "Deferral",
    "DeferredLogits",
    "DividedLogits",
    "Operand",
    "RowNode",
    "count",
    "name_of",
    "real_values",
]


@dataclass
class Deferral:
    """What happened to one head's outputs."""

    num_chunks: int
    gradients: str = "forward"
    """When the gradients of a loss are found: in the forward or in the backward pass."""
    exact: bool = False
    """Whether every sum keeps its order."""
    num_deferred: int = 0
    """How many outputs were deferred."""
    few_rows: int | None = None
    """How many rows an output had that was not deferred because there are more chunks."""
    made_real: dict[str, int] = field(default_factory=dict[str, int])
    """Who made a whole tensor of logits, and how often."""
    in_chunks: dict[str, int] = field(default_factory=dict[str, int])
    """What was computed in chunks, and how often."""


@dataclass(frozen=True, eq=False)
class RowNode:
    """A value for each row: the logits themselves (`func` is None), or what a function makes of other such values."""

    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    """Nodes, operands, and constants."""
    kwargs: tuple[tuple[str, Any], ...] = ()

    def at(self, logits: Tensor, operands: Sequence[Tensor], known: dict[int, Any]) -> Any:
        """Compute it for a chunk. `known` has the nodes that were computed for it before."""
        if self.func is None:
            return logits
        if id(self) not in known:

            def value(x: Any) -> Any:
                if isinstance(x, RowNode):
                    return x.at(logits, operands, known)
                return operands[x.index] if isinstance(x, Operand) else x

            known[id(self)] = self.func(*map(value, self.args), **{name: value(x) for name, x in self.kwargs})
        return known[id(self)]


@dataclass(frozen=True)
class Operand:
    """Stands for a tensor other than the logits that has a row for each token: which of them it is."""

    index: int


LOGITS = RowNode()

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Callable[..., Any], Rule] = {}
"""A torch function -> what it does to deferred logits; the rule returns NotImplemented where it cannot."""
METADATA: set[Callable[..., Any]] = set()
"""Functions that need no values."""


class DeferredLogits(Tensor):
    """Logits, or what is made of them row by row, without their values. See NOTE [ Logits in chunks ]."""

    hidden: Tensor
    """The head's input, with the same leading dimensions."""
    head: Head
    deferral: Deferral
    chunk_rows: int
    node: RowNode
    operands: tuple[Tensor, ...]
    """What the node needs in addition to the logits."""
    versions: WeightVersions
    """The head's weights, when it was called."""
    remake: Callable[[], Tensor] | None
    """How it is made of a real tensor; None for the head's output itself."""
    made: Tensor | None
    """The real tensor, once somebody asked for it."""
    parent: DeferredLogits | None
    """What it was derived from."""
    hooks: OrderedDict[int, Callable[[Tensor], Tensor | None]]
    """FSDP's, which are to run when the backward pass arrives here: they do not look at the gradient."""
    children: list[weakref.ref[DeferredLogits]]

    @staticmethod
    def __new__(
        cls: type[DeferredLogits],
        hidden: Tensor,
        head: Head,
        deferral: Deferral,
        chunk_rows: int,
        *,
        dtype: torch.dtype,
        node: RowNode = LOGITS,
        operands: tuple[Tensor, ...] = (),
        remake: Callable[[], Tensor] | None = None,
        versions: WeightVersions | None = None,
    ) -> DeferredLogits:
        """Create one for a head's input."""
        needs = any(x.requires_grad for x in (hidden, *head.weights, *operands))
        self: DeferredLogits = wrapper_tensor(
            cls,
            (*hidden.shape[:-1], head.num_classes),
            dtype=dtype,
            device=hidden.device,
            requires_grad=torch.is_grad_enabled() and needs,
        )
        self.hidden, self.head, self.deferral, self.chunk_rows = hidden, head, deferral, chunk_rows
        self.node, self.operands, self.remake, self.made = node, operands, remake, None
        self.parent, self.children, self.hooks = None, [], OrderedDict()
        self.versions = versions or WeightVersions(head.module, head.weights)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything was done in `__new__`, as tensors need it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with without_overrides():
                return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None and all(x.made is None for x in _deferred(args, kwargs)):
            done = rule(func, args, kwargs)
            if done is not NotImplemented:
                return done
        if _writes(func, kwargs):
            for x in _deferred(args, kwargs):
                x.check_alone(func)
        return func(*real_values(args, func), **real_values(kwargs, func))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedError(
            f"{func} was called on logits that are computed in chunks, from below torch's Python overrides, where "
            "their gradient is lost. Use them through torch's own functions, or apply the model without split."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        return repr(self.whole("repr"))

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.whole("copy.deepcopy"), memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.whole("pickle").__reduce_ex__(proto)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def whole(self, who: str) -> Tensor:
        """Return the tensor as it would have been without the split. It is made once."""
        if self.made is None:
            if self.remake is None:
                self.check_weights()
                count(self.deferral.made_real, who)
                self.made = self.head.output(self.hidden)
            else:
                self.made = self.remake()
            for hook in self.hooks.values() if self.made.requires_grad else ():
                self.made.register_hook(hook)  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        return self.made

    def with_hooks(self, result: Tensor) -> Tensor:
        """Return what was computed of these logits, with the hooks that wait for the backward pass to arrive."""
        x: DeferredLogits | None = self
        while x is not None:
            for hook in x.hooks.values() if result.requires_grad else ():
                result.register_hook(hook)  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
            x = x.parent
        return result

    def check_weights(self) -> None:
        """Refuse if the weights have been written since the head was called.

        Raises:
            VersionError: they have, so these logits are gone.
        """
        if self.versions.are_written():
            raise VersionError(
                "these logits were not kept: they are computed in chunks where they are used, and the head's weights "
                "have been written since, as by an optimizer's step. Use them before that, or apply the model without "
                "split."
            )

    def check_alone(self, func: Callable[..., Any]) -> None:
        """Refuse to be written in place while other deferred tensors stand on the same logits.

        Raises:
            UnsupportedError: they would not see the change, or would see it when they should not.
        """
        x, others = self, [self.children]
        while x.parent is not None:
            x = x.parent
            others.append(x.children)
        alive = sum(ref() is not None for refs in others for ref in refs)
        if alive > len(others) - 1 and self.made is None:
            raise UnsupportedError(
                f"{name_of(func)} at {_caller()} writes in place on logits that are computed in chunks, and other "
                "tensors were made from them. Write out of place there, or apply the model without split."
            )

    def derived(
        self,
        remake: Callable[[], Tensor],
        *,
        hidden: Tensor | None = None,
        node: RowNode | None = None,
        operands: tuple[Tensor, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> DeferredLogits:
        """Return another deferred tensor on the same head. What is not said stays as it is."""
        other = type(self)(
            self.hidden if hidden is None else hidden,
            self.head,
            self.deferral,
            self.chunk_rows,
            dtype=dtype or self.dtype,
            node=node or self.node,
            operands=self.operands if operands is None else operands,
            remake=remake,
            versions=self.versions,
        )
        other.parent = self
        self.children.append(weakref.ref(other))
        return other


class DividedLogits(DeferredLogits):
    """Deferred logits of a head that returns a DTensor. See NOTE [ Classes over ranks ]."""

    @property
    def device_mesh(self) -> Any:
        """The ranks that its classes are divided over."""
        return self._shards.mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        """How they are divided."""
        return self._shards.placements(self.dim())

    def to_local(self, **options: Any) -> Tensor:
        """Return this rank's part of the tensor, which is made."""
        return cast("Any", self.whole("to_local")).to_local(**options)

    def full_tensor(self, **options: Any) -> Tensor:
        """Return the whole tensor, which is made."""
        return cast("Any", self.whole("full_tensor")).full_tensor(**options)

    def redistribute(self, *args: Any, **options: Any) -> Tensor:
        """Return the tensor, which is made, in another layout."""
        return cast("Any", self.whole("redistribute")).redistribute(*args, **options)

    @property
    def _shards(self) -> Any:
        return self.head.shards


def _deferred(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DeferredLogits]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, DeferredLogits)]


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function writes on its first argument."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    dunder = (
        name.startswith("__i") and name.endswith("__") and name not in ("__iter__", "__init__", "__index__", "__int__")
    )
    return in_place or dunder or name == "__setitem__" or "out" in kwargs


def count(counts: dict[str, int], name: str) -> None:
    """Add one to a count."""
    counts[name] = counts.get(name, 0) + 1


def real_values(x: Any, func: Callable[..., Any]) -> Any:
    """Return arguments with every deferred tensor made real, on behalf of a function."""
    if isinstance(x, DeferredLogits):
        return x.whole(f"{name_of(func)} at {_caller()}")
    if type(x) in (list, tuple):
        return type(x)(real_values(y, func) for y in x)
    if isinstance(x, dict):
        return {k: real_values(v, func) for k, v in cast("dict[Any, Any]", x).items()}
    return x


def name_of(func: Callable[..., Any]) -> str:
    """Return a function's name, as a reader knows it.

    >>> name_of(torch.exp), name_of(Tensor.grad.__get__)
    ('exp', 'Tensor.grad')
    """
    name = getattr(func, "__name__", str(func))
    owner = getattr(getattr(func, "__self__", None), "__name__", None)
    return f"Tensor.{owner}" if name == "__get__" and owner is not None else name


def _caller() -> str:
    """Return the line that called torch, as file and number."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and ("/actmem/splitting/" in (path := frame.f_code.co_filename) or "/torch/" in path):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
