"""What observes a step, on a device that is late: it sees the true peak, waits for nothing, and leaves no trace."""

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from actmem import Full, OffloadActivations, SaveEverything
from actmem.measuring import measure_machine
from tests.flat_device import FLAT
from tests.late_device import late
from tests.late_device.stage import needs_compiler, on_late_device
from tests.late_device.trainings import LAGS, Block, batch, lanes, model

pytestmark = needs_compiler


def generators() -> list[Tensor]:
    return [torch.get_rng_state(), *(g.get_state() for g in torch.get_device_module("late").default_generators)]


def generators_stay() -> None:
    x, there = batch(), model()
    here = nn.Sequential(*(Block() for _ in range(3)))
    observers: dict[str, Callable[[], Any]] = {
        "verify": lambda: actmem.verify(there, (x,), Full()),
        "verify on the CPU": lambda: actmem.verify(here, (x.cpu(),), Full(), loss=torch.sum),
        "doctor": lambda: actmem.doctor(there, (x,)),
        "profile": lambda: actmem.profile(there, (x,), fake=False),
        "profile of a step": lambda: actmem.profile(there, step=lambda: there(x).backward(), fake=False),
        "measure_machine": lambda: measure_machine(seconds=0.02),
    }
    for name, observe in observers.items():
        torch.manual_seed(11)
        torch.rand(3, device="late:1")
        before = generators()
        observe()
        assert all(map(torch.equal, before, generators())), name


def is_verified() -> None:
    with tempfile.TemporaryDirectory() as folder, LAGS["kernels late"](), late.lag(late.SIDES, 500):
        for name, way in lanes(folder).items():
            if not isinstance(way(), dict):
                found = actmem.verify(model(), (batch(),), way())
                assert found.ok, f"{name}: {found}"


def the_peak_is_the_allocators() -> None:
    """The predicted and the measured peak are what the allocator holds, however late the copies are."""
    x = batch(128)
    prediction = actmem.profile(model(), (x,), optimizer=None)
    with tempfile.TemporaryDirectory() as folder:
        ways = {"plain": SaveEverything, "full": Full, **lanes(folder)}
        for name, way in ways.items():
            if isinstance(way(), dict):
                continue
            predicted = actmem.predict(prediction, way(), FLAT).peak_bytes
            for lateness in ("copies late", "all held"):
                held, measured = _peaks(way(), x, lateness)
                assert held == measured, f"{name}, {lateness}: the allocator holds {held}, measure says {measured}"
                assert held <= predicted <= 1.1 * held, f"{name}, {lateness}: predicted {predicted}, held {held}"


def _peaks(mode: Any, x: Tensor, lateness: str) -> tuple[int, int]:
    """Return the peak that the allocator sees without actmem looking, and the measured one: in the third step each."""
    made = model()
    gc.collect()
    late.synchronise()
    other_bytes = late.held_bytes() - sum(p.nbytes for p in made.parameters())

    def step() -> None:
        made(x).backward()

    with actmem.apply(made, mode), LAGS[lateness]():
        for _ in range(2):
            step()
            made.zero_grad()
        late.synchronise()
        torch.accelerator.reset_peak_memory_stats()
        step()
        held_bytes = late.peak_held_bytes() - other_bytes
        made.zero_grad()
        late.synchronise()
        measured = actmem.measure(step, model=made)
        made.zero_grad()
    return held_bytes, measured.peak_bytes


def nothing_waits() -> None:
    made, x = model(), batch()
    with actmem.apply(made, OffloadActivations(to="host", min_bytes=0)):
        for _ in range(2):
            made(x).backward()
        late.synchronise()

        def step() -> None:
            torch.empty(1, device="late").zero_()
            begun = torch.accelerator.current_stream().record_event()
            made(x).backward()
            assert not begun.query(), "something waited for the device within the step"

        late.waits()
        with late.held(late.DEFAULT + late.SIDES):
            actmem.measure(step, model=made)
        assert late.waits() == []
        assert (
            str(actmem.measure(lambda: made(x).backward(), model=made, check=True).check) == "agrees with the allocator"
        )


def a_slow_device_is_measured_with_small_matrices() -> None:
    found = measure_machine(seconds=0.02)
    assert "8192" not in found.sources["flops_per_second.fp32"]
    assert found.memory_bytes == 4 * 2**30


def test_generators_stay_as_they_were_and_modes_are_verified() -> None:
    on_late_device(generators_stay, is_verified, a_slow_device_is_measured_with_small_matrices)


def test_the_peak_is_that_of_the_allocator_at_any_lag_and_no_observer_waits() -> None:
    on_late_device(the_peak_is_the_allocators, nothing_waits)
