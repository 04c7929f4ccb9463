"""The allocator's simulation against public recordings of CUDA memory: a section of `benchmarks/validation.py`.

The recordings lie outside the project, with an index that says where each is from. First every decision of a recording
is repeated, from its start and with the addresses that its driver returned. Then the recordings that begin with an
empty allocator are simulated as a planner would: from the requests and frees alone, with addresses of the simulation's
own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from actmem.allocator import (
    Alloc,
    DeviceRecording,
    EmptyCache,
    Event,
    Free,
    Snapshot,
    read_snapshot,
    reenact,
    simulate,
)
from benchmarks.outcome import Bound, Outcome
from benchmarks.table import rows

EXPLAINED: dict[str, str] = {}
"""Recordings that are not found again, each with the setting that explains it."""


def run(shared: Path) -> Outcome:
    """Simulate every recording of the index."""
    index = json.loads((shared / "recordings" / "index.json").read_text())
    outcome = Outcome("allocator", {"recordings": len(index)})
    num_events, seconds = 0, 0.0
    for record in index:
        started = perf_counter()
        snapshot = read_snapshot(shared / "recordings" / record["file"])
        found = [reenact(snapshot, device, num_largest=0) for device in snapshot.devices]
        seconds += perf_counter() - started
        num_events += sum(each.num_events for each in found)
        for each in found:
            name = f"{record['repo']} {record['path']} {record['commit'][:10]}, device {each.device}"
            outcome.exact[name] = _figures(each, snapshot)
    figures = outcome.exact.values()
    outcome.measured["all"] = {"events": num_events, "seconds": seconds, "recordings": len(index)}
    for what, right in (
        ("allocations", "at_recorded_address"),
        ("device_requests", "device_requests_right"),
        ("releases", "releases_right"),
    ):
        wrong = sum(each[what] - each[right] for name, each in outcome.exact.items() if name not in EXPLAINED)
        outcome.bounds.append(Bound(f"{what.replace('_', ' ')} that come out otherwise", wrong, 0))
    outcome.bounds.append(Bound("recordings that end otherwise", sum(not each["is_end_right"] for each in figures), 0))
    return outcome


def _figures(found: DeviceRecording, snapshot: Snapshot) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "settings": found.settings.text or ("defaults" if snapshot.has_settings else "not recorded"),
        "start": "empty" if not found.start_reserved_bytes else "in use",
        **{
            name: getattr(found, name)
            for name in (
                "allocations",
                "at_recorded_address",
                "device_requests",
                "device_requests_right",
                "releases",
                "releases_right",
                "is_end_right",
                "peak_allocated_bytes",
                "peak_reserved_bytes",
            )
        },
        "alone_allocated_bytes": None,
        "alone_reserved_bytes": None,
    }
    if found.allocations and not found.start_reserved_bytes:
        alone = simulate(events_of(snapshot, found.device), found.settings)
        figures["alone_allocated_bytes"] = alone.peak_allocated_bytes
        figures["alone_reserved_bytes"] = alone.peak_reserved_bytes
    return figures


def events_of(snapshot: Snapshot, device: int) -> Iterator[Event]:
    """Yield what a recorded program asked for, without the driver's answers."""
    names: dict[int, int] = {}
    was_release = False
    for number, event in enumerate(snapshot.traces[device]):
        is_release = event.action in {"segment_free", "segment_unmap"}
        if event.action == "alloc":
            names[event.address] = number
            yield Alloc(number, event.num_bytes, event.stream)
        elif event.action == "free_completed":
            yield Free(names.pop(event.address))
        elif is_release and not was_release:
            yield EmptyCache()
        was_release = is_release


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Yield the section's lines for the page."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for figures in result["exact"].values():
        groups.setdefault(figures["settings"], []).append(figures)
    groups["all"] = list(result["exact"].values())
    yield from rows(
        ["settings", "device traces", "allocations at the recorded address", "requests to the driver", "releases"],
        [
            [
                f"`{name}`" if ":" in name else name,
                str(sum(each["allocations"] > 0 for each in found)),
                _of(found, "at_recorded_address", "allocations"),
                _of(found, "device_requests_right", "device_requests"),
                _of(found, "releases_right", "releases"),
            ]
            for name, found in groups.items()
        ],
    )
    alone = [each for each in groups["all"] if each["alone_reserved_bytes"] is not None]
    equal = [
        sum(each[f"alone_{k}_bytes"] == each[f"peak_{k}_bytes"] for each in alone) for k in ("allocated", "reserved")
    ]
    most = max((abs(each["alone_reserved_bytes"] / each["peak_reserved_bytes"] - 1) for each in alone), default=0.0)
    yield (
        f"{len(alone)} traces begin with an empty allocator. Simulated from their requests and frees alone, with the "
        f"simulation's own addresses, the allocated peak is equal in {equal[0]} of them and the reserved peak in "
        f"{equal[1]}; the reserved peak is off by at most {most:.2%}."
    )
    yield ""


def _of(found: list[dict[str, Any]], right: str, whole: str) -> str:
    return f"{sum(each[right] for each in found):,} of {sum(each[whole] for each in found):,}"
