"""The tape's nouns: values, nodes, references, and how a tensor is seen through them.

NOTE [ Values ]
The unit of the tape is not a tensor but a *value*: one storage, in one version. A view costs nothing: it is a value
and a geometry. An operator that writes in place makes a new value on the same storage. Values and nodes form a graph
that points only backwards (a value to the node that made it, a node to the values it read), so that reference counts
alone decide how long anything lives: a value lives as long as a handle that autograd holds, or a node that may still
be replayed, can reach it. There are no cycles, no registry and nothing to reset.

A value is in one of four states:

    held           `held` is a tensor on the right bytes: an input, something kept, or something replayed already
    recorded       `node` can make it again
    kept           neither, `why` is in `KEPT`: the plan or the smallest cut wants replays to start here
    given          neither, any other `why`: never replayed
The last two become held when something that autograd saves cannot do without them (NOTE [ Barriers ]).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Generator, Tensor

from actmem.decisions import Reason
from actmem.engine.coverage import Coverage
from actmem.torchcompat import FakeTensor, storage_key

__all__ = [
    "HANDLES",
    "Again",
    "Boxed",
    "Flattened",
    "Geometry",
    "Handle",
    "Node",
    "Value",
    "checksum",
    "copied",
    "flat",
    "forget_geometries",
    "geometry",
    "has_bytes",
    "put_together",
    "see",
    "shared_geometry",
    "storages_of",
    "take_apart",
    "tensors",
    "without_bits",
]

Geometry = tuple[Any, Any, Any, torch.dtype, int]
"""Size, stride, storage offset, dtype, and the conj (1) and neg (2) bits."""

KEPT = (Reason.SAVED, Reason.OFFLOADED, Reason.CUT)
"""Why a value is kept: the plan says so, or the smallest cut does."""

UNCHECKED = -1
"""The version of a value whose bytes nobody else can write."""


class Boxed:
    """A held value that an outer saved-tensor hook packed, as `save_on_cpu` does."""

    __slots__ = ("packed", "unpack", "version")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack
        self.version: int | None = None
        """The version of `packed`, where the hook gave back the same bytes that it was given: others may write them."""


class Value:
    """One storage in one version. See NOTE [ Values ].

    A value is made for nearly every operator. What most values never have is on the class, and costs them nothing.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "debts",
        "held",
        "node",
        "num_bytes",
        "order",
        "own",
        "saved",
        "slot",
        "storage",
        "version",
        "why",
    )

    tensor: weakref.ref[torch.Tensor] | None = None
    """For given values: the tensor that the program holds, as long as it lives and was not written."""
    reserved: bool = False
    """`tensor` is kept alive until the forward is over."""
    coverage: Coverage | None = None
    """For values born uninitialised: what was written since."""
    pending: Node | None = None
    """For the same: the node that makes this version, for when nothing is left uninitialised."""
    row: Any = None
    """What the report knows of this value, if this step is observed."""

    def __init__(self, storage: weakref.ref[Any], node: Node | None, slot: int, why: Reason | None) -> None:
        self.storage = storage
        """Which storage this is: a weak reference, because a pointer alone may be used again by the allocator."""
        self.node = node
        self.slot = slot
        """Which output of the node: 0, 1, ... what it returned; -1, -2, ... what it wrote."""
        self.why = why
        self.held: Any = None
        self.order = -1
        """When it was first held, in the order of all values; -1 if it never was."""
        self.num_bytes = 0
        """Of its storage, for what no node makes."""
        self.version = UNCHECKED
        self.own = False
        """`held` was made by a replay: nobody outside the tape can see it."""
        self.debts: tuple[Value, ...] | None = None
        """Given values that a replay would need and that nobody held when this was recorded."""
        self.saved = False
        """Autograd saved it."""

    def written_unseen(self, tensor: torch.Tensor) -> bool:
        """Return whether unseen code wrote what a node made: an operator's result is born at version 0."""
        return self.slot >= 0 and not tensor.is_inference() and tensor._version != 0


