"""The modes a user can ask for: one small frozen class each. Does not import torch.

Every mode but `FromPlan` becomes rules through `.rules()`; see NOTE [ rules ] in plan.py. Modes hold plain data only,
compare by value, and print as the line of code that creates them.
"""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from typing import Any, cast

from actmem.allocator import AllocatorSettings
from actmem.decision_rules import TARGETS, Rule, Slices, check_rules, check_target
from actmem.decisions import Decision
from actmem.errors import ModeError
from actmem.ops import INPUT, is_glob, split_selector
from actmem.settings import STORES, Compiled, Offload
from actmem.units import parse_budget

__all__ = [
    "TARGETS",
    "Budget",
    "EverySecond",
    "FromPlan",
    "Full",
    "Mode",
    "OffloadActivations",
    "Rules",
    "SaveEverything",
    "Selective",
    "Targets",
    "every_second",
]


OPTIMIZERS = ("adamw", "adamw_fused", "adam", "sgd")
"""The optimizers that a budget can count. SGD is without momentum. On a card torch's optimizers work on all parameters
at once, which takes a tensor more for each of them while they step, unless they are fused."""


ALLOWED = ("split",)
"""What a planner may be allowed to use beyond save, recompute and offload."""


def check_allowed(allow: Sequence[str]) -> None:
    """Refuse what cannot be allowed.

    >>> check_allowed(["split"])
    """
    names: Sequence[object] = [allow] if isinstance(allow, str) else allow
    unknown = [name for name in names if name not in ALLOWED]
    if unknown or isinstance(allow, str):
        raise ModeError(f"allow = {allow!r} is not permitted. Expected a list of: {', '.join(ALLOWED)}.")


@dataclass(frozen=True)
class SaveEverything:
    """Save every activation, as plain training does.

    >>> SaveEverything().rules()
    (Rule('save'),)
    """

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        return (Rule("save"),)


@dataclass(frozen=True, repr=False, kw_only=True)
class Full:
    """Recompute everything in the chosen layers; save everything in the others.

    >>> Full(every=2).rules()
    (Rule('recompute', layers='0::2'), Rule('save'))
    >>> Full(layers="-4:").rules()
    (Rule('recompute', layers='-4:'), Rule('save'))

    Raises:
        ModeError: if `every` is below 1, `first` is below 0, or `layers` is not a slice or is combined with them.
    """

    every: int = 1
    """Stride of the layers to recompute: 1 recomputes every layer, 2 every second."""
    first: int = 0
    """Index of the first layer to recompute."""
    layers: str | None = None
    """The layers to recompute, as Python slices: `:8` the first eight, `-4:` the last four, `0,4:6` these three."""
    offload_inputs: Offload | None = None
    """Offload block inputs too, so that next to nothing of a block stays in memory. None holds them."""

    def __post_init__(self) -> None:
        _check_offload("offload_inputs", self.offload_inputs)
        _check_count("every", self.every, least=1, meaning="1 recomputes every layer, 2 every second")
        _check_count("first", self.first, least=0, meaning="0 starts at the first layer")
        _check_layers(self.layers, self.every, self.first)

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        rules = [Rule("recompute")] if self.offload_inputs is None else [Rule("offload", op=INPUT), Rule("recompute")]
        return _only_in(_chosen_layers(self.layers, self.every, self.first), *rules)

    @property
    def offload(self) -> Offload | None:
        """Where offloaded values go."""
        return self.offload_inputs

    def __repr__(self) -> str:
        return _written(self)


@dataclass(frozen=True, repr=False)
class EverySecond:
    """The 1st, 3rd, 5th, ... operator that a selector matches in each block call. Created by `every_second`."""

    op: str
    """Operator group, operator or glob, prefixed with `MODULE_GLOB::` to restrict it to some modules."""

    def __repr__(self) -> str:
        return f"every_second({self.op!r})"


