"""The only place that changes a model: a mode becomes a plan, and the plan an engine on every block."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from torch import nn

from actmem import ops
from actmem.engine.calling import Script, applied_script, install, storages_of, uninstall
from actmem.engine.deciding import resolve
from actmem.errors import ApplyError, ModeError, PlanError, StructureError
from actmem.modes import FromPlan, Full, Mode, Rules, SaveEverything, Selective, Targets
from actmem.plan import Plan, Rule, Slices
from actmem.report import Report, summarise
from actmem.structure import Block, find_blocks, fingerprint, roles
from actmem.torchcompat import all_operator_names, named_modules

__all__ = ["Applied", "apply"]

_MODES = (SaveEverything, Full, Selective, Targets, Rules, FromPlan)
Engine = Literal["auto", "tape", "checkpoint"]


class Applied:
    """A model under a plan. Made by `apply`; `remove()` undoes it. Also a context manager, which removes on leaving."""

    def __init__(self, plan: Plan, blocks: tuple[Block, ...], scripts: tuple[Script, ...]) -> None:
        self.plan = plan
        """The resolved decision: print it, save it, read it back."""
        self._blocks = blocks
        self._scripts = scripts

    def report(self) -> Report:
        """Say what the latest observed step saved, recomputed, and could not replay. Print it.

        A block's first training call is observed; `check_replay` has later ones observed too.
        """
        idle = sum(s.num_idle_calls for s in self._scripts)
        notes = (
            [f"{idle} block calls ran in eval mode with gradients on, and were left alone: call model.train()."]
            if idle
            else []
        )
        return summarise(
            self.plan,
            [(b.path, b.kind, s.observation) for b, s in zip(self._blocks, self._scripts, strict=True)],
            matched=set[int]().union(*(s.verdicts.matched for s in self._scripts)),
            notes=notes,
        )

    def check_replay(self, num_calls: int = 1) -> None:
        """Observe the next calls of every block, and compare each replayed value with a checksum of the dropped one."""
        for script in self._scripts:
            script.num_checked, script.idle = num_calls, False

    def remove(self) -> None:
        """Change the model back into what it was. Graphs that were recorded before stay valid. May be called twice."""
        for block, script in zip(self._blocks, self._scripts, strict=True):
            uninstall(block.module, script)

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Applied {self.plan.mode} on {len(self._blocks)} blocks>"


def apply(
    model: nn.Module,
    mode: Mode | Plan,
    *,
    blocks: str | None = None,
    engine: Engine = "auto",
    example: Any = None,
    loss: Callable[[Any], Any] | None = None,
) -> Applied:
    """Change a model so that training holds only what a mode lets it hold. In place, reversible, names unchanged.

    Args:
        model: any module; its repeating blocks are found.
        mode: a mode such as `Full()` or `Selective(save=[...])`, or a `Plan`. There is no default.
        blocks: where the blocks are, as a glob over module paths, for models in which they cannot be found.
        engine: "tape" records operators and replays them; "auto" chooses, and today that is the tape.
        example: a batch, for modes that must profile the model. No mode of today needs one.
        loss: the loss of the example, for the same.

    Returns:
        The handle to print what was done, and to undo it.

    Raises:
        ModeError: the mode names something that does not exist, or matches nothing.
        StructureError: the blocks were not found, or are ambiguous.
        ApplyError: the model is applied already, or recomputes by other means.

    >>> import torch, actmem
    >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    >>> applied = actmem.apply(model, actmem.Full())
    >>> model(torch.randn(2, 8)).sum().backward()
    >>> applied.report().recomputed_bytes
    192
    >>> applied.remove()
    """
    if not isinstance(mode, (*_MODES, Plan)):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
        names = ", ".join(m.__name__ for m in _MODES)
        raise ModeError(
            f"mode = {mode!r} is no mode. Expected one of {names}, or a Plan, as in actmem.apply(model, actmem.Full())."
        )
    if engine not in ("auto", "tape"):
        raise ModeError(
            f"engine = {engine!r} is not available. Expected 'auto' or 'tape', which record and replay operators."
        )
    if example is not None or loss is not None:
        raise ModeError(
            "example and loss are for modes that profile the model, and no mode of this version does. Leave them out."
        )
    _refuse_state(model)
    if isinstance(mode, FromPlan):
        mode = Plan.load(mode.path)
    if isinstance(mode, Plan):
        plan, found = mode, _blocks_of(model, mode, blocks)
    else:
        found = find_blocks(model, blocks)
        plan = Plan(mode.rules(), tuple(b.path for b in found), fingerprint(model, found), repr(mode))
    _refuse_blocks(found)
    every_role = [roles(b.module) for b in found]
    _check_rules(plan.rules, found, every_role, model)
    scripts: list[Script] = []
    roll = _Roll(plan, model)
    cuts: dict[Any, Any] = {}
    for block, its_roles in zip(found, every_role, strict=True):
        modules = {path: f"{block.path}.{path}".strip(".") for path, _ in named_modules(block.module)}
        verdicts = resolve(plan.rules, layer=block.index, num_layers=len(found), modules=modules, roles=its_roles)
        scripts.append(Script(block.path, verdicts, cuts=cuts, observed=roll.called, state=roll.state))
    roll.scripts = tuple(scripts)
    for block, script in zip(found, scripts, strict=True):
        install(block.module, script)
    return Applied(plan, found, tuple(scripts))


class _Roll:
    """What the blocks of a model have in common: its state, and the plan, some of whose names must match."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._named = frozenset(i for i, r in enumerate(plan.rules) if r.op or r.module or r.target)
        self._plan = plan
        self.scripts: tuple[Script, ...] = ()

    def state(self) -> frozenset[int]:
        """Return the storages of the model's parameters and buffers."""
        model = self._model()
        if model is None:
            return frozenset()
        return frozenset(storages_of([*model.parameters(), *model.buffers()]))

    def called(self) -> None:
        """Notice, when every block has run once, that none of the plan's names matched anything."""
        if not self._named or any(s.observation is None for s in self.scripts):
            return
        if not self._named & set[int]().union(*(s.verdicts.matched for s in self.scripts)):
            seen = sorted({r.op for s in self.scripts if s.observation for r in s.observation.rows if r.kind == "made"})
            raise ModeError(
                f"{self._plan.mode} matches nothing: no operator that ran in the blocks of this model is among "
                "its names. "
                f"Operators that ran: {', '.join(seen[:24])}{', ...' if len(seen) > 24 else ''}. Name one of "
                "these, or a group they belong to."
            )


