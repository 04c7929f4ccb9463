"""Which autograd Functions launch kernels that the tape cannot see, and which of them are run again.

NOTE [ Unseen kernels ]
Triton, CUDA and C++ kernels write into memory that the tape sees only being born. What they make is held, unless the
autograd Function that launches them is recorded as one operator, which takes somebody's word that it is pure:

- the user's, by `actmem.replayable`;
- that of the table in `kernel_libraries.py`, for Functions of known libraries whose source is public;
- under `opaque="replay"`, nobody's. A block's first observed call says which Functions launch such kernels: they give
  birth to a tensor that is not filled by anything the tape sees, call a custom operator, or launch a Triton kernel.
  From the next block on they are recorded as one operator each.

The last two are put on trial in each observed call (NOTE [ The trial ]), and held by name from then on if they fail.
Functions that communicate, that write what they were given, or that run modules are not taken.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from actmem.decisions import Reason
from actmem.engine.kernel_launches import record_launches
from actmem.engine.kernel_libraries import LIBRARIES, STATEFUL
from actmem.engine.observation import Observation, UnseenFunctions
from actmem.engine.pure_functions import Declaration, declare
from actmem.torchcompat import function_call, module_call

__all__ = ["IMPORTED", "declare_libraries", "learn", "running_function"]

IMPORTED = frozenset({"triton", *(library.package for library in LIBRARIES)})
"""Packages of which something is to be declared, or watched, once they are imported."""

_FILLED_UNSEEN = (Reason.UNINITIALISED, Reason.OPAQUE)
_FORBIDDEN: dict[Reason | None, str] = {
    Reason.COLLECTIVE: "it communicates with other ranks",
    Reason.EXTERNAL: "it writes into what it was given",
}


def learn(known: UnseenFunctions, observation: Observation) -> bool:
    """Take the Functions that were seen launching unseen kernels. Return whether there are new ones."""
    new = False
    for kind in dict.fromkeys(_suspects(observation)):
        name = _name(kind)
        if name in known.held or hasattr(kind.forward, "_actmem_declaration"):
            continue
        why = STATEFUL.get(name) or _against(kind, observation)
        if why is not None:
            known.held[name] = why
        else:
            declare(kind, Declaration(name, found=True))
            new = True
    return new


def running_function() -> Any:
    """Return the autograd Function whose forward this thread runs; None if it runs a module inside of it, or none."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code is not module_call:
        if frame.f_code is function_call:
            return frame.f_locals["cls"]
        frame = frame.f_back
    return None


def _suspects(observation: Observation) -> Iterator[Any]:
    yield from observation.launching
    for row, kind in observation.in_functions:
        if row.why in _FILLED_UNSEEN:
            yield kind


def _against(kind: Any, observation: Observation) -> str | None:
    """Return why a Function is not taken, by what it did and says; None if nothing speaks against it."""
    if kind.__module__.partition(".")[0] == "torch":
        return "it is torch's own, and may run any code"
    code = getattr(kind.forward, "__code__", None)
    if code is not None and "mark_dirty" in code.co_names:
        return "it writes into its arguments (ctx.mark_dirty)"
    rows = [row for row, its_kind in observation.in_functions if its_kind is kind]
    if any(row.op.startswith("triton.") for row in rows):
        return _FORBIDDEN[Reason.EXTERNAL]  # launches that only fill newborn tensors are no operators
    return next((_FORBIDDEN[row.why] for row in rows if row.why in _FORBIDDEN), None)


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def declare_libraries() -> None:
    """Declare the Functions of the known libraries that are imported by now, and watch Triton's launcher."""
    record_launches()
    for library in LIBRARIES:
        if library.package not in sys.modules:
            continue
        for module, name in library.names():
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type):
                writes, flag = library.writes.get(name, ()), library.in_place.get(name)
                declare(kind, Declaration(f"{module}.{name}", library.package, writes=writes, in_place=flag))
