"""Read what the configuration files of other systems say about activations, and translate it to actmem."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from actmem.compat._axolotl_checkpoints import WINDOWED, selective_mode
from actmem.compat._compiler_budget import CompilerBudget
from actmem.compat._prime_rl_operators import operators_to_save
from actmem.compat._translation import ROUTER_GATE, selective
from actmem.decision_rules import Rule
from actmem.diagnosis import read_settings
from actmem.errors import ModeError
from actmem.modes import Full, Mode, OffloadActivations, Rules, Selective, Targets
from actmem.ops import did_you_mean
from actmem.settings import Offload

__all__ = [
    "SYSTEMS",
    "FromConfig",
    "checked",
    "flag",
    "known_keys",
    "number",
    "one_of",
    "read_config",
    "section",
    "texts",
]

_Found = Mapping[str, Any]
_FLAG = re.compile(r"--activation[_-]checkpoint\.([\w-]+)(?:=|\s+)(\"[^\"]*\"|'[^']*'|[^\s\\]+)")
_OF_CHECKPOINT = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")


@dataclass(frozen=True, kw_only=True)
class FromConfig:
    """A configuration file, translated to actmem. Print it."""

    system: str
    """The system that the file belongs to: one of `SYSTEMS`."""
    said: Mapping[str, Any]
    """The settings that were read, by their names in the file."""
    mode: Mode | CompilerBudget | None
    """The mode for `actmem.apply`; a `CompilerBudget` is applied by itself. None: there is nothing to apply."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other arguments for `actmem.apply`."""
    notes: tuple[str, ...] = ()
    """What differs from the other system, and what actmem does not handle."""

    @property
    def line(self) -> str | None:
        """The equivalent call; None if there is nothing to apply."""
        if isinstance(self.mode, CompilerBudget):
            return f"actmem.compat.torchtitan.{self.mode!r}.apply(model)"
        more = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return None if self.mode is None else f"actmem.apply(model, actmem.{_written(self.mode)}{more})"

    def __str__(self) -> str:
        said = [f"  {name} = {value!r}" for name, value in self.said.items()] or ["  nothing about activations"]
        notes = [f"  {note}" for note in self.notes]
        becomes = self.line or "nothing to apply: plain training"
        return "\n".join([f"{self.system}:", *said, "here:", f"  {becomes}", *(["notes:", *notes] if notes else [])])


def read_config(path: str | Path | None, system: str | None = None, arguments: Sequence[str] = ()) -> FromConfig:
    """Read a configuration file; the system that it belongs to is recognised by its contents.

    Args:
        path: a YAML, JSON or TOML file, or a script with torchtitan's flags; None if there are only flags.
        system: the system that the file must belong to.
        arguments: flags of torchtitan, which override the file.

    Raises:
        ModeError: the file cannot be read, is not recognised, or contains something unknown.
    """
    given: _Found = {} if path is None else _parsed(Path(path))
    if arguments:
        flags = _flags(" ".join(arguments))
        given = {**given, "activation_checkpoint": {**section(given, "activation_checkpoint"), **flags}}
    kind = _recognised(given)
    name = f"{str(path)!r}" if path is not None else "the configuration"
    if kind is None:
        raise ModeError(
            f"{name} is not recognised. Expected a configuration of {', '.join(SYSTEMS)}: axolotl's names a "
            "base_model, NeMo Automodel's has a section distributed, prime-rl's a table [model.ac] or [trainer.model], "
            "torchtitan's a table [activation_checkpoint]."
        )
    if system is not None and kind != system:
        raise ModeError(f"{name} is a configuration of {kind}. Write actmem.compat.{_MODULES[kind]}.from_config(...).")
    return SYSTEMS[kind](given)


def _parsed(path: Path) -> _Found:
    if path.suffix in (".json", ".yaml", ".yml", ".toml"):
        return read_settings("config", path)
    try:
        return {"activation_checkpoint": found} if (found := _flags(path.read_text(encoding="utf-8"))) else {}
    except (OSError, ValueError) as error:
        raise ModeError(
            f"config = {str(path)!r} cannot be read: {error}. Name a YAML, TOML or JSON file, or a script with flags."
        ) from error


def _flags(text: str) -> dict[str, Any]:
    """Find torchtitan's flags in a command line.

    >>> _flags("run_train.sh --activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option op")
    {'mode': 'selective', 'selective_ac_option': 'op'}
    """
    return {name.replace("-", "_"): value.strip("\"'") for name, value in _FLAG.findall(text)}


