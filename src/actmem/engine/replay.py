"""Opening a handle: find what is held, replay what is not.

NOTE [ Lazy, memoised replay ]
A backward step asks for one saved tensor, and only the chain that leads to it is run. Running a node turns its
outputs from *recorded* into *held*: the result stays in the value, the node is released, and with it everything that
only the node could reach. So each node runs at most once, a chain that others will also need is not run again, and a
result lives exactly as long as a handle or a node that was not yet run can reach it.

Replayed operators run below autograd and autocast, under the numerics flags and generator state that were recorded,
and visible to every active dispatch mode: a FLOP counter counts them.

The engine brackets every replay with `enter` and `leave`; code that counts work asks `replaying`. The file does not
import torch, so both sides can use it without knowing each other.

>>> enter()
>>> replaying()
True
>>> leave()
>>> replaying()
False
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from actmem.compilercompat import is_compiled_backward
from actmem.engine.holding_rules import made, needs_private_copy, replay_order, written_in_place
from actmem.engine.values import (
    HANDLES,
    UNCHECKED,
    Boxed,
    Flattened,
    Node,
    Value,
    checksum,
    copied,
    see,
    tensors,
    without_bits,
)
from actmem.error_causes import likely_of_replay
from actmem.errors import FreedStorageError, ReplayError, SelfCheckError, VersionError
from actmem.torchcompat import (
    BackwardCFunction,
    below_autograd,
    current_autograd_node,
    never_compile,
    numerics,
    opened_parameter,
    restore_numerics,
    without_autocast,
)

__all__ = ["asked_by_function", "enter", "leave", "replaying", "unpack"]


@never_compile
def unpack(packed: Any) -> Tensor:
    """Return the tensor that autograd saved, from what `Tape.pack` gave it."""
    if type(packed) not in HANDLES:
        return _unpack_other(packed)
    value, tape = packed.value, packed.tape
    with tape.lock:
        if tape.observation is not None:
            tape.observation.conclude()
            tape.observation = None
        declared = False
        if value.held is None:
            if packed.checksum is not None:
                declared = any(hasattr(node.func, "function") for _, node in replay_order(value, _name))
            _materialise(value)
        elif type(value.held) is Boxed:
            _open(value)
        base: Any = value.held if value.own else _held(value)
        parameter = type(base) is not Tensor and isinstance(base, Parameter)
        # Asked last: torch makes an object for each node asked about, and frees a long chain of them by recursion.
        if needs_private_copy(value, 2, parameter=parameter) and asked_by_function():
            with below_autograd():
                base = copied(base)
        size, stride, offset, dtype, bits = packed.view
        # As `see`, written out for the common case.
        if base.dtype is not dtype or bits:
            with below_autograd():
                tensor = see(base, size, stride, offset, dtype, bits)
        elif base.shape != size or base.stride() != stride or base.storage_offset() != offset:
            with below_autograd():
                tensor = base.as_strided(size, stride, offset)
        else:
            tensor = base
            if parameter and isinstance(base, Parameter):
                opened_parameter(base)
        if packed.checksum is not None:
            if checksum(tensor) != packed.checksum:
                raise SelfCheckError(_mismatch(value, declared, tensor.device))
            packed.checksum = None
        return tensor


def asked_by_function() -> bool:
    """Return whether the running backward step belongs to a Python autograd Function that somebody wrote.

    That of a compiled graph overwrites only what its own forward made for it alone.
    """
    node = current_autograd_node()
    return isinstance(node, BackwardCFunction) and not is_compiled_backward(node)


def _unpack_other(packed: Any) -> Tensor:
    if type(packed) is Boxed:
        return packed.unpack(packed.packed)
    if type(packed) is Flattened:
        inner = {
            n: unpack(x) if isinstance(x, (*HANDLES, Flattened, Boxed, Tensor)) else x for n, x in packed.inner.items()
        }
        kind: Any = packed.kind
        return kind.__tensor_unflatten__(inner, packed.context, packed.size, packed.stride)
    return packed


def _open(value: Value) -> None:
    """Take a value back from the hooks around the tape, for good: some give a value back once only."""
    boxed = value.held
    if type(boxed) is not Boxed:
        return
    if boxed.version is not None and boxed.packed._version != boxed.version:
        value.held, value.version = boxed.packed, boxed.version
        raise VersionError(_changed(value))
    tensor = boxed.unpack(boxed.packed)
    # What comes back must lie at the beginning of its storage, as what was packed did.
    value.held = tensor if tensor.storage_offset() == 0 and tensor.is_contiguous() else tensor.contiguous().clone()


def _held(value: Value) -> Tensor:
    """Return the tensor that holds a value, after checking that its bytes are still those that were recorded."""
    base = value.held
    if value.version == UNCHECKED:
        if value.num_bytes and not value.own and base.untyped_storage().nbytes() < value.num_bytes:
            raise FreedStorageError(_freed(value))  # an inference tensor: it has no version, but it can be freed
        return base
    if base._version != value.version:
        raise VersionError(_changed(value))
    if value.num_bytes and base.layout is torch.strided and base.untyped_storage().nbytes() < value.num_bytes:
        raise FreedStorageError(_freed(value))
    return base


def _materialise(value: Value) -> None:
    """Replay the chain that leads to a value."""
    order = replay_order(value, _name)
    if not order:
        raise ReplayError(
            "a saved value can no longer be replayed: its operator failed in an earlier backward pass. Run the "
            "forward pass again."
        )
    _open_all(order)
    enter()
    try:
        with below_autograd(), without_autocast():
            flags = numerics()  # nobody changes them while nodes run
            while order:
                wanted, node = order.pop()
                if wanted.node is node:  # else an earlier node of this chain made it, as another of its outputs
                    _run(node, wanted, flags)
                del wanted, node  # release at once what nothing else needs
    finally:
        leave()


def _open_all(order: list[tuple[Value, Node]]) -> None:
    """Take back what the hooks around the tape hold, before anything runs: they may run a forward of their own."""
    for _, node in order:
        for ref in node.refs:
            if ref[2] is not None and type(ref[2].held) is Boxed:
                _open(ref[2])


def _run(node: Node, wanted: Value, flags: tuple[Any, ...]) -> None:
    """Run one recorded operator, and leave the results in the values that can still be reached.

    Args:
        node: the call.
        wanted: one of its results, which somebody asked for.
        flags: the numerics flags that are in force.
    """
    args = list(node.args)
    kwargs = dict(node.kwargs) if node.kwargs else None
    writes = node.writes
    # The call must write and read each written tensor in one place: the tensors of a call may share a storage.
    copies = _writable(node) if writes is not None else None
    i: Any
    j: Any
    view: Any
    for i, j, value, view in node.refs:
        if value is None:
            continue
        if copies is None or id(value) not in copies:
            base = value.held if value.own else _held(value)
        else:
            base = copies[id(value)]
        # As `see`, written out for the common case.
        if view is None:
            tensor = base
        else:
            size, stride, offset, dtype, bits = view
            if base.dtype is not dtype or bits:
                tensor = see(base, size, stride, offset, dtype, bits)
            elif base.shape == size and base.stride() == stride and base.storage_offset() == offset:
                tensor = base
            else:
                tensor = base.as_strided(size, stride, offset)
        if j < 0 and type(i) is int:
            args[i] = tensor
        else:
            _place(args, kwargs, i, j, tensor)
    base = tensor = value = copies = None
    if writes is not None:
        for i, j, num_bytes, device in writes:
            if num_bytes >= 0:
                view = next(r[3] for r in node.refs if r[0] == i and r[1] == j)
                fresh = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                _place(args, kwargs, i, j, see(fresh, *view))
        fresh = None
    if node.state is None and (node.flags is None or node.flags == flags):
        out = node.func(*args, **kwargs) if kwargs else node.func(*args)
    else:
        out = _call(node, args, kwargs, flags)
    if node.outs is None:
        if type(out) is not Tensor:
            out = next(iter(tensors(out)))
        made(wanted, without_bits(out) if out.is_conj() or out.is_neg() else out)
        return
    results = dict(enumerate(tensors(out)))
    if writes is not None:
        for k, (i, j, _, _) in enumerate(writes):
            results[-1 - k] = _placed(args, kwargs, i, j)
    for slot, reference in node.outs:
        value = reference()
        if value is not None and value.node is node:
            made(value, without_bits(results[slot]))


def _call(node: Node, args: list[Any], kwargs: dict[str, Any] | None, flags: tuple[Any, ...]) -> Any:
    if node.flags is not None and node.flags != flags:
        restore_numerics(node.flags)
        try:
            return _draw(node, args, kwargs)
        finally:
            restore_numerics(flags)
    return _draw(node, args, kwargs)


def _draw(node: Node, args: list[Any], kwargs: dict[str, Any] | None) -> Any:
    if node.state is None:
        return node.func(*args, **kwargs) if kwargs else node.func(*args)
    generator, state = node.state
    now = generator.get_state()
    generator.set_state(state)
    try:
        return node.func(*args, **kwargs) if kwargs else node.func(*args)
    finally:
        generator.set_state(now)


def _writable(node: Node) -> dict[int, Any]:
    """Return, for each value that a call writes, bytes that may be written: its own, if nothing else will read them."""
    in_place = written_in_place(node)
    copies: dict[int, Any] = {}
    for ref in node.refs:
        value: Value | None = ref[2]
        if value is not None and id(value) in in_place and id(value) not in copies:
            copies[id(value)] = _held(value) if in_place[id(value)] else copied(_held(value))
    return copies


def _place(args: list[Any], kwargs: dict[str, Any] | None, i: Any, j: int, tensor: Tensor) -> None:
    where: Any = args if type(i) is int else kwargs
    if j < 0:
        where[i] = tensor
        return
    if not isinstance(where[i], _Own):
        where[i] = _Own(where[i])
    where[i][j] = tensor


def _placed(args: list[Any], kwargs: dict[str, Any] | None, i: Any, j: int) -> Tensor:
    where: Any = args if type(i) is int else kwargs
    return where[i] if j < 0 else where[i][j]


class _Own(list[Any]):
    """A list argument that was copied for this call: the recorded one stays unchanged."""


# -------------------------------------------------------------------- errors


def _name(value: Value) -> str:
    if value.row is not None:
        return str(value.row)
    if isinstance(value.held, Tensor):
        kind = "parameter" if isinstance(value.held, Parameter) else "tensor"
        return f"a {kind} of shape {tuple(value.held.shape)} and dtype {str(value.held.dtype).removeprefix('torch.')}"
    return "a value"


def _changed(value: Value) -> str:
    return (
        f"{_name(value)} was changed in place after the forward pass that needs it for backward: it is at version "
        f"{value.held._version}, expected version {value.version}. Gradients would be wrong. Move the in-place "
        "change (an optimizer step, "
        "`x.mul_(...)`, a later in-place residual) behind the backward pass, or make it out of place."
    )


def _freed(value: Value) -> str:
    return (
        f"{_name(value)} has no memory when a replay needs it: it was freed or resharded after the forward pass "
        "(FSDP or ZeRO-3 around a part of the "
        "block, or a program that resizes the storage of an activation). Shard whole blocks, or apply actmem to "
        "blocks that lie inside the sharded unit; free activations after backward."
    )


def _mismatch(value: Value, declared: bool, device: torch.device) -> str:
    likely = likely_of_replay(device.type, declared=declared)
    return f"replaying {_name(value)} did not give the bits of the forward pass. {likely}"


class _Depth(threading.local):
    value: int = 0  # a class attribute: every thread starts from it without running an initialiser


_depth = _Depth()


def replaying() -> bool:
    """Return whether the operators that this thread runs are replays."""
    return _depth.value > 0


def enter() -> None:
    """Begin a replay in this thread. Replays nest; call `leave` in a `finally`."""
    _depth.value += 1


def leave() -> None:
    """End the innermost replay of this thread."""
    _depth.value -= 1
