"""Checkpoint targets under prime-rl's names.

There a target is a hook that a model's author must write. Here it is found in unmodified models, so every layer kind
can be selective and none falls back to full. See docs/compat_prime_rl.md.

>>> layer = nn.TransformerEncoderLayer(8, 2, 16)
>>> sorted(get_supported_targets(layer))
['attn_proj', 'mlp', 'norm']
>>> set_selective_activation_checkpointing(layer, ["norm"])
<Applied Targets(['norm']) on 1 blocks>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from torch import nn

from actmem.applying import Applied
from actmem.compat._translating import apply_once
from actmem.errors import ModeError
from actmem.modes import Full, Mode, Rules, Targets
from actmem.ops import did_you_mean
from actmem.plan import Rule
from actmem.structure import find_blocks, find_roles, layer_type, roles

__all__ = [
    "SELECTIVE_AC_TARGETS",
    "ActivationCheckpointConfig",
    "apply_ac",
    "get_supported_targets",
    "set_selective_activation_checkpointing",
    "supports_selective_activation_checkpointing",
]

SELECTIVE_AC_TARGETS = frozenset(
    {"norm", "attn_proj", "mlp", "mla_up_proj", "routed_experts", "moe_act", "linear_attn"}
)
"""The targets of prime-rl. actmem has more: `actmem.Targets`."""

_SLIDING = "sliding_attention"
_Roles = dict[str, tuple[str, ...]]


@dataclass
class ActivationCheckpointConfig:
    """Say what to recompute. The config itself means full; None in its place means off, here and in `apply_ac`.

    >>> print(ActivationCheckpointConfig(mode="selective", targets=["norm", "mlp", "norm"]).resolved())
    mode = selective, freq = 1, targets = norm, mlp

    Raises:
        ModeError: `freq` is below 1, `mode` unknown, or no target is given for selective.
    """

    mode: Literal["full", "selective"] = "full"
    """`full` recomputes whole blocks, `selective` the targets in them."""
    freq: int = 1
    """Every how many-th layer, beginning with the first."""
    targets: list[str] = field(default_factory=lambda: ["norm"])
    """What `selective` recomputes. Full takes no notice of it."""

    def __post_init__(self) -> None:
        if self.mode not in ("full", "selective"):
            raise ModeError(
                f"mode = {self.mode!r} is not permitted. Expected 'full' or 'selective'; for off, use None."
            )
        if type(self.freq) is not int or self.freq < 1:
            raise ModeError(f"freq = {self.freq!r} is not permitted. Expected an int of 1 or more; 1 is every layer.")
        given = cast(object, self.targets)
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ModeError(f"targets = {given!r} is no list. Write targets=['norm'].")
        self.targets = list(dict.fromkeys(cast(Sequence[str], given)))
        if self.mode == "selective" and not self.targets:
            raise ModeError("targets is empty. Selective needs at least one: write targets=['norm'].")

    def resolved(self) -> str:
        """Return everything that is in force, defaults included, as one line."""
        return f"mode = {self.mode}, freq = {self.freq}, targets = {', '.join(self.targets) or 'none'}"


def get_supported_targets(layer: nn.Module) -> frozenset[str]:
    """List the targets that a layer has. `norm` is among them if there is a norm; prime-rl lists it always."""
    return _supported(roles(layer), layer_type(layer))


def supports_selective_activation_checkpointing(layer: nn.Module) -> bool:
    """Tell whether a layer has any target. In prime-rl only its own model classes do."""
    return bool(get_supported_targets(layer))


def set_selective_activation_checkpointing(layer: nn.Module, targets: Iterable[str]) -> Applied | None:
    """Change one layer so that it recomputes these targets. Those that it does not have are passed over, as there.

    The same call again does nothing. Other targets raise ApplyError: remove the handle first. (prime-rl adds them.)

    Raises:
        ModeError: a target is not known.
    """
    wanted, found, kind = _known(targets), roles(layer), layer_type(layer)
    names = [name for name in wanted if name in _supported(found, kind)]
    return apply_once(layer, _mode(names, [(found, kind)]), blocks=".") if names else None


def apply_ac(model: nn.Module, ac_config: ActivationCheckpointConfig | None) -> Applied | None:
    """Change a model as the config says. None changes nothing.

    Raises:
        ModeError: a target that none of the selected layers has; the message lists those that they have.
    """
    if ac_config is None:
        return None
    if ac_config.mode == "full":
        return apply_once(model, Full(every=ac_config.freq))
    names, blocks = _known(ac_config.targets), find_blocks(model)
    kinds = [layer_type(block.module) for block in blocks]
    chosen = list(zip(find_roles(model, blocks), kinds, strict=True))[:: ac_config.freq]
    supported = frozenset[str]().union(*(_supported(*layer) for layer in chosen))
    if missing := [name for name in names if name not in supported]:
        raise ModeError(
            f"targets {', '.join(missing)}: none of the {len(chosen)} selected layers has them. "
            f"Supported there: {', '.join(sorted(supported)) or 'none'}."
        )
    return apply_once(model, _mode(names, chosen, every=ac_config.freq))


def _supported(found: _Roles, kind: str | None) -> frozenset[str]:
    more = {"moe_act": "routed_experts" in found, "linear_attn": kind == _SLIDING and "attention" in found}
    return SELECTIVE_AC_TARGETS & {*found, *(name for name, there in more.items() if there)}


def _known(targets: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys([targets] if isinstance(targets, str) else targets))
    for name in names:
        if name not in SELECTIVE_AC_TARGETS:
            known = sorted(SELECTIVE_AC_TARGETS)
            raise ModeError(f"target {name!r} is not known. Permitted: {', '.join(known)}.{did_you_mean(name, known)}")
    return names


def _mode(names: list[str], layers: list[tuple[_Roles, str | None]], every: int = 1) -> Mode:
    """Translate; `linear_attn` also means the attention of layers that see a sliding window."""
    if "linear_attn" not in names or all(kind != _SLIDING for _, kind in layers):
        return Targets(names, every=every)
    where = None if every == 1 else f"0::{every}"
    there = [name for name in names if name != "linear_attn" or any(name in found for found, _ in layers)]
    rules = [Rule("recompute", layers=where, target=name) for name in there]
    return Rules([*rules, Rule("recompute", layers=where, layer_type=_SLIDING, target="attention"), Rule("save")])
