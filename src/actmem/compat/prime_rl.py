"""Checkpoint targets under prime-rl's names.

In prime-rl a target is a hook that the author of a model must write. Here it is found in unmodified models, so nearly
every kind of layer can be selective. What tensor and sequence parallelism gather is recomputed too, as in prime-rl:
`collectives="save"` saves it. See docs/compat_prime_rl.md.

>>> layer = nn.TransformerEncoderLayer(8, 2, 16)
>>> sorted(get_supported_targets(layer))
['attn_proj', 'mlp', 'norm']
>>> set_selective_activation_checkpointing(layer, ["norm"])
<Applied Targets(['norm']) on 1 blocks>
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn

from actmem.applying import Applied, Collectives
from actmem.compat._axolotl_manager import OffloadActivations
from actmem.compat._calls import apply_once
from actmem.compat._prime_rl_operators import (
    DEFAULT_SELECTIVE_SAVE_NAMESPACES,
    DEFAULT_SELECTIVE_SAVE_OPERATIONS,
    DEFAULT_SELECTIVE_TARGETS,
    operators_to_save,
)
from actmem.compat.configs import FromConfig, read_config
from actmem.decision_rules import Rule
from actmem.errors import ModeError
from actmem.modes import Full, Rules, Selective, Targets
from actmem.ops import did_you_mean
from actmem.structure import Block, find_blocks, find_roles, layer_type, roles

__all__ = [
    "DEFAULT_SELECTIVE_SAVE_NAMESPACES",
    "DEFAULT_SELECTIVE_SAVE_OPERATIONS",
    "DEFAULT_SELECTIVE_TARGETS",
    "SELECTIVE_AC_TARGETS",
    "ActivationCheckpointConfig",
    "ActivationOffloadingConfig",
    "FromConfig",
    "apply_ac",
    "from_config",
    "get_activation_checkpoint_wrapper",
    "get_supported_targets",
    "maybe_activation_offloading",
    "set_selective_activation_checkpointing",
    "supports_selective_activation_checkpointing",
]

SELECTIVE_AC_TARGETS = frozenset(
    {"norm", "attn_proj", "mlp", "mla_up_proj", "routed_experts", "moe_act", "linear_attn"}
)
"""The targets of prime-rl: parts of a layer to recompute. actmem has more: `actmem.Targets`."""

_SLIDING = "sliding_attention"
_ROUTES = ("tokens_per_expert", "_run_routed_experts", "run_experts_for_torch_a2a", "run_experts_for_deepep")
"""Targets that, in prime-rl, only the feed-forward part of a mixture of experts has."""


@dataclass
class ActivationCheckpointConfig:
    """What to recompute. Without arguments it means full; None instead of a config means off, here and in `apply_ac`.

    `targets` are parts of a layer to recompute, as in older prime-rl, or operators to save, as in newer: `"aten::mm"`,
    or a namespace such as `"flash_attn"`; None means prime-rl's default list of operators.

    >>> print(ActivationCheckpointConfig(mode="selective", targets=["norm", "mlp", "norm"]).resolved())
    mode = selective, freq = 1, targets = norm, mlp

    Raises:
        ModeError: `freq` is below 1, `mode` is unknown, or selective has no target.
    """

    mode: Literal["full", "selective"] = "full"
    """`full` recomputes whole blocks, `selective` the targets in them."""
    freq: int = 1
    """Stride of the layers it applies to, starting with the first."""
    targets: list[str] | None = field(default_factory=lambda: ["norm"])
    """What `selective` recomputes, or which operators it saves. `full` ignores it."""

    def __post_init__(self) -> None:
        if self.mode not in ("full", "selective"):
            raise ModeError(
                f"mode = {self.mode!r} is not permitted. Expected 'full' or 'selective'; for off, use None."
            )
        if type(self.freq) is not int or self.freq < 1:
            raise ModeError(f"freq = {self.freq!r} is not permitted. Expected an int of 1 or more; 1 is every layer.")
        given = cast(object, self.targets)
        if given is None:
            return
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ModeError(f"targets = {given!r} is not a list. Write targets=['norm'].")
        self.targets = list(dict.fromkeys(cast(Sequence[str], given)))
        if self.mode == "selective" and not self.targets:
            raise ModeError("targets is empty. Selective needs at least one: write targets=['norm'].")

    def resolved(self) -> str:
        """Return all effective settings, including defaults, as one line."""
        targets = "default operators" if self.targets is None else ", ".join(self.targets) or "none"
        return f"mode = {self.mode}, freq = {self.freq}, targets = {targets}"


def get_supported_targets(layer: nn.Module) -> frozenset[str]:
    """Return the targets that a layer has, and always `norm`, as in prime-rl: a layer without norms ignores it."""
    return _Layer(layer).supported | {"norm"}


def supports_selective_activation_checkpointing(layer: nn.Module) -> bool:
    """Return whether a layer has any target. In prime-rl only its own model classes do."""
    return bool(_Layer(layer).supported)


def set_selective_activation_checkpointing(
    layer: nn.Module, targets: Iterable[str], *, collectives: Collectives = "recompute"
) -> Applied | None:
    """Change one layer to recompute these targets. Targets that it does not have are ignored, as in prime-rl.

    Repeating the call does nothing; other targets are added to earlier ones. `collectives` is passed to `actmem.apply`.

    Raises:
        ModeError: a target is not known.
    """
    found = _Layer(layer)
    names = [name for name in _known(targets) if name in found.supported]
    return apply_once(layer, _mode(names, [found]), blocks=".", collectives=collectives) if names else None


def apply_ac(
    model: nn.Module, ac_config: ActivationCheckpointConfig | None, *, collectives: Collectives = "recompute"
) -> Applied | None:
    """Apply a config to a model. None changes nothing. `collectives` is passed to `actmem.apply`.

    A selected layer without any target is recomputed as a whole, with a warning, as in prime-rl.

    Raises:
        ModeError: none of the selected layers has one of the targets; the message lists the targets that they have.
    """
    if ac_config is None:
        return None
    if ac_config.mode == "full":
        return apply_once(model, Full(every=ac_config.freq), collectives=collectives)
    if (saved := operators_to_save(ac_config.targets)) is not None:
        return apply_once(model, Selective(save=saved, every=ac_config.freq), collectives=collectives)
    names, blocks = _known(ac_config.targets or ()), find_blocks(model)
    read = zip(blocks, find_roles(model, blocks), strict=True)
    chosen = [_Layer(block.module, found, block) for block, found in read][:: ac_config.freq]
    supported = frozenset[str]().union(*(layer.supported for layer in chosen))
    if missing := [name for name in names if name not in supported]:
        raise ModeError(
            f"targets {', '.join(missing)}: none of the {len(chosen)} selected layers has them. "
            f"Those layers have: {', '.join(sorted(supported)) or 'none'}."
        )
    mode = _mode(names, chosen, every=ac_config.freq)
    if bare := [layer for layer in chosen if not layer.supported]:
        kinds = ", ".join(sorted({type(layer.module).__name__ for layer in bare}))
        warnings.warn(
            f"{len(bare)} of {len(chosen)} selected layers ({kinds}) have none of prime-rl's targets, and are "
            "recomputed as a whole.",
            stacklevel=2,
        )
        mode = Rules([Rule("recompute", layers=",".join(str(layer.index) for layer in bare)), *mode.rules()])
    return apply_once(model, mode, collectives=collectives)


def get_activation_checkpoint_wrapper(config: ActivationCheckpointConfig) -> Callable[[nn.Module], nn.Module]:
    """Return a function that applies the config to one layer, and returns the layer itself: there is no wrapper.

    >>> layer = get_activation_checkpoint_wrapper(ActivationCheckpointConfig())(nn.Linear(2, 2))
    """
    saved = None if config.mode == "full" else operators_to_save(config.targets)

    def change(layer: nn.Module) -> nn.Module:
        if config.mode == "selective" and saved is None:
            set_selective_activation_checkpointing(layer, config.targets or ())
        else:
            apply_once(layer, Full() if saved is None else Selective(save=saved), blocks=".", collectives="recompute")
        return layer

    return change


@dataclass
class ActivationOffloadingConfig:
    """How to offload the tensors that autograd saves. None instead of a config means off.

    Raises:
        ModeError: `max_inflight_activations` is below 1.
    """

    pin_memory: bool = True
    """Use page-locked host memory."""
    max_inflight_activations: int = 5
    """Maximum number of activations in flight at once."""

    def __post_init__(self) -> None:
        if type(self.max_inflight_activations) is not int or self.max_inflight_activations < 1:
            raise ModeError(
                f"max_inflight_activations = {self.max_inflight_activations!r} is not permitted. Expected an int of 1 "
                "or more; 5 is usual."
            )


def maybe_activation_offloading(
    config: ActivationOffloadingConfig | None, model: nn.Module | None = None
) -> AbstractContextManager[Any]:
    """Return a context that offloads what autograd saves in it; for None, one that does nothing.

    prime-rl takes no model, and tells parameters from activations by their class. Here the model is required. The
    activations of a model on the CPU are in host memory already: nothing is offloaded.

    >>> with maybe_activation_offloading(ActivationOffloadingConfig(), nn.Linear(2, 2)):
    ...     pass

    Raises:
        ModeError: no model is given.
    """
    if config is None:
        return nullcontext()
    if model is None:
        raise ModeError(
            "maybe_activation_offloading(config) needs the model, to tell parameters from activations. Write "
            "maybe_activation_offloading(config, model)."
        )
    manager = OffloadActivations(use_pin_memory=config.pin_memory, max_fwd_stash_size=config.max_inflight_activations)
    return manager.attach(model, warn_if_no_head=False)


class _Layer:
    """A layer, and which targets it has.

    Targets are found from the modules themselves. In addition, the names that prime-rl's own models must use are
    trusted, so that a toy layer without weights, as in its tests, has targets too.
    """

    def __init__(
        self, module: nn.Module, found: dict[str, tuple[str, ...]] | None = None, block: Block | None = None
    ) -> None:
        self.module = module
        self.index, self.path = (0, "") if block is None else (block.index, block.path)
        self.roles = roles(module) if found is None else found
        self.is_sliding = layer_type(module) == _SLIDING and "attention" in self.roles
        self.named = self._named()
        """Targets that are known by name only: their child modules."""
        more = {"moe_act": "routed_experts" in self.roles, "linear_attn": self.is_sliding}
        names = {*self.roles, *self.named, *(name for name, there in more.items() if there)}
        self.supported = SELECTIVE_AC_TARGETS & names

    def _named(self) -> dict[str, str]:
        children = dict(self.module.named_children())
        attention, mlp = children.get("self_attn"), children.get("mlp")
        mixers = ["linear_attn", "mamba", *["self_attn"] * (getattr(self.module, "attention_type", None) == _SLIDING)]
        said = {"linear_attn": next((name for name in mixers if name in children), None)}
        if hasattr(attention, "attn_projections") and hasattr(attention, "output_proj"):
            said["attn_proj"] = "self_attn"
        if mlp is not None and any(hasattr(mlp, name) for name in _ROUTES):
            said["routed_experts"] = "mlp"
        known = {*self.roles, *(["linear_attn"] if self.is_sliding else [])}
        return {target: name for target, name in said.items() if name is not None and target not in known}


def _known(targets: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys([targets] if isinstance(targets, str) else targets))
    for name in names:
        if name not in SELECTIVE_AC_TARGETS:
            known = sorted(SELECTIVE_AC_TARGETS)
            raise ModeError(f"target {name!r} is not known. Permitted: {', '.join(known)}.{did_you_mean(name, known)}")
    return names


def _mode(names: list[str], layers: list[_Layer], every: int = 1) -> Rules | Targets:
    """Translate targets to rules; `linear_attn` includes the attention of sliding-window layers."""
    sliding = "linear_attn" in names and any(layer.is_sliding for layer in layers)
    named = [(layer, layer.named[name]) for layer in layers for name in names if name in layer.named]
    if not sliding and not named:
        return Targets(names, every=every)
    where = None if every == 1 else f"0::{every}"
    found = [name for name in names if any(name in layer.roles or name == "moe_act" for layer in layers)]
    rules = [Rule("recompute", layers=where, target=name) for name in found]
    if sliding:
        rules.append(Rule("recompute", layers=where, layer_type=_SLIDING, target="attention"))
    rules += [Rule("recompute", module=f"{layer.path}.{child}".strip(".")) for layer, child in named]
    return Rules([*dict.fromkeys(rules), Rule("save")])


def from_config(path: str | Path) -> FromConfig:
    """Read a configuration file of prime-rl: `[model.ac]` and `[model.ac_offloading]`, also under `[trainer.model]`.

    Returns:
        The translation: `mode` and `options` for `actmem.apply`, and notes. Print it.

    Raises:
        ModeError: the file cannot be read, or contains something unknown.
    """
    return read_config(path, "prime-rl")
