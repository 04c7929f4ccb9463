"""What Dynamo may compile of a block that is not one graph, under a plan that names modules of it.

Without such a plan, Dynamo makes as large pieces of the block as it can. A piece is one operator of the tape and has
one decision, so it must not contain two modules that the plan decides differently. Here Dynamo is asked about a frame
only inside modules that the plan treats as one; the code around them runs in eager.
"""

from __future__ import annotations

from typing import Any

from actmem.compilercompat import compiles_never, innermost_backend, leave_frame
from actmem.engine.verdicts import Verdicts
from actmem.engine.whole_calls import recording

__all__ = ["ModulePieces"]


class ModulePieces:
    """Dynamo's compiler of frames, for the modules of a block that a plan does not look into.

    Dynamo finds compiled code again by the backend, which is this object: what was compiled without regard to the
    plan is not found, and blocks with equal compilers and equal plans share what they compile.
    """

    def __init__(self, compiler: Any, verdicts: Verdicts) -> None:
        self._compiler = compiler
        self._verdicts = verdicts
        self._key = innermost_backend(compiler), verdicts.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModulePieces) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key[1])

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        """Compile a frame, or leave it to Python."""
        tape = recording()
        left = tape is not None and self._verdicts.looks_inside(tape.address) and not compiles_never(frame.f_code)
        return leave_frame() if left else self._compiler(frame, cache_entry, frame_state)