def every_second(group: str) -> EverySecond:
    """Select the 1st, 3rd, 5th, ... operator of a group, in forward order, counted separately in each block call.

    >>> Selective(save=[every_second("matmul")], force_recompute=[]).rules()
    (Rule('save', op='matmul', nth='::2'), Rule('recompute'))
    """
    if not isinstance(cast(object, group), str):
        raise ModeError(f"every_second({group!r}) names no operator. Expected a string: write every_second('matmul').")
    _selector_rule(group, found=f"every_second({group!r})")
    return EverySecond(group)


@dataclass(frozen=True, repr=False, kw_only=True)
class Selective:
    r"""Save the results of the named operators and recompute everything else.

    >>> Selective(save=["attention", every_second("matmul"), "*.mlp::aten.mm"])
    Selective(save=['attention', every_second('matmul'), '*.mlp::aten.mm'])
    >>> print(*Selective(save=["attention", "*.mlp::aten.mm"]).rules(), sep="\n")
    Rule('recompute', target='router', op='matmul')
    Rule('save', op='attention')
    Rule('save', module='*.mlp', op='aten.mm')
    Rule('recompute')

    Raises:
        ModeError: if `save` is empty, an entry is not a selector, or an option has a value that is not permitted.
    """

    save: Sequence[str | EverySecond]
    """What to save: operator groups, operators, globs, `MODULE_GLOB::operator`, or `every_second(...)` of any."""
    force_recompute: Sequence[str] = ("router",)
    """Modules whose matrix products are recomputed and not counted, whatever `save` says: target names, module names
    (`gate` is any module whose path ends in it) or globs. Default: the gates of routers, in models that have them."""
    save_sliding_window: bool = True
    """False recomputes the attention of sliding-window layers, even if `save` names attention."""
    recompute_layer_types: Sequence[str] = ()
    """Layer types to recompute whole, such as `sliding_attention`, `chunked_attention`, `linear_*`."""
    min_bytes: int = 0
    """Save only values of at least this many bytes."""
    every: int = 1
    """Stride of the layers that the mode applies to; the others save everything."""
    layers: str | None = None
    """The layers that the mode applies to, as Python slices; the others save everything."""
    offload: Offload | None = None
    """Offload what is saved instead of holding it. None holds it."""

    def __post_init__(self) -> None:
        _check_offload("offload", self.offload)
        example = "save=['attention', every_second('matmul')]"
        entries = _entries("save", self.save, example=example)
        for index, entry in enumerate(entries):
            if not isinstance(entry, (str, EverySecond)) or not entry:
                raise ModeError(
                    f"save[{index}] = {entry!r} is not a selector. Expected an operator group, an operator, a glob or "
                    f"every_second(...): write {example}."
                )
            _selector_rule(entry, found=f"save[{index}] = {entry!r}", min_bytes=self.min_bytes)
        object.__setattr__(self, "save", entries)
        for name, example in (
            ("force_recompute", "force_recompute=['router']"),
            ("recompute_layer_types", "recompute_layer_types=['sliding_attention']"),
        ):
            object.__setattr__(self, name, _texts(name, getattr(self, name), example=example))
        if type(self.save_sliding_window) is not bool:
            raise ModeError(
                f"save_sliding_window = {self.save_sliding_window!r} is not permitted. Write True or False."
            )
        _check_count("every", self.every, least=1, meaning="1 takes every layer, 2 every second", of="Selective")
        _check_layers(self.layers, self.every)

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        rules = [Rule("recompute", layer_type=kind) for kind in self.recompute_layer_types]
        if not self.save_sliding_window:
            rules.append(Rule("recompute", layer_type="sliding*", op="attention"))
        for name in self.force_recompute:
            if name in TARGETS:
                rules.append(Rule("recompute", target=name, op="matmul"))
            else:
                rules.append(Rule("recompute", module=name if is_glob(name) else f"*.{name}", op="matmul"))
        saved = [_selector_rule(entry, found=repr(entry), min_bytes=self.min_bytes) for entry in self.save]
        rules += saved if self.offload is None else [replace(rule, decision=Decision.OFFLOAD) for rule in saved]
        return _only_in(_chosen_layers(self.layers, self.every), *rules, Rule("recompute"))

    def __repr__(self) -> str:
        return _written(self)


