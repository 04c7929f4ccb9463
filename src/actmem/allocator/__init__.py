"""The CUDA caching allocator, simulated: which bytes a step takes from a device, and where its tensors lie.

- `alloc_conf.py` has the settings of PYTORCH_CUDA_ALLOC_CONF; `allocation_events.py` what a program asks for.
- `caching_allocator.py` decides as torch's allocator does; `free_blocks.py` has its blocks and pools,
  `address_ranges.py` the ranges of expandable segments, and `driver.py` the device that hands out memory.
- `simulated_memory.py` runs a program's events through it, and says what they take.
"""

from actmem.allocator.alloc_conf import AllocatorSettings
from actmem.allocator.allocation_events import Alloc, EmptyCache, Event, Free, FreeCompleted, FreeRequested
from actmem.allocator.simulated_memory import MemoryAtPeak, OutOfMemory, SimulatedMemory, simulate

__all__ = [
    "Alloc",
    "AllocatorSettings",
    "EmptyCache",
    "Event",
    "Free",
    "FreeCompleted",
    "FreeRequested",
    "MemoryAtPeak",
    "OutOfMemory",
    "SimulatedMemory",
    "simulate",
]
