"""Measure the machine at hand, so that a plan for it rests on what it does, not on a datasheet."""

from __future__ import annotations

import functools
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from actmem.devices import THIS_MACHINE, Device, Nvme
from actmem.errors import DeviceError

__all__ = ["measure_machine"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CPU_SIZES = (384, 512, 768)
_ACCELERATOR_SIZES = (
    256,
    512,
    1024,
    2048,
    4096,
    8192,
)  # a fast one needs large products: a launch counts in small ones
_NUM_SIZES = 3
_MOVED_BYTES = 64 * 2**20  # of each of three arrays: more than caches hold
_CHUNK_BYTES = 4 * 2**20
_DISK_BYTES = 128 * 2**20
_LEAST_RUNS = 3


def measure_machine(
    *,
    seconds: float = 0.5,
    directory: str | os.PathLike[str] | None = None,
    dtypes: Iterable[str] = ("float32",),
) -> Device:
    """Measure what this machine can do: its accelerator if there is one, else its CPU with the threads of torch.

    It measures the FLOP/s of matrix products in float32 and in each of `dtypes`, and the bandwidth of an out-of-place
    addition: the median of several sizes and runs each. The figures are what was reached, so `attainable` is 1 for
    all. Memory is that of the accelerator, else the physical memory, or less if this process may use less. The link to
    the host is not measured. The random state stays as it is. It is measured once per process for each number of
    threads.

    >>> here = measure_machine(seconds=0.05)
    >>> here.key, here.flops_per_second["fp32"] > 1e6
    ('this-machine', True)

    Args:
        seconds: About how long to measure; slow machines take longer, because a few runs are needed.
        dtypes: What the model computes in. bfloat16 is measured only if it is among them.
        directory: A folder on the disk that values would be offloaded to. None: the disk is not measured.

    Raises:
        DeviceError: if `seconds` is not above 0, the folder cannot be written to, or tensors here have no data.
    """
    if not seconds > 0:
        raise DeviceError(f"seconds = {seconds!r} leaves no time to measure. Expected a number above 0, such as 0.5.")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        where = torch.device("cpu")
    else:
        where = torch.device(accelerator.type, torch.accelerator.current_device_index())
    if type(torch.empty(1, device=where)) is not torch.Tensor:
        raise DeviceError(
            "the machine cannot be measured where tensors are not real, as under FakeTensorMode. "
            "Call measure_machine() beforehand, and pass on the Device that it returns."
        )
    measured = _measured(where, torch.get_num_threads(), seconds, bfloat16="bfloat16" in set(dtypes))
    if directory is None:
        return measured
    folder = os.fspath(directory)
    drive = _drive(folder)
    rates = dict.fromkeys(("nvme.read_bytes_per_second", "nvme.write_bytes_per_second"), f"measured in {folder}")
    return replace(measured, nvme=drive, sources={**measured.sources, **rates})


@functools.cache
def _measured(where: torch.device, num_threads: int, seconds: float, *, bfloat16: bool) -> Device:
    rates: dict[str, float] = {}
    sources: dict[str, str] = {}
    for name, dtype in _DTYPES.items():
        if dtype is torch.bfloat16 and not bfloat16:
            continue  # some machines advertise products in bfloat16 and then fault on them: run none unless needed
        try:
            rates[name], sizes = _flops_per_second(where, dtype, seconds / 3)
        except (RuntimeError, TypeError):
            if dtype is torch.float32:
                raise
            continue  # a device without this dtype: omit the figure
        listed = ", ".join(map(str, sizes))
        sources[f"flops_per_second.{name}"] = f"measured: the median of matrix products of {listed} in {dtype}"
    bandwidth = _moved_bytes_per_second(where, seconds / 3)
    sources["memory_bytes_per_second"] = (
        f"measured: the median of adding two arrays of {_MOVED_BYTES >> 20} MiB to a third"
    )
    sources["memory_bytes"] = "reported by the driver" if where.type != "cpu" else "reported by the operating system"
    return Device(
        key=THIS_MACHINE,
        name=f"this machine: {_name(where)}, {num_threads} thread{'' if num_threads == 1 else 's'}",
        memory_bytes=_memory_bytes(where),
        flops_per_second=rates,
        memory_bytes_per_second=bandwidth,
        sources=sources,
    )


# --- rates ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _flops_per_second(where: torch.device, dtype: torch.dtype, seconds: float) -> tuple[float, tuple[int, ...]]:
    """Return the median rate of matrix products, and the sizes that were multiplied."""
    sizes = _CPU_SIZES if where.type == "cpu" else _fitting_sizes(where, dtype, seconds)
    found: list[float] = []
    for size in sizes:
        found += _rates(_product(where, dtype, size), 2 * size**3, where, seconds / len(sizes))
    return statistics.median(found), sizes


def _fitting_sizes(where: torch.device, dtype: torch.dtype, seconds: float) -> tuple[int, ...]:
    """Return the largest sizes whose products an accelerator computes in the given time, a few times over.

    It may be as fast as a data centre's or slower than a CPU, so it is asked, from the smallest size on.
    """
    allowed_seconds = seconds / _NUM_SIZES / (_LEAST_RUNS + 1)
    tried: list[int] = []
    for size in _ACCELERATOR_SIZES:
        tried.append(size)
        run = _product(where, dtype, size)
        run()  # the first of a kind may compile or load its kernel
        _wait(where)
        start = perf_counter()
        run()
        _wait(where)
        if 8 * (perf_counter() - start) > allowed_seconds:  # twice the size is eight times the work
            break
    return tuple(tried[-_NUM_SIZES:])


def _product(where: torch.device, dtype: torch.dtype, size: int) -> Callable[[], object]:
    generator = torch.Generator(where).manual_seed(0)
    a = torch.randn(size, size, generator=generator, device=where).to(dtype)
    return functools.partial(torch.mm, a, a, out=torch.empty_like(a))


@torch.no_grad()
def _moved_bytes_per_second(where: torch.device, seconds: float) -> float:
    a, b, result = (torch.ones(_MOVED_BYTES // 4, dtype=torch.float32, device=where) for _ in range(3))
    return statistics.median(_rates(functools.partial(torch.add, a, b, out=result), 3 * _MOVED_BYTES, where, seconds))


def _rates(run: Callable[[], object], work: int, where: torch.device, seconds: float) -> list[float]:
    """Run once to warm up, then again and again for a while; return the work per second of each run."""
    run()
    _wait(where)
    found: list[float] = []
    end = perf_counter() + seconds
    while len(found) < _LEAST_RUNS or perf_counter() < end:
        start = perf_counter()
        run()
        _wait(where)
        found.append(work / (perf_counter() - start))
    return found


def _wait(where: torch.device) -> None:
    if where.type != "cpu":
        torch.accelerator.synchronize(where)


@functools.cache
def _drive(folder: str) -> Nvme:
    """Write a private file to the disk itself and read it back; it is gone afterwards."""
    chunk = os.urandom(_CHUNK_BYTES)  # some disks compress
    num_chunks = _DISK_BYTES // _CHUNK_BYTES
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            start = perf_counter()
            for _ in range(num_chunks):
                file.write(chunk)
            os.fsync(file.fileno())
            writing = perf_counter() - start
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else memory answers, not the disk
            file.seek(0)
            start = perf_counter()
            while file.read(_CHUNK_BYTES):
                pass
            reading = perf_counter() - start
    except OSError as error:
        raise DeviceError(
            f"the disk under {folder!r} cannot be measured: {error.strerror or error}. Name a folder that can be "
            f"written to and has {_DISK_BYTES >> 20} MiB to spare, or omit directory."
        ) from error
    return Nvme(THIS_MACHINE, num_chunks * _CHUNK_BYTES / reading, num_chunks * _CHUNK_BYTES / writing)


# --- what the machine is ----------------------------------------------------------------------------------------------


def _name(where: torch.device) -> str:
    if where.type != "cpu":
        name_of = getattr(torch.get_device_module(where), "get_device_name", None)
        return str(name_of(where)) if name_of is not None else str(where)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine() or "CPU"


def _memory_bytes(where: torch.device) -> int:
    try:
        if where.type != "cpu":
            return torch.accelerator.get_memory_info(where)[1]
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError, RuntimeError) as error:  # a backend that does not tell: RuntimeError
        raise DeviceError(
            "the memory size of this machine cannot be read here. Create a Device with memory_bytes yourself."
        ) from error
    return min([physical, *_limits()])


def _limits() -> list[int]:
    """Return the limits that control groups (v1 and v2) set for this process; empty if there are none."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    files: list[Path] = []
    for number, controllers, group in lines:
        if number == "0":
            root, file = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, file = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        files += [root / file, root / group.strip("/") / file]
    found: list[int] = []
    for file in files:
        try:
            found.append(int(file.read_text()))
        except (OSError, ValueError):  # missing, or "max"
            continue
    return found
