"""The collector of cyclic garbage is out of the way while a plan is found, and afterwards."""

import gc

from actmem.collector import uncollected


def test_what_was_made_meanwhile_counts_as_old() -> None:
    gc.collect()  # the next collection would be one of the young
    with uncollected():
        made: list[list[int]] = [[] for _ in range(10_000)]
    old = {id(each) for each in gc.get_objects(generation=2)}
    assert all(id(each) in old for each in made)
    assert gc.isenabled()


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with uncollected():
            pass
        assert gc.get_freeze_count() > frozen / 2
    finally:
        gc.unfreeze()
