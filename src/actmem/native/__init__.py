"""The native core of the tape: built on request, checked against the Python tape, loaded where it is asked for.

What lives here: the source of the core, how it is built, kept and checked. What must not: rules of the tape, which are
in `engine`, and what a block call needs, which is there too.

- `core.cpp` is the core: NOTE [ The native core ].
- `core_build.py` compiles it, and keeps what was compiled.
- `core_check.py` compares it with the Python tape before it is used.
"""

from actmem.native.core_build import PYTHON_TAPE, Built, NativeTape, build, native_tape

__all__ = ["PYTHON_TAPE", "Built", "NativeTape", "build", "native_tape"]
