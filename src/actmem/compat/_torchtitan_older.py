"""The function and the config that torchtitan had before its policy classes. Imported from `compat.torchtitan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from actmem.applying import Applied
from actmem.compat._translating import ROUTER_GATE, apply_once, check_options, selective, titan_blocks
from actmem.errors import ModeError
from actmem.modes import CompilerBudget, Full, Mode

__all__ = ["ActivationCheckpoint", "apply_ac"]


@dataclass
class ActivationCheckpoint:
    """Hold the options of the older `apply_ac`, which takes torchtitan's own object of that form as well."""

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
) -> Applied:
    """Change a model as torchtitan's older config says; of the saved operators only `mm` alternates.

    Without a save list nothing is saved, as there. Layers are counted anew for each model; there they are counted on.

    Raises:
        ModeError: a mode or option that is not known, or a memory budget for a model that is not compiled.
    """
    del use_flex_attn, base_folder  # see the docstring of compat.torchtitan; the folder was for a picture
    check_options(ac_config)
    option = ac_config.selective_ac_option
    mode: Mode
    if ac_config.mode == "full":
        mode = Full()
    elif ac_config.mode == "selective" and option == "op":
        forced = ac_config.per_op_sac_force_recompute_mm_shapes_by_fqns
        mode = selective(model, op_sac_save_list or (), alternate=("aten.mm",), force_recompute=forced)
    elif ac_config.mode == "selective" and option.isdigit():
        every = max(int(option), 1)
        mode = Full(every=every, first=every - 1)
    elif ac_config.mode == "memory_budget" and model_compile_enabled:
        mode = CompilerBudget(ac_config.memory_budget)
    else:
        raise ModeError(
            f"mode = {ac_config.mode!r}, selective_ac_option = {option!r}, model_compile_enabled = "
            f"{model_compile_enabled} is not permitted. Expected mode 'full'; 'selective' with the option 'op' or a "
            "number of layers; or 'memory_budget' for a compiled model. For 'none', do not call apply_ac."
        )
    return apply_once(model, mode, blocks=titan_blocks(model))