@dataclass(frozen=True, repr=False)
class Targets:
    """Recompute the named parts of every block and save everything else.

    >>> Targets(["norm", "mlp"]).rules()
    (Rule('recompute', target='norm'), Rule('recompute', target='mlp'), Rule('save'))
    >>> Targets(["norm"], every=2).rules()
    (Rule('recompute', layers='0::2', target='norm'), Rule('save'))

    Raises:
        ModeError: if no part is named, or one is not known.
    """

    names: Sequence[str]
    """The parts to recompute: norm, attn_proj, attention, mlp, mla_up_proj, routed_experts, shared_experts, router,
    linear_attn or moe_act; or `own:NAME`, a part that the model declares in its attribute `actmem_targets`."""
    every: int = field(default=1, kw_only=True)
    """Stride of the layers that the mode applies to; the others save everything."""
    layers: str | None = field(default=None, kw_only=True)
    """The layers that the mode applies to, as Python slices; the others save everything."""

    def __post_init__(self) -> None:
        entries = _entries("targets", self.names, example="Targets(['norm'])")
        for index, entry in enumerate(entries):
            if not isinstance(entry, str):
                raise ModeError(
                    f"targets[{index}] = {entry!r} is not a string. Permitted: {', '.join(TARGETS)}: Targets(['norm'])."
                )
            check_target(entry)
        object.__setattr__(self, "names", tuple(dict.fromkeys(cast(Sequence[str], entries))))
        _check_count("every", self.every, least=1, meaning="1 takes every layer, 2 every second", of="Targets")
        _check_layers(self.layers, self.every)

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        rules = [Rule("recompute", target=name) for name in self.names]
        chosen = _chosen_layers(self.layers, self.every)
        return *(replace(rule, layers=chosen) for rule in rules), Rule("save")

    def __repr__(self) -> str:
        return _written(self)


@dataclass(frozen=True)
class Budget:
    """Keep a step within a memory budget, and train as fast as that allows.

    `apply` needs an example batch, or a function that runs one step of your own training loop; `optimizer` and
    `microbatches` are then those of the loop and keep their defaults here.

    >>> Budget("20GiB")
    Budget(amount='20GiB', device=None, offload=None, optimizer='adamw', ..., allow=())

    Raises:
        ModeError: if the amount cannot be read, or another field has a value that is not permitted.
    """

    amount: str | int | float
    """The budget: text such as "20GiB", a number of bytes, or a fraction of the device's memory, such as 0.9. It covers
    parameters, gradients, optimizer state, activations and temporaries."""
    _: KW_ONLY
    device: str | None = None
    """The device to plan for, such as "h100-80gb". None: this machine."""
    offload: str | Offload | None = None
    """"host" or "disk", or an `Offload`, if values may be offloaded."""
    optimizer: Any = "adamw"
    """The optimizer to count: "adamw", "adamw_fused", "adam" or "sgd", an optimizer, or a function of the parameters
    that makes one; None counts none."""
    microbatches: int = 1
    """The number of batches that gradients are accumulated over."""
    compiled: bool | Compiled | None = None
    """Whether it is for compiled blocks, and how they are compiled. None: as the model is when the plan is made."""
    allocator: str | AllocatorSettings = ""
    """On a card: what PYTORCH_CUDA_ALLOC_CONF will be, such as "expandable_segments:True". "": torch's defaults."""
    allow: Sequence[str] = ()
    """What the plan may use that changes the order of sums: "split" computes logits and loss in chunks of tokens."""

    def __post_init__(self) -> None:
        check_allowed(self.allow)
        parse_budget(self.amount, device_bytes=2**40)
        if self.offload not in (None, *STORES) and not isinstance(self.offload, Offload):
            raise ModeError(f"offload = {self.offload!r} is not known. Permitted: 'host', 'disk', an Offload, or None.")
        check_optimizer(self.optimizer)
        _check_count("microbatches", self.microbatches, least=1, meaning="batches to a step", of="Budget")
        AllocatorSettings.of(self.allocator)

    def rules(self) -> tuple[Rule, ...]:
        """Raise: the rules for a budget depend on the model, and `fit` finds them."""
        raise ModeError(
            "a Budget has no rules of its own. Write actmem.fit(model, example, budget=...), which finds them."
        )