def _recognised(given: _Found) -> str | None:
    tables = {name for name, value in given.items() if isinstance(value, Mapping)}
    model = section(given, "model")
    inner = section(section(given, "trainer"), "model")
    if "activation_checkpoint" in tables or {"parallelism", "training"} <= tables:
        return "torchtitan"
    if inner or {"ac", "ac_offloading"} & model.keys() or "orchestrator" in tables:
        return "prime-rl"
    if "distributed" in tables:
        return "NeMo Automodel"
    if "base_model" in given or {"activation_offloading", "selective_checkpointing"} & given.keys():
        return "axolotl"
    return None


# ---------------------------------------------------------------- axolotl


def _axolotl(given: _Found) -> FromConfig:
    names = ("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_offloading")
    said = {name: given[name] for name in (*names, "selective_checkpointing", "adapter") if given.get(name) is not None}
    options = section(given, "gradient_checkpointing_kwargs")
    known_keys("gradient_checkpointing_kwargs", options, _OF_CHECKPOINT)
    offload = one_of("activation_offloading", given, (None, False, True, "legacy", "disk", "hidden_states"))
    switch = one_of("gradient_checkpointing", given, (None, False, True, "offload", "offload_disk"))
    if switch in ("offload", "offload_disk"):
        switch, offload = True, True if switch == "offload" else "disk"
    if section(given, "fsdp_config").get("activation_checkpointing") is True:
        switch, said = True, {**said, "fsdp_config.activation_checkpointing": True}
    chosen = given.get("selective_checkpointing")
    if not switch and (offload or chosen):
        raise ModeError(
            f"{'activation_offloading' if offload else 'selective_checkpointing'} needs gradient_checkpointing: true, "
            "there and here."
        )
    notes = [f"{name}: has no meaning here, because no code runs twice." for name in options]
    place = _axolotls_place(offload) if offload else None
    if given.get("layer_offloading"):
        notes.append("layer_offloading moves parameters, which actmem does not handle.")
    if chosen:
        mode = _axolotls_selection(chosen, offload, place)
    elif place is not None and given.get("adapter") and offload != "hidden_states":
        mode = OffloadActivations(**{name: getattr(place, name) for name in vars(place)})
        notes.append("With an adapter, axolotl recomputes nothing and offloads all activations.")
    else:
        mode = Full(offload_inputs=place) if switch else None
    if offload == "disk":
        notes.append("In axolotl disk is the same as true; here it is a file: directory= says where.")
    return FromConfig(system="axolotl", said=said, mode=mode, notes=tuple(notes))


def _axolotls_place(offload: object) -> Offload:
    if offload == "disk":
        return Offload(to="disk", min_bytes=1024, max_in_flight=5)
    return Offload(
        to="host", min_bytes=1024, max_in_flight=2 if offload == "hidden_states" else 5, use_streams=offload != "legacy"
    )


def _axolotls_selection(chosen: object, offload: object, place: Offload | None) -> Mode:
    table = section({"selective_checkpointing": chosen}, "selective_checkpointing")
    names = ("save", "save_sliding_window", "recompute_layer_types", "offload", "save_modules", "save_matmul_min_k")
    known_keys("selective_checkpointing", table, names)
    if offload not in (None, False, "hidden_states"):
        raise ModeError(
            f"activation_offloading = {offload!r} cannot be combined with selective_checkpointing, there and here. "
            "Permitted: 'hidden_states', or none."
        )
    if table.get("save_matmul_min_k") is not None:
        raise ModeError("save_matmul_min_k has no counterpart here. Name modules instead: save_modules: [down_proj].")
    windowed = table.get("recompute_layer_types")
    kinds = WINDOWED if windowed is None else texts("recompute_layer_types", windowed)
    saved_place = Offload(to="host", min_bytes=1024) if flag("offload", table, default=False) else None
    mode = selective_mode(
        texts("save", table.get("save") or ["attention"]),
        [] if flag("save_sliding_window", table, default=False) else kinds,
        saved_place,
        [name if "*" in name else f"*.{name}" for name in texts("save_modules", table.get("save_modules") or [])],
    )
    if place is None:
        return mode
    return replace(mode, listed=[Rule("offload", op="input"), *mode.listed], offload=saved_place or place)


# ---------------------------------------------------------------- the others


