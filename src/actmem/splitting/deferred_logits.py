"""A head's output that is not there yet. See NOTE [ Logits in chunks ].

`DeferredLogits` looks like the tensor of logits: its shape, dtype and device are known. What is done to it is noted down
as long as it is done row by row (a row is a token), and carried out in chunks of rows when values are asked for: a loss,
log-probabilities of given tokens, an entropy. Anything else makes the tensor real, once, as it would have been without
the split; `Deferral.made_real` says who asked for it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from actmem.errors import VersionError
from actmem.splitting.row_chunks import Head, row_values, scalar_sum

__all__ = ["DeferredLogits", "Deferral"]


@dataclass
class Deferral:
    """What happened to one head's outputs."""

    num_chunks: int
    gradients: str = "forward"
    """Where a loss finds its gradients: in the `forward` pass, or in the `backward` pass, from logits computed again."""
    num_deferred: int = 0
    """How many outputs were deferred."""
    in_graphs: bool = False
    """Whether the head was called inside a compiled graph, where its output is what it always was."""
    made_real: dict[str, int] = field(default_factory=dict[str, int])
    """Who made a whole tensor of logits, and how often."""
    in_chunks: dict[str, int] = field(default_factory=dict[str, int])
    """What was computed in chunks, and how often."""


@dataclass(frozen=True, eq=False)
class _Node:
    """A value for each row: the logits (`func` is None), or what a function makes of other such values."""

    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    """Nodes, numbers of row operands (`_Operand`), and constants."""
    kwargs: tuple[tuple[str, Any], ...] = ()

    def at(self, logits: Tensor, operands: Sequence[Tensor], known: dict[int, Any]) -> Any:
        """Compute it for a chunk."""
        if self.func is None:
            return logits
        if id(self) not in known:
            args = [_value(x, logits, operands, known) for x in self.args]
            kwargs = {name: _value(x, logits, operands, known) for name, x in self.kwargs}
            known[id(self)] = self.func(*args, **kwargs)
        return known[id(self)]


@dataclass(frozen=True)
class _Operand:
    """A tensor with a row for each token, beside the logits."""

    tensor: Tensor
    index: int


def _value(x: Any, logits: Tensor, operands: Sequence[Tensor], known: dict[int, Any]) -> Any:
    if isinstance(x, _Node):
        return x.at(logits, operands, known)
    if isinstance(x, _Operand):
        return operands[x.index]
    return x


LOGITS = _Node()


