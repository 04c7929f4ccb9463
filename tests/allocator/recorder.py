"""Record a program on the simulated allocator as torch does on a real one: a trace, and the state at its end."""

from typing import Any

from actmem.allocator import AllocatorSettings
from actmem.allocator.caching_allocator import CachingAllocator
from actmem.allocator.driver import EndlessDriver
from actmem.allocator.free_blocks import Block

MIB = 2**20


class Recorder:
    """A device whose every event is written down. Memory is named by the order of its allocation."""

    def __init__(self, settings: str = "", limit_bytes: int | None = None) -> None:
        self.settings = AllocatorSettings.parse(settings)
        self.text = settings
        self.trace: list[dict[str, Any]] = []
        self.allocator = CachingAllocator(self.settings, LoggingDriver(self.trace, limit_bytes))
        self.live: dict[int, Block] = {}
        self.num_allocated = 0

    @classmethod
    def example(cls) -> "Recorder":
        """Return a short run: two tensors live, one freed, a segment of 20 MiB cut in two."""
        recorder = cls()
        first = recorder.alloc(3 * MIB)
        recorder.alloc(1000)
        assert first is not None
        recorder.free(first)
        recorder.alloc(12 * MIB)
        return recorder

    def alloc(self, num_bytes: int, stream: int = 0) -> int | None:
        driver = self.allocator.driver
        assert isinstance(driver, LoggingDriver)
        driver.stream = stream
        block = self.allocator.allocate(num_bytes, stream)
        if block is None:
            self.trace.append({"action": "oom", "device_free": 0, "size": num_bytes, "stream": stream, "frames": []})
            return None
        frames = [{"filename": "model.py", "line": self.num_allocated, "name": "forward"}]
        self.trace.append(entry("alloc", block.address, num_bytes, stream) | {"frames": frames})
        self.live[self.num_allocated] = block
        self.num_allocated += 1
        return self.num_allocated - 1

    def free(self, name: int) -> None:
        block = self.live.pop(name)
        for action in ("free_requested", "free_completed"):
            self.trace.append(entry(action, block.address, block.requested, block.segment.stream))
        self.allocator.free(block)

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def snapshot(self, keep: int | None = None) -> dict[str, Any]:
        """Return what torch.cuda.memory._snapshot() would, with the last events only if `keep` says so."""
        return {
            "segments": segments_of(self.allocator, list(self.live.values())),
            "device_traces": [self.trace if keep is None else self.trace[len(self.trace) - keep :]],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": self.text,
                "max_split_size": self.settings.max_split_bytes or -1,
                "expandable_segments": self.settings.expandable_segments,
                "garbage_collection_threshold": 0.0,
                "roundup_power2_divisions": {
                    str(1 << place): number for place, number in enumerate(self.settings.roundup_power2_divisions)
                },
            },
        }


class LoggingDriver(EndlessDriver):
    def __init__(self, trace: list[dict[str, Any]], limit_bytes: int | None) -> None:
        super().__init__(limit_bytes)
        self.trace = trace
        self.stream = 0
        self.owners: dict[int, int] = {}
        self.streams: dict[int, int] = {}
        self.is_segment = False

    def segment(self, num_bytes: int) -> int | None:
        self.is_segment = True
        address = super().segment(num_bytes)
        self.is_segment = False
        if address is not None:
            self.owners[address] = self.stream
            self.trace.append(entry("segment_alloc", address, num_bytes, self.stream))
        return address

    def map(self, address: int, num_bytes: int) -> bool:
        done = super().map(address, num_bytes)
        if done and not self.is_segment:
            self.streams |= dict.fromkeys(range(address, address + num_bytes, 2 * MIB), self.stream)
            self.trace.append(entry("segment_map", address, num_bytes, self.stream))
        return done

    def release(self, address: int, num_bytes: int) -> None:
        super().release(address, num_bytes)
        is_segment = address in self.owners
        stream = self.owners.pop(address) if is_segment else self.streams[address]
        self.trace.append(entry("segment_free" if is_segment else "segment_unmap", address, num_bytes, stream))


def entry(action: str, address: int, num_bytes: int, stream: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": num_bytes, "stream": stream, "frames": []}


def blocks_of(allocator: CachingAllocator, used: list[Block]) -> list[Block]:
    """All mapped blocks of an allocator, by address."""
    free = [key[3] for pool in (allocator.small, allocator.large) for keys in pool.free.values() for key in keys]
    return sorted([*free, *used], key=lambda block: block.address)


def segments_of(allocator: CachingAllocator, used: list[Block]) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = []
    for block in blocks_of(allocator, used):
        previous = block.previous
        if previous is None or not previous.is_mapped:
            segments.append(
                {
                    "device": 0,
                    "address": block.address,
                    "total_size": 0,
                    "stream": block.segment.stream,
                    "segment_type": "small" if block.segment.pool.is_small else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": block.segment.is_range,
                    "frames": [],
                    "blocks": [],
                }
            )
        segments[-1]["total_size"] += block.size
        segments[-1]["blocks"].append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested if block.is_used else 0,
                "state": "active_allocated" if block.is_used else "inactive",
                "frames": [],
            }
        )
    return segments
