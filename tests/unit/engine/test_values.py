"""How a tensor is seen through a storage and a geometry."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import actmem
from actmem.decisions import Reason
from actmem.engine import values
from actmem.engine.values import KEPT, UNCHECKED, Geometry, Node, Value, copied, flat, geometry, see, without_bits
from actmem.torchcompat import below_autograd

aten = torch.ops.aten

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1:, 2:5],
    "with a step": lambda x: x[::2, 1::3],
    "one element": lambda x: x[2, 3],
    "expanded": lambda x: x[:, :1].expand(4, 9),
    "unsqueezed": lambda x: x.unsqueeze(1),
    "nothing": lambda x: x[:0],
    "overlapping": lambda x: x.as_strided((3, 3), (2, 1), 4),
    "diagonal": lambda x: x.diagonal(),
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def source(dtype: torch.dtype) -> Tensor:
    x = torch.arange(32).view(4, 8)
    return (x % 3 == 0) if dtype is torch.bool else (x * (1 + 1j)).to(dtype) if dtype.is_complex else x.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return geometry(a) == geometry(b) and torch.equal(a, b)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_is_seen_again_from_any_tensor_on_the_storage(
    view: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = source(dtype)
    wanted = view(x)
    for base in (x, x[1:], x.t(), wanted):
        seen = see(base, *geometry(wanted))
        assert same(seen, wanted) and seen.untyped_storage() is x.untyped_storage()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_seen_on_a_copy_of_the_storage(view: Callable[[Tensor], Tensor]) -> None:
    x = source(torch.float32)
    wanted = view(x)
    for base in (x, x[1:, 2:], x.t()):
        copy = copied(base)
        assert geometry(copy) == geometry(base)
        assert copy.untyped_storage().nbytes() == x.untyped_storage().nbytes()
        assert copy.untyped_storage() is not x.untyped_storage()
        assert same(see(copy, *geometry(wanted)), wanted)


@pytest.mark.parametrize("other", [torch.int32, torch.int16, torch.uint8, torch.float64], ids=str)
def test_a_view_as_another_dtype_is_seen_again(other: torch.dtype) -> None:
    x = source(torch.float32)
    wanted = x.view(other)[1:]
    assert same(see(x, *geometry(wanted)), wanted)
    assert same(see(x.view(other), *geometry(x)), x)


def test_conj_and_neg_bits_are_part_of_the_geometry() -> None:
    z = source(torch.complex64)
    for wanted, bits in ((z, 0), (z.conj(), 1), (z.conj().imag, 2), (z.conj().imag[1:].t(), 2), (z.conj()[:2], 1)):
        assert geometry(wanted)[-1] == bits
        seen = see(z, *geometry(wanted))
        assert same(seen, wanted) and (seen.is_conj(), seen.is_neg()) == (wanted.is_conj(), wanted.is_neg())


def test_equal_geometries_are_one_object() -> None:
    x, y = torch.zeros(4, 8), torch.ones(9, 8)
    assert geometry(x.t()) is geometry(y[:4].t()) and geometry(x) is not geometry(y)
    assert geometry(x) != geometry(x.double()) and geometry(x) != geometry(x.t())


def test_geometries_are_forgotten_when_a_program_meets_ever_new_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_GEOMETRIES", {})
    monkeypatch.setattr(values, "_MAX_GEOMETRIES", 20)
    blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    most = 0
    with actmem.apply(blocks, actmem.Full(), blocks="*"):
        for n in range(1, 30):
            blocks(torch.ones(n, 8)).sum().backward()
            most = max(most, len(vars(values)["_GEOMETRIES"]))
    assert 0 < most < 40


def test_a_size_that_is_not_yet_a_number_has_a_geometry() -> None:
    met: list[Geometry] = []

    def program(x: Tensor) -> Tensor:
        met.append(geometry(x))
        return x + 1

    make_fx(program, tracing_mode="symbolic")(torch.ones(5, 8))
    assert isinstance(met[0][0][0], torch.SymInt) and met[0][2:] == (0, torch.float32, 0)


def test_bits_are_taken_off_without_touching_bytes() -> None:
    z = source(torch.complex64)
    plain = without_bits(z.conj())
    assert not plain.is_conj() and torch.equal(plain, z) and plain.untyped_storage() is z.untyped_storage()
    imaginary = z.conj().imag
    assert imaginary.is_neg()
    plain = without_bits(imaginary)
    assert not plain.is_neg() and torch.equal(plain, z.imag)
    assert without_bits(z) is z
    version = z._version
    z.mul_(2)
    assert without_bits(z.conj())._version == version + 1


def test_a_base_that_already_is_what_is_wanted_is_returned_as_it_is() -> None:
    x = source(torch.float32)
    assert see(x, *geometry(x)) is x


def test_what_is_seen_shares_bytes() -> None:
    x = source(torch.float32)
    seen = see(x, *geometry(x[1]))
    x[1] = 7
    assert seen.eq(7).all()


def test_seeing_below_autograd_leaves_no_history() -> None:
    x = source(torch.float32).requires_grad_()
    with below_autograd():
        seen = see(x, *geometry(x[1:].detach()))
    assert seen.grad_fn is None


# -------------------------------------------------------------------- whole storages


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_flat_is_all_of_the_storage(view: Callable[[Tensor], Tensor]) -> None:
    x = source(torch.float32)
    whole = flat(view(x))
    assert whole.numel() * whole.element_size() == x.untyped_storage().nbytes()
    assert whole.is_contiguous() and whole.storage_offset() == 0 and torch.equal(whole.reshape(-1), x.view(-1))


def test_flat_of_a_storage_that_is_no_multiple_of_the_element_is_bytes() -> None:
    raw = torch.arange(10, dtype=torch.uint8)
    pairs = raw[:8].view(torch.int32)
    whole = flat(pairs)
    assert whole.dtype is torch.uint8 and torch.equal(whole, raw)


def test_flat_of_a_whole_tensor_is_that_tensor() -> None:
    x = source(torch.float32)
    assert flat(x) is x


# -------------------------------------------------------------------- values and nodes


def test_a_new_value_is_not_held_and_owes_nothing() -> None:
    x = torch.ones(2)
    value = Value(weakref.ref(x.untyped_storage()), None, 0, Reason.OPAQUE)
    assert value.held is None and value.debts is None and value.version == UNCHECKED and not value.own
    assert value.storage() is x.untyped_storage()
    del x
    assert value.storage() is None  # never a bare pointer: the allocator uses it again
    assert KEPT == (Reason.SAVED, Reason.OFFLOADED, Reason.CUT)


def test_a_node_that_overwrites_all_does_not_refer_to_the_old_version() -> None:
    x, y = torch.ones(4), torch.ones(4)
    old, read = (Value(weakref.ref(t.untyped_storage()), None, 0, None) for t in (x, y))
    refs = [(0, -1, old, geometry(x)), (1, -1, read, geometry(y))]
    whole = Node(aten.copy_.default, [None, None], None, list(refs))
    whole.overwrite([(0, -1, x, True)])
    assert whole.refs[0][2] is None and whole.refs[0][3] == geometry(x) and whole.refs[1][2] is read
    assert whole.writes == [(0, -1, 16, torch.device("cpu"))]
    part = Node(aten.copy_.default, [None, None], None, list(refs))
    part.overwrite([(0, -1, x, False)])
    assert part.refs == refs and part.writes == [(0, -1, -1, torch.device("cpu"))]
    nothing = Node(aten.add.Tensor, [None, None], None, list(refs))
    nothing.overwrite([])
    assert nothing.writes is None


def test_a_value_dies_with_the_last_that_can_reach_it() -> None:
    x = torch.ones(2)
    first = Value(weakref.ref(x.untyped_storage()), None, 0, Reason.EXTERNAL)
    node = Node(aten.sin.default, [None], None, [(0, -1, first, *geometry(x))])
    second = Value(weakref.ref(x.untyped_storage()), node, 0, None)
    gone = weakref.ref(first)
    del first, node
    assert gone() is not None
    del second
    assert gone() is None