def _nemo(given: _Found) -> FromConfig:
    table = section(given, "distributed")
    said = {
        f"distributed.{name}": table[name]
        for name in ("activation_checkpointing", "activation_checkpointing_scope")
        if table.get(name) is not None
    }
    value = table.get("activation_checkpointing")
    text = value.lower().replace("-", "_") if isinstance(value, str) else value
    notes: list[str] = []
    mode: Mode | None
    if text in (None, False, "false", "off", "none", "disabled", "no"):
        mode = None
    elif text in (True, "true", "on", "full", "enabled", "yes"):
        mode = Full()
        notes.append(
            "In most models NeMo checkpoints attention, feed-forward and norms one by one; Full recomputes the layer, "
            "which holds less. compat.nemo.apply_submodule_checkpointing does what NeMo does."
        )
    elif text == "selective":
        from actmem.compat import nemo

        saved = nemo._SELECTIVE_AC_MUST_SAVE_OPS | nemo._SELECTIVE_AC_MATMUL_OPS  # pyright: ignore[reportPrivateUsage]
        mode = selective(nn.Module(), saved, alternate=[f"aten.{name}" for name in nemo._ALTERNATING])  # pyright: ignore[reportPrivateUsage]
    else:
        raise ModeError(
            f"distributed.activation_checkpointing = {value!r} is not known. Permitted: true, false, 'full', "
            "'selective'."
        )
    options: dict[str, Any] = {} if mode is None else {"collectives": "recompute"}
    scope = table.get("activation_checkpointing_scope")
    if mode is not None and scope not in (None, "all"):
        asked = texts("activation_checkpointing_scope", [scope] if isinstance(scope, str) else scope)
        permitted = {
            "language": ["language"],
            "vision": ["vision"],
            "audio": ["audio"],
            "multimodal": ["vision", "audio"],
        }
        if bad := [name for name in asked if name not in permitted]:
            raise ModeError(
                f"activation_checkpointing_scope = {scope!r}: {', '.join(bad)} is not known. Permitted: all, "
                f"{', '.join(permitted)}."
            )
        options["scope"] = list(dict.fromkeys(tower for name in asked for tower in permitted[name]))
    return FromConfig(system="NeMo Automodel", said=said, mode=mode, options=options, notes=tuple(notes))


def _prime_rl(given: _Found) -> FromConfig:
    outer = section(given, "trainer")
    prefix = "trainer.model" if "model" in outer else "model"
    model = section(outer, "model") if "model" in outer else section(given, "model")
    there = {name: section(model, name) for name in ("ac", "ac_offloading") if model.get(name) not in (None, False)}
    said = {f"{prefix}.{name}": dict(table) for name, table in there.items()}
    if not there:
        note = (
            "Without [model.ac] nothing is applied here. Some versions of prime-rl switch selective on by themselves."
        )
        return FromConfig(system="prime-rl", said=said, mode=None, notes=(note,))
    table, away = there.get("ac", {}), there.get("ac_offloading")
    known_keys("ac", table, ("mode", "freq", "targets"))
    notes: list[str] = []
    place = None
    if away is not None:
        known_keys("ac_offloading", away, ("pin_memory", "max_inflight_activations"))
        place = Offload(
            to="host",
            min_bytes=1024,
            pin=flag("pin_memory", away, default=True),
            max_in_flight=number("max_inflight_activations", away, default=5),
        )
        notes.append("prime-rl does not overlap copies with computation: use_streams=False does the same here.")
    every = number("freq", table, default=1)
    mode: Mode
    if one_of("mode", table, (None, "full", "selective")) != "selective":
        mode = Full(every=every, offload_inputs=place)
        if every > 1 and place is not None:
            notes.append("Layers that are not recomputed hold their activations here; prime-rl offloads those too.")
    else:
        if table.get("targets") is None:
            notes.append(
                "targets is missing: norm, the default of older prime-rl. Its newest version saves operators instead."
            )
        mode = _prime_rls_targets(texts("targets", table.get("targets") or ["norm"]), every, place)
    return FromConfig(system="prime-rl", said=said, mode=mode, options={"collectives": "recompute"}, notes=tuple(notes))


def _prime_rls_targets(targets: list[str], every: int, place: Offload | None) -> Mode:
    if (saved := operators_to_save(targets)) is not None:
        return Selective(save=saved, every=every, offload=place)
    from actmem.compat.prime_rl import SELECTIVE_AC_TARGETS

    for name in targets:
        checked("targets", name, sorted(SELECTIVE_AC_TARGETS))
    if place is None:
        return Targets(targets, every=every)
    layers = None if every == 1 else f"0::{every}"
    return Rules([*(Rule("recompute", layers=layers, target=t) for t in targets), Rule("offload")], offload=place)


_OLDER_SAVED = ("aten.mm", "aten.max", "_c10d_functional.reduce_scatter_tensor", "attention", "compiled")
_OF_TITAN = (
    *("mode", "selective_ac_option", "per_op_sac_force_recompute_mm_shapes_by_fqns", "memory_budget"),
    *("early_stop", "visualize_memory_budget_pareto", "preserve_rng_state", "determinism_check", "debug"),
)


