"""Random training steps on the virtual accelerator: kernels, views, writes in place, sends, frees; then backward.

The layer of tickets is the least that can be put above a lane: one parcel for each storage and version, however many
views of it are saved, and a slot that goes back with the last of them.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from actmem.offloading.accelerator import AcceleratorLane
from actmem.offloading.lanes import Copy
from actmem.offloading.stores import Slot
from tests.offloading.virtual import CELL, Bytes, Compute, Event, Finding, VirtualDevice


class ArenaSlot(Slot):
    __slots__ = ("start", "tensor")

    def __init__(self, num_bytes: int, start: int, tensor: Tensor) -> None:
        super().__init__(num_bytes)
        self.start, self.tensor = start, tensor


class ArenaStore:
    """Host memory that is handed out again at once, and that reports what is given back too early or twice."""

    def __init__(self, device: VirtualDevice, arena_bytes: int = 1 << 17) -> None:
        self._device = device
        self._arena = torch.from_numpy(np.zeros(arena_bytes + CELL, dtype=np.uint8))
        self._arena = self._arena[-self._arena.data_ptr() % CELL :]
        self._free: dict[int, list[int]] = {}
        self._taken: set[int] = set()
        self.held_bytes = 0
        self.used_bytes = 0

    def take(self, num_bytes: int) -> ArenaSlot:
        size = -(-num_bytes // CELL) * CELL
        free = self._free.get(size)
        if free:
            start = free.pop()
        else:
            start, self.held_bytes = self.held_bytes, self.held_bytes + size
        slot = ArenaSlot(num_bytes, start, self._arena[start : start + num_bytes])
        self._taken.add(id(slot))
        self.used_bytes += num_bytes
        return slot

    def give(self, slot: ArenaSlot) -> None:
        if id(slot) not in self._taken:
            self._device.report("double free", f"{slot} was given back twice")
            return
        under_way = self._device.in_flight(slot.tensor)
        if under_way:
            self._device.report("slot given in flight", ", ".join(under_way))
        self._taken.remove(id(slot))
        self.used_bytes -= slot.num_bytes
        self._free.setdefault(-(-slot.num_bytes // CELL) * CELL, []).append(slot.start)

    def write(self, slot: ArenaSlot, source: Tensor) -> None:
        slot.tensor.copy_(source)

    def read(self, slot: ArenaSlot, target: Tensor) -> None:
        target.copy_(slot.tensor)

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Parcel:
    """One storage in one version, in host memory."""

    slot: ArenaSlot
    out: Copy
    version: int
    num_views: int = 0
    coming: tuple[Tensor, Copy] | None = None
    """Fetched ahead."""


@dataclass(eq=False)
class Ticket:
    parcel: Parcel | None
    kept: Tensor | None = None
    """What is in host memory already, and stays."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0


class Tickets:
    """Send storages away and fetch them back, through a lane."""

    def __init__(self, device: VirtualDevice, lane: AcceleratorLane[Any, Any], store: ArenaStore, bound: int) -> None:
        self.device, self.lane, self.store, self.bound = device, lane, store, bound
        self._away: dict[int, tuple[Any, weakref.ref[Parcel]]] = {}
        self._leaving: list[Parcel] = []

    def send(self, tensor: Tensor) -> Ticket:
        if not self.device.owns(tensor):
            return Ticket(None, tensor)
        parcel = self.known(tensor)
        if parcel is None or parcel.num_views == 0 or parcel.version != tensor._version:
            parcel = self.post(tensor)
        parcel.num_views += 1
        return Ticket(parcel, None, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def known(self, tensor: Tensor) -> Parcel | None:
        """Return the parcel of a living storage."""
        storage = tensor.untyped_storage()
        found, parcel = self._away.get(storage._cdata, (lambda: None, lambda: None))
        return parcel() if found() is storage else None

    def post(self, tensor: Tensor) -> Parcel:
        source = whole(tensor)
        while sum(p.slot.num_bytes for p in self._leaving) + source.nbytes > self.bound and self._leaving:
            self._leaving.pop(0).out.release()
        slot = self.store.take(source.nbytes)
        parcel = Parcel(slot, self.lane.out(source, self.store, slot), tensor._version)
        self._leaving.append(parcel)
        storage = tensor.untyped_storage()
        self._away[storage._cdata] = weakref.ref(storage), weakref.ref(parcel)
        return parcel

    def about_to_write(self, tensor: Tensor) -> None:
        """Let a copy out of a tensor come before a write on it."""
        parcel = self.known(tensor) if self.device.owns(tensor) else None
        if parcel is not None:
            parcel.out.release()

    def prefetch(self, ticket: Ticket) -> None:
        parcel = ticket.parcel
        if parcel is not None and parcel.coming is None:
            target = self.device.allocate(parcel.slot.num_bytes)
            parcel.coming = target, self.lane.back(self.store, parcel.slot, target)

    def fetch(self, ticket: Ticket) -> Tensor:
        if ticket.parcel is None:
            assert ticket.kept is not None
            return ticket.kept
        self.prefetch(ticket)
        coming, ticket.parcel.coming = ticket.parcel.coming, None
        assert coming is not None
        coming[1].wait()
        return coming[0].as_strided(ticket.shape, ticket.stride, ticket.offset)

    def drop(self, ticket: Ticket) -> None:
        parcel, ticket.parcel, ticket.kept = ticket.parcel, None, None
        if parcel is None:
            return
        parcel.num_views -= 1
        if parcel.num_views == 0:
            parcel.coming = None
            self.lane.give(self.store, parcel.slot)

    def end_step(self) -> None:
        self._leaving.clear()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


MakeLane = Callable[[VirtualDevice], AcceleratorLane[Any, Any]]
MakeTickets = Callable[[VirtualDevice, AcceleratorLane[Any, Any], ArenaStore, int], Tickets]


@dataclass
class Outcome:
    findings: list[Finding]
    num_operations: int
    num_sent: int
    num_observed: int
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.findings}


