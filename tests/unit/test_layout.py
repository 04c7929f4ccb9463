"""A layout says how a job is spread over its ranks, and one that is not possible names the nearest that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem import Layout, ModeError
from actmem.catalogue import build, tiny
from actmem.layout import SCHEDULES, Limits, checked_layout, layers_of_stages
from actmem.parallelism import check_parts, find_parts

_COUNT = st.integers(1, 12)
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("dp_shard", "dp_replicate", "tp", "cp", "ep", "pp"), _COUNT),
    "sequence_parallel": st.booleans(),
    "reshard_after_forward": st.booleans(),
    "schedule": st.sampled_from(["", *SCHEDULES]),
    "virtual": st.integers(0, 4),
    "microbatches": st.integers(0, 30),
}
_LIMITS = st.builds(
    Limits,
    num_layers=st.integers(1, 40),
    tp_divides=st.lists(st.tuples(st.just("heads"), st.integers(1, 64)), max_size=2).map(tuple),
    num_experts=st.sampled_from([0, 8, 60]),
    sequence=st.integers(1, 300),
)


def _possible(make: Callable[[], Layout]) -> Layout:
    """Return the layout, or the nearest one that its refusal names."""
    try:
        return make()
    except ModeError as error:
        return eval(str(error).split("not possible")[1].split("The nearest possible layout: ")[1], {"Layout": Layout})


@given(st.fixed_dictionaries(_FIELDS), _LIMITS)
def test_the_nearest_layout_that_a_refusal_names_is_possible(fields: dict[str, Any], limits: Limits) -> None:
    by_itself = _possible(lambda: Layout(**fields))
    found = _possible(lambda: checked_layout(by_itself, limits))
    assert checked_layout(found, limits) is found


@given(st.fixed_dictionaries(_FIELDS))
def test_a_layout_reads_back_as_it_was_written_and_numbers_its_ranks(fields: dict[str, Any]) -> None:
    found = _possible(lambda: Layout(**fields))
    assert Layout.from_json(found.to_json()) == Layout.from_toml(found.to_toml()) == found
    assert eval(repr(found), {"Layout": Layout}) == found
    last = found.world - 1
    at = found.rank_coordinates(last)._asdict()
    assert 0 <= at.pop("ep") < found.ep
    assert found.rank_of(**at) == last
    stages = [stage for pp in range(found.pp) for stage in found.stages_of(pp)]
    assert sorted(stages) == list(range(found.num_stages))


@given(st.integers(1, 200), st.integers(1, 64))
def test_every_stage_gets_a_layer_and_none_gets_many_more(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        return
    counts = layers_of_stages(num_layers, num_stages)
    assert sum(counts) == num_layers
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 2


def test_a_layout_keeps_its_number_of_ranks_where_it_can() -> None:
    limits = Limits(tp_divides=(("key and value heads", 8),))
    with pytest.raises(
        ModeError, match=r"8 key and value heads, which 16 does not divide\.\n.*Layout\(dp_shard=8, tp=8\)"
    ):
        checked_layout(Layout(tp=16, dp_shard=4), limits)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "holds a list"),
        ('{"tensor": 2}', "tensor is not a known key"),
        ('{"tp": "2"}', "tp = '2' is not permitted"),
        ('{"schedule": "GPipe1"}', "Did you mean 'GPipe'"),
        ('{"virtual": -1}', "virtual = -1"),
        ('{"reshard_after_forward": 1}', "Write True or False"),
    ],
)
def test_a_file_that_is_not_a_layout_is_refused(text: str, said: str) -> None:
    with pytest.raises(ModeError, match=said):
        Layout.from_json(text)


@pytest.mark.parametrize(
    ("model", "layout", "said", "nearest"),
    [
        ("gpt-oss-20b", Layout(cp=2), "its attention has windows or sinks", Layout(dp_shard=2)),
        ("gpt-oss-20b", Layout(cp=2, pp=8), "windows or sinks", Layout(dp_shard=4, pp=4, microbatches=8)),
        ("mixtral-8x7b", Layout(dp_shard=4, ep=2, tp=2), "matrices of its 8 experts", Layout(dp_shard=8, ep=2)),
        ("mixtral-8x7b", Layout(dp_shard=16, ep=16), "8 experts, which 16 does not divide", Layout(dp_shard=16, ep=8)),
        ("llama-3.1-8b", Layout(dp_shard=4, ep=2), "the model has no experts", Layout(dp_shard=4)),
        ("llama-3.1-8b", Layout(cp=32), "48 tokens, which 64 does not divide", Layout(dp_shard=4, cp=8)),
    ],
)
def test_what_cannot_be_built_for_a_model_names_the_nearest_that_can(
    model: str, layout: Layout, said: str, nearest: Layout
) -> None:
    parts = find_parts(build(tiny(model)))
    with pytest.raises(ModeError, match=said) as error:
        check_parts(parts, layout, 48)
    assert str(error.value).endswith(f"The nearest possible layout: {nearest!r}")
    check_parts(parts, nearest, 48)