def _torchtitan(given: _Found) -> FromConfig:
    table = section(given, "activation_checkpoint")
    known_keys("activation_checkpoint", table, _OF_TITAN)
    said = {f"activation_checkpoint.{name}": value for name, value in table.items()}
    chosen = one_of("mode", table, (None, "none", "full", "selective", "memory_budget")) or "selective"
    option = str(table.get("selective_ac_option", "2"))
    meaningless = [name for name in _OF_TITAN[4:] if name in table]
    notes = [f"{name}: changes nothing here; see docs/compat_torchtitan.md." for name in meaningless]
    if "mode" not in table:
        notes.append("mode is missing: torchtitan's default is selective, with every second layer.")
    mode: Mode | CompilerBudget | None = None
    if chosen == "full":
        mode = Full()
    elif chosen == "memory_budget":
        if not section(given, "compile").get("enable"):
            raise ModeError("mode = 'memory_budget' needs [compile] enable = true, there and here.")
        mode = CompilerBudget(float(table.get("memory_budget", 0.5)))
    elif chosen == "selective" and option == "op":
        forced = table.get("per_op_sac_force_recompute_mm_shapes_by_fqns", [ROUTER_GATE])
        names = ["router" if name == ROUTER_GATE else f"*{name}*" for name in texts("forced", forced)]
        mode = cast(Selective, selective(nn.Module(), _OLDER_SAVED, alternate=("aten.mm",)))
        mode = replace(mode, force_recompute=names)
        notes.append("These are the operators that its Llama saves; other torchtitan models have their own lists.")
    elif chosen == "selective" and option.isdigit():
        every = max(int(option), 1)
        mode = Full(every=every, first=every - 1)
    elif chosen == "selective":
        raise ModeError(f"selective_ac_option = {option!r} is not known. Permitted: 'op', or a number of layers.")
    options = {} if mode is None or isinstance(mode, CompilerBudget) else {"collectives": "recompute"}
    return FromConfig(system="torchtitan", said=said, mode=mode, options=options, notes=tuple(notes))


SYSTEMS: dict[str, Callable[[_Found], FromConfig]] = {
    "axolotl": _axolotl,
    "NeMo Automodel": _nemo,
    "prime-rl": _prime_rl,
    "torchtitan": _torchtitan,
}
"""The systems whose files can be read."""

_MODULES = {"axolotl": "axolotl", "NeMo Automodel": "nemo", "prime-rl": "prime_rl", "torchtitan": "torchtitan"}


def _written(mode: Mode) -> str:
    """Return a mode as code to copy, with actmem's names qualified by the module."""
    return re.sub(r"(?<![\w.'])(Offload|Rule|every_second)\(", r"actmem.\1(", repr(mode))


def section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table inside a file; empty if it is missing, or only switched on.

    Raises:
        ModeError: it is not a table.
    """
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return {}
    if not isinstance(value, Mapping):
        raise ModeError(f"{name} = {value!r} is not a table of settings by name.")
    return cast("Mapping[str, Any]", value)


def known_keys(name: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a table with an unknown key."""
    for key in table:
        checked(f"a key of {name}", key, known)


def checked(what: str, value: object, known: Sequence[object]) -> None:
    """Refuse a value that is not among the known ones. True is not 1 here."""
    if not any(value is k or (isinstance(k, str) and value == k) for k in known):
        names = [k for k in known if isinstance(k, str)]
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        permitted = ", ".join(str(k).lower() if isinstance(k, bool) else str(k) for k in known if k is not None)
        raise ModeError(f"{what}: {value!r} is not known. Permitted: {permitted}.{hint}")


def one_of(name: str, given: Mapping[str, Any], known: Sequence[object]) -> Any:
    """Return a value that is one of a few choices."""
    checked(name, given.get(name), known)
    return given.get(name)


def flag(name: str, given: Mapping[str, Any], *, default: bool) -> bool:
    """Return a value that is true or false."""
    value = given.get(name, default)
    if type(value) is not bool:
        raise ModeError(f"{name} = {value!r} is not permitted. Write true or false.")
    return value


def number(name: str, given: Mapping[str, Any], *, default: int) -> int:
    """Return an int of 1 or more."""
    value = given.get(name, default)
    if type(value) is not int or value < 1:
        raise ModeError(f"{name} = {value!r} is not permitted. Expected a whole number of 1 or more.")
    return value


def texts(name: str, value: object) -> list[str]:
    """Return a list of strings."""
    items = cast("list[object]", value) if isinstance(value, list | tuple) else None
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise ModeError(f"{name} = {value!r} is not a list of names.")
    return cast("list[str]", list(items))
