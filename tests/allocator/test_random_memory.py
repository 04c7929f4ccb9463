"""What holds for every program: blocks do not overlap, counters add up, and a recording leads to the same decisions."""

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from actmem.allocator import Alloc, AllocatorSettings, EmptyCache, Event, Free, reenact, simulate, snapshot_from
from actmem.allocator.caching_allocator import CachingAllocator
from actmem.allocator.free_blocks import Block
from tests.allocator.recorder import MIB, LoggingDriver, Recorder, blocks_of

CONFIGURATIONS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "expandable_segments:True,max_split_size_mb:32",
]
SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 3 * MIB),
    st.integers(1, 64 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 32 * MIB]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.just(("empty",)),
    ),
    max_size=80,
)
LIMITS = st.one_of(st.none(), st.integers(2 * MIB, 300 * MIB))
QUICK = hypothesis_settings(max_examples=60, deadline=None, derandomize=True)


def play(steps: list[tuple[Any, ...]], settings: str, limit_bytes: int | None) -> Recorder:
    recorder = Recorder(settings, limit_bytes)
    for step in steps:
        if step[0] == "alloc":
            recorder.alloc(step[1], step[2])
        elif step[0] == "empty":
            recorder.empty_cache()
        elif recorder.live:
            names = list(recorder.live)
            recorder.free(names[step[1] % len(names)])
        check(recorder.allocator, list(recorder.live.values()))
    return recorder


def check(allocator: CachingAllocator, used: list[Block]) -> None:
    blocks = blocks_of(allocator, used)
    for left, right in pairwise(blocks):
        assert left.address + left.size <= right.address, "two blocks overlap"
        if left.next is right:
            assert right.previous is left
            assert left.is_used or right.is_used, "two free neighbours were not merged"
    assert sum(block.size for block in blocks) == allocator.reserved_bytes
    assert sum(block.size for block in used) == allocator.allocated_bytes <= allocator.reserved_bytes
    assert sum(block.requested for block in used) == allocator.requested_bytes <= allocator.rounded_bytes
    assert allocator.rounded_bytes <= allocator.allocated_bytes
    idle = sum(block.whole_bytes() for block in blocks if not block.is_used)
    assert idle == allocator.small.idle_bytes + allocator.large.idle_bytes
    large = [block for block in blocks if not block.segment.pool.is_small and not block.segment.is_range]
    assert all(block.size > MIB for block in large), "the large pool has no small blocks"


@pytest.mark.parametrize("settings", CONFIGURATIONS)
@given(steps=STEPS, limit_bytes=LIMITS)
@QUICK
def test_blocks_never_overlap_and_the_counters_add_up(settings: str, steps: list[Any], limit_bytes: int | None) -> None:
    recorder = play(steps, settings, limit_bytes)
    if limit_bytes is not None:
        assert recorder.allocator.reserved_bytes <= limit_bytes


@pytest.mark.parametrize("settings", CONFIGURATIONS)
@given(steps=STEPS, limit_bytes=LIMITS)
@QUICK
def test_a_recording_from_its_start_leads_to_the_same_decisions(
    settings: str, steps: list[Any], limit_bytes: int | None
) -> None:
    recorder = play(steps, settings, limit_bytes)
    content = recorder.snapshot()
    for device in (snapshot := snapshot_from(content, "recorded")).devices:
        result = reenact(snapshot, device)
        assert result.is_exact, result
        assert result.settings == recorder.settings
        assert result.final_reserved_bytes == recorder.allocator.reserved_bytes
        assert result.final_allocated_bytes == recorder.allocator.allocated_bytes


@pytest.mark.parametrize("settings", ["expandable_segments:True", ""])
@given(steps=STEPS, limit_bytes=LIMITS, part=st.floats(0, 1))
@QUICK
def test_a_recording_that_begins_in_the_middle_leads_to_the_same_decisions(
    settings: str, steps: list[Any], limit_bytes: int | None, part: float
) -> None:
    # Multiples of 2 MiB above 10 MiB have no tails in plain segments, and ranges have none at all.
    if not settings:
        steps = [(s[0], (10 + s[1] % 8 * 2) * MIB, s[2]) if s[0] == "alloc" else s for s in steps]
    recorder = play(steps, settings, limit_bytes)
    content = recorder.snapshot(keep=int(len(recorder.trace) * part))
    for device in (snapshot := snapshot_from(content, "recorded")).devices:
        result = reenact(snapshot, device)
        assert result.is_exact, result


@given(steps=STEPS)
@QUICK
def test_the_same_events_take_the_same_memory_and_a_limit_that_is_not_reached_changes_nothing(
    steps: list[Any],
) -> None:
    events: list[Event] = []
    live: list[int] = []
    for number, step in enumerate(steps):
        if step[0] == "alloc":
            events.append(Alloc(number, step[1], step[2]))
            live.append(number)
        elif step[0] == "empty":
            events.append(EmptyCache())
        elif live:
            events.append(Free(live.pop(step[1] % len(live))))
    memory = simulate(events, with_curve=True)
    assert memory == simulate(events, with_curve=True)
    assert memory == simulate(events, limit_bytes=memory.peak_reserved_bytes or MIB, with_curve=True)
    assert memory.peak_requested_bytes <= memory.peak_allocated_bytes <= memory.peak_reserved_bytes
    assert max((reserved for _, reserved in memory.curve), default=0) <= memory.peak_reserved_bytes
    assert max((allocated for allocated, _ in memory.curve), default=0) == memory.peak_allocated_bytes
    parts = memory.at_peak
    assert parts.allocated_bytes + parts.split_bytes + parts.idle_bytes == parts.reserved_bytes
    assert min(parts.rounding_bytes, parts.tail_bytes, parts.split_bytes, parts.idle_bytes) >= 0


def test_older_and_newer_rule_for_ties_are_told_apart_by_a_recording() -> None:
    rng = random.Random(0)
    counts = set[int]()
    for tie in ("address", "age"):
        recorder = Recorder()
        recorder.allocator = CachingAllocator(AllocatorSettings(tie=tie), recorder.allocator.driver)
        recorder.allocator.driver = Descending(recorder.trace, None)
        for _ in range(300):
            if recorder.live and rng.random() < 0.5:
                recorder.free(rng.choice(list(recorder.live)))
            else:
                recorder.alloc(12 * MIB)
        snapshot = snapshot_from(recorder.snapshot(), "recorded")
        result = reenact(snapshot, 0)
        assert result.settings.tie == tie
        assert result.is_exact
        counts.add(result.allocations)
    assert min(counts) > 100


class Descending(LoggingDriver):
    """A driver whose addresses descend."""

    def segment(self, num_bytes: int) -> int | None:
        address = super().segment(num_bytes)
        assert address is not None
        self.trace[-1]["addr"] = mirrored = (1 << 42) - address
        self.owners[mirrored] = self.owners.pop(address)
        return mirrored
