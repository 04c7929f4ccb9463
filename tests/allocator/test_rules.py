"""Each rule of the caching allocator, and each setting, by the smallest program that shows it."""

import pytest
from syrupy.assertion import SnapshotAssertion

from actmem import ModeError
from actmem.allocator import (
    Alloc,
    AllocatorSettings,
    EmptyCache,
    Event,
    Free,
    FreeCompleted,
    FreeRequested,
    OutOfMemory,
    simulate,
)
from tests.allocator.recorder import MIB, Recorder


def reserved(*events: Event, settings: str = "") -> float:
    return simulate(events, settings).peak_reserved_bytes / MIB


def allocated(*events: Event, settings: str = "") -> int:
    return simulate(events, settings).peak_allocated_bytes


# ---------------------------------------------------------------- plain segments


@pytest.mark.parametrize(
    ("request_bytes", "block", "segment"),
    [
        (1, 512, 2),
        (512, 512, 2),
        (513, 1024, 2),
        (MIB, MIB, 2),
        (MIB + 1, MIB + 512, 20),
        (10 * MIB - 512, 10 * MIB - 512, 20),
        (10 * MIB, 10 * MIB, 10),
        (10 * MIB + 1, 12 * MIB, 12),  # the rest is below 1 MiB of 2 MiB steps: a tail
        (11 * MIB + 512, 12 * MIB, 12),
    ],
)
def test_a_request_is_rounded_up_and_has_a_segment_of_its_size(request_bytes: int, block: int, segment: int) -> None:
    tail = block - (request_bytes + 511) // 512 * 512
    if tail > MIB:  # then it is split off
        block -= tail
    assert allocated(Alloc("a", request_bytes)) == block
    assert reserved(Alloc("a", request_bytes)) == segment


def test_nothing_is_requested_for_no_bytes() -> None:
    memory = simulate([Alloc("a", 0), Free("a"), Alloc("a", 0)])
    assert (memory.peak_reserved_bytes, memory.num_device_requests) == (0, 0)


def test_a_rest_of_more_than_1_mib_is_split_off_and_a_smaller_one_is_a_tail() -> None:
    split = simulate([Alloc("a", 19 * MIB - 512), Free("a"), Alloc("b", 9 * MIB - 1024), Alloc("c", 9 * MIB)])
    assert split.peak_reserved_bytes == 20 * MIB
    tail = simulate([Alloc("a", 20 * MIB), Free("a"), Alloc("b", 19 * MIB)])
    assert tail.peak_allocated_bytes == tail.peak_reserved_bytes == 20 * MIB
    assert simulate([Alloc("b", 11 * MIB)]).at_peak.tail_bytes == MIB


def test_the_small_pool_splits_off_512_bytes_and_shares_no_segment_with_the_large_one() -> None:
    assert reserved(*[Alloc(number, 512) for number in range(4096)]) == 2
    assert reserved(*[Alloc(number, 512) for number in range(4097)]) == 4
    assert reserved(Alloc("large", 2 * MIB), Alloc("small", 512)) == 22


def test_the_smallest_block_that_fits_is_taken() -> None:
    sizes = [40, 12, 30]
    filled: list[Event] = [Alloc(size, size * MIB) for size in sizes]
    freed: list[Event] = [Free(size) for size in sizes]
    memory = simulate([*filled, *freed, Alloc("a", 11 * MIB), Alloc("b", 29 * MIB), Alloc("c", 40 * MIB)])
    assert memory.peak_reserved_bytes == 82 * MIB


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_equal_blocks_the_one_at_the_lower_address_is_taken_whichever_was_freed_first(
    order: tuple[int, int],
) -> None:
    recorder = Recorder()
    for _ in range(2):
        recorder.alloc(12 * MIB)
    lower = min(block.address for block in recorder.live.values())
    for name in order:
        recorder.free(name)
    taken = recorder.alloc(12 * MIB)
    assert taken is not None
    assert recorder.live[taken].address == lower


def test_freed_neighbours_merge() -> None:
    parts: list[Event] = [Alloc(number, 5 * MIB) for number in range(4)]
    assert reserved(*parts, *[Free(number) for number in (1, 3, 0, 2)], Alloc("all", 20 * MIB)) == 20
    assert reserved(*parts, Free(0), Free(2), Alloc("more", 9 * MIB)) == 40