@dataclass
class Saved:
    ticket: Ticket
    expected: Bytes
    on_device: bool


class Program:
    """One random program under one random schedule, both drawn from a seed."""

    def __init__(self, seed: int, make_lane: MakeLane = AcceleratorLane, make_tickets: MakeTickets = Tickets) -> None:
        self.random = random.Random(seed)
        self.device = VirtualDevice(seed + 1, eager=self.random.choice([0.0, 0.3, 0.7, 0.95]))
        self.streams = [self.device.compute, self.device.new_stream(), self.device.new_stream()]
        self.lane = make_lane(self.device)
        self.store = ArenaStore(self.device)
        self.tickets = make_tickets(self.device, self.lane, self.store, self.random.choice([64, 400, 1 << 20]))
        self.live: list[tuple[Tensor, Bytes]] = []
        """Tensors of the program, and what they hold. Views share a base on both sides."""
        self.saved: list[Saved] = []
        self.observed: list[tuple[Bytes, Bytes]] = []
        self.touched: weakref.WeakKeyDictionary[Any, Event] = weakref.WeakKeyDictionary()
        """Storage -> an event after the last kernel that touched it."""
        self.num_sent = 0

    def order(self, *tensors: Tensor) -> None:
        """Put the current stream behind the last kernels on some tensors. Streams are not ordered otherwise."""
        for tensor in tensors:
            event = self.touched.get(tensor.untyped_storage())
            if event is not None:
                self.device.wait(self.device.compute, event)

    def kernel(self, what: str, reads: list[Tensor], writes: list[Tensor], compute: Compute) -> None:
        self.order(*reads, *writes)
        self.device.kernel(what, reads, writes, compute)
        event = self.device.record(self.device.compute)
        for tensor in (*reads, *writes):
            self.touched[tensor.untyped_storage()] = event

    def run(self, num_steps: int = 2) -> Outcome:
        held: list[int] = []
        for _ in range(num_steps):
            for _ in range(self.random.randint(6, 20)):
                self.random.choice(self.OPERATIONS)(self)
            if self.random.random() < 0.8:
                self.live.clear()
            self.backward()
            self.tickets.end_step()
            self.live.clear()
            self.lane.settle()
            held.append(self.store.used_bytes)
        self.lane.close()
        self.device.drain()
        if held[-1]:
            self.device.report("leak", f"host memory in use after each step: {held}")
        if self.device.live_bytes:
            self.device.report("leak", f"{self.device.live_bytes} bytes of device memory are in use at the end")
        for found, expected in self.observed:
            if found.shape != expected.shape or not np.array_equal(found, expected):
                self.device.report("wrong bytes", "a kernel of the backward pass read other bytes than were saved")
        return Outcome(self.device.findings, self.device.num_done, self.num_sent, len(self.observed))

    # ------------------------------------------------------------------ forward

    def make(self) -> None:
        num_bytes = self.random.choice([64, 64, 64, 128])
        reads = self.random.sample(self.live, min(len(self.live), self.random.randint(0, 2)))
        constant = self.random.randrange(256)
        out = self.device.allocate(num_bytes)
        expected = np.zeros(num_bytes, dtype=np.uint8)

        def compute(sources: list[Bytes], targets: list[Bytes]) -> None:
            mixed = np.arange(constant, constant + num_bytes, dtype=np.int64)
            for source in sources:
                mixed = mixed * 3 + np.resize(source, num_bytes)
            targets[0][...] = (mixed & 255).astype(np.uint8)

        self.kernel("make", [t for t, _ in reads], [out], compute)
        compute([e for _, e in reads], [expected])
        self.live.append((out, expected))

    def view(self) -> None:
        if self.live:
            tensor, expected = self.random.choice(self.live)
            if tensor.dim() != 1 or tensor.numel() % 16 or not tensor.is_contiguous():
                return
            kind = self.random.randrange(3)
            if kind == 0:
                self.live.append((tensor.view(8, -1).t(), expected.reshape(8, -1).T))
            elif kind == 1:
                self.live.append((tensor[16:], expected[16:]))
            else:
                self.live.append((tensor[::2], expected[::2]))

    def write(self) -> None:
        if self.live:
            tensor, expected = self.random.choice(self.live)
            constant = self.random.randrange(256)

            def compute(sources: list[Bytes], targets: list[Bytes]) -> None:
                targets[0][...] = ((sources[0].astype(np.int64) * 5 + constant) & 255).astype(np.uint8)

            self.tickets.about_to_write(tensor)
            self.kernel("write in place", [tensor], [tensor], compute)
            compute([expected], [expected])
            increment_version(tensor)

    def send(self, place: int = 1 << 30) -> None:
        if self.live:
            index = self.random.randrange(len(self.live))
            tensor, expected = self.live[index]
            self.order(tensor)
            self.saved.insert(place, Saved(self.tickets.send(tensor), expected.copy(), on_device=True))
            self.num_sent += 1
            if self.random.random() < 0.5:
                del self.live[index]

    def send_host(self) -> None:
        tensor = torch.arange(64, dtype=torch.uint8)
        self.saved.append(Saved(self.tickets.send(tensor), tensor.numpy().copy(), on_device=False))

    def free(self) -> None:
        if self.live:
            del self.live[self.random.randrange(len(self.live))]

    def switch(self) -> None:
        self.device.compute = self.random.choice(self.streams)

    OPERATIONS = (
        make,
        make,
        make,
        make,
        view,
        view,
        write,
        send,
        send,
        send,
        send,
        send_host,
        free,
        free,
        switch,
        switch,
        switch,
    )

    # ------------------------------------------------------------------ backward

    def backward(self) -> None:
        if self.random.random() < 0.2:
            self.random.shuffle(self.saved)
        skipped = self.random.random() < 0.1
        while self.saved:
            for ahead in self.saved[::-1][: self.random.randint(0, 3)]:
                self.tickets.prefetch(ahead.ticket)
            one = self.saved.pop()
            if not skipped and self.random.random() > 0.15:
                for _ in range(2 if self.random.random() < 0.2 else 1):
                    self.use(one)
            self.tickets.drop(one.ticket)
            if self.random.random() < 0.2:
                self.switch()
            if self.random.random() < 0.3:
                self.make()
            if self.random.random() < 0.5:
                self.free()
            if not skipped and self.saved and self.random.random() < 0.25:  # the forward of another microbatch
                self.switch()
                self.make()
                self.send(place=0)

    def use(self, one: Saved) -> None:
        fetched = self.tickets.fetch(one.ticket)
        if self.device.owns(fetched) != one.on_device:
            self.device.report("wrong place", f"came back {'in device memory' if not one.on_device else 'on the host'}")
            return
        if not one.on_device:
            self.observed.append((fetched.numpy().copy(), one.expected))
            return
        gradient = self.device.allocate(64)
        observed = self.observed

        def compute(sources: list[Bytes], targets: list[Bytes]) -> None:
            observed.append((sources[0].copy(), one.expected))
            targets[0][...] = np.resize(sources[0], 64)

        self.kernel("use", [fetched], [gradient], compute)
        self.live.append((gradient, np.resize(one.expected, 64)))
