"""Carry what other systems write over to modes: operator objects, module names, options. Decides nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from actmem.applying import Applied, apply
from actmem.errors import ApplyError, ModeError
from actmem.modes import EverySecond, Full, Mode, Selective, every_second
from actmem.structure import Block, find_blocks
from actmem.torchcompat import named_modules

__all__ = [
    "ROUTER_GATE",
    "apply_once",
    "check_options",
    "install_note",
    "resolved",
    "selective",
    "selector",
    "titan_blocks",
]

_HANDLE = "_actmem_compat_applied"
_KINDS: tuple[type, ...] = (type(torch.ops.aten.mm), type(torch.ops.aten.mm.default))
_GROUP_OF = {"inductor_compiled_code": "compiled"}
ROUTER_GATE = "moe.router.gate"
"""The module whose products torchtitan recomputes unless told otherwise. A model without it is no mistake."""


def apply_once(model: nn.Module, mode: Mode, *, blocks: str | None = None) -> Applied:
    """Apply a mode to a model, or return a handle of the call before, if that was the same.

    Raises:
        ApplyError: another mode is applied already, or to other blocks.
    """
    try:
        applied = apply(model, mode, blocks=blocks)
    except ApplyError:
        found = find_blocks(model, blocks)
        earlier: Applied | None = next((e for b in found if (e := getattr(type(b.module), _HANDLE, None))), None)
        if earlier is None or (earlier.plan.mode, earlier.plan.blocks) != (repr(mode), tuple(b.path for b in found)):
            raise
        return _with_blocks(earlier, found)
    for path in applied.plan.blocks:
        install_note(model.get_submodule(path), _HANDLE, _with_blocks(applied, ()))
    return applied


def _with_blocks(applied: Applied, blocks: tuple[Block, ...]) -> Applied:
    """Copy a handle. The copy that a block's class keeps holds no blocks: a dropped model is freed at once."""
    again = copy.copy(applied)
    again._blocks = blocks  # pyright: ignore[reportPrivateUsage]
    return again


def install_note(block: nn.Module, name: str, value: object) -> None:
    """Let an applied block show an attribute until it is removed, without a trace in the block itself or its copies."""
    if "_actmem_scripts" in vars(type(block)):  # the class that was made for the blocks of this call
        setattr(type(block), name, value)


def resolved(root: object, path: str) -> Any:
    """Follow a dotted path of attributes; None where a part is absent.

    >>> resolved(torch.ops, "aten.mm.default"), resolved(torch.ops, "deepep.dispatch.default")
    (<OpOverload(op='aten.mm', overload='default')>, None)
    """
    try:
        for part in path.split("."):
            root = getattr(root, part)
    except AttributeError:
        return None
    return root


def selector(op: object) -> str | EverySecond:
    """Name an operator, a packet or a higher-order operator as a selector; leave selectors as they are.

    >>> selector(torch.ops.aten.mm.default), selector(torch.ops.aten.mm), selector("attention")
    ('aten.mm.default', 'aten.mm', 'attention')
    """
    if isinstance(op, (str, EverySecond)):
        return op
    if isinstance(op, _KINDS):
        return str(op)
    if getattr(op, "namespace", None) == "higher_order":
        return _GROUP_OF.get(str(op), f"higher_order.{op}")
    raise ModeError(
        f"{op!r} is no operator. Expected one of torch.ops, such as torch.ops.aten.mm.default, or a selector of "
        "actmem, such as 'attention'."
    )


def selective(
    model: nn.Module, save: Iterable[object], *, alternate: Sequence[str], force_recompute: Iterable[str] = ()
) -> Mode:
    """Say in actmem's words: save these operators, but of `alternate` every second only, and not in these modules.

    Args:
        model: where the names of modules are looked up, as parts of paths.
        save: operators or selectors.
        alternate: names of packets, such as "aten.mm", counted together; those that are not in `save` are left out.
        force_recompute: modules whose products are recomputed and not counted.
    """
    names = {text if isinstance(text, EverySecond) else text.removesuffix(".default") for text in map(selector, save)}
    entries: list[str | EverySecond] = sorted(names - set(alternate), key=str)
    if counted := [name for name in alternate if name in names]:
        entries.append(every_second("|".join(counted)))  # one count for all of them
    paths = [path for path, _ in named_modules(model)]
    forced = [name for name in force_recompute if any(name in path for path in paths)]
    for name in set(force_recompute) - {*forced, ROUTER_GATE}:
        warnings.warn(f"{name!r} is in no module path of {type(model).__name__}: it recomputes nothing.", stacklevel=4)
    return Selective(save=entries, force_recompute=[f"*{name}*" for name in forced]) if entries else Full()


_MEANINGLESS = {
    "determinism_check": (
        "default",
        "no code runs twice, and replayed values are compared by checksum in the first step",
    ),
    "debug": (False, "there is no second run to compare; print applied.trace(), or call applied.check_replay()"),
    "visualize_memory_budget_pareto": (False, "set torch._functorch.config.visualize_memory_budget_pareto yourself"),
}


def check_options(config: object) -> None:
    """Refuse the options of torch's checkpoint that would do nothing here, where they are not at their defaults.

    Raises:
        ModeError: one of them is set.
    """
    for name, (default, why) in _MEANINGLESS.items():
        value = cast(object, getattr(config, name, default))
        if value != default:
            raise ModeError(f"{name} = {value!r} has no meaning here: {why}. Leave it at {default!r}.")


def titan_blocks(model: nn.Module) -> str | None:
    """Return where the blocks of a torchtitan model are; None, to have them found, where it has no `layers`."""
    return "layers.*" if "layers" in dict(model.named_children()) else None
