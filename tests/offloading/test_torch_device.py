"""`TorchDevice` on a backend that is written in Python: which calls of torch it makes, in which order.

The backend carries tensors (their bytes are in host memory), `torch.Stream` and `torch.Event`. What it cannot carry:
its streams run nothing, `with stream` leaves `torch.accelerator.current_stream()` as it is, events are done at once and
cannot be synchronised. So the calls are recorded by subclasses of `torch.Stream` and `torch.Event`, and whether an
event is done is set by the test. A backend stays for the life of a process: this one lives in a child.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from typing import Any

import torch
from torch.utils import backend_registration

from actmem.errors import OffloadError
from actmem.offloading.accelerator import AcceleratorLane, TorchDevice
from actmem.offloading.lanes import Lane
from tests.children import run
from tests.offloading.programs import ArenaSlot

NAME = "actmemtest"


class _Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float32]


class _Store:
    def __init__(self) -> None:
        self.given: list[int] = []

    def take(self, num_bytes: int) -> ArenaSlot:
        return ArenaSlot(num_bytes, 0, torch.zeros(num_bytes, dtype=torch.uint8))

    def give(self, slot: ArenaSlot) -> None:
        self.given.append(slot.num_bytes)


def _child() -> dict[str, Any]:
    """Register the backend, run a lane on it, and return the calls of each act."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend())
    kind = torch.device(NAME, 0)
    calls: list[str] = []
    stream_numbers, event_numbers = itertools.count(1), itertools.count()
    done: set[str] = set()

    class DeviceTensor(torch.Tensor):
        data_: torch.Tensor

        @staticmethod
        def __new__(cls: Any, data: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=kind)
            made.data_ = data
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                target, source = args[:2]
                calls.append(f"copy_ to {'device' if isinstance(target, cls) else 'host'}, non_blocking={args[2]}")
                getattr(target, "data_", target).copy_(getattr(source, "data_", source))
                return target
            if func is torch.ops.aten.record_stream.default:
                calls.append(f"record_stream {args[1].stream_id}")
                return None
            return cls(func(args[0].data_, *args[1:], **(kwargs or {})))

    class Stream(torch.Stream):
        def __new__(cls, device: torch.device) -> Any:
            assert device == kind
            return super().__new__(cls, next(stream_numbers), 0, 20)

        def wait_event(self, event: Any) -> None:
            calls.append(f"stream {self.stream_id} waits for {event.name}")
            super().wait_event(event)

        def __enter__(self) -> Any:
            calls.append(f"enter {self.stream_id}")
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            calls.append(f"exit {self.stream_id}")
            super().__exit__(*error)

    class Event(torch.Event):
        def __init__(self, *args: Any) -> None:
            self.name = f"event {next(event_numbers)}"

        def record(self, stream: Any = None) -> None:
            calls.append(f"stream {stream.stream_id} records {self.name}")
            super().record(stream)

        def query(self) -> bool:
            return super().query() and self.name in done

    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc]
    current = [Stream(kind)]
    real = torch.accelerator.current_stream

    def current_stream(device: torch.device) -> Any:
        assert real(device).device == kind
        return current[0]

    torch.accelerator.current_stream = current_stream  # type: ignore[assignment]

    acts: dict[str, Any] = {}

    def act(name: str) -> None:
        acts[name] = list(calls)
        calls.clear()

    device, store = TorchDevice(kind), _Store()
    lane: Lane = AcceleratorLane(device, timeout_seconds=0.05)
    source = DeviceTensor(torch.arange(4, dtype=torch.float32))
    target = DeviceTensor(torch.zeros(4))
    slot = store.take(16)
    copy = lane.out(source, store, slot)
    act("out")
    copy.release()
    act("release")
    current[0] = Stream(kind)
    back = lane.back(store, slot, target)
    act("back")
    back.wait()
    act("wait")
    lane.give(store, slot)
    acts["given while under way"] = list(store.given)
    try:
        lane.settle()
    except OffloadError as error:
        acts["stuck"] = str(error)
    done.update(f"event {i}" for i in range(next(event_numbers)))
    calls.clear()
    lane.close()
    act("close")
    acts["given"] = store.given
    acts["came back"] = target.data_.tolist()
    without = AcceleratorLane(device, use_streams=False, timeout_seconds=0.05)
    done.update(f"event {i}" for i in range(20))
    without.out(source, store, store.take(16))
    act("out without streams")
    return acts


@functools.cache
def acts() -> dict[str, Any]:
    """Run the child once, for all tests of this file."""
    ended = run("-m", "tests.offloading.test_torch_device")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_copy_out_waits_for_the_current_stream_and_runs_on_its_own() -> None:
    assert acts()["out"] == [
        "stream 1 records event 0",
        "stream 2 waits for event 0",
        "enter 2",
        "copy_ to host, non_blocking=True",
        "exit 2",
        "stream 2 records event 1",
    ]


def test_release_orders_the_current_stream_and_marks_the_source() -> None:
    assert acts()["release"] == ["stream 1 waits for event 1", "record_stream 1"]


def test_a_copy_back_waits_for_the_stream_that_is_current_by_then_and_for_the_copy_out() -> None:
    assert acts()["back"] == [
        "stream 4 records event 2",
        "stream 3 waits for event 2",
        "stream 3 waits for event 1",
        "enter 3",
        "copy_ to device, non_blocking=True",
        "exit 3",
        "stream 3 records event 3",
    ]
    assert acts()["wait"] == ["stream 4 waits for event 3", "record_stream 4"]


def test_a_slot_goes_back_when_its_copies_are_done_and_the_bytes_are_the_same() -> None:
    assert acts()["given while under way"] == []
    assert acts()["given"] == [16]
    assert acts()["close"] == []
    assert acts()["came back"] == [0.0, 1.0, 2.0, 3.0]


def test_a_device_that_hangs_is_an_error_in_bounded_time() -> None:
    assert acts()["stuck"].startswith("a copy of 16 bytes to host memory did not finish within 0.05 s.")


def test_without_streams_the_copy_runs_on_the_current_stream() -> None:
    assert acts()["out without streams"] == [
        "enter 4",
        "copy_ to host, non_blocking=True",
        "exit 4",
        "stream 4 records event 5",
    ]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_child()))
