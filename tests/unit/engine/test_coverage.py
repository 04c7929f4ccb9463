"""Several partial writes, and when they are the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actmem.engine.coverage import Coverage, fills


def after(tensor: Tensor, *writes: Tensor) -> Coverage | None:
    """Return the coverage of a newborn tensor after writes to views of it."""
    coverage = Coverage.of(tensor)
    for view in writes:
        assert coverage is not None
        coverage = coverage.with_write(view)
    return coverage


def full(tensor: Tensor, *writes: Tensor) -> bool:
    coverage = after(tensor, *writes)
    return coverage is not None and coverage.full


# -------------------------------------------------------------------- boxes


def test_nothing_written_is_not_full() -> None:
    coverage = Coverage.of(torch.empty(4, 6))
    assert coverage is not None and coverage.boxes == () and not coverage.full


def test_one_write_of_everything_is_full() -> None:
    x = torch.empty(4, 6)
    assert full(x, x) and full(x, x.t()) and full(x, x.view(2, 2, 6)[:, :].reshape(4, 6)) and full(x.t(), x)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slices_of_one_dimension_are_full_when_the_last_is_there(dim: int) -> None:
    x = torch.empty(4, 6, 8)
    parts = x.split(2, dim)
    assert not full(x, *parts[:-1]) and not full(x, *parts[1:])
    assert full(x, *parts) and full(x, *reversed(parts))


def test_neighbours_are_joined_to_one_box() -> None:
    x = torch.empty(4, 6)
    joined = after(x, x[:, :2], x[:, 4:], x[:, 2:4])
    assert joined is not None and joined.boxes == (((0, 4), (0, 6)),)
    apart = after(x, x[:, :2], x[:, 4:])
    assert apart is not None and len(apart.boxes) == 2


def test_a_join_may_allow_another_one() -> None:
    x = torch.empty(4, 6)
    quarters = [x[:2, :3], x[:2, 3:], x[2:, :3], x[2:, 3:]]
    coverage = after(x, *quarters)
    assert coverage is not None and coverage.full and len(coverage.boxes) == 1


def test_boxes_that_cannot_be_joined_still_add_up() -> None:
    x = torch.empty(3, 3)  # a pinwheel: no two pieces have a whole side in common
    pieces = [x[0, :2], x[:2, 2], x[2, 1:], x[1:, 0], x[1, 1]]
    assert full(x, *pieces) and not any(full(x, *pieces[:k], *pieces[k + 1 :]) for k in range(5))


def test_single_elements_and_dimensions_of_size_one() -> None:
    x = torch.empty(2, 1, 2)
    assert full(x, x[0, 0, 0], x[0, :, 1], x[1])
    assert not full(x, x[0, 0, 0], x[0, :, 1])
    scalar = torch.empty(())
    assert full(scalar, scalar)


def test_an_element_that_is_written_twice_cannot_be_told() -> None:
    x = torch.empty(4)
    assert after(x, x[:2], x[1:3]) is None
    assert after(x, x[:3], x[:3]) is None


def test_more_pieces_than_are_counted_cannot_be_told() -> None:
    x = torch.empty(64)
    coverage = Coverage.of(x)
    for k in range(0, 64, 2):
        coverage = coverage and coverage.with_write(x[k : k + 1])
    assert coverage is None
    assert full(x, *x.split(1))  # in order they are joined as they come, and stay few


# -------------------------------------------------------------------- strides, dtypes


def test_a_write_with_a_step_cannot_be_told() -> None:
    x = torch.empty(6)
    assert after(x, x[::2]) is None


def test_the_order_of_the_strides_does_not_matter() -> None:
    x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert full(x, x[:, :1], x[:, 1:]) and full(x, x[..., :2], x[..., 2:]) and not full(x, x[:, :1], x[:, 2:])
    y = torch.empty(4, 6).t()
    assert full(y, y[:3], y[3:])


def test_an_expanded_or_overlapping_view_is_not_counted_by_its_elements() -> None:
    x = torch.empty(4, 4)
    assert not full(x, x[:1].expand(4, 4))
    assert not full(x, x.as_strided((4, 4), (1, 1)))


def test_a_view_as_another_dtype_of_the_same_size_counts_and_of_another_size_does_not() -> None:
    x = torch.empty(4, 4)
    assert full(x, x.view(torch.int32))
    assert after(x, x.view(torch.int16)) is None
    assert after(x, x.view(torch.float64)) is None


def test_a_tensor_that_does_not_fill_its_storage_has_no_coverage() -> None:
    assert Coverage.of(torch.empty(9)[1:]) is None
    assert Coverage.of(torch.empty(4, 4)[:, :2]) is None
    assert Coverage.of(torch.empty(1).expand(4)) is None
    assert Coverage.of(torch.empty(0)) is None


def test_each_version_has_a_coverage_of_its_own() -> None:
    x = torch.empty(4)
    first = after(x, x[:2])
    assert first is not None
    second = first.with_write(x[2:])
    assert second is not None and second.full and not first.full


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), True),
        (torch.zeros(2, 1, 4).transpose(0, 1), True),
        (torch.zeros(()), True),
        (torch.zeros(0), True),
        (torch.zeros(6)[:5], False),
        (torch.zeros(6)[::2], False),
        (torch.zeros(9).as_strided((3, 3), (1, 1)), False),
        (torch.zeros(9).as_strided((3, 3), (2, 2)), False),
        (torch.zeros(3).expand(3, 3), False),
    ],
)
def test_fills(tensor: Tensor, expected: bool) -> None:
    assert fills(tensor) is expected


# -------------------------------------------------------------------- against a mask


@st.composite
def written(draw: st.DrawFn) -> tuple[Tensor, list[Tensor]]:
    """Draw a newborn tensor, of any order of strides, and views of it."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    order = draw(st.permutations(range(len(shape))))
    x = torch.zeros(shape, dtype=draw(st.sampled_from([torch.uint8, torch.int32]))).permute(order)
    views: list[Tensor] = []
    for _ in range(draw(st.integers(1, 6))):
        view = x
        for _ in range(draw(st.integers(0, 3))):
            view = draw(st.sampled_from(STEPS))(view, draw)
        views.append(view)
    return x, views


