"""A predicted step over a recorded one: where they are equal, and where they part."""

from collections.abc import Sequence
from dataclasses import dataclass

from actmem.allocator.reenactment import DeviceRecording
from actmem.allocator.step_curves import NUM_POINTS, points_of, step_curve

__all__ = ["StepComparison", "compare_step"]

_APART = 0.02
"""Two curves part where they differ by more than this fraction of the recorded peak."""
_NEAR = 2
"""What one of two programs requests more shifts the parts of a step: so many on either side are looked at too."""


@dataclass(frozen=True)
class StepComparison:
    """The last step of a recording, and a predicted one. See NOTE [ Steps of a recording ]."""

    steps: tuple[range, ...]
    """The allocations of each step that the recording has."""
    predicted: tuple[int, ...]
    """Allocated bytes in each of the parts of a step that request equally many bytes."""
    recorded: tuple[int, ...]
    """The same, in the last step of the recording."""
    moments: tuple[int, ...]
    """The allocation with which each of these parts begins, counted from the beginning of the step."""

    @property
    def apart(self) -> tuple[int, ...]:
        """Return how many bytes more were recorded than were predicted in each part or in the two next to it."""
        found: list[int] = []
        for at, seen in enumerate(self.recorded):
            near = self.predicted[max(0, at - _NEAR) : at + _NEAR + 1]
            found.append(seen - min(max(seen, min(near)), max(near)))
        return tuple(found)

    @property
    def parting(self) -> int | None:
        """Return the first of the parts in which they are apart."""
        limit = _APART * max(self.recorded)
        return next((at for at, by in enumerate(self.apart) if abs(by) > limit), None)

    @property
    def farthest(self) -> int:
        """Return the part in which they are farthest apart."""
        apart = self.apart
        return max(range(len(apart)), key=lambda at: abs(apart[at]))


def compare_step(found: DeviceRecording, predicted: Sequence[int]) -> StepComparison | None:
    """Lay a predicted step over the last one of a recording. None: there is nothing to compare.

    Args:
        found: The recording of a device.
        predicted: What `step_curve` made of a prediction, such as `FitRecord.curve`.
    """
    steps = found.steps
    if len(predicted) != NUM_POINTS or not steps or not any(found.requests[at] for at in steps[-1]):
        return None
    last = slice(steps[-1].start, steps[-1].stop)
    sizes = found.requests[last]
    allocated = [after for after, _ in found.curve[1:][last]]
    moments = tuple(part.start for part in points_of(sizes))
    return StepComparison(tuple(steps), tuple(predicted), step_curve(sizes, allocated), moments)
