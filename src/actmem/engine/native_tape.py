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
from actmem.engine.tape import HANDLES, Tape
from actmem.engine.values import copied, without_bits
from actmem.torchcompat import numerics, opened_parameter

__all__ = ["native_tape_class"]


def _described(func: Any) -> tuple[Any, ...]:
    o = describe(func)
    repeatable = not (o.view or o.composite or o.call is not o.func or o.again is not o.func or o.never)
    repeatable = repeatable and not (o.accumulate or o.transfers or o.on_accelerator)
    special = o.overwritten or o.fills_saved or o.training or o.statistics
    in_place = repeatable and not (o.random or special or o.fresh) and o.writes == ((0, "self"),)
    dropout = o.dropout[0] if repeatable and o.random and o.dropout is not None and not (o.writes or special) else -1
    flags = o.plain, o.may_alias, bool(o.fills_saved), o.numerics, in_place
    return o, bool(o.view), o.view == 2, *flags, dropout


def _settle(tape: Any, value: Any, num_bytes: int, tensor: Any) -> None:
    barriers.settle(value, num_bytes, tape._hold_owed, tensor, holdings.find, tape._free)


def _decide(tape: Any, operator: Any, out: Any) -> Any:
    return tape._verdicts.decide(operator, tape.address, tape._counts, out)


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
        "decide": _decide,
        "note_holder": holdings._note_holder,
        "Holders": holdings._Holders,
        "is_trainable": Tape._is_trainable,
        "unpack": replay.unpack,
        "run": replay._run,
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
        **{r.name: r for r in (Reason.SAVED, Reason.OFFLOADED, Reason.CUT, Reason.EXTERNAL, Reason.UNSEEN)},
    }
    core.configure(given)
    HANDLES.add(core.Handle)

    class NativeTape(core.Tape, Tape):
        unpack = staticmethod(core.unpack)

    return NativeTape
