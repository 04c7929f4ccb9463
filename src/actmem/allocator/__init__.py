"""The CUDA caching allocator, simulated: which bytes a step takes from a device, and where its tensors lie.

- `alloc_conf.py` has the settings of PYTORCH_CUDA_ALLOC_CONF, and `environment_settings.py` those that are set here;
  `allocation_events.py` has what a program asks for.
- `caching_allocator.py` decides as torch's allocator does; `free_blocks.py` has its blocks and pools,
  `address_ranges.py` the ranges of expandable segments, and `driver.py` the device that hands out memory.
- `simulated_memory.py` runs a program's events through it, and says what they take.
- `snapshot_file.py` reads what torch recorded on a real device, which `opcode_scan.py` has looked through first;
  `start_state.py` finds the state in which the recording began, and `reenactment.py` repeats all its decisions.
- `step_curves.py` finds the steps of a recording and draws one; `step_comparison.py` lays a predicted one over it.
- `attachment.py` is what actmem adds to a recording.
"""

from typing import TYPE_CHECKING

from actmem.doors import on_first_use

if TYPE_CHECKING:
    from actmem.allocator.alloc_conf import AllocatorSettings
    from actmem.allocator.allocation_events import Alloc, EmptyCache, Event, Free, FreeCompleted, FreeRequested
    from actmem.allocator.attachment import Attachment, write_recording
    from actmem.allocator.environment_settings import environment_note
    from actmem.allocator.reenactment import DeviceRecording, LiveTensor, place_of, reenact
    from actmem.allocator.simulated_memory import MemoryAtPeak, OutOfMemory, SimulatedMemory, simulate
    from actmem.allocator.snapshot_file import Frame, Snapshot, read_snapshot, snapshot_from
    from actmem.allocator.step_comparison import StepComparison, compare_step
    from actmem.allocator.step_curves import find_steps, step_curve

__all__ = [
    "Alloc",
    "AllocatorSettings",
    "Attachment",
    "DeviceRecording",
    "EmptyCache",
    "Event",
    "Frame",
    "Free",
    "FreeCompleted",
    "FreeRequested",
    "LiveTensor",
    "MemoryAtPeak",
    "OutOfMemory",
    "SimulatedMemory",
    "Snapshot",
    "StepComparison",
    "compare_step",
    "environment_note",
    "find_steps",
    "place_of",
    "read_snapshot",
    "reenact",
    "simulate",
    "snapshot_from",
    "step_curve",
    "write_recording",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "actmem.allocator.alloc_conf": "AllocatorSettings",
        "actmem.allocator.allocation_events": "Alloc EmptyCache Event Free FreeCompleted FreeRequested",
        "actmem.allocator.attachment": "Attachment write_recording",
        "actmem.allocator.environment_settings": "environment_note",
        "actmem.allocator.reenactment": "DeviceRecording LiveTensor place_of reenact",
        "actmem.allocator.simulated_memory": "MemoryAtPeak OutOfMemory SimulatedMemory simulate",
        "actmem.allocator.snapshot_file": "Frame Snapshot read_snapshot snapshot_from",
        "actmem.allocator.step_comparison": "StepComparison compare_step",
        "actmem.allocator.step_curves": "find_steps step_curve",
    },
)