def _blocks_of(model: nn.Module, plan: Plan, blocks: str | None) -> tuple[Block, ...]:
    if blocks is not None:
        raise ModeError(f"blocks = {blocks!r} is given beside a plan, which names its own blocks. Leave blocks out.")
    try:
        found = find_blocks(model, ",".join(p or "." for p in plan.blocks))
    except StructureError as error:
        raise PlanError(
            f"the plan was made for another model: {type(model).__name__} has not the blocks that it names, "
            f"{', '.join(p or 'the model itself' for p in plan.blocks[:3])}{', ...' if len(plan.blocks) > 3 else ''}. "
            "Make a plan for this model: actmem.apply(model, mode).plan.save(path)."
        ) from error
    actual = fingerprint(model, found)
    if actual != plan.fingerprint:
        raise PlanError(
            f"the plan was made for another model: its fingerprint is {plan.fingerprint}, this model's is "
            f"{actual} (parameter names, shapes, dtypes "
            "and blocks count). Make a plan for this model: actmem.apply(model, mode).plan.save(path)."
        )
    return found


def _refuse_state(model: nn.Module) -> None:
    for path, module in named_modules(model):
        if (script := applied_script(module)) is not None:
            raise ApplyError(
                f"a plan is applied to this model already, at {script.path or 'the model itself'} and others. "
                "Remove it first: applied.remove(), on what actmem.apply returned."
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ApplyError(
                f"{path or 'the model'}.gradient_checkpointing = True: Hugging Face gradient checkpointing is on, "
                "and would run the forward code twice. "
                "Switch it off first: model.gradient_checkpointing_disable()."
            )
        if hasattr(module, "_checkpoint_wrapped_module"):
            raise ApplyError(
                f"{path or 'the model'} is wrapped by torch's checkpoint_wrapper, which recomputes on its own account. "
                "Build the model without that wrapper, and let actmem decide."
            )


def _refuse_blocks(blocks: tuple[Block, ...]) -> None:
    for block in blocks:
        if "forward" in vars(block.module):
            raise ApplyError(
                f"{block.path or 'the model'} has a forward of its own in the instance (accelerate's hooks put "
                "one there), which would bypass actmem. "
                "Apply actmem before the library that sets it."
            )


def _check_rules(
    rules: tuple[Rule, ...], blocks: tuple[Block, ...], every_role: list[dict[str, tuple[str, ...]]], model: nn.Module
) -> None:
    known = all_operator_names()
    for rule in rules:
        if rule.decision == "offload":
            raise ModeError(
                f"{rule!r}: this version saves and recomputes, and does not offload. Use 'save' or 'recompute'."
            )
        if rule.op is not None and rule.op not in ops.GROUPS and not rule.op.startswith("replayable."):
            packet, _ = ops.packet_name(rule.op)
            if not any(
                ops.matches(rule.op, name, "default") or name == packet
                for name in known | {"higher_order.flex_attention"}
            ):
                hint = ops.did_you_mean(rule.op, sorted({*known, *ops.GROUPS}))
                raise ModeError(
                    f"op = {rule.op!r} is no operator, group or glob that torch knows.{hint} Groups: "
                    f"{', '.join(sorted(ops.GROUPS))}."
                )
        if rule.module is not None:
            _check_module(rule, model)
        if rule.layers is not None and not any(
            Slices.parse(rule.layers).contains(b.index, len(blocks)) for b in blocks
        ):
            raise ModeError(
                f"layers = {rule.layers!r} selects none of the {len(blocks)} blocks (0 to {len(blocks) - 1}). "
                f"Name some of these, as in layers='0:{len(blocks)}'."
            )
    named = [r for r in rules if r.target is not None]
    if (
        named
        and all(r.is_default or r.target for r in rules)
        and not any(r.target in found for r in named for found in every_role)
    ):
        present = sorted({name for found in every_role for name in found})
        raise ModeError(
            f"target{'s' if len(named) > 1 else ''} {', '.join(repr(r.target) for r in named)} matched no module "
            "in the blocks of this model. "
            f"Targets that would match: {', '.join(present) or 'none'}."
        )


def _check_module(rule: Rule, model: nn.Module) -> None:
    from fnmatch import fnmatchcase

    assert rule.module is not None
    paths = [path for path, _ in named_modules(model) if path]
    if not any(fnmatchcase(path, rule.module) for path in paths):
        wanted = rule.module.strip("*.")
        hint = ops.did_you_mean(wanted, paths if "." in wanted else dict.fromkeys(p.rpartition(".")[2] for p in paths))
        example = max(paths, key=lambda path: path.count("."))
        raise ModeError(
            f"module = {rule.module!r} matches no module of this model.{hint} A glob is matched against whole "
            f"paths, such as {example!r}: module='*{example.rpartition('.')[1]}{example.rpartition('.')[2]}'."
        )
