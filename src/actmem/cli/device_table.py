"""`actmem devices`: the table of known accelerators, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from actmem.cli.commands import Devices
from actmem.cli.schema import Document
from actmem.cli.screen import Screen, table
from actmem.devices import Device, device, known_devices

__all__ = ["DevicesShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class DevicesShown(Document):
    """Output of `actmem devices`."""

    command: Literal["devices"] = "devices"
    devices: tuple[Device, ...]


def run(asked: Devices, _: Screen) -> tuple[DevicesShown, int]:
    """Look up one device, or all of them."""
    found = known_devices().values() if asked.name is None else [device(asked.name)]
    return DevicesShown(devices=tuple(found)), 0


def show(shown: DevicesShown, screen: Screen) -> None:
    """Print all devices as a table, or a single one with the source of each figure."""
    if len(shown.devices) == 1:
        only = shown.devices[0]
        screen.out.print(f"{only.key}: {only.name}\n", markup=False)
        made = table("", "figure", "value", "source", num_texts=3, copied=("figure", "value"))
        for name, source in only.sources.items():
            made.add_row(name, _figure(only, name), source)
        screen.out.print(made)
        return
    figures = "memory\nGiB", "bf16\nTFLOP/s", "bandwidth\nTB/s", "host link\nGB/s"
    made = table("", "device", "name", *figures, num_texts=2, copied=("device",))
    for each in shown.devices:
        made.add_row(
            each.key,
            each.name,
            f"{each.memory_bytes / 2**30:.1f}",
            _rate(each.flops_per_second.get("bf16"), 1e12),
            _rate(each.memory_bytes_per_second, 1e12),
            _rate(each.host_link_bytes_per_second, 1e9),
        )
    screen.out.print(made)
    screen.out.print(
        "Memory as the driver reports it; rates as the vendors state them, in decimal units; bf16 without sparsity. "
        "`actmem devices NAME` shows the "
        "source of each. To add a device, point ACTMEM_DEVICES at a TOML file. `this` is this machine, measured.",
        markup=False,
    )


def _rate(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value / scale:g}"


def _figure(found: Device, name: str) -> str:
    group, _, key = name.partition(".")
    if group == "flops_per_second":
        return f"{_rate(found.flops_per_second[key], 1e12)} TFLOP/s"
    value: float = attrgetter(name)(found)
    return f"{value:,.0f}" if name.endswith("_bytes") else f"{value:g}"