class Node:
    """One recorded operator call: what is needed to run it again."""

    __slots__ = ("__weakref__", "args", "flags", "func", "kwargs", "outs", "refs", "state", "writes")

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None, refs: list[tuple[Any, ...]]
    ) -> None:
        self.func = func
        self.args = args
        """The arguments, with None in place of each tensor."""
        self.kwargs = kwargs
        self.refs = refs
        """A tuple for each tensor argument: (position or name, position in a list or -1, value, geometry). The last is
        None for tensors that are read as the objects they are."""
        self.writes: list[tuple[int | str, int, int, torch.device]] | None = None
        """A tuple for each written argument: (position or name, position in a list or -1, bytes to allocate or -1,
        device)."""
        self.outs: list[tuple[int, weakref.ref[Value]]] | None = None
        """Slot and value of each output, where there are several. The only arrows that point forwards, hence weak."""
        self.state: tuple[torch.Generator, torch.Tensor] | None = None
        """The generator and its state before the call, for random operators."""
        self.flags: tuple[Any, ...] | None = None
        """The numerics flags that were in force."""

    @property
    def parents(self) -> tuple[Any, ...]:
        """The rows of the values that a replay reads, where the step is observed."""
        return tuple(ref[2].row for ref in self.refs if ref[2] is not None and ref[2].row is not None)

    def overwrite(self, writes: list[tuple[int | str, int, torch.Tensor, bool]]) -> None:
        """Note what the call writes. Where it overwrites all of a storage, the old version is not needed."""
        self.writes = [] if writes else None
        for i, j, t, whole in writes:
            assert self.writes is not None
            self.writes.append((i, j, t.untyped_storage().nbytes() if whole else -1, t.device))
            if whole:
                self.refs = [(*r[:2], None, r[3]) if r[0] == i and r[1] == j else r for r in self.refs]


class Handle:
    """What autograd holds instead of a saved tensor: a value, and how to view it."""

    __slots__ = ("__weakref__", "checksum", "tape", "value", "view")

    def __init__(self, tape: Any, value: Value, view: Geometry) -> None:
        self.tape = tape
        self.value = value
        self.view = view
        self.checksum: int | None = None


HANDLES: set[type] = {Handle}
"""The classes of handles: this one, and that of the native core where it is used."""


