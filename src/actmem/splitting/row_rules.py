"""What torch's functions do to deferred logits: views of whole rows, operators on rows, and what gives values.

See NOTE [ Logits in chunks ]. Every rule returns NotImplemented where it cannot help; the tensor is then made real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from actmem.distributedcompat import is_loss_parallel
from actmem.errors import UnsupportedError
from actmem.splitting.class_shards import as_plain
from actmem.splitting.deferred_logits import (
    LOGITS,
    METADATA,
    RULES,
    DeferredLogits,
    DividedLogits,
    Operand,
    RowNode,
    count,
    name_of,
    real_values,
)
from actmem.splitting.row_chunks import row_values, scalar_sum

__all__: list[str] = []

Func = Callable[..., Any]
Rule = Callable[[Func, tuple[Any, ...], dict[str, Any]], Any]


def _named(names: str) -> list[Func]:
    """Return the functions and methods of these names."""
    return [f for name in names.split() for owner in (Tensor, torch) if callable(f := getattr(owner, name, None))]


def _rule(*funcs: Func) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(funcs, rule))
        return rule

    return register


_PROPERTIES = "shape dtype device layout ndim requires_grad itemsize nbytes _base"
_KINDS = "is_cuda is_cpu is_meta is_sparse is_quantized is_nested"
_MEASURES = "size dim ndimension numel nelement element_size is_floating_point is_complex __len__"
METADATA.update(getattr(Tensor, name).__get__ for name in f"{_PROPERTIES} {_KINDS}".split())
METADATA.update({*_named(_MEASURES), Tensor.get_device})


# ---------------------------------------------------------------- views


@_rule(Tensor.contiguous)
def _same(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func
    return args[0] if len(args) == 1 and not kwargs else NotImplemented


@_rule(*_named("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as"))
def _reshaped(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, DeferredLogits) or any(isinstance(a, (torch.dtype, DeferredLogits)) for a in args[1:]):
        return NotImplemented
    shape = func(torch.empty(x.shape, device="meta"), *args[1:], **kwargs).shape
    if shape[-1:] != x.shape[-1:]:  # the elements stay in order, so equal rows are the same rows
        return NotImplemented
    return _view(x, x.hidden.reshape(*shape[:-1], x.hidden.shape[-1]), func, args[1:], kwargs)


@_rule(Tensor.__getitem__)
def _indexed(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index = args[0], cast("tuple[Any, ...]", args[1] if isinstance(args[1], tuple) else (args[1],))
    if not isinstance(x, DeferredLogits) or any(isinstance(i, (DeferredLogits, list)) for i in index):
        return NotImplemented
    taken = _num_taken(index)
    ends = any(i is Ellipsis for i in index) and index[-1] is not Ellipsis
    if (taken >= x.dim() or ends) and not (isinstance(index[-1], slice) and index[-1] == slice(None)):
        return NotImplemented  # classes are taken, not rows
    return _view(x, x.hidden[index], func, args[1:], kwargs)


def _num_taken(index: tuple[Any, ...]) -> int:
    """Return how many dimensions an index is about."""
    about = [i for i in index if i is not None and i is not Ellipsis]
    return sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in about)


@_rule(*_named("split chunk unbind"), Tensor.__iter__)
def _divided(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    if not isinstance(x, DeferredLogits):
        return NotImplemented
    if func is Tensor.__iter__:
        return iter([x[i] for i in range(x.shape[0])])
    place = 0 if func in _named("unbind") else 1
    dim = kwargs.get("dim", rest[place] if len(rest) > place else 0)
    if dim % x.dim() == x.dim() - 1:
        return NotImplemented
    at_front = {k: v for k, v in kwargs.items() if k != "dim"}
    parts = func(x.hidden, *rest[:place], dim=dim % x.dim(), **at_front)
    return tuple(_view(x, part, partial(_part_of, func, i), tuple(rest), kwargs) for i, part in enumerate(parts))


def _part_of(func: Func, index: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return func(x, *args, **kwargs)[index]


def _view(x: DeferredLogits, hidden: Tensor, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if x.operands:  # they would have to be viewed alike
        return NotImplemented
    return x.derived(lambda: func(x.whole(name_of(func)), *args, **kwargs), hidden=hidden)


@_rule(*_named("register_hook"))
def _hooked(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func
    x, hook = args[0], args[1] if len(args) == 2 else kwargs.get("hook")
    if not getattr(hook, "__qualname__", "").startswith("FSDPState."):
        return NotImplemented
    handle = RemovableHandle(x.hooks)
    x.hooks[handle.id] = hook
    return handle


# ---------------------------------------------------------------- operators on rows

CASTS = {*_named("float double half bfloat16 type"), Tensor.to}
_OF_ONE = "tanh exp log neg abs sigmoid square sqrt clamp clamp_min clamp_max nan_to_num detach"
_OF_TWO = "add sub subtract mul multiply div divide true_divide rsub pow masked_fill"
_SIGNS = "add radd sub rsub mul rmul truediv rtruediv neg pow"
ELEMENTWISE = {*CASTS, *_named(f"{_OF_ONE} {_OF_TWO}"), *(getattr(Tensor, f"__{sign}__") for sign in _SIGNS.split())}


@_rule(*ELEMENTWISE)
def _elementwise(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    noted = _noted(func, args, kwargs)
    is_cast = func in CASTS and isinstance(noted, DeferredLogits)
    return args[0] if is_cast and noted.dtype == args[0].dtype else noted


@_rule(functional.log_softmax, functional.softmax, *_named("log_softmax softmax"))
def _along_rows(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    along = _with_last(args, kwargs)
    return NotImplemented if along is None else _noted(func, *along)


def _with_last(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with `dim` as -1, if it is the dimension of the classes."""
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(dim, (tuple, list)):
        dims = cast("Sequence[Any]", dim)
        dim = dims[0] if len(dims) == 1 else None
    if not isinstance(x, DeferredLogits) or type(dim) is not int or dim % x.dim() != x.dim() - 1:
        return None
    return (args, {**kwargs, "dim": -1}) if "dim" in kwargs else ((x, -1, *args[2:]), kwargs)


