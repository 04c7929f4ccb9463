"""Read an out-of-memory error of torch: which tensor it was, what the card has, and what to run next.

torch has worded it in several ways since 2.0. Numbers are printed with two decimals, and what the caching allocator
asked the device for is a whole segment: at most 1 MiB comes from one of 2 MiB, at most 10 MiB from one of 20 MiB, and
more is rounded up to 2 MiB. So a size is known as a range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from actmem.units import size

__all__ = ["OutOfMemory", "products", "read_out_of_memory"]

_UNITS = {
    "bytes": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 2**10,
    "MB": 2**20,
    "GB": 2**30,
}
"""What a unit is in bytes. MPS writes KB, MB and GB, and means binary units."""
_SIZE = r"([\d.]+) ([KMGT]i?B|bytes|B)"
_MIB = 2**20

_WANTED = re.compile(rf"Tried to allocate {_SIZE}")
_WHERE = re.compile(r"\b(CUDA|HIP|XPU|MPS)\b[\w ]*out of memory", re.IGNORECASE)
_PARTS: dict[str, tuple[re.Pattern[str], ...]] = {
    "total": (re.compile(rf"total capaci?ty of {_SIZE}"), re.compile(rf"{_SIZE} total capacity")),
    "free": (re.compile(rf"of which {_SIZE} is free"), re.compile(rf"{_SIZE} free;")),
    "allowed": (re.compile(rf"{_SIZE} allowed;"), re.compile(rf"max allowed: {_SIZE}")),
    "process": (re.compile(rf"this process has {_SIZE} memory in use"),),
    "allocated": (
        re.compile(rf"{_SIZE} is allocated by PyTorch"),
        re.compile(rf"{_SIZE} already allocated"),
        re.compile(rf"MPS allocated: {_SIZE}"),
    ),
    "unallocated": (re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),),
    "reserved": (re.compile(rf"{_SIZE} reserved in total by PyTorch"), re.compile(rf"{_SIZE} cached\)")),
    "private": (re.compile(rf"{_SIZE} allocated in private pools"),),
}
_SETTINGS = {"CUDA": "PYTORCH_CUDA_ALLOC_CONF", "HIP": "PYTORCH_HIP_ALLOC_CONF"}
_LARGE_PART = 0.1
"""Unused reserved memory is worth a hint from this part of what PyTorch has reserved on."""


@dataclass(frozen=True)
class OutOfMemory:
    """What an out-of-memory error says. Bytes; None where it does not say."""

    kind: str | None
    """CUDA, HIP, XPU or MPS."""
    wanted: int
    """What was asked of the device, within `rounding`."""
    rounding: int
    """Half of the last printed digit."""
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    """The limit that the process was given."""
    process: int | None = None
    """What the process holds, with what is not torch's."""
    allocated: int | None = None
    unallocated: int | None = None
    """Reserved, and in no tensor."""
    private: int | None = None
    """In pools of CUDA graphs."""

    @property
    def tensor_bytes(self) -> tuple[int, int]:
        """The fewest and the most bytes that the tensor has.

        >>> OutOfMemory("CUDA", 20 * 2**20, 5243).tensor_bytes
        (1048577, 20971520)
        """
        if self.kind == "MPS":
            return self.wanted - self.rounding, self.wanted + self.rounding
        if self.wanted <= 2 * _MIB:
            return 1, _MIB
        if self.wanted == 20 * _MIB:
            return _MIB + 1, 20 * _MIB
        most = (self.wanted + self.rounding) // (2 * _MIB) * 2 * _MIB
        return self.wanted - self.rounding - 2 * _MIB + 1, max(most, self.wanted)

    @property
    def budget(self) -> int | None:
        """What torch could have had at that moment: what it has reserved, and what is free."""
        if self.free is None or self.allocated is None:
            return self.allowed
        found = self.free + self.allocated + (self.unallocated or 0)
        return found if self.allowed is None else min(found, self.allowed)

    @property
    def elsewhere(self) -> int | None:
        """What others hold on the device: other processes, and this one outside of torch."""
        if self.total is None or self.budget is None or self.free is None or self.allocated is None:
            return None
        return max(self.total - self.free - self.allocated - (self.unallocated or 0), 0)

    @property
    def is_fragmented(self) -> bool:
        """Whether what torch had reserved without using it would have been enough, or is a large part."""
        unused = self.unallocated or 0
        return bool(unused) and unused >= min(self.wanted, _LARGE_PART * (unused + (self.allocated or 0)))

    def says(self) -> Iterator[str]:
        """Yield what the card had, in words."""
        low, high = self.tensor_bytes
        yield f"{size(self.wanted)} were asked for, by a tensor of {size(max(low, 1))} to {size(high)}"
        if self.total is not None:
            parts = [f"the card has {size(self.total)}"]
            parts += [f"{size(self.allocated)} in tensors"] if self.allocated is not None else []
            parts += [f"{size(self.unallocated)} reserved and unused"] if self.unallocated is not None else []
            parts += [f"{size(self.private)} of it in pools of CUDA graphs"] if self.private is not None else []
            parts += [f"{size(self.free)} free"] if self.free is not None else []
            parts += [f"{size(self.elsewhere)} held by others or outside of torch"] if self.elsewhere else []
            yield ", ".join(parts)
        if self.allowed is not None:
            yield f"the process may use {size(self.allowed)}"

    def advice(self) -> str:
        """Return what to change besides the plan."""
        found: list[str] = []
        if self.total is not None and self.tensor_bytes[0] > self.total:
            found.append("This tensor alone is larger than the card: compute it in parts, or make the batch smaller.")
        if self.is_fragmented and self.kind in _SETTINGS:
            found.append(
                f"{size(self.unallocated or 0)} are reserved in pieces that do not fit: "
                f"{_SETTINGS[self.kind]}=expandable_segments:True."
            )
        if self.total and self.process is not None and self.free is not None:
            others = self.total - self.free - self.process
            if others > _LARGE_PART * self.total:
                found.append(f"Other processes hold {size(others)} on this card: stop them, or plan for what is left.")
        return " ".join(found)

    def command(self, model: str | None, sequence: int | None, batch: int | None) -> str:
        """Return the commands that find a plan for this card, as they are to be typed."""
        budget = self.budget
        if budget is None:
            return ""
        amount = f"{math.floor(budget / 2**30 * 10) / 10:g}GiB" if budget >= 2**30 else f"{budget // _MIB}MiB"
        numbers = f" --sequence {sequence}" if sequence else ""
        numbers += f" --batch {batch}" if batch else ""
        command = f"actmem fit {model or 'MODEL'}{numbers} --device this --budget {amount}"
        return (
            f"{command}, on the machine of the card, finds a plan that fits, or says what would. In transformers' "
            f"Trainer: callbacks=[ActmemCallback(actmem.Budget('{amount}'))]."
        )


