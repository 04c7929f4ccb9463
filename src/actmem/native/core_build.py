"""Compile the native core, keep it in the user's cache, and load it.

A library is kept under a name that tells all it depends on: torch, Python, the compiler's flags, the source, and the
Python files of the engine, whose objects it reads. It is used only if a second file says that it was checked
(`core_check.py`), and a build ends with that check.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from actmem.engine import Tape, native_tape_class
from actmem.errors import ModeError, UnsupportedError
from actmem.native.core_check import difference

__all__ = ["PYTHON_TAPE", "Built", "NativeTape", "build", "native_tape"]

_SOURCE = Path(__file__).with_name("core.cpp")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
_COMMAND = "actmem native build"


@dataclass(frozen=True)
class Built:
    """A native core that was built and checked."""

    library: Path
    """The file."""
    seconds: float
    """How long compiling and checking took; 0 if it was there already."""


def build(*, again: bool = False) -> Built:
    """Compile the native core, check it against the Python tape, and keep it. About 30 s, once.

    Args:
        again: compile it even if it is there.

    Raises:
        UnsupportedError: there is no compiler, the source does not compile, or the check finds a difference.
    """
    library = _library()
    if _is_checked(library) and not again:
        return Built(library, 0.0)
    started = time.perf_counter()
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
        if again or not _is_checked(library):
            made = Path(folder) / library.name
            _compile(made)
            _check(made)
            made.replace(library)  # at once, so that another process never sees half of it
            _mark(library).touch()
    return Built(library, time.perf_counter() - started)


class NativeTape(NamedTuple):
    """Which tape runs, and what the report says about it."""

    kind: type[Tape] | None
    """The tape with a native core; None if the Python tape runs."""
    notes: tuple[str, ...]


PYTHON_TAPE = NativeTape(None, ())
"""The native tape is not asked for."""


def native_tape(asked: bool | str) -> NativeTape:
    """Return the tape with a native core, if it is asked for.

    Args:
        asked: True, or "auto" for a core if one was built. ACTMEM_NATIVE=1 in the environment turns False into True.

    Raises:
        ModeError: something else is asked for.
        UnsupportedError: it is asked for, and was not built for this torch, this Python and this source.
    """
    if asked not in (True, False, "auto"):
        raise ModeError(
            f"native = {asked!r} is not known. Expected False (the Python tape), True (the native one, built by "
            f"`{_COMMAND}`) or 'auto' (the native one where it was built)."
        )
    if asked is False and os.environ.get("ACTMEM_NATIVE", "") in ("", "0"):
        return PYTHON_TAPE
    library = _library()
    if _is_checked(library):
        note = (
            "the native tape runs; the Python tape runs the calls that are observed or offload, and all calls in a "
            "process in which torch.compile has compiled anything."
        )
        return NativeTape(_loaded(library), (note,) if asked else ())
    if asked == "auto":
        note = f"native = 'auto': the Python tape runs, because no native core was built. Build it: {_COMMAND}."
        return NativeTape(None, (note,))
    raise UnsupportedError(
        f"native = True, but no native core was built for torch {torch.__version__} and Python "
        f"{sys.version.split()[0]}: {library} is not there. Build it, which takes about half a minute: {_COMMAND}; or "
        "write native='auto', which takes the Python tape until then."
    )


def _library() -> Path:
    parts = (torch.__version__, sys.version, *_FLAGS, str(torch.compiled_with_cxx11_abi()))
    key = hashlib.sha256("\n".join(parts).encode() + _sources()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "actmem"
    return cache / f"actmem_core_{key}.so"


@functools.cache
def _sources() -> bytes:
    engine = Path(str(sys.modules[Tape.__module__].__file__)).parent
    return b"".join(path.read_bytes() for path in (_SOURCE, *sorted(engine.glob("*.py"))))


def _mark(library: Path) -> Path:
    return library.with_suffix(".checked")


def _is_checked(library: Path) -> bool:
    return library.exists() and _mark(library).exists()


def _compile(library: Path) -> None:
    named = os.environ.get("CXX", "g++")
    compiler = shutil.which(named)
    if compiler is None:
        raise UnsupportedError(
            f"the native core needs a C++ compiler, and {named} is not there. Install one (Debian: apt install g++), "
            "or name another in CXX. Without it the Python tape runs, which gives the same bits."
        )
    home = Path(torch.__file__).parent
    command = [
        *(compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *(f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"),
        *(f"-I{sysconfig.get_paths()['include']}", str(_SOURCE), "-o", str(library)),
        *(f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(
            f"the native core does not compile against torch {torch.__version__} with {compiler}; it is known to with "
            "torch 2.13 and g++ 12. Leave native out: the Python tape gives the same bits. The compiler "
            f"says:\n{done.stderr[:2000]}"
        )


def _check(library: Path) -> None:
    """Check a library in a process of its own: a core stays in a process for good."""
    script = f"from actmem.native.core_build import check_here; check_here({str(library)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(
            "the native core was built, and does not do what the Python tape does, so it is not used. Leave native "
            f"out, and please report this:\n{(done.stdout + done.stderr)[-2000:]}"
        )


def check_here(library: str) -> None:
    """Load a library, and end the process with a message if it differs from the Python tape."""
    found = difference(_loaded(Path(library)))
    if found is not None:
        sys.exit(found)


@functools.cache
def _loaded(library: Path) -> type[Tape]:
    loader = importlib.machinery.ExtensionFileLoader("actmem_core", str(library))
    spec = importlib.util.spec_from_file_location("actmem_core", str(library), loader=loader)
    assert spec is not None
    core: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(core)
    return native_tape_class(core)