def test_memory_of_one_stream_is_not_found_by_another() -> None:
    assert reserved(Alloc("a", 12 * MIB, 0), Free("a"), Alloc("b", 12 * MIB, 1)) == 24
    assert reserved(Alloc("a", 12 * MIB, 0), Free("a"), Alloc("b", 12 * MIB, 0)) == 12


def test_memory_that_another_stream_uses_comes_back_when_that_is_done() -> None:
    start: list[Event] = [Alloc("a", 12 * MIB), FreeRequested("a")]
    assert reserved(*start, Alloc("b", 12 * MIB)) == 24
    assert reserved(*start, FreeCompleted("a"), Alloc("b", 12 * MIB)) == 12


def test_emptying_the_cache_gives_back_free_segments_of_every_stream_and_no_others() -> None:
    events: list[Event] = [Alloc("a", 12 * MIB, 3), Alloc("b", 4 * MIB), Alloc("c", 4 * MIB), Alloc("d", 100)]
    memory = simulate([*events, Free("a"), Free("b"), Free("d"), EmptyCache()])
    assert memory.final_reserved_bytes == 20 * MIB
    assert memory.final_allocated_bytes == 4 * MIB


def test_a_request_that_the_device_cannot_serve_gives_back_what_is_free_and_asks_again() -> None:
    events: list[Event] = [Alloc("a", 30 * MIB), Free("a"), Alloc("b", 40 * MIB)]
    memory = simulate(events, limit_bytes=50 * MIB)
    assert (memory.num_retries, memory.out_of_memory) == (1, None)
    assert memory.final_reserved_bytes == memory.peak_reserved_bytes == 40 * MIB


def test_a_request_that_still_fails_ends_the_simulation() -> None:
    memory = simulate([Alloc("a", 30 * MIB), Alloc("b", 40 * MIB), Alloc("c", 1)], limit_bytes=50 * MIB)
    assert memory.out_of_memory == OutOfMemory(1, "b", 40 * MIB, 30 * MIB, 30 * MIB)
    assert memory.peak_allocated_bytes == 30 * MIB


def test_the_size_of_the_segment_counts_against_the_limit_not_that_of_the_request() -> None:
    assert simulate([Alloc("a", 2 * MIB)], limit_bytes=19 * MIB).out_of_memory is not None
    assert simulate([Alloc("a", 2 * MIB)], limit_bytes=20 * MIB).out_of_memory is None


# ---------------------------------------------------------------- settings


EXPANDABLE = "expandable_segments:True"


def test_expandable_segments_are_mapped_in_units_and_have_no_tails() -> None:
    assert reserved(Alloc("a", 11 * MIB), settings=EXPANDABLE) == 20
    assert allocated(Alloc("a", 11 * MIB), settings=EXPANDABLE) == 11 * MIB
    assert reserved(Alloc("a", 11 * MIB), Alloc("b", 9 * MIB), settings=EXPANDABLE) == 20
    assert reserved(Alloc("a", 100), Alloc("b", MIB), Alloc("c", MIB), settings=EXPANDABLE) == 4


def test_expandable_segments_grow_at_their_end_and_fill_holes_first() -> None:
    start: list[Event] = [Alloc("a", 30 * MIB), Alloc("b", 30 * MIB), Free("a")]
    assert reserved(*start, Alloc("c", 40 * MIB), settings=EXPANDABLE) == 100
    assert reserved(*start, Free("b"), Alloc("c", 70 * MIB), settings=EXPANDABLE) == 80
    hole = [*start, Alloc("c", 25 * MIB), Alloc("d", 5 * MIB)]
    assert reserved(*hole, settings=EXPANDABLE) == 60


def test_expandable_segments_give_back_whole_units_between_used_blocks() -> None:
    events: list[Event] = [Alloc("a", 5 * MIB), Alloc("b", 60 * MIB), Alloc("c", 5 * MIB), Free("b"), EmptyCache()]
    memory = simulate(events, EXPANDABLE)
    assert (memory.peak_reserved_bytes, memory.final_reserved_bytes) == (80 * MIB, 40 * MIB)
    again = simulate([*events, Alloc("b", 60 * MIB)], EXPANDABLE)
    assert again.final_reserved_bytes == 80 * MIB, "the hole is mapped again"