@dataclass(frozen=True, repr=False)
class Rules:
    """Decide by your own rules: the first match wins; the last rule has no selectors and is the default.

    >>> Rules([Rule("recompute", target="norm"), Rule("save")])
    Rules([Rule('recompute', target='norm'), Rule('save')])

    Raises:
        ModeError: if there are no rules, the last is not a default, or a rule can never match.
    """

    listed: Sequence[Rule]
    """The rules, in the order in which they are tried."""
    offload: Offload | None = field(default=None, kw_only=True)
    """Where offloaded values go, if a rule offloads."""

    def __post_init__(self) -> None:
        _check_offload("offload", self.offload)
        object.__setattr__(self, "listed", check_rules(self.listed))

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        return tuple(self.listed)

    def __repr__(self) -> str:
        return f"Rules({list(self.listed)!r}{'' if self.offload is None else f', offload={self.offload!r}'})"


@dataclass(frozen=True, repr=False)
class OffloadActivations(Offload):
    """Offload everything in the blocks that backward needs, and prefetch it in time. Recompute nothing.

    Activations outside the blocks stay, such as those of the output head, which backward needs first.

    >>> OffloadActivations(to="disk", directory="/scratch").rules()
    (Rule('offload'),)

    Raises:
        ModeError: if a field has a value that is not permitted.
    """

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        return (Rule("offload"),)

    @property
    def offload(self) -> Offload:
        """Where offloaded values go."""
        return Offload(**{f.name: getattr(self, f.name) for f in fields(Offload)})

    def __repr__(self) -> str:
        return repr(self.offload).replace("Offload(", "OffloadActivations(", 1)


@dataclass(frozen=True, repr=False)
class FromPlan:
    """Apply the plan in a file.

    >>> FromPlan("plan.json")
    FromPlan('plan.json')

    Raises:
        ModeError: if `path` is not a path.
    """

    path: str | os.PathLike[str]
    """The plan file, `.json` or `.toml`."""

    def __post_init__(self) -> None:
        path = cast(object, self.path)
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(cast(str, path)):
            raise ModeError(f"path = {path!r} is not a path. Expected a plan file: write FromPlan('plan.json').")
        object.__setattr__(self, "path", os.fspath(cast(str, path)))

    def __repr__(self) -> str:
        return f"FromPlan({self.path!r})"


Mode = SaveEverything | Full | Selective | Targets | Rules | OffloadActivations | Budget | FromPlan
"""What `apply` takes, besides a Plan."""


def check_optimizer(optimizer: object, *, names_only: str = "") -> None:
    """Accept one of `OPTIMIZERS`, an optimizer, a function that makes one, or None.

    Args:
        optimizer: what was given.
        names_only: why only a name is accepted, if that is so.

    Raises:
        ModeError: otherwise.
    """
    if isinstance(optimizer, str) or optimizer is None:
        if optimizer not in (None, *OPTIMIZERS):
            raise ModeError(
                f"optimizer = {optimizer!r} is not known. Permitted: {', '.join(OPTIMIZERS)}; an optimizer, or a "
                "function of the parameters that makes one, such as torch.optim.Adafactor; None not to count it, for "
                "example because its state is kept elsewhere."
            )
        return
    if names_only:
        raise ModeError(
            f"optimizer = {optimizer!r} is not permitted here: {names_only}. Name one of: {', '.join(OPTIMIZERS)}."
        )
    if not callable(optimizer) and not hasattr(optimizer, "param_groups"):
        raise ModeError(
            f"optimizer = {optimizer!r} is not an optimizer. Expected a name, one of {', '.join(OPTIMIZERS)}; an "
            "optimizer; or a function of the parameters that makes one, such as torch.optim.Adafactor."
        )


