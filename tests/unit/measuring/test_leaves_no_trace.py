from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Generator

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optim
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from actmem.measuring import Measurement, PeakOp, Sample, measure


def global_state() -> tuple[object, ...]:
    return (
        list(_get_current_dispatch_mode_stack()),
        vars(torch.UntypedStorage).get("resize_"),
        dict(optim._global_optimizer_pre_hooks),
        dict(optim._global_optimizer_post_hooks),
    )


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Generator[None]:
    before = global_state()
    yield
    assert global_state() == before


def test_an_error_in_the_step_passes_through_and_nothing_stays() -> None:
    model = nn.Linear(4, 4)

    for error in (KeyError("mine"), KeyboardInterrupt()):

        def failing(error: BaseException = error) -> None:
            model(torch.ones(2, 4))
            raise error

        before = global_state()
        with pytest.raises(type(error)):
            measure(failing, model=model)
        assert global_state() == before
    measure(lambda: model(torch.ones(2, 4)), model=model)


def test_an_error_in_backward_does_not_spoil_the_next_backward() -> None:
    def bad(_: torch.Tensor) -> None:
        raise ValueError("in backward")

    def step() -> None:
        x = torch.ones(10, requires_grad=True)
        y = x.exp()
        y.register_hook(bad)
        with pytest.raises(ValueError, match="in backward"):
            y.sum().backward()
        del x, y
        z = torch.ones(1000, requires_grad=True)
        z.exp().sum().backward()

    m = measure(step)
    assert m.saved_bytes == 4000 + 4000 + 4 + 4


def test_measuring_keeps_no_tensor_alive_and_makes_no_cycle() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    alive: list[weakref.ref[torch.Tensor]] = []

    def step() -> torch.Tensor:
        x = torch.ones(4, 8)
        y = model(x)
        alive.extend((weakref.ref(x), weakref.ref(y)))
        y.sum().backward()
        optimizer.step()
        return y

    step()
    alive.clear()
    while gc.collect():  # what other tests left behind may take several rounds
        pass
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        measure(step, model=model, optimizer=optimizer)
        assert [ref() for ref in alive] == [None, None]
        gc.collect()
        # names, not the things themselves: what the collector took apart must not be printed
        kinds = {f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.garbage}
        assert not [kind for kind in kinds if kind.startswith("actmem")]
        assert "torch.Tensor" not in kinds
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_after_an_error_nothing_is_alive_once_the_error_is_handled() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        x = torch.ones(4)
        alive.append(weakref.ref(x))
        raise ValueError

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError) as caught:
            measure(step)
        del caught
        gc.collect()
        assert alive[0]() is None
    finally:
        gc.enable()


def test_measurements_nest() -> None:
    inner: list[Measurement] = []

    def step() -> None:
        x = torch.ones(10)
        inner.append(measure(lambda: torch.ones(100)))
        del x

    outer = measure(step)
    assert inner[0].peak_bytes == 400
    assert outer.peak_bytes == 440


def test_parameters_have_no_hooks_afterwards() -> None:
    model = nn.Linear(4, 4)
    measure(lambda: model(torch.ones(2, 4)).sum().backward(), model=model)
    for parameter in model.parameters():
        assert parameter._backward_hooks is None
        assert parameter._post_accumulate_grad_hooks is None
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_measurement_is_plain_data() -> None:
    model = nn.Linear(4, 4)
    m = measure(lambda: model(torch.ones(2, 4)).sum().backward(), model=model)
    read = json.loads(m.to_json())
    assert read["peak_bytes"] == m.peak_bytes
    assert read["by_category"] == m.by_category
    read["timeline"] = tuple(Sample(*sample) for sample in read["timeline"])
    read["peak_op"] = PeakOp(**read["peak_op"])
    assert Measurement(**read) == m
    with pytest.raises(AttributeError):
        m.peak_bytes = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_measurement_prints_sizes_a_person_can_read() -> None:
    m = Measurement(
        peak_bytes=3 * 2**30,
        tensor_bytes=3 * 2**30,
        unseen={},
        step_bytes=2 * 2**30,
        saved_bytes=512 * 2**20,
        external_bytes=0,
        device="cpu",
        by_category={
            "parameters": 2**30,
            "buffers": 0,
            "gradients": 0,
            "optimizer_state": 0,
            "activations": 2**30,
            "temporary": 2**30,
        },
        by_device={"cpu": 3 * 2**30, "meta": 2**20},
        peak_op=PeakOp("aten.mm.default", "backward", "layers.3.mlp"),
        timeline=(),
        forward_flops=10**9,
        backward_flops=2 * 10**9,
        replayed_flops=5 * 10**8,
        optimizer_flops=0,
        forward_seconds=1.0,
        backward_seconds=2.0,
        replay_seconds=0.5,
        optimizer_seconds=0.25,
        num_ops=100,
        num_replayed_ops=20,
    )
    assert str(m) == (
        "peak      3.00 GiB on cpu, at aten.mm.default (backward) in layers.3.mlp\n"
        "  of it   parameters 1.00 GiB, activations 1.00 GiB, temporary 1.00 GiB\n"
        "step      2.00 GiB allocated at its peak, 512.00 MiB saved for backward\n"
        "forward   1.000 GFLOP, 1.000 s\n"
        "backward  2.000 GFLOP, 2.000 s\n"
        "replay    0.500 GFLOP, 0.500 s, 20 of 100 operators\n"
        "optimizer 0.000 GFLOP, 0.250 s\n"
        "elsewhere meta 1.00 MiB"
    )
