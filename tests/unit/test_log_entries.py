"""The entries of a profile's log are told apart by what happened, in a file too."""

from __future__ import annotations

import json

import pytest

from actmem.errors import PlanError
from actmem.log_entries import (
    CallRan,
    Dropped,
    Entered,
    Entry,
    GivenGone,
    GradientsCounted,
    LayerEntry,
    Left,
    LiveEntry,
    Loosened,
    OpRan,
    Packed,
    PhaseBegan,
    StorageDied,
    TensorGone,
    Unpacked,
    from_row,
)
from actmem.profiles import Profile

EVERY: tuple[Entry, ...] = (
    Entered(0, 10),
    Packed(0, 1),
    CallRan(0, 1, 2, 30),
    TensorGone(0, 1),
    StorageDied(7),
    Left(0, 20),
    OpRan(3, 40),
    PhaseBegan("backward", 40),
    Unpacked(0, 1, 50),
    Loosened(0, 1),
    GivenGone(0, 1),
    Dropped(0, 1),
    GradientsCounted(8, 60),
)


def test_a_log_with_every_kind_of_entry_survives_a_file() -> None:
    profile = Profile(log=EVERY)
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: entry.verb)
def test_an_entry_survives_plain_data(entry: Entry) -> None:
    assert from_row(json.loads(json.dumps(entry.row()))) == entry


def test_entries_with_equal_numbers_are_equal_only_if_the_same_happened() -> None:
    alike = {kind(0, 1) for kind in (Packed, Dropped, Loosened, GivenGone, TensorGone)}
    assert len(alike) == 5
    assert Packed(0, 1) == Packed(0, 1) != Dropped(0, 1)


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: entry.verb)
def test_only_what_says_how_much_is_alive_is_shifted(entry: Entry) -> None:
    more = entry.shifted(5)
    assert type(more) is type(entry) and more.shifted(-5) == entry
    if isinstance(entry, LiveEntry):
        assert isinstance(more, LiveEntry) and more.live_bytes == entry.live_bytes + 5
    else:
        assert more == entry


@pytest.mark.parametrize("entry", [e for e in EVERY if isinstance(e, LayerEntry)], ids=lambda entry: entry.verb)
def test_an_entry_moves_to_another_layer_with_what_is_alive(entry: LayerEntry) -> None:
    assert entry.moved(4, 5).layer == 4
    assert entry.moved(4, 5).moved(entry.layer, 0) == entry.shifted(5)


@pytest.mark.parametrize("row", [["melt", 0], ["pack", 0], []], ids=str)
def test_a_file_with_an_unknown_entry_is_refused(row: list[object]) -> None:
    text = Profile().to_json().replace('"log":[]', f'"log":[{json.dumps(row)}]')
    with pytest.raises(PlanError, match="this is not a profile"):
        Profile.from_json(text)
