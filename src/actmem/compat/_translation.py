"""Translate the settings of other systems to modes: operator objects, module names, options. Decides nothing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from actmem.compilercompat import keep_graph_order
from actmem.errors import ModeError
from actmem.modes import EverySecond, Full, Selective, every_second
from actmem.torchcompat import named_modules

__all__ = [
    "ROUTER_GATE",
    "check_options",
    "disable_lru_cache",
    "install_note",
    "resolved",
    "selective",
    "selector",
    "titan_layers",
]

_logger = logging.getLogger("actmem.compat")
_KINDS: tuple[type, ...] = (type(torch.ops.aten.mm), type(torch.ops.aten.mm.default))
_GROUP_OF = {"inductor_compiled_code": "compiled"}
ROUTER_GATE = "moe.router.gate"
"""The module whose matrix products torchtitan recomputes by default. A model without it is not an error."""


def install_note(block: nn.Module, name: str, value: object) -> None:
    """Give an applied block an attribute until the mode is removed, without changing the block itself or its copies."""
    if "_actmem_runners" in vars(type(block)):  # the class that was created for the blocks of this call
        setattr(type(block), name, value)


def resolved(root: object, path: str) -> Any:
    """Follow a dotted path of attributes; return None if a part is missing.

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
    """Return the selector for an operator, a packet or a higher-order operator; selectors are returned unchanged.

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
        f"{op!r} is not an operator. Expected one of torch.ops, such as torch.ops.aten.mm.default, or an actmem "
        "selector, such as 'attention'."
    )


def selective(
    model: nn.Module, save: Iterable[object], *, alternate: Sequence[str], force_recompute: Iterable[str] = ()
) -> Selective | Full:
    """Return the mode that saves these operators, but only every second of `alternate`, and not in these modules.

    Args:
        model: where module names are looked up, as parts of paths.
        save: operators or selectors.
        alternate: packet names, such as "aten.mm", counted together; those that are not in `save` are ignored.
        force_recompute: modules whose matrix products are recomputed and not counted.
    """
    names = {text if isinstance(text, EverySecond) else text.removesuffix(".default") for text in map(selector, save)}
    entries: list[str | EverySecond] = sorted(names - set(alternate), key=str)
    if counted := [name for name in alternate if name in names]:
        entries.append(every_second("|".join(counted)))  # counted together
    paths = [path for path, _ in named_modules(model)]
    forced = [name for name in force_recompute if any(name in path for path in paths)]
    for name in set(force_recompute) - {*forced, ROUTER_GATE}:
        warnings.warn(f"{name!r} is in no module path of {type(model).__name__}: it has no effect.", stacklevel=4)
    return Selective(save=entries, force_recompute=[f"*{name}*" for name in forced]) if entries else Full()


def disable_lru_cache() -> None:
    """Make Dynamo try graphs in the order of their creation from now on. Does nothing if torch does not support it."""
    try:
        keep_graph_order()
    except (AttributeError, RuntimeError):
        _logger.debug("this torch has no setting for the order in which Dynamo tries graphs", exc_info=True)


def check_options(config: object) -> None:
    """Refuse the options of torch's checkpoint that are not supported here.

    Raises:
        ModeError: `determinism_check` is not one that torch knows, or the compiler's plot is requested.
    """
    check = getattr(config, "determinism_check", "default")
    if check not in ("default", "none"):
        raise ModeError(
            f"determinism_check = {check!r} is not known. Expected 'default' or 'none'; both mean the same here, since "
            "no code runs twice."
        )
    if getattr(config, "visualize_memory_budget_pareto", False):
        raise ModeError(
            "visualize_memory_budget_pareto = True has no meaning here: set "
            "torch._functorch.config.visualize_memory_budget_pareto yourself. Leave it at False."
        )


def titan_layers(model: nn.Module) -> list[str] | None:
    """Return the names in `model.layers`, in order; None if a model has no `layers`, and its blocks must be found."""
    layers = dict(model.named_children()).get("layers")
    return None if layers is None else [name for name, _ in layers.named_children()]
