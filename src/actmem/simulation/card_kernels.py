"""A profile as it would be on a card: CUDA's operators in the place of the CPU's. The table is `card_kernels.toml`."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from actmem import devices
from actmem.devices import Device
from actmem.log_entries import CallRan, Entry, OperatorEntry, OpRan, PhaseBegan
from actmem.profiles import Call, Cost, Layer, Profile, Value
from actmem.profiling import STEP

__all__ = ["on_card", "unknowns"]

_FLOAT32 = "float32"


@dataclass(frozen=True)
class _Kernel:
    on_card: str
    in_float32: str
    temporaries: tuple[tuple[int, int], ...]
    """Which result it is as large as, and the bytes of each element."""


@functools.cache
def _table() -> tuple[dict[str, _Kernel], dict[str, str]]:
    document = tomllib.loads(Path(devices.__file__).with_name("card_kernels.toml").read_text(encoding="utf-8"))
    kernels = {
        name: _Kernel(
            line["on_card"],
            line.get("in_float32", line["on_card"]),
            tuple((each["like"], each["item_bytes"]) for each in line.get("temporaries", ())),
        )
        for name, line in document["operators"].items()
    }
    return kernels, {line["operator"]: line["text"] for line in document["unknown"]}


def unknowns(profile: Profile) -> tuple[str, ...]:
    """Return what is not known of the kernels that a step runs on a card."""
    ran = {cost.op for cost in profile.costs}
    return tuple(text for op, text in _table()[1].items() if op in ran)


def on_card(profile: Profile, device: Device) -> Profile:
    """Return the profile of the same step on a card. A profile for any other device is returned unchanged.

    >>> from actmem.devices import device
    >>> cost = Cost("aten._scaled_dot_product_flash_attention_for_cpu.default", 1, 1, "bfloat16")
    >>> on_card(Profile(costs=(cost,)), device("h100-80gb")).costs[0].op
    'aten._scaled_dot_product_flash_attention.default'
    """
    if not device.has_caching_allocator:
        return profile
    costs = tuple(_named(cost) for cost in profile.costs)
    layers = tuple(_layer(layer, profile.costs) for layer in profile.layers)
    memory, storages = _with_temporaries(profile)
    found = _with_small_masks(replace(profile, costs=costs, layers=layers, memory=memory, storages=storages))
    return found if profile.is_step else _with_foreach(found)


def _named(cost: Cost) -> Cost:
    kernel = _table()[0].get(cost.op)
    return cost if kernel is None else replace(cost, op=_name(kernel, cost.dtype))


def _name(kernel: _Kernel, dtype: str) -> str:
    return kernel.in_float32 if dtype == _FLOAT32 else kernel.on_card


def _layer(layer: Layer, costs: tuple[Cost, ...]) -> Layer:
    kernels = _table()[0]
    if not any(call.op in kernels for call in layer.calls):
        return layer

    def renamed(call: Call) -> Call:
        kernel = kernels.get(call.op)
        return call if kernel is None else replace(call, op=_name(kernel, costs[call.cost].dtype))

    return replace(layer, calls=tuple(map(renamed, layer.calls)))


_ITEM_BYTES = {"float32": 4, "float64": 8}

_DROPOUT = ("aten.empty_like.default", "aten.bernoulli_.float", "aten.div_.Scalar")
"""How a CPU makes the mask of a dropout, in the dtype of what it is multiplied with. See `[elsewhere]` in the table."""
_DROPOUT_ON_CARD = "aten.native_dropout.default"


def _with_small_masks(profile: Profile) -> Profile:
    """Let the mask of a dropout take one byte for each element."""
    names = [profile.costs[e.cost].op if isinstance(e, OperatorEntry) else "" for e in profile.log]
    makers = {at for at, name in enumerate(names) if name == _DROPOUT[0] and tuple(names[at : at + 3]) == _DROPOUT}
    masks: dict[int, int] = {}
    """Storage -> its bytes on a card."""
    for at, storage, size in profile.memory:
        entry = profile.log[at] if at in makers else None
        if size and isinstance(entry, OperatorEntry):
            masks[storage] = size // _ITEM_BYTES.get(profile.costs[entry.cost].dtype, 2)
    if not masks:
        return profile
    costs, log = _Costs(profile.costs), list[Entry]()
    less, changes, nth = 0, profile.memory, 0
    for at, entry in enumerate(profile.log):
        while nth < len(changes) and changes[nth][0] <= at:
            _, storage, size = changes[nth]
            if storage in masks:
                fewer = profile.storages[storage] - masks[storage]
                less += fewer if size else -fewer
            nth += 1
        if at - 1 in makers and isinstance(entry, (OpRan, CallRan)):
            entry = replace(entry, cost=costs.named(entry.cost, _DROPOUT_ON_CARD))
        log.append(entry.shifted(-less))
    layers = tuple(_with_masks(layer, masks, costs) for layer in profile.layers)
    return replace(
        profile,
        costs=tuple(costs.found),
        layers=layers,
        log=tuple(log),
        memory=tuple((at, storage, size and masks.get(storage, size)) for at, storage, size in changes),
        storages={**profile.storages, **masks},
    )


class _Costs:
    """Costs, to which the same ones under another name are added."""

    def __init__(self, costs: tuple[Cost, ...]) -> None:
        self.found = list(costs)
        self._renamed: dict[int, int] = {}

    def named(self, cost: int, name: str) -> int:
        if cost not in self._renamed:
            self._renamed[cost] = len(self.found)
            self.found.append(replace(self.found[cost], op=name))
        return self._renamed[cost]


def _with_masks(layer: Layer, masks: dict[int, int], costs: _Costs) -> Layer:
    def renamed(call: Call) -> Call:
        if call.op != _DROPOUT[1] or not any(write.storage in masks for write in call.writes):
            return call
        return replace(call, op=_DROPOUT_ON_CARD, cost=costs.named(call.cost, _DROPOUT_ON_CARD))

    def smaller(value: Value) -> Value:
        most = masks.get(value.storage)
        if most is None:
            return value
        return replace(value, num_bytes=min(value.num_bytes, most), copy_bytes=min(value.copy_bytes, most))

    return replace(layer, calls=tuple(map(renamed, layer.calls)), values=tuple(map(smaller, layer.values)))


def _with_temporaries(profile: Profile) -> tuple[tuple[tuple[int, int, int], ...], dict[int, int]]:
    """Add what kernels allocate for themselves: after their results, and freed before anything else happens."""
    kernels = _table()[0]
    wanted: dict[int, tuple[_Kernel, str]] = {}
    for at, entry in enumerate(profile.log):
        if isinstance(entry, OperatorEntry):
            cost = profile.costs[entry.cost]
            if (kernel := kernels.get(cost.op)) is not None and kernel.temporaries:
                wanted[at] = kernel, cost.dtype
    storages = dict(profile.storages)
    if not wanted:
        return profile.memory, storages
    made: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    for nth, (at, _, size) in enumerate(profile.memory):
        if at in wanted and size:
            made.setdefault(at, []).append(size)
            ends[at] = nth
    follows = {nth: at for at, nth in ends.items()}
    memory: list[tuple[int, int, int]] = []
    for nth, change in enumerate(profile.memory):
        memory.append(change)
        if nth in follows:
            at = follows[nth]
            kernel, dtype = wanted[at]
            for like, item_bytes in kernel.temporaries:
                number = len(storages)
                storages[number] = size = made[at][like] // _ITEM_BYTES.get(dtype, 2) * item_bytes
                memory += [(at, number, size), (at, number, 0)]
    return tuple(memory), storages


def _with_foreach(profile: Profile) -> Profile:
    """Let the optimizer's step take what it takes on a card, where it works on all parameters at once."""
    if not profile.log:
        return profile
    live = peak = 0
    alive: dict[int, int] = {}
    for number, size in profile.optimizer_memory:
        live += size or -alive.pop(number)
        alive |= {number: size} if size else {}
        peak = max(peak, live)
    last = profile.log[-1]
    if not isinstance(last, OpRan) or profile.costs[last.cost].op != STEP:
        return profile
    end = next(e for e in reversed(profile.log) if isinstance(e, PhaseBegan) and e.name == "end")
    log: tuple[Entry, ...] = (*profile.log[:-1], OpRan(last.cost, end.live_bytes + peak // profile.shard))
    return replace(profile, log=log)
