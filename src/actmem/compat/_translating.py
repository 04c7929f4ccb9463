"""Carry what other systems write over to modes: operator objects, module names, options. Decides nothing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from actmem.errors import ModeError
from actmem.modes import EverySecond, Full, Selective, every_second
from actmem.torchcompat import keep_graph_order, named_modules

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
"""The module whose products torchtitan recomputes unless told otherwise. A model without it is no mistake."""


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
) -> Selective | Full:
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


def disable_lru_cache() -> None:
    """Have Dynamo try graphs in the order in which they were made, from now on. Does nothing where torch cannot."""
    try:
        keep_graph_order()
    except (AttributeError, RuntimeError):
        _logger.debug("this torch has no switch for the order in which Dynamo tries graphs", exc_info=True)


def check_options(config: object) -> None:
    """Refuse the options of torch's checkpoint that cannot be done here.

    Raises:
        ModeError: `determinism_check` is not one that torch knows, or the compiler's picture is asked for.
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
    """Return the names in `model.layers`, in order; None where a model has no `layers`, and blocks must be found."""
    layers = dict(model.named_children()).get("layers")
    return None if layers is None else [name for name, _ in layers.named_children()]