class DeferredLogits(Tensor):
    """Logits, or what is made of them row by row, without their values."""

    hidden: Tensor
    """The head's input, with the same leading dimensions."""
    _made: Callable[[], Tensor] | None
    """How it would have been made: from a real parent, or by the head."""

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        head: Head,
        deferral: Deferral,
        chunk_rows: int,
        *,
        dtype: torch.dtype,
        node: _Node = LOGITS,
        operands: tuple[Tensor, ...] = (),
        made: Callable[[], Tensor] | None = None,
    ) -> DeferredLogits:
        self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 # pyright: ignore
            cls,
            (*hidden.shape[:-1], head.num_classes),
            dtype=dtype,
            device=hidden.device,
            requires_grad=torch.is_grad_enabled() and any(x.requires_grad for x in (hidden, *head.weights, *operands)),
        )
        self.hidden, self._head, self._deferral, self._chunk_rows = hidden, head, deferral, chunk_rows
        self._node, self._operands, self._made = node, operands, made
        self._real: Tensor | None = None
        self._children: weakref.WeakSet[DeferredLogits] = weakref.WeakSet()
        self._versions = [w._version for w in head.weights]
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        done = NotImplemented
        if not any(isinstance(x, DeferredLogits) and x._real is not None for x in (*args, *kwargs.values())):
            rule = RULES.get(func)
            if rule is not None:
                done = rule(func, args, kwargs)
        if done is not NotImplemented:
            return done
        return func(*_real(args, func), **_real(kwargs, func))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"{func} was called on logits that actmem computes in chunks, past Python's overrides, so their gradient "
            "would be lost. Use the tensor through torch's functions, or apply the model without split."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.real("repr"))

    def __deepcopy__(self, memo: Any) -> Any:
        return self.real("copy.deepcopy").__deepcopy__(memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.real("pickle").__reduce_ex__(proto)

    def real(self, who: str) -> Tensor:
        """Return the tensor as it would have been without the split. It is made once."""
        if self._real is None:
            if self._made is None:
                self.check_weights()
                _count(self._deferral.made_real, who)
                head = self._head
                self._real = head.logits(*_cast(self.hidden, head.weights))
            else:
                self._real = self._made()
        return self._real

    def check_weights(self) -> None:
        """Refuse if the weights have changed since.

        Raises:
            VersionError: they have, so these logits are gone.
        """
        if self._versions != [w._version for w in self._head.weights]:
            raise VersionError(
                "these logits were not kept: actmem computes them in chunks where they are used, and the head's weights "
                "have been written since (by an optimizer's step?). Use them before, or apply the model without split."
            )

    # ------------------------------------------------------------ what rules make of it

    def derived(self, hidden: Tensor, node: _Node, operands: tuple[Tensor, ...], dtype: torch.dtype, made: Any) -> Any:
        """Return another deferred tensor on the same head."""
        child = DeferredLogits(
            hidden,
            self._head,
            self._deferral,
            self._chunk_rows,
            dtype=dtype,
            node=node,
            operands=operands,
            made=made,
        )
        child._versions = self._versions
        self._children.add(child)
        return child

    def rows(self) -> Tensor:
        """Return the hidden states as rows."""
        return self.hidden.reshape(-1, self.hidden.shape[-1])


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _cast(hidden: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Cast as autocast would, once and not in each chunk."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return hidden, list(weights)
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), [w.to(dtype) for w in weights]


def _real(x: Any, func: Any) -> Any:
    if isinstance(x, DeferredLogits):
        return x.real(f"{_name(func)} at {_caller()}")
    if isinstance(x, (list, tuple)):
        items = [_real(y, func) for y in cast("list[Any]", x)]
        return type(x)(items) if type(x) in (list, tuple) else x
    if isinstance(x, dict):
        return {k: _real(v, func) for k, v in cast("dict[Any, Any]", x).items()}
    return x


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    return f"Tensor.{owner.__name__}" if name == "__get__" and hasattr(owner, "__name__") else name


def _caller() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/actmem/splitting/" not in path and "/torch/" not in path:
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


# ---------------------------------------------------------------- rules: what can be deferred, by function

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Callable[..., Any], Rule] = {}
METADATA: set[Callable[..., Any]] = {
    Tensor.shape.__get__,
    Tensor.dtype.__get__,
    Tensor.device.__get__,
    Tensor.layout.__get__,
    Tensor.ndim.__get__,
    Tensor.requires_grad.__get__,
    Tensor.is_cuda.__get__,
    Tensor.is_cpu.__get__,
    Tensor.is_meta.__get__,
    Tensor.is_sparse.__get__,
    Tensor.is_quantized.__get__,
    Tensor.is_nested.__get__,
    Tensor.itemsize.__get__,
    Tensor.nbytes.__get__,
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.get_device,
    Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}


def _rule(*funcs: Callable[..., Any]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(funcs, rule))
        return rule

    return register


def _methods(*names: str) -> list[Callable[..., Any]]:
    found = [getattr(owner, name) for name in names for owner in (Tensor, torch) if hasattr(owner, name)]
    return [f for f in found if callable(f)]


@_rule(*_methods("contiguous"))
def _same(func: Any, args: Any, kwargs: Any) -> Any:
    del func
    return args[0] if not args[1:] and not kwargs else NotImplemented


