"""What would be wrong on a real device is wrong on the late one: each planted fault is caught by comparing bits."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from actmem import Full, OffloadActivations
from actmem.engine import replay
from actmem.errors import ActmemError
from actmem.offloading.accelerator import AcceleratorLane, TorchDevice, _StreamCopy
from tests.late_device import late
from tests.late_device.stage import needs_compiler, on_late_device
from tests.late_device.trainings import Lag, Model, differences, model, train

pytestmark = needs_compiler


def nothing(*_: Any) -> None:
    """Take the place of a call."""


def release_without_wait(copy: Any) -> None:
    if not copy.done():
        copy._tensor = None


def unordered_stream(lane: Any, slot: Any, *, outward: bool) -> Any:
    del slot
    return lane._device.current_stream() if lane._streams is None else lane._streams[0 if outward else 1]


def draw_from_here(node: Any, args: Any, kwargs: Any) -> Any:
    return node.func(*args, **(kwargs or {}))


@contextlib.contextmanager
def planted(*places: tuple[Any, str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, fault in places:
            stack.enter_context(patch.object(owner, name, fault))
        yield


class Branches(Model):
    """Two branches on two streams that do not wait for one another.

    What the first block made is pushed out by the second one, on another stream, and the third asks for memory on the
    stream of the first.
    """

    def forward(self, x: Tensor) -> Tensor:
        here = torch.accelerator.current_stream()
        one, other = self.streams
        for stream in self.streams:
            stream.wait_stream(here)
        with one:
            y = self.blocks[0](x)
        with other:
            z = self.blocks[1](x)
        with one:
            y = self.blocks[2](y)
        for stream, made in ((one, y), (other, z)):
            here.wait_stream(stream)
            made.record_stream(here)
        return self.head(y + z).pow(2).mean()


_OWN: list[torch.Stream] = []
STREAMS_OF_LANES = late.SIDES[2:]
"""All but the two that the program made first."""


def branches() -> Model:
    late.library().late_poison_at_free(False)
    torch.manual_seed(0)
    made = Branches().to("late")
    made.streams = _OWN
    return made


def little() -> OffloadActivations:
    return OffloadActivations(to="host", min_bytes=0, in_flight_bytes=20_000)


def true(*_: Any) -> bool:
    return True


Fault = tuple[tuple[tuple[Any, str, Any], ...], Callable[[], Any], Lag, Callable[[], Model]]

FAULTS: dict[str, Fault] = {
    "no stream waits for an event": (
        ((TorchDevice, "wait", nothing),),
        little,
        lambda: late.held(late.DEFAULT),
        model,
    ),
    "events are always done": (
        ((TorchDevice, "done", true), (TorchDevice, "synchronise", true)),
        little,
        lambda: late.held(late.SIDES),
        model,
    ),
    "a source is released without a wait": (
        ((_StreamCopy, "release", release_without_wait),),
        little,
        lambda: late.held(late.OUTS),
        model,
    ),
    "the streams of the copies are not ordered": (
        ((AcceleratorLane, "_ordered_stream", unordered_stream),),
        little,
        lambda: late.held(late.DEFAULT),
        model,
    ),
    "the allocator is not told which stream uses a tensor": (
        ((TorchDevice, "keep_alive", nothing),),
        little,
        lambda: late.lag(STREAMS_OF_LANES, 30_000),
        branches,
    ),
    "the generator is not restored": (((replay, "_draw", draw_from_here),), Full, contextlib.nullcontext, model),
}


def faults() -> None:
    _OWN.extend(torch.Stream("late") for _ in range(2))
    assert {stream.stream_id for stream in _OWN}.isdisjoint(STREAMS_OF_LANES)
    for name, (places, mode, lag, make) in FAULTS.items():
        want = train(made=make(), steps=2)
        assert differences(want, train(mode(), lag, made=make(), steps=2)) == [], f"without {name!r}"
        with planted(*places):
            try:
                found = differences(want, train(mode(), lag, made=make(), steps=2))
            except (ActmemError, RuntimeError) as error:  # a check of actmem's own
                found = [repr(error)]
        late.synchronise()
        assert found, f"{name}: not caught"
        late.library().late_poison_at_free(True)


def test_every_planted_fault_is_caught() -> None:
    on_late_device(faults)
