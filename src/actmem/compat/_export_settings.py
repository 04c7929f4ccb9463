"""What other systems can say about activations: every setting to try, and what it does there, as an actmem mode."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from actmem.compat._nemo_models import named_parts
from actmem.compat.configs import SYSTEMS
from actmem.decision_rules import Rule
from actmem.modes import Full, Mode, Rules, SaveEverything
from actmem.profiles import Profile
from actmem.settings import Offload

__all__ = ["VOCABULARIES", "Setting", "Vocabulary"]

_MOST_EVERY = 8
"""The largest n of "every n-th layer" that is tried."""


@dataclass(frozen=True, eq=False)
class Setting:
    """One way to set a system up."""

    said: Mapping[str, Any]
    does: Mode
    notes: tuple[str, ...] = ()


Settings = Callable[..., Iterator[Setting]]


@dataclass(frozen=True)
class Vocabulary:
    """What one system can say."""

    system: str
    suffix: str
    settings: Settings
    """From a profile, what the plan does, and whether a mode is within its peak: the settings to try."""
    cannot: Mapping[str, str]
    """What a rule may say -> the sentence for a system that cannot say it."""
    notes: tuple[str, ...] = field(default=())


def _read(system: str, said: Mapping[str, Any]) -> Setting:
    """Return a setting that does what the reader of configuration files finds in it."""
    found = SYSTEMS[system](said)
    return Setting(said, found.mode if isinstance(found.mode, Mode) else SaveEverything())


def _torchtitan(profile: Profile, **_: Any) -> Iterator[Setting]:
    tables: list[dict[str, Any]] = [{"mode": "none"}, {"mode": "full"}]
    tables.append({"mode": "selective", "selective_ac_option": "op"})
    tables += [{"mode": "selective", "selective_ac_option": str(n)} for n in _every(profile)]
    for table in tables:
        yield _read("torchtitan", {"activation_checkpoint": table})


def _transformers(profile: Profile, *, offloads: bool, **_: Any) -> Iterator[Setting]:
    yield Setting({"gradient_checkpointing": False}, SaveEverything())
    for every in (1, *_every(profile)):
        for offload in (False, True)[: 1 + offloads]:
            kwargs: dict[str, Any] = {"use_reentrant": False}
            kwargs |= {"every_n_layers": every} if every > 1 else {}
            kwargs |= {"offload": True} if offload else {}
            said = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
            yield Setting(said, Full(every=every, offload_inputs=Offload(to="host") if offload else None))


def _deepspeed(profile: Profile, *, offloads: bool, **_: Any) -> Iterator[Setting]:
    yield Setting({}, SaveEverything())
    for away in (False, True)[: 1 + offloads]:
        table = {"partition_activations": False, "cpu_checkpointing": away, "number_checkpoints": len(profile.layers)}
        mode = Full(offload_inputs=Offload(to="host") if away else None)
        yield Setting({"activation_checkpointing": table}, mode)


def _axolotl(profile: Profile, *, offloads: bool, saved: tuple[str, ...], **_: Any) -> Iterator[Setting]:  # noqa: ARG001
    yield _read("axolotl", {"gradient_checkpointing": False})
    yield _read("axolotl", {"gradient_checkpointing": True})
    if offloads:
        yield _read("axolotl", {"gradient_checkpointing": True, "activation_offloading": "hidden_states"})
    for save in (["attention"], ["attention", "aten::mm"]):
        for modules in ((), saved) if saved else ((),):
            for away in (False, True)[: 1 + offloads]:
                table: dict[str, Any] = {"save": save}
                table |= {"save_modules": list(modules)} if modules else {}
                table |= {"offload": True} if away else {}
                yield _read("axolotl", {"gradient_checkpointing": True, "selective_checkpointing": table})


def _nemo(profile: Profile, **_: Any) -> Iterator[Setting]:
    yield _read("NeMo Automodel", {"distributed": {"activation_checkpointing": False}})
    yield _read("NeMo Automodel", {"distributed": {"activation_checkpointing": "selective"}})
    parts = dict.fromkeys(part for layer in profile.layers for part in named_parts(layer.modules))
    if parts:
        yield Setting(
            {"distributed": {"activation_checkpointing": True}},
            Rules([*(Rule("recompute", module=f"*.{part}") for part in parts), Rule("save")]),
        )


_MEGATRON_MODULES: Mapping[str, Rule] = {
    "layernorm": Rule("recompute", target="norm"),
    "core_attn": Rule("recompute", op="attention"),
    "mlp": Rule("recompute", target="mlp"),
    "moe_act": Rule("recompute", target="moe_act"),
    "mla_up_proj": Rule("recompute", target="mla_up_proj"),
}
"""What `--recompute-modules` takes, as far as it has a counterpart here."""


def _megatron(profile: Profile, *, fits: Callable[[Mode], bool], **_: Any) -> Iterator[Setting]:
    yield Setting({}, SaveEverything())
    num_layers = len(profile.layers)
    whole = {"recompute-granularity": "full"}
    yield Setting({**whole, "recompute-method": "uniform", "recompute-num-layers": 1}, Full())
    num = bisect_left(range(1, num_layers), True, key=lambda n: fits(Full(layers=f"0:{n}"))) + 1
    if num < num_layers:  # the more layers, the less memory: the smallest number that fits is the fastest
        said = {**whole, "recompute-method": "block", "recompute-num-layers": num}
        yield Setting(said, Full(layers=f"0:{num}"))
    targets = {target for layer in profile.layers for target in layer.roles}
    known = [name for name, rule in _MEGATRON_MODULES.items() if rule.target is None or rule.target in targets]
    for num in range(1, len(known) + 1):
        for names in combinations(known, num):
            said = {"recompute-granularity": "selective", "recompute-modules": list(names)}
            yield Setting(said, Rules([*(_MEGATRON_MODULES[name] for name in names), Rule("save")]))


def _every(profile: Profile) -> range:
    return range(2, min(len(profile.layers), _MOST_EVERY) + 1)


_TWICE = "It recomputes by running the layer's code twice; the prediction is for replaying the same values."
_ONE_FOR_ALL = "It cannot treat layers differently, except every n-th:"
_NO_OFFLOAD = "It cannot offload single activations:"
_NO_OPERATORS = "It cannot choose operators:"
_NO_MODULES = "It cannot choose parts of a layer:"

VOCABULARIES: dict[str, Vocabulary] = {
    "torchtitan": Vocabulary(
        "torchtitan",
        ".toml",
        _torchtitan,
        {
            "layers": _ONE_FOR_ALL,
            "operators": "Its list of operators is fixed in each model's code, and the file only switches it on:",
            "modules": _NO_MODULES,
            "offload": _NO_OFFLOAD,
        },
        (_TWICE,),
    ),
    "megatron": Vocabulary(
        "Megatron-LM",
        ".txt",
        _megatron,
        {
            "layers": "It can recompute the first n layers of a stage whole, or the same modules in all of them:",
            "operators": _NO_OPERATORS,
            "modules": "It knows modules by its own names only:",
            "offload": _NO_OFFLOAD,
        },
        (
            "--recompute-num-layers counts the layers of a pipeline stage; here it is the number of layers profiled.",
            _TWICE,
        ),
    ),
    "transformers": Vocabulary(
        "transformers",
        ".json",
        _transformers,
        {"layers": _ONE_FOR_ALL, "operators": _NO_OPERATORS, "modules": _NO_MODULES, "offload": _NO_OFFLOAD},
        (
            "every_n_layers and offload need transformers 5.",
            "It switches the cache of keys and values off: profile with model.config.use_cache = False.",
            _TWICE,
        ),
    ),
    "deepspeed": Vocabulary(
        "DeepSpeed",
        ".json",
        _deepspeed,
        {
            "layers": "Its configuration does not choose layers:",
            "operators": _NO_OPERATORS,
            "modules": _NO_MODULES,
            "offload": _NO_OFFLOAD,
        },
        (
            "The section is for deepspeed.checkpointing.checkpoint, and recomputes nothing by itself.",
            "The model's code must call that for each layer. Models of transformers do not: export to transformers.",
            _TWICE,
        ),
    ),
    "nemo": Vocabulary(
        "NeMo Automodel",
        ".yaml",
        _nemo,
        {
            "layers": "It cannot treat layers differently:",
            "operators": "Its list of operators is fixed:",
            "modules": "It recomputes attention, feed-forward and norms, each as a whole:",
            "offload": _NO_OFFLOAD,
        },
        (_TWICE,),
    ),
    "axolotl": Vocabulary(
        "axolotl",
        ".yaml",
        _axolotl,
        {"layers": "It cannot treat layers differently, except by their type of attention:"},
        (_TWICE,),
    ),
}
"""The systems by the name that `to=` takes."""