class _Notes:
    """A call, written down for a chunk: deferred arguments as nodes, tensors with a row for each token as operands."""

    def __init__(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.first = next(x for x in (*args, *kwargs.values()) if isinstance(x, DeferredLogits))
        self.operands = list(self.first.operands)
        self.can_be = "out" not in kwargs
        self.node = RowNode(func, tuple(map(self._take, args)), tuple((k, self._take(v)) for k, v in kwargs.items()))

    def _take(self, x: Any) -> Any:
        if isinstance(x, DeferredLogits):
            shared = x.operands == self.first.operands[: len(x.operands)] if x.operands else True
            self.can_be &= x.hidden is self.first.hidden and shared
            return x.node
        if not isinstance(x, Tensor):
            return x
        if x.dim() == 0:
            self.can_be &= not x.requires_grad
            return x
        lead = self.first.hidden.shape[:-1]
        self.can_be &= x.dim() == len(lead) + 1 and x.shape[:-1] == lead
        self.operands.append(x)
        return Operand(len(self.operands) - 1)

    def probe(self) -> Any:
        """Return what comes out for one row, without values; None if the call fails."""
        first = self.first
        kind = first.hidden.device.type
        cast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if cast else first.hidden.dtype
        logits = torch.empty(1, first.shape[-1], dtype=dtype, device="meta")
        beside = [torch.empty(1, x.shape[-1], dtype=x.dtype, device="meta") for x in self.operands]
        try:
            return self.node.at(logits, beside, {})
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None


def _noted(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note an operator whose result has a row of the same length for each row."""
    notes = _Notes(func, args, kwargs)
    if not notes.can_be or (notes.operands and isinstance(notes.first, DividedLogits)):
        return NotImplemented  # DTensors go with no plain tensors
    one = notes.probe()
    if not isinstance(one, Tensor) or one.shape != (1, notes.first.shape[-1]) or not one.is_meta:
        return NotImplemented
    return notes.first.derived(
        lambda: func(*real_values(args, func), **real_values(kwargs, func)),
        node=notes.node,
        operands=tuple(notes.operands),
        dtype=one.dtype,
    )


# ---------------------------------------------------------------- values


@_rule(*_named("logsumexp sum mean amax amin argmax argmin gather"))
def _reduced(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a value, or a few, for each row."""
    along = _with_last(args, kwargs)
    notes = None if along is None else _Notes(func, *along)
    if notes is None or not notes.can_be or isinstance(notes.first, DividedLogits):
        return NotImplemented  # how torch would divide the values of a DTensor is not known
    x, node, head = notes.first, notes.node, notes.first.head
    x.check_weights()
    count(x.deferral.in_chunks, name_of(func))
    found = row_values(
        x.head,
        lambda logits, operands: node.at(head.rows(logits), operands, {}),
        x.chunk_rows,
        _rows(x.hidden),
        [_rows(o) for o in notes.operands],
    )
    return x.with_hooks(found.reshape(*x.hidden.shape[:-1], *found.shape[1:]))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


_LOSS_ARGUMENTS = "input target weight size_average ignore_index reduce reduction label_smoothing"


@_rule(functional.cross_entropy, functional.nll_loss)
def _loss(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(_LOSS_ARGUMENTS.split(), args, strict=False)) | kwargs
    x, target, weight = given["input"], given["target"], given.get("weight")
    if (
        not isinstance(x, DeferredLogits)
        or x.dim() != 2
        or target.shape != x.shape[:1]
        or target.dtype != torch.int64
        or given.get("size_average") is not None
        or given.get("reduce") is not None
        or (isinstance(weight, Tensor) and weight.requires_grad)
    ):
        return NotImplemented
    x.check_weights()
    count(x.deferral.in_chunks, name_of(func))
    found = _loss_in_chunks(func, x, target, weight, given)
    return x.with_hooks(found if x.head.shards is None else x.head.shards.value(found))


def _loss_in_chunks(
    func: Func, x: DeferredLogits, target: Tensor, weight: Tensor | None, given: dict[str, Any]
) -> Tensor:
    ignored, reduction = given.get("ignore_index", -100), given.get("reduction", "mean")
    smoothing = given.get("label_smoothing", 0.0)
    exact = x.deferral.exact
    if exact and (weight is not None or smoothing != 0.0):
        raise UnsupportedError(
            f"exact = True: {name_of(func)} with class weights or label smoothing adds up its rows in an order that "
            "cannot be kept in chunks. Leave exact=True out of the Split."
        )
    by_class = isinstance(x, DividedLogits) and is_loss_parallel()
    if smoothing != 0.0 and by_class:
        raise UnsupportedError(
            f"label_smoothing = {smoothing} is not permitted under torch's loss_parallel(), which computes no gradient "
            "for it. Omit it, or have the logits gathered, in chunks: ColwiseParallel(output_layouts=Replicate()) for "
            "the head, and no loss_parallel()."
        )
    in_forward = x.deferral.gradients == "forward" and not exact
    if in_forward and func is functional.cross_entropy and smoothing == 0.0 and _torch_can(x):
        return _by_torch(x, target, weight, reduction, ignored)
    more = {"label_smoothing": smoothing} if func is functional.cross_entropy else {}
    node, head = x.node, x.head
    dtypes: list[torch.dtype] = []  # autocast decides

    def each(logits: Tensor, operands: Sequence[Tensor]) -> Tensor:
        *beside, chosen = operands
        rows = node.at(head.rows(logits), beside, {})
        values = as_plain(func(rows, chosen.reshape(-1), weight=weight, ignore_index=ignored, reduction="none", **more))
        dtypes.append(values.dtype)
        return values

    operands = [*map(_rows, x.operands), target.reshape(-1, 1)]
    if reduction == "none":
        return row_values(x.head, each, x.chunk_rows, x.hidden, operands)
    if not in_forward:
        values = row_values(x.head, each, x.chunk_rows, x.hidden, operands)
        if weight is None and not by_class:  # torch's own sum over rows: in its order
            chosen = torch.where(as_plain(target) != ignored, 0, -100)
            return functional.nll_loss(-values.unsqueeze(1), chosen, ignore_index=-100, reduction=reduction)
        found = values.sum(dtype=values.dtype if exact else torch.promote_types(values.dtype, torch.float32))
    else:
        found = scalar_sum(x.head, each, x.chunk_rows, x.hidden, operands)
    if reduction == "mean":
        target, weight = as_plain(target), as_plain(weight)
        valid = target != ignored
        count_of = valid.sum() if weight is None else (weight[target.where(valid, 0)] * valid).sum()
        found = found / count_of.to(found.dtype)
    return found.to(dtypes[0])


def _torch_can(x: DeferredLogits) -> bool:
    """Whether torch's own chunked loss does the job: for a plain linear layer, in full precision."""
    if x.node is not LOGITS or not x.head.is_linear or x.head.shards is not None:
        return False
    return x.dtype in (torch.float32, torch.float64) and x.head.weights[0].dtype == x.hidden.dtype == x.dtype


def _by_torch(x: DeferredLogits, target: Tensor, weight: Tensor | None, reduction: str, ignored: int) -> Tensor:
    matrix, *bias = x.head.weights
    return functional.linear_cross_entropy(
        x.hidden,
        matrix,
        target,
        linear_bias=bias[0] if bias else None,
        weight=weight,
        reduction=reduction,
        ignore_index=ignored,
        options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=x.chunk_rows, chunking_method=None),
    )
