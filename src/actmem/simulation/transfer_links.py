"""What offloading takes: the seconds that a step waits for copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from actmem.log_entries import OperatorEntry, PhaseBegan
from actmem.profiles import Profile
from actmem.simulation.peak_moments import Effect, Timeline

__all__ = ["Link", "Traffic"]


@dataclass(frozen=True)
class Link:
    """Where values are sent to, and how fast."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    in_flight_bytes: int
    """How many bytes may be in flight at a time. They count as alive. No layer sends more than this."""


class Traffic:
    """When each layer of a step sends and needs its values.

    Copies overlap with the work, one after the other. A layer's values leave when its forward is over; if too many
    bytes are in flight by then, the step waits. They come back in the order in which backward needs the layers, and no
    more is prefetched than may be in flight. A layer that is not back in time is waited for.
    """

    def __init__(self, profile: Profile, seconds: Sequence[float], line: Timeline, link: Link) -> None:
        self._link, self._line = link, line
        clock, clocks = 0.0, [0.0] * len(profile.log)
        self.forward_seconds = 0.0
        for at, entry in enumerate(profile.log):
            if isinstance(entry, OperatorEntry):
                clock += seconds[entry.cost]
            elif isinstance(entry, PhaseBegan) and entry.name == "backward" and not self.forward_seconds:
                self.forward_seconds = clock
            clocks[at] = clock
        self.backward_seconds = clock - self.forward_seconds
        self._leaves: list[float] = []
        self._needs: list[float] = []
        for nth, places in enumerate(line.places):
            family = line.families[line.family_of[nth]]
            self._leaves.append(clocks[line.entries[int(places[family.leave])]])
            last = family.first_unpack < len(places)
            self._needs.append(clocks[line.entries[int(places[family.first_unpack])]] if last else clock)
        self.out_order = sorted(range(len(self._leaves)), key=lambda nth: self._leaves[nth])
        self._in_order = sorted(range(len(self._needs)), key=lambda nth: self._needs[nth])

    def stall_seconds(self, effects: Sequence[Effect]) -> float:
        """Return how long the step waits for copies."""
        if not any(e.sent_bytes for e in effects):
            return 0.0
        late, gone = self._send(effects)
        return late + self._fetch(effects, late, gone)

    def _send(self, effects: Sequence[Effect]) -> tuple[float, dict[int, float]]:
        link, late, free = self._link, 0.0, 0.0
        under_way: deque[tuple[float, int]] = deque()
        gone: dict[int, float] = {}
        for nth in self.out_order:
            size = effects[nth].sent_bytes
            if not size:
                continue
            now = self._leaves[nth] + late
            while under_way and (under_way[0][0] <= now or sum(n for _, n in under_way) + size > link.in_flight_bytes):
                done = under_way.popleft()[0]
                late += max(0.0, done - now)
                now = max(now, done)
            wait = max(0, size - link.in_flight_bytes) / link.out_bytes_per_second
            late += wait
            free = max(now, free) + size / link.out_bytes_per_second
            under_way.append((free, min(size, link.in_flight_bytes)))
            gone[nth] = free
        return late, gone

    def _fetch(self, effects: Sequence[Effect], late: float, gone: dict[int, float]) -> float:
        link, begin = self._link, self.forward_seconds + late
        free, shift, stalled = begin, late, 0.0
        ahead: deque[tuple[float, int]] = deque()
        for nth in self._in_order:
            size = effects[nth].sent_bytes
            need = self._needs[nth] + shift
            if size:
                start = max(free, gone[nth])
                while ahead and sum(n for _, n in ahead) + size > link.in_flight_bytes:
                    start = max(start, ahead.popleft()[0])
                free = start + size / link.in_bytes_per_second
                wait = max(0.0, free - need)
                stalled += wait
                shift += wait
                ahead.append((need + wait, size))
            shift += effects[nth].seconds
        return stalled
