"""The tape whose hot path is the native core. See NOTE [ The native core ] in `native/core.cpp`."""

# pyright: reportPrivateUsage=false
# The core is a part of the tape, and is given what is its own.

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from actmem.decisions import Decision, Reason
from actmem.engine import barriers, holdings, replay
from actmem.engine.operators import describe
from actmem.engine.tape import Tape
from actmem.engine.values import HANDLES, copied, without_bits
from actmem.torchcompat import numerics, opened_parameter

__all__ = ["native_tape_class"]


def _described(func: Any) -> tuple[Any, ...]:
    o = describe(func)
    dropout = o.dropout[0] if o.calm and o.dropout is not None else -1
    return o, bool(o.view), o.view == 2, o.plain, o.may_alias, bool(o.fills_saved), o.numerics, o.in_place, dropout


def _run(node: Any, wanted: Any) -> None:
    replay._run(node, wanted, numerics())


def _settle(tape: Any, value: Any, num_bytes: int, tensor: Any) -> None:
    barriers.settle(value, num_bytes, tape._hold_owed, tensor, holdings.find, tape._free)


@functools.cache
def native_tape_class(core: ModuleType) -> type[Tape]:
    """Return the class of tapes that a loaded core records for."""
    given: dict[str, Any] = {
        "describe": _described,
        "meet": Tape._meet,
        "hold": Tape._hold_owed,
        "hold_in_handler": Tape._hold_owed_in_handler,
        "pack": Tape.pack,
        "settle": _settle,
        "note_holder": holdings._note_holder,
        "is_trainable": Tape._is_trainable,
        "unpack": replay.unpack,
        "run": _run,
        "enter": replay.enter,
        "leave": replay.leave,
        "held": replay._held,
        "asked_by_function": replay.asked_by_function,
        "opened_parameter": opened_parameter,
        "without_bits": without_bits,
        "numerics": numerics,
        "copied": copied,
        "Parameter": torch.nn.Parameter,
        "nothing": lambda: None,
        **{d.name: d for d in (Decision.RECOMPUTE, Decision.SAVE)},
        **{r.name: r for r in (Reason.SAVED, Reason.OFFLOADED, Reason.CUT, Reason.EXTERNAL)},
        **{r.name: r for r in (Reason.BARRIER, Reason.UNSEEN)},
    }
    core.configure(given)
    HANDLES.add(core.Handle)

    class NativeTape(core.Tape, Tape):
        unpack = staticmethod(core.unpack)

    return NativeTape
