"""The late device for Python: build it, load it into this process, and make its streams late.

`load()` is called in a child process: a backend stays for the life of a process.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent / "csrc"
NAME = "late"
DEVICES = 2


def compiler() -> str | None:
    """Return the C++ compiler of this machine, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Compile the device, unless this user has it already for this source and this torch; return the library.

    It takes about 25 s of one core, once.
    """
    texts = [file.read_bytes() for file in sorted(SOURCES.iterdir())]
    key = hashlib.sha256(b"".join(texts) + torch.__version__.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "actmem-tests"
    library = cache / f"late_device_{key}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=cache) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        if not library.exists():
            sys.__stderr__.write(
                "Compiling the late device for the tests: about 25 s, once for each version of torch.\n"
            )
            _compile(library, Path(folder))
    return library


def _compile(library: Path, folder: Path) -> None:
    home = Path(torch.__file__).parent
    made = folder / library.name
    command = [
        str(compiler()),
        *("-std=c++20", "-O1", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"),
        *(str(SOURCES / "device.cpp"), "-o", str(made)),
        *(f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        raise RuntimeError(f"the late device does not compile:\n{built.stderr}")
    made.replace(library)  # at once, so that another process never sees half of it


@functools.cache
def library() -> Any:
    """Return the functions of the device that tests call."""
    found = ctypes.CDLL(str(build()))
    found.late_set_lag.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint64]
    found.late_peak_held.restype = found.late_held.restype = ctypes.c_int64
    found.late_waits.restype = ctypes.c_char_p
    return found


@functools.cache
def load() -> None:
    """Make `torch.device("late")` an accelerator of this process."""
    lib = library()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    assert lib.late_num_streams() > 1
    atexit.register(synchronise)  # no kernel may run while the process ends


def _module() -> Any:
    module: Any = types.ModuleType(f"torch.{NAME}")
    generators = tuple(torch.ops.late.default_generator(n) for n in range(DEVICES))

    def index(device: Any) -> int:
        number = device if isinstance(device, int) else torch.device(device).index
        return module.current_device() if number is None else number

    def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
        generators[index(device)].set_state(state)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module.default_generators = generators
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: DEVICES
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module.get_rng_state = lambda device=NAME: generators[index(device)].get_state()
    module.set_rng_state = set_rng_state
    module.manual_seed_all = manual_seed_all
    module.get_amp_supported_dtype = lambda: [torch.float32, torch.bfloat16]
    module.Stream, module.Event = torch.Stream, torch.Event
    return module


def synchronise() -> None:
    """Wait for both devices."""
    for number in range(DEVICES):
        torch.accelerator.synchronize(number)


# --- lags -------------------------------------------------------------------------------------------------------------

DEFAULT, SIDES = (0,), tuple(range(1, 33))
"""The default stream, and all others: those of a lane are made in pairs, out and back."""
OUTS, BACKS = SIDES[::2], SIDES[1::2]


@contextlib.contextmanager
def lag(streams: tuple[int, ...], fixed: int = 0, spread: int = 0, seed: int = 0) -> Iterator[None]:
    """Have each operator on these streams of both devices wait for so many microseconds, and up to `spread` more."""
    _set_lag(streams, fixed, spread, seed)
    try:
        yield
    finally:
        _set_lag(streams, 0, 0, 0)


def _set_lag(streams: tuple[int, ...], fixed: int, spread: int, seed: int) -> None:
    for device in range(DEVICES):
        for stream in streams:
            library().late_set_lag(device, stream, fixed, spread, seed)


@contextlib.contextmanager
def held(streams: tuple[int, ...]) -> Iterator[None]:
    """Have these streams do nothing before somebody waits for it: as late as a device can be."""
    _hold(streams, True)
    try:
        yield
    finally:
        _hold(streams, False)


def _hold(streams: tuple[int, ...], whether: bool) -> None:
    for device in range(DEVICES):
        for stream in streams:
            library().late_hold(device, stream, whether)


# --- memory -----------------------------------------------------------------------------------------------------------


def held_bytes(device: int = 0) -> int:
    """Return the bytes that are alive or in use by another stream."""
    return library().late_held(device)


def peak_held_bytes(device: int = 0) -> int:
    """Return the peak of `held_bytes` since `torch.accelerator.reset_peak_memory_stats`."""
    return library().late_peak_held(device)


def waits() -> list[str]:
    """Return the operators and copies that the host has waited for since it was last asked."""
    return library().late_waits().decode().split()
