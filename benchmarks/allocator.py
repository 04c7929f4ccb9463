"""One training step in its own process, and what the allocator handed out for it.

`actmem.measure` counts the tensors that operators make. Here the C library's allocator, from which torch takes its host
memory, is asked after every operator how much it has handed out (`mallinfo2`), so that what threads hold on to, copies
and scratch memory count too. torch's profiler has events of its allocator as well (`profile_memory=True`), but a thread
that it does not follow frees memory unseen, and the threads that write to the disk free what they wrote.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import actmem
from actmem.cli.demo import LlamaLike, Size

FORMS = ("plain", "full", "disk")


_NAMES = (*("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


class Asking(TorchDispatchMode):
    """Asks the allocator after every operator. `peak_bytes` is the most that was handed out above the start."""

    def __init__(self) -> None:
        super().__init__()
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Mallinfo
        self._mallinfo = library.mallinfo2
        self.began_bytes = self.now()
        self.peak_bytes = 0

    def now(self) -> int:
        """Return the bytes handed out now, from the heaps and as separate mappings."""
        found = self._mallinfo()
        return found.uordblks + found.hblkhd

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.peak_bytes = max(self.peak_bytes, self.now() - self.began_bytes)
        return out


def in_fresh_process(form: str, size: Size, offload: dict[str, Any]) -> dict[str, float]:
    """Run a form of a step in its own process, and return its figures."""
    asked = {"form": form, "size": asdict(size), "offload": offload}
    command = [sys.executable, "-m", "benchmarks.allocator", json.dumps(asked)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{form} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def figures(form: str, size: Size, offload: dict[str, Any]) -> dict[str, float]:
    """Train three steps, and return the figures of the last one. By then an offloader knows the order of the step."""
    torch.set_num_threads(1)
    model = LlamaLike(size)
    applied = None
    if form != "plain":
        mode = actmem.Full() if form == "full" else actmem.OffloadActivations(to="disk", **offload)
        applied = actmem.apply(model, mode)
    _step(model, size)
    with Asking():  # the first use of a dispatch mode allocates memory
        _step(model, size)
    model.zero_grad()
    with Asking() as asking:
        _step(model, size)
    found = {
        "allocator_bytes": asking.peak_bytes,
        "out_bytes": 0 if applied is None or (moved := applied.report().moved) is None else moved.out_bytes,
    }
    if applied is not None:
        applied.remove()
    return found


def _step(model: nn.Module, size: Size) -> None:
    torch.manual_seed(0)
    model.zero_grad()
    model(*size.tokens()).backward()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(figures(asked["form"], Size(**asked["size"]), asked["offload"])))