def read_out_of_memory(text: str) -> OutOfMemory | None:
    """Read the last out-of-memory error in a text with whitespace collapsed to single blanks; None if there is none.

    >>> found = read_out_of_memory(
    ...     "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 11.06 "
    ...     "MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory in use. Of the allocated "
    ...     "memory 22.90 GiB is allocated by PyTorch, and 194.87 MiB is reserved by PyTorch but unallocated."
    ... )
    >>> found.kind, found.wanted, found.free, found.is_fragmented
    ('CUDA', 23068672, 11597250, True)
    """
    wanted = [*_WANTED.finditer(text)]
    if not wanted:
        return None
    last = wanted[-1]
    # MPS, and the wordings before it, say what the card had before what was asked for.
    around = text[max(0, last.start() - 200) : last.end() + 1500]
    where = [*_WHERE.finditer(text[: last.start()])]
    found = {name: _first(patterns, around) for name, patterns in _PARTS.items()}
    reserved = found.pop("reserved")
    if found["unallocated"] is None and reserved is not None and found["allocated"] is not None:
        found["unallocated"] = max(reserved - found["allocated"], 0)
    kind = where[-1].group(1).upper() if where else None
    return OutOfMemory(kind, _bytes(*last.groups()), _rounding(*last.groups()), **found)


def _first(patterns: tuple[re.Pattern[str], ...], text: str) -> int | None:
    matches = (pattern.search(text) for pattern in patterns)
    return next((_bytes(*match.groups()) for match in matches if match is not None), None)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _rounding(number: str, unit: str) -> int:
    return math.ceil(_UNITS[unit] * 0.5 / 10 ** len(number.partition(".")[2])) if "." in number else 0


_TENSORS: dict[str, tuple[str, ...]] = {
    "logits": ("batch", "sequence", "vocabulary"),
    "attention scores": ("batch", "heads", "sequence", "sequence"),
    "inside the MLP": ("batch", "sequence", "intermediate"),
    "gate and up projection in one": ("batch", "sequence", "2", "intermediate"),
    "hidden states": ("batch", "sequence", "hidden"),
    "embedding or output weights, or their gradient": ("vocabulary", "hidden"),
    "weights of the MLP, or their gradient": ("intermediate", "hidden"),
}
_ITEM_BYTES = (2, 4)


def products(dimensions: Mapping[str, int], low: int, high: int) -> Iterator[str]:
    """Yield the tensors of a model whose bytes lie in a range, each as a product of its dimensions.

    >>> llama = {"batch": 1, "sequence": 6000, "vocabulary": 128256, "hidden": 4096, "intermediate": 14336, "heads": 32}
    >>> list(products(llama, 1467 * 2**20, 1469 * 2**20))
    ['1 batch x 6000 sequence x 128256 vocabulary x 2 bytes: logits']
    """
    known = {**dimensions, "2": 2}
    for name, shape in _TENSORS.items():
        if not all(part in known for part in shape):
            continue
        for item in _ITEM_BYTES:
            if low <= math.prod(known[part] for part in shape) * item <= high:
                factors = " x ".join(part if part == "2" else f"{known[part]} {part}" for part in shape)
                yield f"{factors} x {item} bytes: {name}"
