"""The function and the config that torchtitan had before its policy classes. Imported from `compat.torchtitan`."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from actmem.applying import Applied, Collectives
from actmem.compat._calls import RuleMode, apply_once
from actmem.compat._compiler_budget import AppliedBudget, CompilerBudget
from actmem.compat._translation import ROUTER_GATE, check_options, selective, titan_layers
from actmem.errors import ModeError
from actmem.modes import Full, SaveEverything

__all__ = ["ActivationCheckpoint", "apply_ac", "apply_to_layers"]


@dataclass
class ActivationCheckpoint:
    """Options of the older `apply_ac`, which also accepts torchtitan's own object with the same fields."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    selective_ac_option: str = "2"
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(default_factory=lambda: [ROUTER_GATE])
    early_stop: bool = False
    memory_budget: float = 0.5
    visualize_memory_budget_pareto: bool = False
    preserve_rng_state: bool = False
    determinism_check: str = "default"
    debug: bool = False


def apply_ac(
    model: nn.Module,
    ac_config: ActivationCheckpoint,
    *,
    model_compile_enabled: bool = False,
    use_flex_attn: bool = False,
    op_sac_save_list: set[Any] | None = None,
    base_folder: str = "",
    collectives: Collectives = "recompute",
) -> Applied | AppliedBudget | None:
    """Apply torchtitan's older config to a model; of the saved operators only `mm` alternates.

    Without a save list nothing is saved, as in torchtitan. A number n selects the layers n, 2n, 3n, ... of the whole
    model: layers are named by their numbers, and a pipeline stage keeps these names. `collectives` is passed to
    `actmem.apply`.

    Returns:
        The handle; None if `model.layers` is empty.

    Raises:
        ModeError: a mode or option is not known, or a memory budget is set for a model that is not compiled.
    """
    del use_flex_attn, base_folder  # see the docstring of compat.torchtitan; the folder was for a plot
    option = ac_config.selective_ac_option
    mode: RuleMode | CompilerBudget
    if ac_config.mode == "full":
        mode = Full()
    elif ac_config.mode == "selective" and option == "op":
        forced = ac_config.per_op_sac_force_recompute_mm_shapes_by_fqns
        mode = selective(model, op_sac_save_list or (), alternate=("aten.mm",), force_recompute=forced)
    elif ac_config.mode == "selective" and option.isdigit():
        mode = _every(max(int(option), 1), titan_layers(model))
    elif ac_config.mode == "memory_budget" and model_compile_enabled:
        mode = CompilerBudget(ac_config.memory_budget)
    else:
        raise ModeError(
            f"mode = {ac_config.mode!r}, selective_ac_option = {option!r}, model_compile_enabled = "
            f"{model_compile_enabled} is not permitted. Expected mode 'full'; 'selective' with the option 'op' or a "
            "number of layers; or 'memory_budget' for a compiled model. For 'none', do not call apply_ac."
        )
    return apply_to_layers(model, mode, ac_config, collectives)


def _every(distance: int, names: list[str] | None) -> RuleMode:
    """Select every n-th layer, counted by the numbers in their names, or else by position."""
    usual = Full(every=distance, first=distance - 1)
    if names is None:
        return usual
    numbers = [int(name) for name in names] if all(map(str.isdigit, names)) else range(len(names))
    places = [place for place, number in enumerate(numbers) if (number + 1) % distance == 0]
    if not places and names:
        warnings.warn(
            f"selective_ac_option = '{distance}' selects one in {distance} layers of the whole model, and none of "
            f"those is here ({', '.join(names)}): everything is saved.",
            stacklevel=3,
        )
        return SaveEverything()
    in_order = places == list(range(distance - 1, len(names), distance))
    return usual if in_order else Full(layers=",".join(map(str, places)))


def apply_to_layers(
    model: nn.Module, mode: RuleMode | CompilerBudget, config: object, collectives: Collectives
) -> Applied | AppliedBudget | None:
    """Apply a mode to `model.layers`; return None if that is empty."""
    check_options(config)
    names = titan_layers(model)
    if names == []:
        return None
    if isinstance(mode, CompilerBudget):
        return mode.apply(model)
    applied = apply_once(model, mode, blocks=None if names is None else "layers.*", collectives=collectives)
    if getattr(config, "debug", False):
        applied.check_replay(sys.maxsize)
    return applied
