"""Activation checkpointing under torchtitan's names: the newer classes, and the older function and config.

The blocks are those of `model.layers`, as in torchtitan; if a model has none, they are found. Options of torch's
checkpoint that change nothing here: `preserve_rng_state` (random operators are always replayed under their recorded
state), `early_stop` (only what backward needs is ever replayed), `determinism_check` (there is no second run to
compare), `model_compile_enabled` and `use_flex_attn` (a block is one region, compiled or not, and what is compiled
inside stays compiled). `debug=True` compares every replayed value with a checksum.
`visualize_memory_budget_pareto=True` raises, because it would do nothing. What tensor and sequence parallelism gather
is recomputed, as in torchtitan: `collectives="save"` saves it. See docs/compat_torchtitan.md.

>>> SelectiveAC.Config().build().config.force_recompute_mm_shapes_by_fqns
['moe.router.gate']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

from actmem.applying import Applied, Collectives
from actmem.compat._calls import RuleMode
from actmem.compat._compiler_budget import AppliedBudget, CompilerBudget
from actmem.compat._torchtitan_older import ActivationCheckpoint, apply_ac, apply_to_layers
from actmem.compat._translation import ROUTER_GATE, disable_lru_cache, resolved, selective
from actmem.compat.configs import FromConfig, read_config
from actmem.modes import Full
from actmem.ops import GROUPS
from actmem.torchcompat import compute_intensive

__all__ = [
    "ActivationCheckpoint",
    "ActivationCheckpointConfig",
    "ActivationCheckpointing",
    "ActivationCheckpointingConfig",
    "AppliedBudget",
    "CompilerBudget",
    "FromConfig",
    "FullAC",
    "MemoryBudgetAC",
    "SelectiveAC",
    "apply_ac",
    "from_config",
]

_OPS = (
    *("aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_attention_math", "aten.linear"),
    *("aten._scaled_dot_product_fused_attention_overrideable", "aten.max", "aten.topk", "torch_attn._varlen_attn"),
    *("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_to_all_single"),
    *("deepep.dispatch", "deepep.combine", "hybridep.dispatch", "hybridep.combine"),
)
"""What torchtitan saves in addition to torch's compute-intensive operators. What is not installed is skipped."""


def _get_default_save_ops() -> set[Any]:
    """Return what `SelectiveAC` saves: torch's compute-intensive operators, and those of `_OPS` that are installed."""
    listed = (*(compute_intensive() or GROUPS["compute_intensive"]), *_OPS)
    found = [resolved(torch.ops, f"{name}.default") for name in listed]
    compiled = resolved(torch, "_higher_order_ops.inductor_compiled_code")
    return {op for op in (*found, torch.ops.higher_order.flex_attention, compiled) if op is not None}


_disable_dynamo_lru_cache = disable_lru_cache


class ActivationCheckpointing:
    """Base of the policies: built from a nested `Config`, applied with `apply(model)`."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Options that all policies share. The module's docstring says what they mean here."""

        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False
        _owner: ClassVar[Any] = None

        def build(self, **kwargs: Any) -> Any:
            """Create the policy that this `Config` belongs to; `dump_folder` is accepted and ignored."""
            return self._owner(config=replace(self), **kwargs)

        def to_dict(self) -> dict[str, Any]:
            """Return the options as plain data."""
            return {f.name: getattr(self, f.name) for f in fields(self)}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" not in vars(cls):  # so that Config().build() of a subclass creates that subclass
            cls.Config = dataclass(kw_only=True, slots=True)(type("Config", (cls.Config,), {}))
        cls.Config._owner = cls  # pyright: ignore[reportPrivateUsage] # as torchtitan wires it

    def __init__(self, config: ActivationCheckpointing.Config, dump_folder: str = "") -> None:
        self.config = config
        self.dump_folder = dump_folder

    def apply(self, model: nn.Module, *, collectives: Collectives = "recompute") -> Applied | AppliedBudget | None:
        """Apply the policy to every block of the model.

        Returns:
            The handle; torchtitan returns nothing. None if `model.layers` is empty, as in a stage without layers.
        """
        return apply_to_layers(model, self._mode(model), self.config, collectives)

    def _mode(self, model: nn.Module) -> RuleMode | CompilerBudget:
        raise NotImplementedError(f"{type(self).__name__} is not a policy. Use FullAC, SelectiveAC or MemoryBudgetAC.")


class FullAC(ActivationCheckpointing):
    """Recompute whole blocks."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """The shared options only."""

    def _mode(self, model: nn.Module) -> RuleMode:  # noqa: ARG002 - other policies look names up in it
        return Full()


class SelectiveAC(ActivationCheckpointing):
    """Save the operators of `get_save_ops`, but only every second `mm` and `linear`; recompute the rest."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """The modules whose matrix products are always recomputed and not counted.

        A name is part of a module's path. It selects the products in that module, not all products of the same shape as
        in torchtitan.
        """

        force_recompute_mm_shapes_by_fqns: list[str] = field(default_factory=lambda: [ROUTER_GATE])

    def get_save_ops(self) -> set[Any]:
        """Return what to save. Override it; operators of `torch.ops` and actmem selectors may be mixed."""
        return _get_default_save_ops()

    def _mode(self, model: nn.Module) -> RuleMode:
        forced = cast(SelectiveAC.Config, self.config).force_recompute_mm_shapes_by_fqns
        return selective(model, self.get_save_ops(), alternate=("aten.mm", "aten.linear"), force_recompute=forced)


class MemoryBudgetAC(ActivationCheckpointing):
    """Leave the choice to torch.compile: `CompilerBudget`, whose docstring lists its defects."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """The compiler's fraction. The plot is not supported here: True raises."""

        memory_budget: float = 0.5
        visualize_memory_budget_pareto: bool = False

    def _mode(self, model: nn.Module) -> CompilerBudget:  # noqa: ARG002 - other policies look names up in it
        return CompilerBudget(cast(MemoryBudgetAC.Config, self.config).memory_budget)


ActivationCheckpointConfig = ActivationCheckpoint
"""The older config, under its last name."""
ActivationCheckpointingConfig = SelectiveAC.Config | FullAC.Config | MemoryBudgetAC.Config | None
"""The type of a trainer's field for the policy. None: no checkpointing."""


def from_config(path: str | Path | None = None, arguments: Sequence[str] = ()) -> FromConfig:
    """Read the section `activation_checkpoint` of a torchtitan TOML file, or its flags.

    >>> found = from_config(arguments=["--activation_checkpoint.mode=selective"])
    >>> found.line
    "actmem.apply(model, actmem.Full(every=2, first=1), collectives='recompute')"

    Args:
        path: the TOML file, or a script with flags.
        arguments: flags, which override the file.

    Returns:
        The translation: `mode` and `options` for `actmem.apply`, and notes. Print it.

    Raises:
        ModeError: the file cannot be read, or contains something unknown.
    """
    return read_config(path, "torchtitan", arguments)