def _check_count(name: str, value: object, *, least: int, meaning: str, of: str = "Full") -> None:
    if type(value) is not int or value < least:
        raise ModeError(
            f"{name} = {value!r} is not permitted. Expected an int of {least} or more ({meaning}): "
            f"write {of}({'' if of == 'Full' else '..., '}{name}={least})."
        )


def _check_offload(name: str, value: object) -> None:
    if value is not None and type(value) is not Offload:
        raise ModeError(f"{name} = {value!r} is not an Offload. Write {name}=Offload(to='host') or Offload(to='disk').")


def _check_layers(layers: object, every: int, first: int = 0) -> None:
    if layers is None:
        return
    if not isinstance(layers, str):
        hint = f" Write layers={str(layers)!r}." if isinstance(layers, int) else ""
        raise ModeError(f"layers = {layers!r} is not a string. Expected a Python slice, such as '0:24' or '-4:'.{hint}")
    Slices.parse(layers)
    if (every, first) != (1, 0):
        raise ModeError(
            f"layers = {layers!r} cannot be combined with every = {every} or first = {first}: both choose layers. "
            f"Write one of them: layers='{first}::{every}' means the same as the other two."
        )


def _chosen_layers(layers: str | None, every: int, first: int = 0) -> str | None:
    return layers if (every, first) == (1, 0) else f"{first}::{every}"


def _only_in(layers: str | None, *rules: Rule) -> tuple[Rule, ...]:
    """Restrict rules to some layers, and save everything in the others."""
    return rules if layers is None else (*(replace(rule, layers=layers) for rule in rules), Rule("save"))


def _written(mode: "Full | Selective | Targets") -> str:
    """Return the line of code that creates a mode, without options that have their default."""
    arguments: list[str] = []
    for option in fields(mode):
        value = getattr(mode, option.name)
        if option.default is MISSING or value != option.default:
            text = repr(list(cast(Sequence[object], value)) if isinstance(value, tuple) else value)
            arguments.append(text if option.name == "names" else f"{option.name}={text}")
    return f"{type(mode).__name__}({', '.join(arguments)})"


def _texts(name: str, value: object, *, example: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ModeError(f"{name} = {value!r} is not a list. Expected a list of names: write {example}.")
    for index, entry in enumerate(cast(Sequence[object], value)):
        if not isinstance(entry, str) or not entry.strip() or "::" in entry:
            raise ModeError(f"{name}[{index}] = {entry!r} is not a name. Expected a list of names: write {example}.")
    return tuple(cast(Sequence[str], value))


def _entries(name: str, value: object, *, example: str) -> tuple[object, ...]:
    """Return a non-empty list as a tuple; a lone string is the usual mistake."""
    if isinstance(value, (str, EverySecond)):
        raise ModeError(f"{name} = {value!r} is one entry, not a list. Write [{value!r}].")
    if not isinstance(value, Sequence):
        raise ModeError(f"{name} = {value!r} is not a list. Expected a list: write {example}.")
    entries = tuple(cast(Sequence[object], value))
    if not entries:
        raise ModeError(
            f"{name} is empty. Expected at least one entry: write {example}. To recompute everything, write Full(); "
            "to save everything, write SaveEverything()."
        )
    return entries


def _selector_rule(entry: str | EverySecond, *, found: str, min_bytes: int = 0) -> Rule:
    """Turn an entry of `save` into its rule; `found` opens the error message."""
    text, nth = (entry.op, "::2") if isinstance(entry, EverySecond) else (entry, None)
    module, op = split_selector(text)
    try:
        return Rule("save", module=module, op=op, nth=nth, min_bytes=min_bytes)
    except ModeError as error:
        raise ModeError(f"{found}: {error}") from None