def narrowed(x: Tensor, draw: Any) -> Tensor:
    if not x.dim():
        return x
    dim = draw(st.integers(0, x.dim() - 1))
    start = draw(st.integers(0, x.size(dim) - 1))
    return x.narrow(dim, start, draw(st.integers(1, x.size(dim) - start)))


def selected(x: Tensor, draw: Any) -> Tensor:
    if not x.dim():
        return x
    dim = draw(st.integers(0, x.dim() - 1))
    return x.select(dim, draw(st.integers(0, x.size(dim) - 1)))


def stepped(x: Tensor, draw: Any) -> Tensor:
    return x[:: draw(st.integers(1, 3))] if x.dim() else x


def turned(x: Tensor, draw: Any) -> Tensor:
    return x.transpose(0, -1) if x.dim() else x


def flattened(x: Tensor, draw: Any) -> Tensor:
    return x.view(-1) if x.is_contiguous() else x


def spread(x: Tensor, draw: Any) -> Tensor:
    return x.unsqueeze(0).expand(2, *x.shape)


def diagonal(x: Tensor, draw: Any) -> Tensor:
    return x.diagonal() if x.dim() > 1 else x


def bytes_of(x: Tensor, draw: Any) -> Tensor:
    return x.view(torch.uint8) if x.dim() and x.stride(-1) == 1 else x


STEPS = [narrowed, narrowed, narrowed, selected, stepped, turned, flattened, spread, diagonal, bytes_of]


@given(written())
def test_what_is_called_full_has_no_element_left(drawn: tuple[Tensor, list[Tensor]]) -> None:
    x, views = drawn
    coverage = Coverage.of(x)
    mask = torch.zeros(x.untyped_storage().nbytes(), dtype=torch.uint8)
    for view in views:
        coverage = coverage and coverage.with_write(view)
        mark(view, mask)
        if coverage is None:
            return
        assert coverage.full == bool(mask.all())


def mark(view: Tensor, mask: Tensor) -> None:
    """Write ones into every byte on which the view lies."""
    size = view.element_size()
    base = mask.as_strided((*view.shape, size), (*(s * size for s in view.stride()), 1), view.storage_offset() * size)
    base.fill_(1)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_disjoint_slices_in_any_order_are_recognised(shape: list[int], data: st.DataObject) -> None:
    x = torch.empty(shape)
    pieces = [x]
    for _ in range(data.draw(st.integers(0, 4))):
        piece = pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
        dim = data.draw(st.integers(0, x.dim() - 1))
        at = data.draw(st.integers(0, piece.size(dim)))
        pieces += [p for p in (piece.narrow(dim, 0, at), piece.narrow(dim, at, piece.size(dim) - at)) if p.numel()]
    pieces = data.draw(st.permutations(pieces))
    assert math.prod(shape) == sum(p.numel() for p in pieces)
    assert full(x, *pieces)
    assert not full(x, *pieces[:-1])
