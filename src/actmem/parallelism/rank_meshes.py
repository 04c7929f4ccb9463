"""The device meshes of a layout. The same ranks are counted in several ways: for FSDP2, for the experts, for a ring."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actmem.layout import Layout

__all__ = ["Meshes", "meshes_of"]


@dataclass(frozen=True)
class Meshes:
    """The meshes that this rank is in. None: there is only this rank in it."""

    shard: DeviceMesh | None
    """For FSDP2: the ranks of `dp_shard` and `cp`; with `dp_replicate` in front of them, if there is more than one."""
    experts: DeviceMesh | None
    """For FSDP2 on experts: the ranks that have the same ones, with `dp_replicate` in front of them likewise."""
    ep: DeviceMesh | None
    cp: DeviceMesh | None
    tp: DeviceMesh | None
    pp: DeviceMesh | None


def meshes_of(layout: Layout) -> Meshes:
    """Make the meshes of a layout on the CPU. The default process group must have as many ranks."""
    over = layout.dp_shard * layout.cp
    dense = _made({"pp": layout.pp, "dp_replicate": layout.dp_replicate, "shard": over, "tp": layout.tp})
    spread = ring = None
    if layout.ep > 1:
        sizes = {"shard": over // layout.ep, "ep": layout.ep}
        spread = _made({"pp": layout.pp, "dp_replicate": layout.dp_replicate, **sizes, "tp": layout.tp})
    if layout.cp > 1:
        ring = _made({"before": layout.world // layout.cp // layout.tp, "cp": layout.cp, "tp": layout.tp})
    return Meshes(
        shard=_sharded(dense, layout, over),
        experts=None if spread is None else _sharded(spread, layout, 0),
        ep=None if spread is None else spread["ep"],
        cp=None if ring is None else ring["cp"],
        tp=dense["tp"] if layout.tp > 1 else None,
        pp=dense["pp"] if layout.pp > 1 else None,
    )


def _sharded(mesh: DeviceMesh, layout: Layout, over: int) -> DeviceMesh | None:
    if layout.dp_replicate > 1:
        return mesh["dp_replicate", "shard"]
    return None if over == 1 else mesh["shard"]


def _made(sizes: dict[str, int]) -> DeviceMesh:
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))
