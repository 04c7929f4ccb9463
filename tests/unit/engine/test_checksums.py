"""The sum that tells whether a replay made the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actmem.engine.values import checksum

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def random_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
    return (raw & 1).bool() if dtype is torch.bool else raw.view(dtype)


def flipped(tensor: Tensor, element: int, bit: int) -> Tensor:
    """Return a copy in which one bit of one element is another."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.dtype is torch.bool:
        copy.view(-1)[element] ^= True
        return copy
    raw = copy.view(-1).view(torch.uint8)
    raw[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_have_equal_sums_and_any_flipped_bit_another(dtype: torch.dtype) -> None:
    x = random_bits(dtype, 3, 5)
    assert checksum(x) == checksum(x.clone())
    bits = 1 if dtype is torch.bool else 8 * x.element_size()
    for element in (0, 7, 14):
        for bit in range(bits):
            assert checksum(flipped(x, element, bit)) != checksum(x), (element, bit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_without_dimensions(dtype: torch.dtype) -> None:
    x = random_bits(dtype, 1)[0]
    assert x.dim() == 0
    assert checksum(x) == checksum(x.clone()) != checksum(flipped(x.reshape(1), 0, 0)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_elements(dtype: torch.dtype) -> None:
    for shape in ((0,), (0, 3), (3, 0)):
        x = torch.empty(shape, dtype=dtype)
        assert checksum(x) == checksum(x.clone())


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.bool], ids=str)
def test_halves_that_changed_places(dtype: torch.dtype) -> None:
    x = random_bits(dtype, 6, 4)
    assert checksum(x.roll(3, 0) if x.element_size() > 1 else torch.cat([x[3:], x[:3]])) != checksum(x)


@pytest.mark.parametrize("shape", [(1, 6, 4), (1, 1, 8), (1, 1, 1, 2)], ids=str)
def test_halves_that_changed_places_in_a_batch_of_one(shape: tuple[int, ...]) -> None:
    x = random_bits(torch.float32, *shape)
    dim = next(d for d, n in enumerate(shape) if n > 1)
    assert checksum(x.roll(shape[dim] // 2, dim)) != checksum(x)


def test_signed_zero_and_the_payload_of_nan_are_bits_too() -> None:
    assert checksum(torch.tensor([0.0, 1.0])) != checksum(torch.tensor([-0.0, 1.0]))
    nan = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert checksum(nan) == checksum(nan.clone()) != checksum(other)


def test_one_step_of_rounding_is_seen() -> None:
    x = torch.rand(1000)
    y = x.clone()
    y[617] = torch.nextafter(y[617], torch.tensor(2.0))
    assert checksum(x) != checksum(y)


# -------------------------------------------------------------------- how a tensor lies


VIEWS = {
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:1].expand(5, 8),
    "channels": lambda x: x.view(2, 2, 2, 4).to(memory_format=torch.channels_last),
    "offset": lambda x: x.view(-1)[3:],
    "overlapping": lambda x: x.as_strided((3, 3), (1, 1)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool], ids=str)
def test_elements_count_and_not_how_they_lie(view: object, dtype: torch.dtype) -> None:
    x = view(random_bits(dtype, 4, 8))  # type: ignore[operator]
    assert checksum(x) == checksum(x.contiguous()) == checksum(x.clone(memory_format=torch.contiguous_format))


def test_bytes_beside_the_view_do_not_count() -> None:
    x = torch.rand(4, 8)
    before = checksum(x[:, :4])
    x[:, 4:] = 0
    assert checksum(x[:, :4]) == before


def test_conj_and_neg_bits_are_resolved() -> None:
    z = random_bits(torch.complex64, 4)
    assert checksum(z.conj()) == checksum(z.conj().resolve_conj()) != checksum(z)
    assert z.conj().imag.is_neg()
    assert checksum(z.conj().imag) == checksum(z.conj().imag.resolve_neg()) != checksum(z.imag)


def test_it_leaves_the_tensor_alone() -> None:
    x = torch.rand(4, requires_grad=True)
    y = x * 2
    version = y._version
    checksum(y)
    assert y._version == version and y.requires_grad and isinstance(checksum(x), int)


@given(st.integers(0, 2**16), st.integers(1, 40), st.integers(0, 2**16), st.integers(0, 31))
def test_any_flipped_bit_of_a_float_is_seen(seed: int, size: int, element: int, bit: int) -> None:
    x = random_bits(torch.float32, size, seed=seed)
    assert checksum(x) == checksum(x.clone())
    assert checksum(flipped(x, element % size, bit)) != checksum(x)
