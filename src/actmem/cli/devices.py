"""`actmem devices`: what is known of accelerators, without torch."""

from __future__ import annotations

from actmem.cli.commands import Devices
from actmem.cli.schema import DeviceShown, DevicesShown
from actmem.cli.screen import Screen, table
from actmem.devices import Device, device, known_devices

__all__ = ["device_shown", "run", "show"]


def run(asked: Devices, _: Screen) -> tuple[DevicesShown, int]:
    """Look the devices up."""
    found = known_devices().values() if asked.name is None else [device(asked.name)]
    return DevicesShown(devices=tuple(device_shown(each) for each in found)), 0


def device_shown(found: Device) -> DeviceShown:
    """Return a device as it is printed.

    >>> device_shown(device("h100-80gb")).memory_bytes
    80000000000
    """
    return DeviceShown(
        key=found.key,
        name=found.name,
        memory_bytes=found.memory_bytes,
        flops_per_second=found.flops_per_second,
        memory_bytes_per_second=found.memory_bytes_per_second,
        host_link_bytes_per_second=found.host_link_bytes_per_second,
        nvme=None if found.nvme is None else found.nvme.key,
        sources=found.sources,
    )


def show(shown: DevicesShown, screen: Screen) -> None:
    """Print all devices as a table, or one with the sources of its figures."""
    if len(shown.devices) == 1:
        only = shown.devices[0]
        screen.out.print(f"{only.key}: {only.name}\n", markup=False)
        made = table("", "figure", "value", "source", num_texts=3, copied=("figure", "value"))
        for name, source in only.sources.items():
            made.add_row(name, _figure(only, name), source)
        screen.out.print(made)
        return
    figures = "memory\nGB", "bf16\nTFLOP/s", "bandwidth\nTB/s", "host link\nGB/s"
    made = table("", "device", "name", *figures, num_texts=2, copied=("device",))
    for each in shown.devices:
        made.add_row(
            each.key,
            each.name,
            f"{each.memory_bytes / 1e9:g}",
            _rate(each.flops_per_second.get("bf16"), 1e12),
            _rate(each.memory_bytes_per_second, 1e12),
            _rate(each.host_link_bytes_per_second, 1e9),
        )
    screen.out.print(made)
    screen.out.print(
        "As the makers state them, decimal; bf16 without sparsity. `actmem devices NAME` has the source of each. "
        "Another device goes into a TOML file that ACTMEM_DEVICES names. `this` is this machine, measured.",
        markup=False,
    )


def _rate(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value / scale:g}"


def _figure(found: DeviceShown, name: str) -> str:
    group, _, key = name.partition(".")
    if group == "flops_per_second":
        return f"{_rate(found.flops_per_second[key], 1e12)} TFLOP/s"
    if group in ("attainable", "nvme"):
        from_device = getattr(device(found.key), group)
        return f"{getattr(from_device, key):g}"
    value: float = getattr(found, name)
    return f"{value:g}" if name != "memory_bytes" else f"{value:,.0f}"
