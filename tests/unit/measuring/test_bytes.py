"""Bytes that can be counted on paper. `F` is the size of a float32."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn

from actmem.measuring import CATEGORIES, Measurement, measure

F = 4
NUMBER = 8 + F
"""What `x + 1` takes of the allocator besides its result: 1 as a tensor, and once more in the dtype of x."""


def by_category(measurement: Measurement) -> dict[str, int]:
    assert tuple(measurement.by_category) == CATEGORIES
    assert sum(measurement.by_category.values()) == measurement.peak_bytes
    return {name: size for name, size in measurement.by_category.items() if size}


def test_matmul_chain_forward_and_backward_is_counted_to_the_byte() -> None:
    n, d = 8, 16
    w1, w2 = (torch.ones(d, d, requires_grad=True) for _ in range(2))
    x = torch.ones(n, d)

    def step() -> None:
        h = x @ w1  # n*d, saved by the second product
        y = h @ w2  # n*d, saved by nobody: dies when step's name for it dies, which is after backward
        y.backward(torch.ones(n, d))

    m = measure(step)
    act, weight = n * d * F, d * d * F
    assert m.saved_bytes == 3 * act  # h, y, the gradient handed in
    assert [s.live_bytes for s in m.timeline if s.op == "aten.mm.default"] == [
        act,
        2 * act,
        3 * act + weight,  # the gradient of w2
        4 * act + weight,  # that of h
        4 * act + 2 * weight,  # that of w1, while step still holds h and y
    ]
    assert m.step_bytes == m.peak_bytes == 4 * act + 2 * weight
    assert by_category(m) == {"activations": 3 * act, "temporary": act + 2 * weight}, "nobody said whose gradients"
    assert m.external_bytes == act + 2 * weight
    assert m.forward_flops == 2 * (2 * n * d * d)
    assert m.backward_flops == 3 * (2 * n * d * d)  # x needs no gradient


def test_views_cost_nothing_and_a_storage_counts_once() -> None:
    def step() -> None:
        x = torch.ones(4, 8)
        views = [x.t(), x[1:], x.view(-1), x.expand(3, 4, 8), x.detach(), x.unsafe_split(2)[0]]
        assert len(views) == 6

    m = measure(step)
    assert m.peak_bytes == 32 * F
    assert {s.live_bytes for s in m.timeline} == {32 * F}


def test_a_view_keeps_the_whole_storage_alive() -> None:
    def step() -> torch.Tensor:
        x = torch.ones(100)
        one = x[:1]
        del x
        return one + 1

    assert [s.live_bytes for s in measure(step).timeline] == [100 * F, 100 * F, 101 * F]


def test_in_place_operators_allocate_nothing() -> None:
    def step() -> None:
        x = torch.ones(10)
        x.mul_(2).add_(1)
        x[2:4].zero_()
        torch.add(x, x, out=x)

    assert {s.live_bytes for s in measure(step).timeline} == {10 * F}


def test_temporaries_are_counted_until_they_are_freed() -> None:
    def step() -> None:
        x = torch.ones(10)
        y = ((x + 1) * 2).exp()  # each result lives while the next is made: x + 1, then * 2, then exp
        del y

    m = measure(step)
    assert [s.live_bytes for s in m.timeline] == [40, 80, 120, 120]
    assert (m.tensor_bytes, m.peak_bytes) == (120, 120 + NUMBER)
    assert m.unseen == {"aten.mul.Tensor": NUMBER}
    assert by_category(m) == {"temporary": 120 + NUMBER}


def test_what_forward_leaves_alive_is_an_activation_and_the_rest_temporary() -> None:
    def step() -> torch.Tensor:
        x = torch.ones(10)
        return (x + 1) * 2  # x + 1 is freed; x when step returns

    m = measure(step)
    assert by_category(m) == {"activations": 40, "temporary": 80 + NUMBER}
    assert m.saved_bytes == 0, "no backward ran"


def test_categories_of_a_training_step_with_adamw() -> None:
    model = nn.Linear(32, 16)
    model.register_buffer("scale", torch.ones(7))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    weights = (32 * 16 + 16) * F

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()

    first = measure(step, model=model, optimizer=optimizer)
    parts = by_category(first)
    assert parts["parameters"] == weights
    assert parts["buffers"] == 7 * F
    assert parts["gradients"] == weights
    second = measure(step, model=model, optimizer=optimizer)
    parts = by_category(second)
    assert parts["optimizer_state"] == 2 * weights + 2 * F  # two moments and a step count for each of weight and bias
    assert second.peak_op is not None
    assert second.peak_op.phase == "optimizer"
    assert second.step_bytes == second.peak_bytes - (3 * weights + 2 * F + 7 * F)  # the gradients are new each time


def test_state_that_the_first_step_creates_is_optimizer_state_even_if_the_optimizer_was_not_given() -> None:
    weight = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], momentum=0.9, foreach=False)
    weight.grad = torch.ones(1000)
    given = measure(optimizer.step, optimizer=optimizer)
    assert by_category(given) == {"parameters": 4000, "gradients": 4000, "optimizer_state": 4000}
    optimizer.state.clear()
    assert by_category(measure(optimizer.step)) == {"optimizer_state": 4000}


def test_gradient_accumulation_adds_no_second_gradient() -> None:
    model = nn.Linear(64, 64, bias=False)
    weights = 64 * 64 * F
    x = torch.ones(1, 64)

    def micro_batches(count: int) -> Measurement:
        model.zero_grad()

        def step() -> None:
            for _ in range(count):
                model(x).sum().backward()

        return measure(step, model=model)

    one, two, three = (micro_batches(count) for count in (1, 2, 3))
    assert one.tensor_bytes == 2 * weights + 8  # parameter, gradient, the loss and its gradient
    assert (
        two.tensor_bytes == three.tensor_bytes == 3 * weights + 8
    )  # a second gradient lives until it is added to the first
    parts = by_category(two)
    assert parts["temporary"] == weights + sum(two.unseen.values())
    assert parts == {"parameters": weights, "gradients": weights, "activations": 8, "temporary": parts["temporary"]}
    assert one.saved_bytes == two.saved_bytes, "a gradient is nothing that forward left alive"
    kept = measure(lambda: model(x).sum().backward(), model=model)
    assert by_category(kept)["gradients"] == weights, "gradients from before the step count too"


def test_tied_parameters_count_once_and_frozen_ones_count() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False), "c": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    model["c"].requires_grad_(False)
    assert by_category(measure(lambda: None, model=model)) == {"parameters": (64 + 64 + 8) * F}


def test_a_resized_storage_is_counted_at_its_new_size() -> None:
    def by_operator() -> None:
        x = torch.empty(10)
        x.resize_(100)
        torch.ones(1)

    assert [s.live_bytes for s in measure(by_operator).timeline] == [40, 400, 404]

    def by_storage() -> None:
        x = torch.empty(100)
        x.untyped_storage().resize_(0)
        y = torch.ones(50)
        x.untyped_storage().resize_(400)
        del y

    m = measure(by_storage)
    assert [(s.op, s.live_bytes) for s in m.timeline] == [
        ("aten.empty.memory_format", 400),
        ("storage.resize_", 0),
        ("aten.ones.default", 200),
        ("storage.resize_", 600),
    ]
    assert m.peak_bytes == 600
    assert m.num_ops == 2
    assert by_category(m) == {"temporary": 600}


def test_parameters_that_are_freed_and_filled_again_count_when_they_are_there() -> None:
    model = nn.Linear(10, 10, bias=False)

    def step() -> None:
        model.weight.untyped_storage().resize_(0)
        torch.ones(50)
        model.weight.untyped_storage().resize_(400)

    m = measure(step, model=model)
    assert [s.live_bytes for s in m.timeline] == [0, 200, 400]
    assert m.peak_bytes == 400
    assert by_category(m) == {"parameters": 400}
    assert m.step_bytes == 200


def test_a_tensor_from_outside_that_the_step_enlarges_becomes_the_steps() -> None:
    buffer = torch.empty(0)
    m = measure(lambda: torch.add(torch.ones(10), 1, out=buffer))
    assert m.peak_bytes == 80 + NUMBER
    assert m.external_bytes == 0


def test_swapping_storages_counts_each_as_long_as_it_lives() -> None:
    def step() -> None:
        x = torch.ones(10)
        x.set_(torch.ones(100))
        torch.ones(1)
        x.data = torch.ones(5)
        torch.ones(1)

    live = [s.live_bytes for s in measure(step).timeline if s.op == "aten.ones.default"]
    assert live == [40, 440, 404, 420, 24]


def test_storages_are_told_apart_although_the_allocator_reuses_their_memory() -> None:
    def step() -> set[int]:
        return {torch.empty(1000).data_ptr() for _ in range(50)}

    assert {s.live_bytes for s in measure(step).timeline} == {4000}


def test_tensors_made_from_python_data_are_counted() -> None:
    def step() -> None:
        x = torch.tensor([1.0, 2.0, 3.0])
        y = torch.as_tensor([1, 2])
        del x, y

    assert [s.live_bytes for s in measure(step).timeline] == [12, 12 + 16]


def test_sparse_tensors_count_by_their_components() -> None:
    def step() -> None:
        dense = torch.eye(4)
        sparse = dense.to_sparse()
        del dense
        torch.ones(1)
        del sparse
        torch.ones(1)

    coo = 2 * 4 * 8 + 4 * F
    assert [s.live_bytes for s in measure(step).timeline] == [64, 64 + coo, coo + 4, 4]

    def compressed() -> None:
        dense = torch.eye(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this layout a beta
            sparse = dense.to_sparse_csr()
        del sparse

    # row starts, values, and the column indices, which torch leaves in a storage with the row indices
    assert measure(compressed).tensor_bytes == 64 + 5 * 8 + 4 * F + 2 * 4 * 8


def test_sparse_gradients_are_gradients() -> None:
    model = nn.Embedding(100, 8, sparse=True)
    index = torch.tensor([3, 5])
    parts = by_category(measure(lambda: model(index).sum().backward(), model=model))
    assert parts["parameters"] == 3200
    assert parts["gradients"] == 2 * 8 * F + 2 * 8, "values and indices"


def test_wrapper_subclasses_count_by_what_they_hold() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Module()
    model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    m = measure(lambda: (model.weight * 2).sum().backward(), model=model)
    parts = by_category(m)
    assert parts["parameters"] == 2 * 64
    assert parts["gradients"] == 2 * 64
    assert {s.op for s in m.timeline} >= {"aten.mul.Tensor", "aten.sum.default"}, "the operators beneath are seen"
    assert m.saved_bytes == 2 * 4 + 2 * 4, "two sums and their gradients"


def test_other_devices_are_reported_apart() -> None:
    model = nn.Linear(4, 4, bias=False)

    def step() -> None:
        there = torch.empty(1000, device="meta")
        here = torch.ones(1)
        del there, here

    m = measure(step, model=model)
    assert m.device == "cpu"
    assert m.peak_bytes == 64 + 4
    assert m.by_device == {"cpu": 68, "meta": 4000}
    on_meta = measure(step, model=model.to("meta"))
    assert on_meta.device == "meta"
    assert on_meta.peak_bytes == 64 + 4000


def test_saved_bytes_are_the_largest_of_several_backward_passes() -> None:
    weight = torch.ones(10, requires_grad=True)

    def step() -> None:
        for size in (10, 1000, 100):
            weight.grad = None
            (weight[:1] * torch.ones(size)).sum().backward()

    # the factor and the product's sum and gradient; the product itself is not saved
    assert measure(step).saved_bytes == 4000 + 4 + 4


def test_the_peak_names_operator_phase_and_module() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 800)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x).sum()

    model = nn.Sequential(nn.Identity(), Block())
    with torch.no_grad():
        m = measure(lambda: model(torch.ones(50, 8)), model=model)
    assert m.peak_op is not None
    assert (m.peak_op.op, m.peak_op.phase, m.peak_op.module) == ("aten.sum.default", "forward", "1")
    last = m.timeline[-1]
    assert last.live_bytes + last.workspace_bytes == m.peak_bytes  # several threads add up in one
    linear = measure(lambda: model[1].up(torch.ones(50, 8)), model=model)
    assert linear.peak_op is not None
    assert (linear.peak_op.op, linear.peak_op.module) == ("aten.addmm.default", "1.up")
    nothing = measure(lambda: None, model=model)
    assert nothing.peak_op is None
    assert nothing.peak_bytes == (8 * 800 + 800) * F


def test_a_peak_before_the_first_operator_is_reported() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight.grad = torch.ones(4, 4)

    def step() -> None:
        model.weight.grad = None
        torch.ones(1)

    m = measure(step, model=model)
    assert m.peak_bytes == 128
    assert m.peak_op is None
    assert by_category(m) == {"parameters": 64, "gradients": 64}


def test_tensors_in_reference_cycles_live_until_the_collector_runs() -> None:
    def step() -> None:
        holder: list[object] = [torch.ones(100)]
        holder.append(holder)
        del holder
        torch.ones(1)
        gc.collect()
        torch.ones(1)

    gc.collect()
    assert [s.live_bytes for s in measure(step).timeline] == [400, 404, 4]


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_count_the_same(grad: type[torch.no_grad]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def step() -> torch.Tensor:
        with grad():
            return model(torch.ones(2, 8))

    m = measure(step, model=model)
    assert m.peak_bytes == 2 * (64 + 8) * F + 3 * 64
    assert m.forward_flops == 2 * 2 * 2 * 8 * 8
    assert m.backward_flops == m.replayed_flops == 0
