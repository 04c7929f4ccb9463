import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actmem.errors import ModeError
from actmem.units import UNITS, parse_budget

GPU = 80_000_000_000


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [
        ("20GiB", 20 * 2**30),
        ("20 GiB", 20 * 2**30),
        ("  20gib\n", 20 * 2**30),
        ("20GB", 20 * 10**9),
        ("20 gb", 20 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("0.1KB", 100),
        ("2TiB", 2 * 2**40),
        ("3 TB", 3 * 10**12),
        ("512 B", 512),
        ("0.0009765625 KiB", 1),
        ("21474836480", 20 * 2**30),
        (21474836480, 20 * 2**30),
        (4096, 4096),
        ("1B", 1),
        ("72G", 72 * 2**30),
        ("72 g", 72 * 2**30),
        ("1.5K", 1536),
        ("2M", 2 * 2**20),
        ("1T", 2**40),
        ("90%", 72_000_000_000),
        ("90 %", 72_000_000_000),
        ("12.5%", 10_000_000_000),
        ("100%", GPU),
        (0.9, 72_000_000_000),
        ("0.9", 72_000_000_000),
        (1.0, GPU),
        ("1.0", GPU),
    ],
)
def test_what_a_budget_means(budget: str | float, num_bytes: int) -> None:
    found = parse_budget(budget, device_bytes=GPU)
    assert found == num_bytes and type(found) is int


@pytest.mark.parametrize(
    ("budget", "why"),
    [
        ("20 bananas", "has an unknown unit, 'bananas'"),
        ("20 Gbit", "has an unknown unit, 'Gbit'"),
        ("", "is not an amount of memory"),
        ("GiB", "is not an amount of memory"),
        ("half", "is not an amount of memory"),
        ("90%%", "is not an amount of memory"),
        ("-90%", "is not an amount of memory"),
        ("150%", "is a fraction above 1, and no device has more than all of its memory"),
        ("0%", "leaves no memory at all"),
        ("-5GiB", "is not an amount of memory"),
        ("1e3 GiB", "is not an amount of memory"),
        ("nan", "is not an amount of memory"),
        ("٢٠ GiB", "is not an amount of memory"),
        ("9" * 5000, "is not an amount of memory"),
        ("1.5", "is a fraction above 1, and no device has more than all of its memory"),
        ("0", "leaves no memory at all"),
        ("0 GiB", "leaves no memory at all"),
        ("0.0", "leaves no memory at all"),
        ("0.2 B", "is less than one byte"),
        (0, "leaves no memory at all"),
        (0.0, "leaves no memory at all"),
        (-1, "is negative"),
        (-0.5, "is negative"),
        (1.5, "is a fraction above 1, and no device has more than all of its memory"),
        (20e9, "is a fraction above 1, and no device has more than all of its memory"),
        (1e-12, "is less than one byte of the 80000000000 that the device has"),
        (float("nan"), "is not an amount of memory"),
        (float("inf"), "is not an amount of memory"),
        (True, "is not an amount of memory"),
        (None, "is not an amount of memory"),
        ([1], "is not an amount of memory"),
        (b"20GiB", "is not an amount of memory"),
    ],
)
def test_what_is_no_budget_is_refused_with_the_reason_and_the_repair(budget: object, why: str) -> None:
    with pytest.raises(ModeError) as caught:
        parse_budget(budget, device_bytes=GPU)  # type: ignore[arg-type]
    message = str(caught.value)
    assert re.match(
        rf"budget = .{{1,80}} {re.escape(why)}\. Expected a string with a unit \(B, KB, MB, GB, TB, KiB,", message
    )
    assert message.endswith("Write budget='20GiB', or budget=0.9 for 90 %.")


@pytest.mark.parametrize("budget", [72, "72", " 72\n", 1, 4095])
def test_a_number_that_is_too_small_to_be_bytes_has_lost_its_unit(budget: str | int) -> None:
    with pytest.raises(ModeError) as caught:
        parse_budget(budget, device_bytes=GPU)
    number = int(budget)
    assert str(caught.value) == (
        f"{number} bytes? Write budget='{number}GiB', or budget='{number}B' if you mean bytes."
    )
    assert parse_budget(f"{number}GiB", device_bytes=None) == number * 2**30
    assert parse_budget(f"{number}B", device_bytes=None) == number


def test_a_fraction_is_taken_as_it_is_written() -> None:
    assert int(0.29 * 100) == 28  # what binary arithmetic makes of it
    assert parse_budget(0.29, device_bytes=100) == 29


@pytest.mark.parametrize("budget", [0.9, "0.9", 1.0, "90%"])
def test_a_fraction_needs_a_device(budget: str | float) -> None:
    with pytest.raises(ModeError, match=r"is a fraction, but the device's memory is not known. Name the device too"):
        parse_budget(budget, device_bytes=None)
    assert parse_budget("20GiB", device_bytes=None) == parse_budget(20 * 2**30, device_bytes=None) == 20 * 2**30


@settings(deadline=None)  # a shared machine may pause
@given(st.integers(4096, 10**15))
def test_bytes_come_back_whether_int_text_or_with_a_unit(num_bytes: int) -> None:
    spellings: list[str | int] = [num_bytes, str(num_bytes), f"{num_bytes}B", f"{num_bytes} b"]
    assert {parse_budget(spelling, device_bytes=None) for spelling in spellings} == {num_bytes}


@settings(deadline=None)
@given(st.decimals(min_value="0.001", max_value=99999, places=3), st.sampled_from(sorted(UNITS)), st.booleans())
def test_an_amount_is_its_number_times_its_unit_rounded_down(number: Decimal, unit: str, lower: bool) -> None:
    exact = int(Fraction(number) * UNITS[unit])
    text = f"{number} {unit.lower() if lower else unit}"
    if exact == 0:
        with pytest.raises(ModeError, match="less than one byte"):
            parse_budget(text, device_bytes=None)
    else:
        assert parse_budget(text, device_bytes=None) == exact


@settings(deadline=None)
@given(st.floats(0, 1, exclude_min=True, allow_subnormal=False), st.integers(1, 10**13))
def test_a_fraction_never_asks_for_more_than_the_device_has(fraction: float, device_bytes: int) -> None:
    try:
        found = parse_budget(fraction, device_bytes=device_bytes)
    except ModeError:
        assert fraction * device_bytes < 1.001
    else:
        assert 1 <= found <= device_bytes
        assert abs(found - fraction * device_bytes) <= 1 + device_bytes * 1e-12
