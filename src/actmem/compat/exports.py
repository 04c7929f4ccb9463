"""Write a plan as the nearest settings of another system, with what they take there and what is lost on the way.

The settings of a system are few. Each is predicted as that system would carry it out, on the same profile, and the
fastest within the plan's peak is chosen; if none is, the one with the lowest peak. Where `configs.py` reads that
system's files, the mode that is predicted is the one that it reads from the exported file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from actmem.compat._export_settings import VOCABULARIES, Setting, Vocabulary
from actmem.decision_rules import Rule
from actmem.decisions import Decision
from actmem.devices import Device
from actmem.errors import ModeError, PlanError
from actmem.modes import Mode
from actmem.ops import did_you_mean
from actmem.plan import Plan
from actmem.profiles import Profile
from actmem.simulation import Prediction, dtypes_of, plan_of, predict, resolved
from actmem.units import size

__all__ = ["Exported", "export_plan"]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A plan as the settings of another system. Print it, or write it to a file with `save`."""

    system: str
    settings: Mapping[str, Any]
    """The settings by name, in sections as the system has them; by flag for Megatron."""
    text: str
    """The same as the system reads it: TOML, YAML, JSON, or flags of a command line."""
    suffix: str
    """The ending of a file for it, such as ".toml"."""
    mode: Mode
    """What the system does with these settings, as an actmem mode."""
    predicted: Prediction
    """What a step takes under the system's settings."""
    planned: Prediction
    """What it takes under the plan."""
    lost: tuple[str, ...]
    """What the plan says and these settings do not."""
    notes: tuple[str, ...]
    """What else there is to know about that system."""

    def save(self, path: str | Path) -> None:
        """Write the settings to a file of their own, to be merged into the system's configuration.

        Raises:
            PlanError: it cannot be written.
        """
        try:
            Path(path).write_text(self.text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot write {str(path)!r}: {error.strerror}. Name another file.") from error

    def __str__(self) -> str:
        ours, theirs = self.planned, self.predicted
        lines = [
            f"{self.system}:",
            *(f"  {line}" for line in self.text.splitlines()),
            f"predicted there: {size(theirs.peak_bytes)}, step {theirs.step_time_ratio:.3f}x of saving everything",
            f"the plan:        {size(ours.peak_bytes)}, step {ours.step_time_ratio:.3f}x",
        ]
        lines += ["lost:", *(f"  {sentence}" for sentence in self.lost)] if self.lost else ["nothing is lost."]
        return "\n".join([*lines, *(["notes:", *(f"  {note}" for note in self.notes)] if self.notes else [])])


def export_plan(profile: Profile, plan: Plan | Mode, to: str, device: Device | str | None = None) -> Exported:
    """Find the settings of another system that come nearest to a plan.

    Args:
        profile: what the step does, as `actmem.profile` found it.
        plan: a plan for the same model, or a mode.
        to: "torchtitan", "megatron", "transformers", "deepspeed", "nemo" or "axolotl".
        device: whose speed and kernels to take, as for `actmem.predict`. Default: this machine.

    Returns:
        The settings, with predictions for both, and what is lost.

    Raises:
        ModeError: the system is not known.
        PlanError: the plan was made for another step than the one profiled.

    >>> import torch, actmem
    >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    >>> found = actmem.profile(model, (torch.randn(64, 8),), loss=torch.sum, optimizer=None)
    >>> exported = export_plan(found, actmem.Full(), "torchtitan", actmem.device("h100-80gb").tensors_only())
    >>> print(exported.text, exported.lost)
    [activation_checkpoint]
    mode = "full"
     ()
    """
    if to not in VOCABULARIES:
        raise ModeError(
            f"to = {to!r} is not known. Permitted: {', '.join(VOCABULARIES)}.{did_you_mean(to, list(VOCABULARIES))}"
        )
    vocabulary, mine = VOCABULARIES[to], plan_of(profile, plan)
    _check_step(profile, mine)
    known = resolved(device, dtypes_of(profile))
    planned = predict(profile, mine, known)

    def fits(mode: Mode) -> bool:
        return _bytes(predict(profile, mode, known)) <= _bytes(planned)

    settings = vocabulary.settings(profile, offloads=_offloads(mine), saved=_saved_modules(mine), fits=fits)
    tried = {setting: predict(profile, setting.does, known) for setting in settings}
    chosen = _nearest(tried, planned)
    return Exported(
        system=vocabulary.system,
        settings=chosen.said,
        text=_WRITERS[vocabulary.suffix](chosen.said),
        suffix=vocabulary.suffix,
        mode=chosen.does,
        predicted=tried[chosen],
        planned=planned,
        lost=tuple(_lost(mine, planned, tried[chosen], vocabulary, chosen)),
        notes=(*vocabulary.notes, *chosen.notes),
    )


def _check_step(profile: Profile, plan: Plan) -> None:
    """Refuse a plan that was fitted to another step: its peak would not be the one that is compared with."""
    told = plan.predicted
    if told is None:
        return
    for name in ("shapes", "optimizer", "microbatches", "shard"):
        mine: Any = getattr(told, name)
        theirs: Any = getattr(profile, name)
        if mine != theirs:
            shown = [
                ", ".join(map(str, cast("Sequence[object]", x))) if name == "shapes" else x for x in (mine, theirs)
            ]
            raise PlanError(
                f"the plan was made for {name} = {shown[0]}, but the profile has {shown[1]}. Profile the step that the "
                "plan was made for: the same batch, optimizer, microbatches and shards."
            )


def _nearest(tried: Mapping[Setting, Prediction], planned: Prediction) -> Setting:
    """Return the fastest setting within the plan's peak; the one with the lowest peak if there is none."""
    within = {setting: found for setting, found in tried.items() if _bytes(found) <= _bytes(planned)}
    if within:
        return min(within, key=lambda s: (within[s].step_time_ratio, _bytes(within[s])))
    return min(tried, key=lambda s: (_bytes(tried[s]), tried[s].step_time_ratio))


def _bytes(found: Prediction) -> int:
    return found.peak_bytes if found.reserved_bytes is None else found.reserved_bytes


# ---------------------------------------------------------------- what is lost


def _lost(plan: Plan, planned: Prediction, found: Prediction, vocabulary: Vocabulary, chosen: Setting) -> list[str]:
    sentences: list[str] = []
    if _rules_of(chosen.does) == plan.rules:
        return sentences
    more = _bytes(found) - _bytes(planned)
    if more > 0:
        sentences.append(
            f"The plan's peak: no setting of {vocabulary.system} is within it. This one takes {size(more)} more."
        )
    slower = found.step_time_ratio - planned.step_time_ratio
    if slower > 0.0005:
        sentences.append(
            f"Time: the step is predicted to take {found.step_time_ratio:.3f}x of saving everything, under the plan "
            f"{planned.step_time_ratio:.3f}x."
        )
    for what, cannot in vocabulary.cannot.items():
        rules = [rule for rule in plan.rules if _SAYS[what](rule)]
        if rules:
            shown = "; ".join(_written(rule) for rule in rules[:3]) + (" ..." if len(rules) > 3 else "")
            sentences.append(f"{cannot} ({len(rules)} of {len(plan.rules)} rules: {shown})")
    return sentences


def _rules_of(mode: Mode) -> tuple[Rule, ...]:
    return tuple(cast(Any, mode).rules())


def _written(rule: Rule) -> str:
    return " ".join([str(rule.decision), *(f"{n}={v}" for n, v in vars(rule).items() if n != "decision" and v)])


_SAYS: dict[str, Callable[[Rule], bool]] = {
    "layers": lambda rule: rule.layers is not None or rule.layer_type is not None,
    "operators": lambda rule: rule.op is not None,
    "modules": lambda rule: rule.module is not None or rule.target is not None,
    "offload": lambda rule: rule.decision is Decision.OFFLOAD,
}
"""What a rule may say that a system perhaps cannot."""


def _offloads(plan: Plan) -> bool:
    return any(rule.decision is Decision.OFFLOAD for rule in plan.rules)


def _saved_modules(plan: Plan) -> tuple[str, ...]:
    """Return the last names of the modules whose results the plan saves or offloads by name, in its order."""
    named = [r.module for r in plan.rules if r.module and r.decision is not Decision.RECOMPUTE]
    return tuple(dict.fromkeys(name for m in named if (name := m.rsplit(".", 1)[-1]) and name.isidentifier()))


# ---------------------------------------------------------------- writing


def _toml(settings: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for name, table in settings.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _yaml(settings: Mapping[str, Any], indent: str = "") -> str:
    lines: list[str] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", _yaml(cast("Mapping[str, Any]", value), indent + "  ").rstrip("\n")]
        else:
            lines.append(f"{indent}{name}: {value if _is_word(value) else json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier() and value.lower() not in _YAML_CONSTANTS


_YAML_CONSTANTS = frozenset(("true", "false", "null", "on", "off", "yes", "no", "y", "n"))


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _flags(settings: Mapping[str, Any]) -> str:
    words: list[str] = []
    for name, value in settings.items():
        values = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else [value]
        words.append(" ".join([f"--{name}", *map(str, values)]))
    return " ".join(words) + "\n"


_WRITERS = {".toml": _toml, ".yaml": _yaml, ".json": _json, ".txt": _flags}