class Flattened:
    """A saved wrapper subclass (DTensor, nested tensor): its inner tensors packed one by one."""

    __slots__ = ("context", "inner", "kind", "size", "stride")

    def __init__(self, kind: type, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> None:
        self.kind, self.inner, self.context, self.size, self.stride = kind, inner, context, size, stride


def _count_of_a_local() -> int:
    value = object()
    return sys.getrefcount(value)


if _count_of_a_local() != 2:  # pragma: no cover - depends on the interpreter
    # Whether anything else can reach a value is asked of its reference count. Some interpreters do not count local
    # names.
    raise ImportError(
        f"this Python ({sys.version.split()[0]}) does not count references as actmem's tape expects, and gradients "
        "could be wrong. Use CPython 3.11, 3.12 or 3.13."
    )


def without_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the same storage and version counter that shows the raw bytes."""
    if tensor.is_conj():
        tensor = torch.ops.aten._conj(tensor)
    return torch.ops.aten._neg_view(tensor) if tensor.is_neg() else tensor


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage as one dimension, or the tensor itself if that is the same.

    >>> flat(torch.arange(6).view(2, 3)[:, 1]).shape
    torch.Size([6])
    """
    num_bytes, itemsize = tensor.untyped_storage().nbytes(), tensor.element_size()
    if tensor.numel() * itemsize == num_bytes and tensor.is_contiguous():
        return tensor
    if num_bytes % itemsize == 0:
        return tensor.as_strided((num_bytes // itemsize,), (1,), 0)
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), 0, (num_bytes,), (1,))


def copied(base: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out like `base` on a copy of its whole storage. Dispatch modes see the copy being made."""
    storage = flat(base).clone().untyped_storage()
    copy = torch.empty(0, dtype=base.dtype, device=base.device)
    return copy.set_(storage, base.storage_offset(), base.size(), base.stride())


def geometry(tensor: torch.Tensor) -> Geometry:
    """Return the geometry of `tensor` on its storage."""
    return shared_geometry(tensor, tensor.is_conj() | tensor.is_neg() << 1)


def shared_geometry(tensor: torch.Tensor, bits: int) -> Geometry:
    """Return the geometry of `tensor`, whose conj and neg bits are known, as one object for all that have the same.

    A step has a few dozen, and refers to each of them thousands of times.
    """
    found = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, bits)
    try:
        return _GEOMETRIES.setdefault(found, found)
    except TypeError:  # a size that is not a number yet, where a program is traced for all sizes
        return found


def forget_geometries() -> None:
    """Forget the geometries that were met, if they are many: a program may meet new sizes in every step."""
    if len(_GEOMETRIES) > _MAX_GEOMETRIES:
        _GEOMETRIES.clear()


_GEOMETRIES: dict[Geometry, Geometry] = {}
_MAX_GEOMETRIES = 4096


def see(base: torch.Tensor, size: Any, stride: Any, offset: Any, dtype: Any, bits: Any) -> torch.Tensor:
    """Return the tensor of the given geometry on the storage of `base`.

    Runs below autograd. `base` itself has neither bit set.

    >>> x = torch.arange(6.0)
    >>> see(x, (2, 2), (3, 1), 1, torch.float32, 0)
    tensor([[1., 2.],
            [4., 5.]])
    """
    if base.dtype is dtype:
        if base.shape == size and base.stride() == stride and base.storage_offset() == offset:
            tensor = base
        else:
            tensor = base.as_strided(size, stride, offset)
    else:
        tensor = torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)
    if bits:
        if bits & 1:
            tensor = torch.ops.aten._conj(tensor)
        if bits & 2:
            tensor = torch.ops.aten._neg_view(tensor)
    return tensor


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_bytes(tensor: torch.Tensor) -> bool:
    """Return whether there is anything to sum: a fake or meta tensor has a shape only."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def checksum(tensor: torch.Tensor) -> int:
    """Return a number that almost surely changes when any bit of `tensor` does.

    It costs one pass over the tensor and no copy.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> checksum(x) == checksum(x.clone()), checksum(x) == checksum(x + 1e-6)
    (True, False)
    """
    with torch.no_grad():
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.dtype is not torch.bool:
            tensor = tensor.view(_INTEGERS[tensor.element_size()])
        total = tensor.sum(dtype=torch.int64)
        # The second sum detects a swap of two halves, which the first one does not.
        halved = next((d for d, n in enumerate(tensor.shape) if n > 1), None)
        if halved is None:
            return int(total)
        part = tensor.narrow(halved, 0, (tensor.size(halved) + 1) // 2).sum(dtype=torch.int64)
        return hash((int(total), int(part)))


def take_apart(x: Any, leaves: list[Any]) -> Any:
    """Append the leaves of nested lists, tuples and dicts, and return what `put_together` needs. Makes no cycles."""
    kind = cast("Any", type(x))
    if kind is list or kind is tuple:
        return kind, [take_apart(y, leaves) for y in x]
    if kind is dict:
        return list(x), [take_apart(y, leaves) for y in x.values()]
    leaves.append(x)
    return None


def put_together(spec: Any, leaves: Iterator[Any]) -> Any:
    """Undo `take_apart`.

    >>> leaves = []
    >>> spec = take_apart({"a": [1, (2, 3)]}, leaves)
    >>> leaves, put_together(spec, iter(leaves))
    ([1, 2, 3], {'a': [1, (2, 3)]})
    """
    if spec is None:
        return next(leaves)
    kind, parts = spec
    items = [put_together(part, leaves) for part in parts]
    if kind is list:
        return items
    return tuple(items) if kind is tuple else dict(zip(kind, items, strict=True))


def tensors(*items: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples, dicts and dataclasses, in order.

    >>> import torch
    >>> [t.item() for t in tensors([torch.tensor(1), {"a": torch.tensor(2)}], 3, (torch.tensor(4),))]
    [1, 2, 4]
    """
    x: Any
    for x in items:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors(*x)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(x, dict):
            yield from tensors(*x.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            yield from tensors(*(getattr(x, field.name) for field in dataclasses.fields(x)))


class Again:
    """Call a declared function again, from its arguments as a flat list, with generators and autocast as they were."""

    def __init__(
        self,
        function: Any,
        spec: Any,
        states: list[tuple[Generator, Tensor]],
        autocasts: tuple[tuple[str, torch.dtype], ...] = (),
    ) -> None:
        self.function, self.spec, self.states, self.autocasts = function, spec, states, autocasts

    def __call__(self, *leaves: Any) -> Any:
        """Call it, and leave the generators in their present state."""
        now = [(g, g.get_state()) for g, _ in self.states]
        for g, state in self.states:
            g.set_state(state)
        try:
            args, kwargs = put_together(self.spec, iter(leaves))
            with contextlib.ExitStack() as casting:
                for device, dtype in self.autocasts:
                    casting.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
                return self.function(*args, **kwargs)
        finally:
            for g, state in now:
                g.set_state(state)


def storages_of(items: list[Tensor]) -> set[int]:
    """Return the identities of the tensors' storages."""
    found: set[int] = set()
    for t in items:
        try:
            found.add(storage_key(t.untyped_storage()))
        except (NotImplementedError, RuntimeError, ValueError):  # sparse, a wrapper without bytes of its own, or lazy
            continue
    return found
