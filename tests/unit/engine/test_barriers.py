"""What is held where a chain cannot be replayed to its beginning."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from actmem import Full
from actmem.decisions import Reason
from actmem.engine.barriers import TRIFLE_BYTES, owe, settle
from actmem.engine.holdings import find
from actmem.engine.observation import ObservedOperator
from actmem.engine.values import Node, Value
from tests.engine.cases import Program, compare, never, stack


def given(tensor: Tensor, why: Reason = Reason.OPAQUE) -> Value:
    """Make a value that is never replayed."""
    value = Value(weakref.ref(tensor.untyped_storage()), None, 0, why)
    value.tensor, value.num_bytes = weakref.ref(tensor), tensor.untyped_storage().nbytes()
    return value


def recorded(tensor: Tensor, *debts: Value) -> Value:
    """Make a value that a node can make again, and that owes."""
    node = Node(torch.ops.aten.add.Tensor, [], None, [])
    value = Value(weakref.ref(tensor.untyped_storage()), node, 0, None)
    value.debts = debts
    value.row = ObservedOperator("", "aten.add.Tensor", "made", tensor, tensor.nbytes, None)
    return value


class Held:
    """Note what is held, and hold it."""

    def __init__(self) -> None:
        self.values: list[Value] = []

    def __call__(self, value: Value, tensor: Tensor) -> None:
        value.held = tensor
        self.values.append(value)


def settled(value: Value, tensor: Tensor) -> list[Value]:
    hold = Held()
    settle(value, tensor.untyped_storage().nbytes(), hold, tensor, find)
    assert value.debts is None  # from now on it is closed
    return hold.values


# -------------------------------------------------------------------- debts


def test_debts_are_joined_in_the_order_in_which_they_were_met() -> None:
    tensors = [torch.ones(1) for _ in range(3)]
    a, b, c = (given(t) for t in tensors)
    assert owe(None, (a,)) == (a,)
    assert owe((a,), (b,)) == (a, b)
    assert owe((a, b), (b, c)) == (a, b, c)
    same = (a, b)
    assert owe(same, same) is same


# -------------------------------------------------------------------- whichever is fewer bytes


@pytest.mark.parametrize(
    ("sizes", "size", "owed_is_held"),
    [
        ((10,), 20, True),
        ((10,), 10, True),
        ((11,), 10, False),
        ((10, 10), 20, True),
        ((10, 11), 20, False),
        ((100,), 1, False),
    ],
)
def test_the_fewer_bytes_are_held(sizes: tuple[int, ...], size: int, owed_is_held: bool) -> None:
    tensors = [torch.ones(n) for n in sizes]
    debts = [given(t) for t in tensors]
    tensor = torch.ones(size)
    value = recorded(tensor, *debts)
    held = settled(value, tensor)
    if owed_is_held:
        assert held == debts and value.node is not None and value.why is None
        assert all(v.held is t for v, t in zip(debts, tensors, strict=True))
    else:
        assert held == [value] and value.node is None and value.why is Reason.BARRIER and value.held is tensor
        assert value.row.cause == "opaque"


def test_what_is_held_already_costs_nothing() -> None:
    large, small, tensor = torch.ones(100), torch.ones(5), torch.ones(10)
    free, owed = given(large), given(small)
    free.held = large
    value = recorded(tensor, free, owed)
    assert settled(value, tensor) == [owed] and value.node is not None


def test_nothing_is_held_where_every_debt_is_paid() -> None:
    large, tensor = torch.ones(100), torch.ones(1)
    owed = given(large)
    owed.held = large
    value = recorded(tensor, owed)
    assert settled(value, tensor) == [] and value.node is not None


def test_the_whole_storage_of_what_is_owed_counts() -> None:
    base = torch.ones(100)
    tensor = torch.ones(10)
    value = recorded(tensor, given(base[:5]))
    base_view_lives = settled(value, tensor)
    assert base_view_lives == [value]


# -------------------------------------------------------------------- lost debts


def test_if_what_is_owed_has_died_the_value_itself_is_held() -> None:
    tensor, small = torch.ones(100), torch.ones(1)
    value = recorded(tensor, given(small))
    del small
    assert settled(value, tensor) == [value] and value.why is Reason.BARRIER


def test_if_what_is_owed_was_overwritten_the_value_itself_is_held() -> None:
    tensor, small = torch.ones(100), torch.ones(1)
    owed = given(small)
    owed.tensor = None  # as `preserve` leaves it
    assert settled(value := recorded(tensor, owed), tensor) == [value]


def test_if_the_data_of_what_is_owed_was_exchanged_the_value_itself_is_held() -> None:
    tensor, small = torch.ones(100), torch.ones(1)
    owed = given(small)
    small.data = torch.zeros(1)
    assert settled(value := recorded(tensor, owed), tensor) == [value]


def test_one_lost_debt_of_several_is_enough() -> None:
    tensor, kept, lost = torch.ones(100), torch.ones(1), torch.ones(1)
    debts = given(kept), given(lost)
    del lost
    assert settled(value := recorded(tensor, *debts), tensor) == [value]
    assert debts[0].held is None


# -------------------------------------------------------------------- in a block


@torch.library.custom_op("actmem_tests::dequantised", mutates_args=())
def dequantised(weight: Tensor) -> Tensor:
    return weight.float() / 16


def dequantising(width: int) -> Any:
    weight = torch.arange(width * width, dtype=torch.int8).view(width, width)
    return lambda block, h: (h @ dequantised(weight)).sin()


def test_a_weight_that_an_opaque_kernel_makes_costs_no_more_than_plain_training() -> None:
    report = compare(lambda: stack(dequantising(8)), Full(), num_steps=3)
    inputs = 2 * 6 * 8 * 4
    assert report.held_bytes <= report.plain_bytes + inputs


def test_of_a_product_with_a_large_opaque_weight_that_is_not_saved_the_product_is_held() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        weight = dequantised(torch.ones(32, 8, dtype=torch.int8))  # 1024 bytes, detached from h: nobody saves it
        return (h @ block.v + weight.sum(0) * weight.amax()).sin()

    first = compare(lambda: stack(body), Full(), num_steps=1)
    assert set(never(first).values()) and first.never_replayed_bytes <= 2 * 6 * 8 * 4


def test_a_trifle_is_held_when_it_is_read_and_does_not_end_the_chain_when_it_dies() -> None:
    assert TRIFLE_BYTES == 64

    def body(block: Program, h: Tensor) -> Tensor:
        mask = torch.full((), 0.5) * h.detach()  # the constant dies here
        return (h @ block.v) * mask.exp()

    report = compare(lambda: stack(body), Full(), num_steps=1)
    assert "aten.exp.default" not in never(report)
    assert report.never_replayed_bytes == 2 * 4  # two constants of one float, instead of two masks


def test_a_lost_value_that_is_no_trifle_ends_the_chain() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        return (h @ block.v) * (dequantised(torch.ones(6, 8, dtype=torch.int8)) * h.detach()).exp()

    found = never(compare(lambda: stack(body), Full(), num_steps=1))
    assert set(found) <= {"aten.exp.default", "aten.mul.Tensor"} and found