def test_expandable_segments_keep_what_they_mapped_before_the_device_was_full() -> None:
    # Between a and c lies a hole of three units. b needs it and the first unit behind: that one is missing.
    events: list[Event] = [Alloc("a", 20 * MIB), Alloc("b", 60 * MIB), Free("b"), EmptyCache(), Alloc("d", 90 * MIB)]
    memory = simulate(events, EXPANDABLE, limit_bytes=100 * MIB)
    assert memory.out_of_memory is not None
    assert memory.final_reserved_bytes == 20 * MIB


def test_blocks_above_the_split_limit_are_left_whole_for_requests_above_it() -> None:
    settings = "max_split_size_mb:64"
    start: list[Event] = [Alloc("a", 100 * MIB), Free("a")]
    assert reserved(*start, Alloc("b", 30 * MIB), settings=settings) == 130
    assert reserved(*start, Alloc("b", 30 * MIB)) == 100
    assert allocated(*start, Alloc("b", 90 * MIB), settings=settings) == 100 * MIB, "it is not split"
    assert reserved(*start, Alloc("b", 80 * MIB), settings=settings) == 180, "20 MiB is too much to be left over"
    assert reserved(*start, Alloc("b", 80 * MIB), settings=f"{settings},max_non_split_rounding_mb:40") == 100


def test_above_the_split_limit_single_blocks_are_given_back_before_everything_is() -> None:
    events: list[Event] = [Alloc("a", 100 * MIB), Alloc("s", 30 * MIB), Free("a"), Free("s"), Alloc("b", 70 * MIB)]
    memory = simulate(events, "max_split_size_mb:64", limit_bytes=140 * MIB)
    assert (memory.num_retries, memory.final_reserved_bytes) == (0, 100 * MIB)


@pytest.mark.parametrize(
    ("setting", "request_bytes", "expected"),
    [
        ("4", 1200 * 1024, 1280 * 1024),
        ("4", 1024 * 1024, 1024 * 1024),
        ("4", 2000, 2048),  # small sizes are rounded as before
        ("4", 2049, 2560),
        ("[1:4,2:8,>:2]", 3 * MIB - 5, 3 * MIB),
        ("[1:4,2:8,>:2]", 5 * MIB, 6 * MIB),
        ("[1:4,2:0,>:2]", 3 * MIB - 5, 3 * MIB),
        ("[256:4]", 5 * MIB - 5, 5 * MIB),  # the first entry is for everything below it too
    ],
)
def test_sizes_are_rounded_up_to_parts_of_a_power_of_two(setting: str, request_bytes: int, expected: int) -> None:
    assert AllocatorSettings.parse(f"roundup_power2_divisions:{setting}").rounded(request_bytes) == expected


REFUSED = (
    "expandable_segment:True",
    "expandable_segments",
    "expandable_segments:true",
    "max_split_size_mb:19",
    "max_split_size_mb:-1",
    "max_split_size_mb:1e3",
    "max_non_split_rounding_mb:2",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[256:1",
    "roundup_power2_divisions:[3:1]",
    "garbage_collection_threshold:1.5",
    "garbage_collection_threshold:often",
    "backend:cudaMallocAsync",
    "per_process_memory_fraction:0.5",
    "large_segment_size_mb:12",
    "nonsense",
)


@pytest.mark.parametrize("text", REFUSED)
def test_a_setting_that_is_not_understood_is_refused_by_name(text: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ModeError) as raised:
        AllocatorSettings.parse(text)
    assert text.partition(":")[0] in str(raised.value)
    assert str(raised.value) == snapshot


def test_settings_without_effect_on_device_memory_are_accepted_and_text_comes_back() -> None:
    assert AllocatorSettings.parse("pinned_use_background_threads:True, backend:native,") == AllocatorSettings()
    for text in ("", "expandable_segments:True,max_split_size_mb:128", "roundup_power2_divisions:8"):
        assert AllocatorSettings.parse(text).text == text
    listed = AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8")
    assert AllocatorSettings.parse(listed.text) == listed


@pytest.mark.parametrize(
    "events",
    [[Free("a")], [Alloc("a", 1), Alloc("a", 1)], [Alloc("a", 1), Free("a"), FreeCompleted("a")], [FreeRequested("a")]],
)
def test_an_event_that_cannot_be_is_refused(events: list[Event]) -> None:
    with pytest.raises(ModeError, match=r"event \d is .*'a'"):
        simulate(events)