@_rule(*_methods("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"))
def _reshaped(func: Any, args: Any, kwargs: Any) -> Any:
    """Take a view that leaves the rows whole."""
    x: DeferredLogits = args[0]
    if not isinstance(x, DeferredLogits) or any(isinstance(a, torch.dtype) for a in args[1:]):
        return NotImplemented
    classes = x.shape[-1]
    shape = func(_meta(x), *args[1:], **kwargs).shape
    if not shape or shape[-1] != classes or not _keeps_last(func, x, args, kwargs):
        return NotImplemented
    width = x.hidden.shape[-1]
    return _viewed(x, x.hidden.reshape(*shape[:-1], width), partial(_remade, x, func, args[1:], kwargs))


def _keeps_last(func: Any, x: DeferredLogits, args: Any, kwargs: Any) -> bool:
    # A row stays a row if its elements stay next to one another and in order: seen in the strides.
    probe = func(_meta(x), *args[1:], **kwargs)
    return probe.stride()[-1] == 1 and probe.shape[-1] == x.shape[-1]


def _viewed(x: DeferredLogits, hidden: Tensor, made: Callable[[], Tensor]) -> Any:
    if x._operands:  # they would have to be viewed alike: rare
        return NotImplemented
    return x.derived(hidden, x._node, (), x.dtype, made)


def _remade(x: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Tensor:
    return func(x.real(_name(func)), *args, **kwargs)


def _meta(x: DeferredLogits) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


@_rule(Tensor.__getitem__)
def _indexed(func: Any, args: Any, kwargs: Any) -> Any:
    """Take rows."""
    x, index = args
    if not isinstance(x, DeferredLogits):
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, (DeferredLogits, list)) for i in index):
        return NotImplemented
    taken = sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in index if i is not None and i is not Ellipsis)
    if Ellipsis in [i for i in index if not isinstance(i, Tensor)]:
        last = index[-1]
        if last is not Ellipsis:
            if not (isinstance(last, slice) and last == slice(None)):
                return NotImplemented
    elif taken == x.dim():
        if not (isinstance(index[-1], slice) and index[-1] == slice(None)):
            return NotImplemented
    elif taken > x.dim():
        return NotImplemented
    return _viewed(x, x.hidden[index], partial(_remade, x, func, (args[1],), kwargs))


@_rule(*_methods("split", "chunk", "unbind"), Tensor.__iter__)
def _divided(func: Any, args: Any, kwargs: Any) -> Any:
    """Take groups of rows apart."""
    x: DeferredLogits = args[0]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if func in _methods("unbind"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not isinstance(dim, int) or dim % x.dim() == x.dim() - 1 or x._operands:
        return NotImplemented
    if func is Tensor.__iter__:
        return iter([x[i] for i in range(x.shape[0])])
    positional = list(args[1:])
    parts = func(x.hidden, *positional, **({**kwargs, "dim": dim % x.dim()} if "dim" in kwargs else kwargs))
    return tuple(
        _viewed(x, part, partial(_remade, x, _item_of(func, i), args[1:], kwargs)) for i, part in enumerate(parts)
    )


def _item_of(func: Any, i: int) -> Any:
    def item(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(x, *args, **kwargs)[i]

    return item


ELEMENTWISE = _methods(
    "tanh", "exp", "neg", "abs", "float", "double", "half", "bfloat16", "type", "clamp", "clamp_min", "clamp_max",
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rsub", "pow", "square", "negative",
    "detach", "sigmoid", "log", "sqrt", "nan_to_num", "masked_fill", "where",
)  # fmt: skip
ELEMENTWISE += [
    getattr(Tensor, name)
    for name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
                 "__neg__", "__pow__", "to")
]  # fmt: skip
CASTS = {*_methods("float", "double", "half", "bfloat16", "type"), Tensor.to}


@_rule(*ELEMENTWISE)
def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Note an operator that treats every element alike, of logits, numbers and values of the same rows."""
    done = _noted(func, args, kwargs)
    if func in CASTS and isinstance(done, DeferredLogits) and done.dtype == args[0].dtype:
        return args[0]
    return done


@_rule(functional.log_softmax, functional.softmax, *_methods("log_softmax", "softmax"))
def _row_wise(func: Any, args: Any, kwargs: Any) -> Any:
    """Note an operator along the row."""
    x: DeferredLogits = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(x, DeferredLogits) or not isinstance(dim, int) or dim % x.dim() != x.dim() - 1:
        return NotImplemented
    args, kwargs = _dim_last(func, args, kwargs)
    return _noted(func, args, kwargs)


def _dim_last(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    del func
    if "dim" in kwargs:
        return args, {**kwargs, "dim": -1}
    return (args[0], -1, *args[2:]), kwargs


class _Noter:
    """Turns the arguments of a call into nodes, operands and constants; `ok` is False where that cannot be."""

    def __init__(self, first: DeferredLogits) -> None:
        self.first = first
        self.lead = first.hidden.shape[:-1]
        self.operands: list[Tensor] = list(first._operands)
        self.ok = True

    def take(self, x: Any, *, classes: bool = True) -> Any:
        if isinstance(x, DeferredLogits):
            if x.hidden is not self.first.hidden or x._operands != self.first._operands[: len(x._operands)]:
                self.ok = False
            return x._node
        if not isinstance(x, Tensor):
            return x
        if x.dim() == 0 or (classes and x.dim() == 1 and x.shape[0] == self.first.shape[-1]):
            if x.requires_grad and torch.is_grad_enabled():
                self.ok = False
            return x
        return self.row_operand(x)

    def row_operand(self, x: Tensor) -> Any:
        if x.dim() != len(self.lead) + 1 or x.shape[:-1] != self.lead:
            self.ok = False
            return x
        self.operands.append(x)
        return _Operand(x, len(self.operands) - 1)


def _noted(func: Any, args: Any, kwargs: Any) -> Any:
    first = next(x for x in (*args, *kwargs.values()) if isinstance(x, DeferredLogits))
    noter = _Noter(first)
    nodes = tuple(noter.take(x) for x in args)
    named = tuple((k, noter.take(v)) for k, v in kwargs.items())
    if not noter.ok or "inplace" in kwargs or "out" in kwargs:
        return NotImplemented
    node = _Node(func, nodes, named)
    # One row says what comes out.
    with torch.device("meta"):
        probe = _probe(node, first, noter.operands)
    if not isinstance(probe, Tensor) or probe.shape != (1, first.shape[-1]) or probe.device.type != "meta":
        return NotImplemented
    return first.derived(
        first.hidden, node, tuple(noter.operands), probe.dtype, lambda: func(*_real(args, func), **_real(kwargs, func))
    )


def _probe(node: _Node, first: DeferredLogits, operands: Sequence[Tensor]) -> Any:
    logits = torch.empty(1, first.shape[-1], dtype=_base_dtype(first), device="meta")
    beside = [torch.empty(1, *x.shape[len(first.hidden.shape) - 1 :], dtype=x.dtype, device="meta") for x in operands]
    try:
        return node.at(logits, beside, {})
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def _base_dtype(x: DeferredLogits) -> torch.dtype:
    kind = x.hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.hidden.dtype


# ---------------------------------------------------------------- what gives values


@_rule(*_methods("logsumexp", "sum", "mean", "amax", "amin", "argmax", "argmin", "var", "std", "norm"))
def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """Reduce each row to a value."""
    x: DeferredLogits = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or dim % x.dim() != x.dim() - 1:
        return NotImplemented
    args, kwargs = _dim_last(func, args, kwargs)
    return _values(func, x, args, kwargs)


@_rule(*_methods("gather"))
def _gathered(func: Any, args: Any, kwargs: Any) -> Any:
    """Pick given classes of each row."""
    x: DeferredLogits = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(dim, int) or dim % x.dim() != x.dim() - 1:
        return NotImplemented
    args, kwargs = _dim_last(func, args, kwargs)
    return _values(func, x, args, kwargs)


def _values(func: Any, x: DeferredLogits, args: Any, kwargs: Any) -> Any:
    noter = _Noter(x)
    nodes = tuple(noter.take(a, classes=False) for a in args)
    named = tuple((k, noter.take(v, classes=False)) for k, v in kwargs.items())
    if not noter.ok:
        return NotImplemented
    node = _Node(func, nodes, named)

    def formula(logits: Tensor, operands: Sequence[Tensor]) -> Tensor:
        return node.at(logits, operands, {})

    x.check_weights()
    flat = [o.reshape(-1, o.shape[-1]) for o in noter.operands]
    found = row_values(*_ready(x, formula), flat)
    _count(x._deferral.in_chunks, _name(func))
    return found.reshape(*x.hidden.shape[:-1], *found.shape[1:])


def _ready(x: DeferredLogits, formula: Any) -> tuple[Head, Any, int, Tensor]:
    hidden, weights = _cast(x.rows(), x._head.weights)
    return Head(x._head.module, tuple(weights), x._head.is_linear), formula, x._chunk_rows, hidden


@_rule(functional.cross_entropy)
def _cross_entropy(
    func: Any, args: Any, kwargs: Any
) -> Any:
    """Compute the loss in chunks."""
    return _loss(func, args, kwargs, functional.cross_entropy)


@_rule(functional.nll_loss)
def _nll_loss(func: Any, args: Any, kwargs: Any) -> Any:
    return _loss(func, args, kwargs, functional.nll_loss)


def _loss(func: Any, args: Any, kwargs: Any, how: Callable[..., Tensor]) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, target = given["input"], given["target"]
    if (
        not isinstance(x, DeferredLogits)
        or x.dim() != 2
        or target.shape != x.shape[:1]
        or target.dtype != torch.int64
        or given.get("size_average") is not None
        or given.get("reduce") is not None
    ):
        return NotImplemented
    weight, ignored = given.get("weight"), given.get("ignore_index", -100)
    reduction, smoothing = given.get("reduction", "mean"), given.get("label_smoothing", 0.0)
    if isinstance(weight, Tensor) and weight.requires_grad:
        return NotImplemented
    x.check_weights()
    more: dict[str, Any] = {"weight": weight, "ignore_index": ignored}
    if how is functional.cross_entropy:
        more["label_smoothing"] = smoothing
    _count(x._deferral.in_chunks, _name(func))
    node, deferral = x._node, x._deferral
    at_operands = len(x._operands)

    def formula(logits: Tensor, operands: Sequence[Tensor], reduction: str = "sum") -> Tensor:
        return how(node.at(logits, operands, {}), operands[at_operands].reshape(-1), reduction=reduction, **more)

    if how is functional.cross_entropy and _torch_can(x, smoothing):
        return _by_torch(x, target, weight, reduction, ignored)
    operands = [*(o.reshape(-1, o.shape[-1]) for o in x._operands), target.reshape(-1, 1)]
    if reduction == "none":
        return row_values(*_ready(x, partial(formula, reduction="none")), operands)
    if deferral.gradients == "backward":
        total = row_values(*_ready(x, partial(formula, reduction="none")), operands).sum()
    else:
        total = scalar_sum(*_ready(x, formula), operands)
    if reduction == "sum":
        return total
    valid = target != ignored
    share = valid.sum() if weight is None else weight[target.masked_fill(~valid, 0)].mul(valid).sum()
    return total / share.to(total.dtype)


def _torch_can(x: DeferredLogits, smoothing: float) -> bool:
    """Whether torch's own chunked loss does the job: of a plain linear layer, in full precision, without smoothing."""
    full = (torch.float32, torch.float64)
    return (
        x._node is LOGITS
        and x._head.is_linear
        and smoothing == 0.0
        and x.dtype in full
        and x._head.weights[0].dtype == x.hidden.dtype
        and x._deferral.gradients == "forward"
    )


def _by_torch(x: DeferredLogits, target: Tensor, weight: Tensor | None, reduction: str, ignored: int) -> Tensor:
    matrix, *bias = x._head.weights
    return functional.linear_cross_entropy(
        x.rows(),
        matrix,
        target,
        linear_bias=bias[0] if bias else None,
        weight=weight,
        reduction=reduction,
        ignore_index=ignored,
        options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=x._chunk_rows, chunking_method=None),
    )
